"""Clears free blocks whose content is wrong before another request can read them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Set
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
        # Blocks to clear, in the order in which they became free. They are free until the next step
        # is scheduled.
        self._to_clear: dict[int, None] = {}
        # Results of `add_free`.
        self._followed: list[set[int]] = []

    def add(self, block_ids: Collection[int]) -> None:
        """Remembers blocks of wrong content. The caller has taken them out of the prefix cache."""
        self._held.update(block_ids)

    def add_free(self, block_ids: Collection[int]) -> Set[int]:
        """Does the same, and marks those that are free now.

        Returns:
            The marked blocks. A block leaves the set when a step clears it.
        """
        self.add(block_ids)
        self.release_free()
        followed = {block_id for block_id in block_ids if block_id in self._to_clear}
        self._followed.append(followed)
        return followed

    def release_free(self) -> None:
        """Marks the remembered blocks that are free now; the next steps clear them.

        HandoffScheduler calls this after each step's output was processed. There the engine
        frees the blocks of requests whose load has failed (never while a step of such a request
        runs: Scheduler.defer_block_free of vllm/v1/core/sched/scheduler.py), so no request has got
        a block before this sees it. A block that another request still holds waits until it is
        free. A block that is in the prefix cache again was filled by a request: it is right.
        """
        blocks = self._pool.blocks
        released = [block_id for block_id in self._held if blocks[block_id].ref_cnt == 0]
        if not released:
            return
        self._held.difference_update(released)
        wrong = [block_id for block_id in released if blocks[block_id].block_hash is None]
        self._to_clear |= dict.fromkeys(sorted(wrong))
        self._leave(set(released).difference(wrong))

    @property
    def has_free(self) -> bool:
        """Whether blocks that were free after the latest step are not cleared yet."""
        return bool(self._to_clear)

    def take(self, most: int, filled: Collection[int] = ()) -> list[int]:
        """Returns the blocks that the step being made must clear, and forgets them.

        The step is scheduled, so requests may hold some of the blocks. The ranks clear these before
        the model runs, except the `filled` ones, which are cleared when they are free again.

        Args:
            most: Number of blocks after which no further free block is returned. Blocks that
                requests hold are returned anyway.
            filled: Blocks that vLLM fills in this step before the ranks clear any.
        """
        blocks = self._pool.blocks
        in_use = [block_id for block_id in self._to_clear if blocks[block_id].ref_cnt]
        for block_id in in_use:
            del self._to_clear[block_id]
        taken = [block_id for block_id in in_use if block_id not in filled]
        self._held.update(set(in_use).intersection(filled))
        free = list(itertools.islice(self._to_clear, max(0, most - len(taken))))
        for block_id in free:
            del self._to_clear[block_id]
        self._leave(taken + free)
        return taken + free

    def _leave(self, block_ids: Collection[int]) -> None:
        """Takes blocks out of the followed sets."""
        for followed in self._followed:
            followed.difference_update(block_ids)
        self._followed = [followed for followed in self._followed if followed]
