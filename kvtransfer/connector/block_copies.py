"""Copies between a rank's paged KV cache and staging: what every kind of device has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.kvtransfer.connector.notifier import Copy


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that lie side by side in staging.

    Attributes:
        begin: index of the first in the block ids that were prepared.
        offset: of its bytes in the segment.
    """

    begin: int
    num_blocks: int
    offset: int


class BlockCopies(ABC):
    """Copies of one rank. One thread uses it; only what a gather returns may go to another.

    Attributes:
        finishes_at_once: a copy has ended when the call returns.
        max_blocks: of one gather.
    """

    finishes_at_once: bool
    max_blocks: int

    @abstractmethod
    def prepare(self, block_ids: Sequence[int]) -> Any:
        """Block ids of one step, as the other calls take them: the same for all layers."""

    @abstractmethod
    def gather(self, layer: int, blocks: Any, runs: Sequence[Run]) -> Copy:
        """From the cache to staging: runs that follow each other in `blocks`.

        What the stream of the caller has written before is what is copied.
        """

    @abstractmethod
    def scatter(self, layer: int, blocks: Any, run: Run) -> Copy:
        """From staging to the cache. The copy has ended when staging has been read.

        What the stream of the caller does before is over when the blocks change; for what it does
        afterwards it must `join` first.
        """

    @abstractmethod
    def clear(self, block_ids: Sequence[int]) -> None:
        """Fills blocks of every layer with zeros, on the caller's stream, after earlier copies."""

    @abstractmethod
    def join(self) -> None:
        """What the caller's stream does from now on comes after every gather's and scatter's touch.

        Of the paged cache, that is: bytes may still be on their way to staging.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for all copies, and lets go of staging; idempotent."""
