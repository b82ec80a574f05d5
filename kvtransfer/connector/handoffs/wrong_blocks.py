"""Clears free blocks whose content is wrong before another request can read them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class WrongBlocks:
    """Remembers blocks of wrong content until a step can clear them; HandoffScheduler owns it.

    Wrong content may be NaN. Attention kernels multiply the positions after a block's last token
    by zero, and NaN times zero is NaN, so such a block would spoil the next request that gets it.

    Args:
        pool: The engine's vllm.v1.core.block_pool.BlockPool. This class only reads it.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # Blocks of wrong content that were not free when `release_free` last looked.
        self._held: set[int] = set()
        # Those of them that were free before, and that no step could clear (see `take`).
        self._left_out: set[int] = set()
        # Blocks that the next step must clear. They are free until it is scheduled.
        self._to_clear: list[int] = []

    def add(self, block_ids: Collection[int]) -> None:
        """Remembers blocks of wrong content. The caller has taken them out of the prefix cache."""
        self._held.update(block_ids)

    def release_free(self) -> None:
        """Marks the remembered blocks that are free now; the next step clears them.

        HandoffScheduler calls this after each step's output was processed. There the engine
        frees the blocks of requests whose load has failed (never while a step of such a request
        runs: Scheduler.defer_block_free of vllm/v1/core/sched/scheduler.py), so no request has got
        a block before this sees it. A block that another request still holds waits until it is
        free. A block that is in the prefix cache again was filled by a request: it is right.
        """
        for block_id in tuple(self._held):
            block = self._pool.blocks[block_id]
            if block.ref_cnt == 0:
                self._held.remove(block_id)
                self._left_out.discard(block_id)
                if block.block_hash is None:
                    self._to_clear.append(block_id)

    @property
    def has_free(self) -> bool:
        """Whether blocks that were free after the latest step must be cleared."""
        return bool(self._to_clear)

    @property
    def is_clearing(self) -> bool:
        """Whether blocks that have been free since they were added are not cleared yet."""
        return bool(self._to_clear or self._left_out)

    def take(self, filled: Collection[int] = ()) -> list[int]:
        """Returns the blocks that the step being made must clear, and forgets them.

        The step is scheduled, so requests may hold some of the blocks. The ranks clear these before
        the model runs, except the `filled` ones, which are cleared when they are free again.

        Args:
            filled: Blocks that vLLM fills in this step before the ranks clear any.
        """
        block_ids = [block_id for block_id in self._to_clear if block_id not in filled]
        left_out = set(self._to_clear).intersection(filled)
        self._held |= left_out
        self._left_out |= left_out
        self._to_clear = []
        return block_ids
