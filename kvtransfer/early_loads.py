"""Loading a handoff while it still arrives, into blocks of the engine's prefix cache.

A request whose prompt is computed elsewhere is given to the decode engine before its first token is
known. What has arrived of its handoff is copied, frame by frame, into free blocks that the
scheduler's half takes from the engine's pool for this alone. Once the handoff is committed and
every rank has verified every frame, the blocks enter the prefix cache under the prompt's hashes and
are given back: the request finds them as it would find any prefix, and loads only the rest, less
than a block. Nobody else knows of them before; and if something else takes them first, or the
handoff fails, the request loads or computes as if none of this had been tried.

No copy can outlive its blocks: ranks copy within engine steps, as the steps' metadata says, in the
order of the steps, and the scheduler's half gives blocks back between steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from baton.kvtransfer.layout import KvLayout

# Of SchedulerStats.kv_connector_stats: by request, tokens of its prompt that were loaded early.
EARLY_TOKENS = "baton_early"
# An early load must leave so much of the pool free, as a share, and is given up below the second.
_FREE_SHARE, _LEAST_FREE_SHARE = 0.1, 0.02


@dataclass(frozen=True, slots=True)
class EarlyLoad:
    """Blocks to fill, of every layer, as their bytes arrive.

    Attributes:
        num_tokens: that the handoff must hold.
        first_block: index within the handoff of block_ids[0].
        block_ids: in the engine's cache; in use for nothing else until this load is over.
    """

    handoff_id: bytes
    num_tokens: int
    first_block: int
    block_ids: list[int]


@dataclass(slots=True)
class EarlyWork:
    """What one step's metadata says of early loads.

    Attributes:
        begun: to be remembered by the ranks.
        arrived: more has come of these, which were begun.
        over: to be forgotten.
    """

    begun: list[EarlyLoad] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)
    over: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.begun or self.arrived or self.over)


@dataclass(slots=True)
class EarlyReport:
    """What ranks say after a step.

    Attributes:
        loaded: how many ranks have all of a (handoff, epoch), verified.
        spoiled: handoffs that cannot be loaded early any more.
    """

    loaded: Counter[tuple[bytes, int]] = field(default_factory=Counter)
    spoiled: set[bytes] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.loaded or self.spoiled)

    def add(self, other: EarlyReport) -> None:
        self.loaded += other.loaded
        self.spoiled |= other.spoiled


@dataclass(slots=True)
class _Load:
    """What is known of one.

    Attributes:
        first_block: index within the prompt of blocks[0].
        blocks: of the engine's pool, held for this load.
        kept: of its prefix cache, likewise, which the handoff leaves out.
        loaded: ranks that have an epoch.
    """

    request: Any
    first_block: int
    blocks: list[Any]
    kept: list[Any]
    loaded: Counter[int] = field(default_factory=Counter)
    committed_epoch: int = 0


class EarlyLoads:
    """The scheduler's half.

    Args:
        layout: of the cache.
        pool: the engine's vllm.v1.core.block_pool.BlockPool.
    """

    def __init__(self, layout: KvLayout, pool: Any) -> None:
        self._layout, self._pool = layout, pool
        self._loads: dict[bytes, _Load] = {}
        self._work = EarlyWork()

    @property
    def possible(self) -> bool:
        """Whether the engine keeps prefixes at all."""
        return bool(self._pool.enable_caching)

    @property
    def has_work(self) -> bool:
        """For the next step."""
        return bool(self._work)

    def loading(self, handoff_id: bytes) -> bool:
        return handoff_id in self._loads

    def begin(
        self,
        handoff_id: bytes,
        request: Any,
        num_tokens: int,
        skip_tokens: int,
        num_cached_tokens: int,
        epoch: int,
        *,
        committed: bool,
    ) -> None:
        """Takes blocks for a handoff of which something has come, if there are enough.

        Args:
            handoff_id: not being loaded.
            request: the engine's, which will find the blocks.
            num_tokens: of the prompt, from the first, that it will have with the handoff.
            skip_tokens: of them, that the handoff leaves out; at most those cached.
            num_cached_tokens: of the prompt, found in the prefix cache; whole blocks.
            epoch: of what has come.
            committed: whether it is all.
        """
        size = self._layout.block_size_tokens
        first, skip = num_cached_tokens // size, skip_tokens // size
        count = num_tokens // size - first
        least = int(_FREE_SHARE * self._pool.num_gpu_blocks)
        room = self._pool.get_num_free_blocks() - count - skip
        if not self.possible or count <= 0 or room < least:
            return
        # Nothing brings these again: without them the rest is of no use.
        kept = self._cached_blocks(request, skip)
        self._pool.touch(kept)
        blocks = self._pool.get_new_blocks(count)
        self._loads[handoff_id] = _Load(request, first, blocks, kept)
        block_ids = [block.block_id for block in blocks]
        load = EarlyLoad(handoff_id, num_tokens - skip_tokens, first - skip, block_ids)
        self._work.begun.append(load)
        self.arrived(handoff_id, epoch, committed=committed)

    def arrived(self, handoff_id: bytes, epoch: int, *, committed: bool) -> None:
        """More has come of a handoff; `committed`: all of it, verified by the transfer service."""
        load = self._loads.get(handoff_id)
        if load is None:
            return
        load.committed_epoch = epoch if committed else 0
        if handoff_id not in self._work.arrived:
            self._work.arrived.append(handoff_id)

    def drop(self, handoff_id: bytes) -> None:
        """Not wanted any more, or never to be complete; unknown ones are ignored."""
        load = self._loads.pop(handoff_id, None)
        if load is None:
            return
        self._work.begun = [one for one in self._work.begun if one.handoff_id != handoff_id]
        self._work.arrived = [one for one in self._work.arrived if one != handoff_id]
        self._work.over.append(handoff_id)
        self._give_back(load)

    def yield_blocks(self) -> None:
        """Somebody else may need them: gives all loads up."""
        for handoff_id in list(self._loads):
            self.drop(handoff_id)

    def take_work(self) -> EarlyWork:
        """For the step that is being scheduled. Where blocks have run short, gives up first."""
        least = max(1, int(_LEAST_FREE_SHARE * self._pool.num_gpu_blocks))
        if self._pool.get_num_free_blocks() < least:
            self.yield_blocks()
        work, self._work = self._work, EarlyWork()
        return work

    def reported(self, report: EarlyReport) -> None:
        """What the ranks said after a step."""
        for handoff_id in report.spoiled:
            self.drop(handoff_id)
        for (handoff_id, epoch), num_ranks in report.loaded.items():
            if (load := self._loads.get(handoff_id)) is not None:
                load.loaded[epoch] += num_ranks

    def take_complete(self) -> list[tuple[Any, int]]:
        """Ends the loads that are committed and that every rank has, whichever came last.

        Returns:
            Their requests, and the tokens that the prefix cache has of them now.
        """
        done = []
        for handoff_id, load in list(self._loads.items()):
            if load.loaded[load.committed_epoch] == self._layout.tp_size:
                del self._loads[handoff_id]
                self._work.over.append(handoff_id)
                done.append((load.request, self._enter(load)))
        return done

    def _enter(self, load: _Load) -> int:
        size, end = self._layout.block_size_tokens, load.first_block + len(load.blocks)
        # vLLM passes all blocks of a request and looks at these.
        every = [None] * load.first_block + load.blocks
        self._pool.cache_full_blocks(load.request, every, load.first_block, end, size, 0)
        self._give_back(load)
        return len(load.blocks) * size

    def _cached_blocks(self, request: Any, num_blocks: int) -> list[Any]:
        """The first of a request's prompt, in the prefix cache."""
        found = (self._pool.get_cached_block(one, [0]) for one in request.block_hashes[:num_blocks])
        return [blocks[0] for blocks in found if blocks]

    def _give_back(self, load: _Load) -> None:
        # In the order in which they are to be reused: the end of a prefix is worth the least.
        self._pool.free_blocks(reversed([*load.kept, *load.blocks]))
