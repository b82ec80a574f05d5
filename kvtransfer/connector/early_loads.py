"""Loading a handoff while it still arrives, into blocks that its request is given later.

A request whose prompt is computed elsewhere is given to the decode engine before its first token is
known. What has arrived of its handoff is copied, frame by frame, into free blocks that the
scheduler's half takes from the engine's pool for this alone. When the request is to run, they go
back to the head of the pool's queue, a moment before the engine takes the request's blocks from
there: it gets these, and the load in its first step has only to bring what is missing.

So the engine knows of nothing but an ordinary load, and nothing enters its prefix cache in any
other way. A rank leaves a frame out of the load only if it has copied this very frame, of the same
epoch and with the checksum that was committed, to the same blocks, and found it right after the
copy. Where the request gets other blocks, or anything else comes between, the load comes whole.
What then goes to somebody else is cleared first: until the commit nobody knows what was copied, and
attention may read, and multiply by nothing, what is in a block behind its last token.

No copy can outlive its blocks: ranks copy within engine steps, as the steps' metadata says, in the
order of the steps, and the scheduler's half gives blocks back only between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.kvtransfer.layout import KvLayout

# Of SchedulerStats.kv_connector_stats: by request, tokens of its prompt that were loaded early.
EARLY_TOKENS = "baton_early"
# Likewise: requests whose handoff leaves out what the prefix cache no longer has.
PREFIX_GONE = "baton_gone"
# An early load begins only where it leaves the first share of the pool free, and is given up when
# less than the second is.
_FREE_SHARE, _LEAST_FREE_SHARE = 0.1, 0.02


@dataclass(frozen=True, slots=True)
class EarlyLoad:
    """Blocks to fill, of every layer, as their bytes arrive.

    Attributes:
        num_tokens: how many tokens the handoff must hold.
        first_block: index within the handoff of block_ids[0].
        block_ids: in the engine's cache; nothing else uses them until this load is over.
    """

    handoff_id: bytes
    num_tokens: int
    first_block: int
    block_ids: list[int]


@dataclass(slots=True)
class EarlyWork:
    """What one step's metadata says of early loads.

    Attributes:
        begun: loads that the ranks remember from now on.
        arrived: handoffs of remembered loads of which more has come.
        over: handoffs whose loads the ranks forget; they forget those that an ordinary load of this
            step takes over without being told.
        cleared: blocks that ranks clear before anything else is done in this step.
    """

    begun: list[EarlyLoad] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)
    over: list[bytes] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.begun or self.arrived or self.over or self.cleared)


@dataclass(slots=True)
class _Load:
    """One early load, as the scheduler's half knows it.

    Attributes:
        first_block: index within the prompt of the first block to fill.
        blocks: blocks of the engine's pool that are held for it; empty once they were offered.
        kept: the prompt's blocks before those, in the prefix cache, which are held as well.
        told: what the ranks know of it.
        offered: ids of the blocks that its request gets if nothing comes between.
    """

    first_block: int
    blocks: list[Any]
    kept: list[Any]
    told: EarlyLoad
    offered: list[int] = field(default_factory=list)


class EarlyLoads:
    """Decides which handoffs are loaded early, and into which blocks; the scheduler's half.

    Args:
        layout: of the cache.
        pool: the engine's vllm.v1.core.block_pool.BlockPool.
    """

    def __init__(self, layout: KvLayout, pool: Any) -> None:
        self._layout, self._pool = layout, pool
        self._loads: dict[bytes, _Load] = {}
        # By handoff, the blocks in the prefix cache that it leaves out; held until its load begins.
        self._kept: dict[bytes, list[Any]] = {}
        # Blocks of wrong content that are not free yet.
        self._spoilt: set[int] = set()
        self._work = EarlyWork()

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to do."""
        return bool(self._work)

    def keep(self, handoff_id: bytes, request: Any, num_tokens: int) -> None:
        """Holds the blocks in the prefix cache that a handoff leaves out of its prompt.

        It holds those that are there, and only where enough of the pool is free beside them.

        Args:
            handoff_id: of the request.
            request: the engine's.
            num_tokens: how many tokens the handoff leaves out, from the first.
        """
        num_blocks = num_tokens // self._layout.block_size_tokens
        least = int(_FREE_SHARE * self._pool.num_gpu_blocks)
        if num_blocks and self._pool.get_num_free_blocks() - num_blocks >= least:
            self._kept[handoff_id] = self._cached_blocks(request, num_blocks)
            self._pool.touch(self._kept[handoff_id])

    def begin(
        self,
        handoff_id: bytes,
        request: Any,
        num_tokens: int,
        skip_tokens: int,
        num_cached_tokens: int,
    ) -> None:
        """Takes blocks for a handoff of which something has come, if there are enough.

        The prompt's blocks in the prefix cache are held with them: the others are of use only
        behind those.

        Args:
            handoff_id: one that is not being loaded.
            request: the engine's.
            num_tokens: how many tokens of the prompt, from the first, it has with the handoff.
            skip_tokens: how many of those the handoff leaves out; at most those cached.
            num_cached_tokens: how many tokens of the prompt are in the prefix cache; whole blocks.
        """
        size = self._layout.block_size_tokens
        first, skip = num_cached_tokens // size, skip_tokens // size
        count = self._layout.num_blocks(num_tokens) - first
        least = int(_FREE_SHARE * self._pool.num_gpu_blocks)
        if count <= 0 or self._pool.get_num_free_blocks() - count - first < least:
            return
        kept = self._cached_blocks(request, first)
        self._pool.touch(kept)
        self._give_back(self._kept.pop(handoff_id, []))
        blocks = self._pool.get_new_blocks(count)
        block_ids = [block.block_id for block in blocks]
        told = EarlyLoad(handoff_id, num_tokens - skip_tokens, first - skip, block_ids)
        self._loads[handoff_id] = _Load(first, blocks, kept, told)
        self._work.begun.append(told)
        self.arrived(handoff_id)

    def arrived(self, handoff_id: bytes) -> None:
        """More has come of a handoff."""
        if handoff_id in self._loads and handoff_id not in self._work.arrived:
            self._work.arrived.append(handoff_id)

    def offer(self, handoff_id: bytes, num_cached_tokens: int) -> None:
        """A request is about to get blocks: makes those that were filled for it the pool's next.

        The load is given up unless `take` follows before the step is made.

        Args:
            handoff_id: of the request; ignored where nothing is being loaded.
            num_cached_tokens: how many tokens the request finds in the prefix cache now; whole
                blocks.
        """
        if (load := self._loads.get(handoff_id)) is None:
            return
        begin = num_cached_tokens // self._layout.block_size_tokens - load.first_block
        if not 0 <= begin < len(load.blocks):
            self.drop(handoff_id)
            return
        load.offered = [block.block_id for block in load.blocks[begin:]]
        # The pool hands out first what comes first here: such blocks are in no prefix cache.
        self._pool.free_blocks([*load.blocks[begin:], *load.blocks[:begin]])
        load.blocks = []

    def take(self, handoff_id: bytes, block_ids: Sequence[int]) -> bool:
        """A request has got blocks, and an ordinary load into them follows.

        Returns:
            Whether they are the blocks that were offered, and hold what has come.
        """
        load = self._loads.get(handoff_id)
        is_same = load is not None and load.offered[: len(block_ids)] == list(block_ids)
        self._end(handoff_id, block_ids if is_same else ())
        return is_same

    def drop(self, handoff_id: bytes) -> None:
        """Gives up a load that is not wanted any more, or will never be complete; idempotent."""
        self._end(handoff_id)

    def _end(self, handoff_id: bytes, taken_ids: Sequence[int] = ()) -> None:
        self._give_back(self._kept.pop(handoff_id, []))
        load = self._loads.pop(handoff_id, None)
        if load is None:
            return
        self._work.arrived = [one for one in self._work.arrived if one != handoff_id]
        if load.told in self._work.begun:
            self._work.begun.remove(load.told)
        else:
            self._work.over.append(handoff_id)
            self._work.cleared += [one for one in load.told.block_ids if one not in taken_ids]
        self._give_back([*load.kept, *load.blocks])

    def yield_blocks(self) -> None:
        """Gives up all loads, since another request may need their blocks."""
        for handoff_id in [*self._kept, *self._loads]:
            self.drop(handoff_id)

    def take_work(self) -> EarlyWork:
        """What the step that is made has to do; gives loads up where blocks have run short."""
        for handoff_id in [key for key, load in self._loads.items() if load.offered]:
            # Its request has got no blocks: from now on the offered ones are anybody's.
            self.drop(handoff_id)
        least = max(1, int(_LEAST_FREE_SHARE * self._pool.num_gpu_blocks))
        if self._pool.get_num_free_blocks() < least:
            self.yield_blocks()
        work, self._work = self._work, EarlyWork()
        return work

    def spoil(self, block_ids: Collection[int]) -> None:
        """Remembers blocks of wrong content, which are in no prefix cache, for `clear_spoilt`."""
        self._spoilt.update(block_ids)

    def clear_spoilt(self) -> None:
        """Has the next step clear blocks of wrong content that are free.

        Called after each step's output was processed. It is there that the engine gives back the
        blocks of requests whose load has failed (never while a step of theirs runs:
        Scheduler.defer_block_free of vllm/v1/core/sched/scheduler.py), so that none is handed out
        before. Blocks that are held here follow when they are given back. A block that another
        request still holds, which has nothing wrong, is left alone until it is free, or in the
        prefix cache: then somebody has filled it.
        """
        for block_id in tuple(self._spoilt):
            block = self._pool.blocks[block_id]
            if block.ref_cnt == 0:
                self._spoilt.remove(block_id)
                if block.block_hash is None:
                    self._work.cleared.append(block_id)

    def _cached_blocks(self, request: Any, num_blocks: int) -> list[Any]:
        """The first blocks of a request's prompt, those that are in the prefix cache."""
        found = (self._pool.get_cached_block(one, [0]) for one in request.block_hashes[:num_blocks])
        return [blocks[0] for blocks in found if blocks]

    def _give_back(self, blocks: list[Any]) -> None:
        # In the order in which they are to be reused: the end of a prefix is worth the least.
        self._pool.free_blocks(reversed(blocks))
        self.clear_spoilt()
