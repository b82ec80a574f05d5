"""Loading a handoff while it still arrives, into blocks of the engine's prefix cache.

A request whose prompt is computed elsewhere is given to the decode engine before its first token is
known. What has arrived of its handoff is copied, frame by frame, into free blocks that the
scheduler's half takes from the engine's pool for this alone. The handoff is claimed ahead: from its
commit on, nobody takes the staging away. Then the whole blocks enter the prefix cache under the
prompt's hashes, where the request finds them as it would find any prefix, and the very next step
loads what is still missing of them before its model runs. What any rank finds wrong then is told as
a load that failed: whoever has begun with it is run again, and the blocks leave the cache. The
last, broken block cannot be in the cache: it is copied to the request's own when that first runs.

Nobody else knows of the blocks before the commit; and if something else takes them first, or the
handoff fails, the request loads or computes as if none of this had been tried.

No copy can outlive its blocks: ranks copy within engine steps, as the steps' metadata says, in the
order of the steps, and the scheduler's half gives blocks back when the step that fills them has
been made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.kvtransfer.layout import KvLayout

# Of SchedulerStats.kv_connector_stats: by request, tokens of its prompt that were loaded early.
EARLY_TOKENS = "baton_early"
# Likewise: requests whose handoff leaves out what the prefix cache no longer has.
PREFIX_GONE = "baton_gone"
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


@dataclass(frozen=True, slots=True)
class DueLoad:
    """A committed handoff, of which everything is to be there before this step's model runs.

    Attributes:
        claims: what each rank may read, by rank, as Claim.parse takes it.
    """

    load: EarlyLoad
    claims: Sequence[bytes]


@dataclass(slots=True)
class EarlyWork:
    """What one step's metadata says of early loads.

    Attributes:
        begun: to be remembered by the ranks.
        arrived: more has come of these, which were begun.
        due: to be finished, and then to be forgotten.
        over: to be forgotten.
    """

    begun: list[EarlyLoad] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)
    due: list[DueLoad] = field(default_factory=list)
    over: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.begun or self.arrived or self.due or self.over)


@dataclass(slots=True)
class EarlyReport:
    """What ranks say after a step.

    Attributes:
        spoiled: handoffs that cannot be loaded early any more, or were not finished when due.
    """

    spoiled: set[bytes] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.spoiled)

    def add(self, other: EarlyReport) -> None:
        self.spoiled |= other.spoiled


@dataclass(slots=True)
class _Load:
    """What is known of one that is not committed.

    Attributes:
        request: the engine's.
        first_block: index within the prompt of blocks[0].
        blocks: of the engine's pool, held for this load.
        num_whole: of them; the rest, at most one, is broken.
        kept: of the prefix cache, likewise held, which the handoff leaves out.
        told: what the ranks know of it.
    """

    request: Any
    first_block: int
    blocks: list[Any]
    num_whole: int
    kept: list[Any]
    told: EarlyLoad


class EarlyLoads:
    """The scheduler's half.

    Args:
        layout: of the cache.
        pool: the engine's vllm.v1.core.block_pool.BlockPool.
    """

    def __init__(self, layout: KvLayout, pool: Any) -> None:
        self._layout, self._pool = layout, pool
        self._loads: dict[bytes, _Load] = {}
        # What handoffs leave out, held until more of them comes.
        self._kept: dict[bytes, list[Any]] = {}
        # Broken last blocks of committed handoffs, held until their requests run.
        self._tails: dict[bytes, Any] = {}
        # Given back when the step that is made next has been told what to do with them.
        self._settling: list[Any] = []
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
        """Begun, and neither committed nor given up."""
        return handoff_id in self._loads

    def keep(self, handoff_id: bytes, request: Any, skip_tokens: int) -> None:
        """Holds what a handoff leaves out, as far as it is there and enough is free beside it."""
        num_blocks = skip_tokens // self._layout.block_size_tokens
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

        What it leaves out is held with them: nothing brings that again.

        Args:
            handoff_id: not being loaded.
            request: the engine's, which will find the blocks.
            num_tokens: of the prompt, from the first, that it will have with the handoff.
            skip_tokens: of them, that the handoff leaves out; at most those cached.
            num_cached_tokens: of the prompt, found in the prefix cache; whole blocks.
        """
        size = self._layout.block_size_tokens
        first, skip = num_cached_tokens // size, skip_tokens // size
        count = self._layout.num_blocks(num_tokens) - first
        least = int(_FREE_SHARE * self._pool.num_gpu_blocks)
        room = self._pool.get_num_free_blocks() - count - skip
        if not self.possible or count <= 0 or room < least:
            return
        if handoff_id not in self._kept:
            self.keep(handoff_id, request, skip_tokens)
        kept = self._kept.pop(handoff_id, [])
        blocks = self._pool.get_new_blocks(count)
        block_ids = [block.block_id for block in blocks]
        told = EarlyLoad(handoff_id, num_tokens - skip_tokens, first - skip, block_ids)
        num_whole = num_tokens // size - first
        self._loads[handoff_id] = _Load(request, first, blocks, num_whole, kept, told)
        self._work.begun.append(told)
        self.arrived(handoff_id)

    def arrived(self, handoff_id: bytes) -> None:
        """More has come of a handoff."""
        if handoff_id in self._loads and handoff_id not in self._work.arrived:
            self._work.arrived.append(handoff_id)

    def commit(self, handoff_id: bytes, claims: Sequence[bytes]) -> EarlyLoad:
        """Ends a load that is under way with its handoff's commit.

        Its whole blocks are in the prefix cache from now on; the next step fills what is missing.

        Args:
            handoff_id: one of which `loading` is true.
            claims: see DueLoad.
        """
        load = self._loads.pop(handoff_id)
        size, end = self._layout.block_size_tokens, load.first_block + load.num_whole
        whole, tail = load.blocks[: load.num_whole], load.blocks[load.num_whole :]
        # vLLM passes all blocks of a request and looks at these.
        every = [None] * load.first_block + whole
        self._pool.cache_full_blocks(load.request, every, load.first_block, end, size, 0)
        # It holds all that could have arrived.
        self._work.arrived = [one for one in self._work.arrived if one != handoff_id]
        self._work.begun = [one for one in self._work.begun if one.handoff_id != handoff_id]
        self._work.due.append(DueLoad(load.told, claims))
        self._settling += [*load.kept, *whole]
        if tail:
            (self._tails[handoff_id],) = tail
        return load.told

    def take_tail(self, handoff_id: bytes) -> int | None:
        """The id of the block whose content a committed handoff's broken one has.

        It has it from the next step on, and keeps it for that step only. None: there is none.
        """
        tail = self._tails.pop(handoff_id, None)
        if tail is None:
            return None
        self._settling.append(tail)
        return int(tail.block_id)

    def drop(self, handoff_id: bytes) -> None:
        """Not wanted any more, or never to be complete; unknown ones are ignored.

        What is in the prefix cache already is finished all the same.
        """
        self.take_tail(handoff_id)
        self._give_back(self._kept.pop(handoff_id, []))
        load = self._loads.pop(handoff_id, None)
        if load is None:
            return
        self._work.begun = [one for one in self._work.begun if one.handoff_id != handoff_id]
        self._work.arrived = [one for one in self._work.arrived if one != handoff_id]
        self._work.over.append(handoff_id)
        self._give_back([*load.kept, *load.blocks])

    def yield_blocks(self) -> None:
        """Somebody else may need them: gives all loads up."""
        for handoff_id in [*self._kept, *self._loads, *self._tails]:
            self.drop(handoff_id)

    def take_work(self) -> EarlyWork:
        """For the step that is being made. Where blocks have run short, gives up first."""
        least = max(1, int(_LEAST_FREE_SHARE * self._pool.num_gpu_blocks))
        if self._pool.get_num_free_blocks() < least:
            self.yield_blocks()
        work, self._work = self._work, EarlyWork()
        settling, self._settling = self._settling, []
        self._give_back(settling)
        return work

    def reported(self, report: EarlyReport) -> None:
        """What the ranks said after a step."""
        for handoff_id in report.spoiled:
            self.drop(handoff_id)

    def _cached_blocks(self, request: Any, num_blocks: int) -> list[Any]:
        """The first of a request's prompt, in the prefix cache."""
        found = (self._pool.get_cached_block(one, [0]) for one in request.block_hashes[:num_blocks])
        return [blocks[0] for blocks in found if blocks]

    def _give_back(self, blocks: list[Any]) -> None:
        # In the order in which they are to be reused: the end of a prefix is worth the least.
        self._pool.free_blocks(reversed(blocks))
