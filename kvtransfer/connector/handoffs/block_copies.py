"""Copies between a rank's paged KV cache and staging: the interface for every kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.kvtransfer.connector.handoffs.notifier import Copy
from baton.kvtransfer.head_ranges import HeadRange


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that are adjacent in staging.

    Attributes:
        begin: Index of the first block among the prepared block IDs.
        num_blocks: Number of blocks.
        offset: Where the blocks begin in the segment.
    """

    begin: int
    num_blocks: int
    offset: int


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """Blocks of one layer that are gathered.

    Attributes:
        layer: Index of the layer.
        blocks: The prepared block IDs.
        runs: Blocks that follow each other in `blocks`.
    """

    layer: int
    blocks: Any
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Blocks of one layer that are scattered.

    Attributes:
        layer: Index of the layer.
        blocks: The prepared block IDs.
        run: Blocks in staging, as the sender has them.
        heads: The heads to copy, if the sender's blocks have other heads than the cache's.
    """

    layer: int
    blocks: Any
    run: Run
    heads: HeadRange | None = None


class BlockCopies(ABC):
    """Copies of one rank. Only the rank's thread uses it; the result of a gather may go to another.

    Attributes:
        joined_bytes: Most bytes of staging in one copy of several layers; 0: each layer is copied
            alone.
        finishes_at_once: Whether a copy has ended when the call returns.
        gathers_wait: Whether a gather waits until an earlier gather's copy was waited for
            (`Copy.wait`) in another thread.
    """

    joined_bytes: int = 0
    finishes_at_once: bool
    gathers_wait: bool

    @abstractmethod
    def max_blocks(self, layer: int) -> int:
        """Returns the most blocks of one gather of a layer."""

    @abstractmethod
    def bind_thread(self) -> None:
        """Prepares the calling thread to wait for copies; called once in such a thread."""

    @abstractmethod
    def prepare(self, block_ids: Sequence[int]) -> Any:
        """Converts a step's block IDs to the form of the other calls.

        Layers of one block table use the same result.
        """

    @abstractmethod
    def gather(self, parts: Sequence[LayerRuns]) -> Copy:
        """Copies blocks from the cache to staging.

        It copies what the caller's stream has written before.

        Args:
            parts: At most `max_blocks` of one layer, or `joined_bytes` of several.

        Raises:
            TimeoutError: Earlier copies have not ended in time. Nothing is copied.
        """

    @abstractmethod
    def scatter(self, parts: Sequence[LayerRun]) -> Copy:
        """Copies blocks from staging to the cache. The copy has ended when staging has been read.

        The blocks change after the earlier work of the caller's stream. Later work that depends on
        them needs `join_scatters`, or the end of `landing`.

        Args:
            parts: Any number of blocks of one layer, or `joined_bytes` of several.
        """

    @abstractmethod
    def landing(self) -> Copy:
        """Returns a copy that ends when the blocks of all scatters so far have changed."""

    @abstractmethod
    def clear(self, block_ids: Sequence[int]) -> None:
        """Fills blocks of every layer with zeros, on the caller's stream, after earlier copies.

        The blocks may belong to any block table.
        """

    @abstractmethod
    def clear_draft(self, block_ids: Sequence[int]) -> None:
        """Fills blocks of a draft's layers with zeros, on the caller's stream.

        The blocks are new: no copy from or to these layers of them is under way.
        """

    @abstractmethod
    def join_gathers(self) -> None:
        """Orders the caller's later work after all gathers from the paged cache.

        Bytes may still be on their way to staging.
        """

    @abstractmethod
    def join_scatters(self) -> None:
        """Orders the caller's later work after all scatters into the paged cache."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all copies, and unmaps staging. Idempotent."""
