"""Clears free blocks whose content is wrong before another request can get them."""

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
        # Free blocks that the next step must clear.
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
                if block.block_hash is None:
                    self._to_clear.append(block_id)

    def take(self) -> list[int]:
        """Returns the blocks that the step being made must clear, and forgets them."""
        block_ids, self._to_clear = self._to_clear, []
        return block_ids
