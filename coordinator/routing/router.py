"""Which worker gets a request: its cached prefix against the work that is queued there.

Every cost is in seconds, and every choice looks at a few candidates only: those that hold the
longest prefixes, the session's last, and the least loaded. So a decision costs the same with ten
workers and with a thousand. The core decides which requests may run, and when; this module only
knows where.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.coordinator.core.request import WorkerKey
from baton.coordinator.routing.choices import DecodeChoice, PrefillChoice
from baton.coordinator.routing.load_index import LoadIndex, Pool
from baton.coordinator.routing.prefix_index import PrefixIndex, PrefixMatch
from baton.coordinator.routing.worker_load import ANYTHING_AHEAD, Ahead, WorkerLoad, WorkerTraits
from baton.v1 import cluster_pb2

# Candidates with the longest prefixes, per choice.
_NUM_HOLDERS = 3
# How much more a second of computing costs than a second of waiting. Waiting delays this request;
# computing what another worker holds delays those behind it too, and pushes other prefixes out of
# the cache.
_WORK_WEIGHT = 4.0
# A handoff's speed between hosts and within one.
_NETWORK_BYTES_PER_S, _MEMORY_BYTES_PER_S = 1e9, 5e9
# How much longer steps may be where outputs that yield are put together than where they would be
# spread to, while urgent ones are there too.
_PACKED_ITL = 1.15
# Remembered in all; the longest unused are forgotten.
_MAX_SESSIONS = 65536


@dataclass(slots=True)
class _Session:
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None


class _Target(NamedTuple):
    """A decode worker with room: its step with the request, the KV tokens it needs and has."""

    entry: WorkerLoad
    itl_s: float
    num_kv_tokens: int
    num_cached_tokens: int


class Router:
    """Owns the load entries of all workers, the prefix index and the sessions.

    Whoever uses it assigns what it chose, reports what it hears, and releases every request once.

    Args:
        max_prefill_requests, max_decode_requests: of one worker, assigned at a time.

    Attributes:
        index: where prefixes are; fed by `apply_cache`.
        now: by the core's clock; set by whoever uses it, before it does.
    """

    def __init__(self, max_prefill_requests: int, max_decode_requests: int) -> None:
        self.now = 0.0
        self.index = PrefixIndex()
        self._loads = LoadIndex(max_prefill_requests, max_decode_requests)
        self._prefilling: dict[str, WorkerKey] = {}
        self._decoding: dict[str, WorkerKey] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # Decoded now, and others yield to them.
        self._urgent: set[str] = set()
        # Where the last output that yields went.
        self._packed: WorkerKey | None = None

    # ---- Members.

    def add_worker(self, worker: WorkerKey, traits: WorkerTraits, pool: Pool | None) -> None:
        """A worker whose cache is empty, or not known yet; pool as in `set_pool`."""
        self.index.add(worker, traits.kv_tokens // traits.block_size_tokens)
        self._loads.add(WorkerLoad(worker, traits, self.index.bit(worker)))
        self.set_pool(worker, pool)

    def set_pool(self, worker: WorkerKey, pool: Pool | None) -> None:
        """What a worker is given from now on; None for nothing. It keeps what it has."""
        self._loads.set_pool(worker, pool)

    def pool(self, worker: WorkerKey) -> Pool | None:
        """What a worker is given now."""
        return self._loads.pool(worker)

    def remove_worker(self, worker: WorkerKey) -> None:
        """A worker that is gone. Its requests are still to be released. Idempotent."""
        if self._loads.get(worker) is not None:
            self._loads.remove(worker)
            self.index.forget(worker)

    def load(self, worker: WorkerKey) -> WorkerLoad | None:
        """What is assigned to a worker; to be read only."""
        return self._loads.get(worker)

    @property
    def num_prefill_workers(self) -> int:
        """In the prefill pool, full ones included."""
        return self._loads.num_prefill_workers

    def idlest_prefill(self) -> WorkerLoad | None:
        """With the shortest queue of prefill work; None when every worker is full."""
        return self._loads.get(self._loads.by_queue.least())

    def longest_prefill(self, match: PrefixMatch) -> int:
        """Blocks of a prompt that some prefill worker with room holds, at most."""
        return max(match.longest(1, self._loads.open_prefill).values(), default=0)

    def longest_decode(self, match: PrefixMatch) -> int:
        """The same of decode workers."""
        return max(match.longest(1, self._loads.open_decode).values(), default=0)

    def report_kv(self, worker: WorkerKey, kv_tokens_used: int) -> None:
        """What a worker's load report says that it holds."""
        if (entry := self._loads.get(worker)) is not None:
            entry.report(kv_tokens_used)
            self._loads.file(entry)

    def apply_cache(self, worker: WorkerKey, changes: cluster_pb2.CacheEvents) -> None:
        """Takes in what changed in a worker's prefix cache."""
        if changes.reset:
            self.index.cleared(worker)
        self.index.removed(worker, changes.removed)
        self.index.stored(worker, changes.stored)

    # ---- Requests.

    def match(self, prompt_hashes: Sequence[int]) -> PrefixMatch:
        """Who holds how much of a prompt; good until the next change."""
        return self.index.match(prompt_hashes)

    def assign_prefill(
        self,
        request_id: str,
        choice: PrefillChoice,
        prompt_hashes: Sequence[int],
        session: str = "",
    ) -> None:
        """The prompt goes where it was chosen to; "" is no session."""
        entry = self._loads.entries[choice.worker]
        entry.assign_prefill(request_id, choice.work_s, choice.num_work_tokens, self.now)
        self._prefilling[request_id] = choice.worker
        self.index.expect(request_id, choice.worker, prompt_hashes)
        self._loads.file(entry)
        if session:
            self._session(session).prefill = choice.worker

    def assign_decode(
        self, request_id: str, choice: DecodeChoice, session: str = "", *, urgent: bool = False
    ) -> None:
        """The output goes where it was chosen to; others yield to one that is urgent."""
        entry = self._loads.entries[choice.worker]
        entry.assign_decode(request_id, choice.num_kv_tokens, urgent=urgent)
        self._decoding[request_id] = choice.worker
        if urgent:
            self._urgent.add(request_id)
        else:
            self._packed = choice.worker
        self._loads.file(entry)
        if session:
            self._session(session).decode = choice.worker

    def hold(self, request_id: str, worker: WorkerKey, num_tokens: int) -> None:
        """A worker goes on with an output of which nothing else is known."""
        entry = self._loads.entries[worker]
        entry.assign_decode(request_id, num_tokens)
        entry.arrive(request_id)
        self._decoding[request_id] = worker
        self._loads.file(entry)

    def hold_up(self, choice: DecodeChoice, share: float) -> None:
        """The prompt is computed where its output will be, and is felt there; see WorkerLoad."""
        self._loads.entries[choice.worker].hold_up(choice.num_new_tokens, share, self.now)

    def first_token(self, request_id: str) -> None:
        """The prompt is computed. Its worker's cache events came before this. Idempotent."""
        self._end_prefill(request_id)
        if (entry := self._loads.get(self._decoding.get(request_id))) is not None:
            entry.arrive(request_id)

    def outgrows(self, request_id: str, num_tokens: int) -> bool:
        """Whether so long a prompt and output is more than was reserved for it."""
        entry = self._loads.get(self._decoding.get(request_id))
        return entry is not None and entry.outgrows(request_id, num_tokens)

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Reserves as much for one that outgrows what was expected of it, if not more already."""
        entry = self._loads.entries[self._decoding[request_id]]
        block_size = entry.traits.block_size_tokens
        entry.grow(request_id, -(-num_tokens // block_size) * block_size)
        self._loads.file(entry)

    def release(self, request_id: str) -> None:
        """The request has ended, or leaves its workers. Idempotent."""
        self._end_prefill(request_id)
        self._urgent.discard(request_id)
        if (entry := self._loads.get(self._decoding.pop(request_id, None))) is not None:
            entry.end_decode(request_id)
            self._loads.file(entry)

    def _end_prefill(self, request_id: str) -> None:
        self.index.settle(request_id)
        if (entry := self._loads.get(self._prefilling.pop(request_id, None))) is not None:
            entry.end_prefill(request_id, self.now)
            self._loads.file(entry)

    def _session(self, session: str) -> _Session:
        found = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return found

    # ---- Choices.

    def choose_prefill(
        self,
        match: PrefixMatch,
        num_tokens: int,
        session: str = "",
        ahead: Ahead = ANYTHING_AHEAD,
    ) -> PrefillChoice | None:
        """The least predicted finish, work counted more than waiting; None when all are full.

        Of equals the session's last worker, then the longest prefix, then the least loaded.

        Args:
            match: of the prompt.
            num_tokens: of the prompt.
            session: "" for none.
            ahead: of it a worker may have so much: what waits here can still be ordered.
        """
        loads = self._loads
        best: tuple[WorkerKey, float, float, int] | None = None
        least, factor = math.inf, 1 + _WORK_WEIGHT
        for worker, num_blocks in self._prefill_candidates(match, session).items():
            entry = loads.entries[worker]
            traits = entry.traits
            if entry.is_full(ahead, self.now):
                continue
            # The last token is always computed: the first output token comes from it.
            cached = min(num_blocks * traits.block_size_tokens, num_tokens - 1)
            cached -= cached % traits.block_size_tokens
            work_s = traits.latency.prefill_s(num_tokens - cached)
            queued_s = entry.queued_s(self.now)
            cost = queued_s + work_s * factor
            if cost < least:
                least, best = cost, (worker, queued_s, work_s, cached)
        if best is None:
            return None
        worker, queued_s, work_s, cached = best
        return PrefillChoice(worker, queued_s + work_s, work_s, num_tokens - cached, cached)

    def prefill_candidates(self, match: PrefixMatch, session: str = "") -> list[WorkerLoad]:
        """Those that `choose_prefill` looks at."""
        return [self._loads.entries[one] for one in self._prefill_candidates(match, session)]

    def _prefill_candidates(self, match: PrefixMatch, session: str) -> dict[WorkerKey, int]:
        """How many blocks of a prompt each holds."""
        loads, last = self._loads, self._sessions.get(session)
        sticky = last.prefill if last is not None else None
        candidates: dict[WorkerKey, int] = {}
        if sticky is not None and sticky in loads.by_queue:
            candidates[sticky] = match.blocks_of(sticky)
        candidates |= match.longest(_NUM_HOLDERS, loads.open_prefill)
        idlest = loads.by_queue.least()
        if idlest is not None and idlest not in candidates:
            candidates[idlest] = match.blocks_of(idlest)
        return candidates

    def choose_decode(
        self,
        match: PrefixMatch,
        num_tokens: int,
        num_output_tokens: int,
        *,
        prefill: WorkerKey | None = None,
        session: str = "",
        max_itl_s: float = math.inf,
        yields: bool = False,
    ) -> DecodeChoice | None:
        """The least time for the whole output, what is left of the handoff included.

        Args:
            match: of the prompt.
            num_tokens: of the prompt, and of known output.
            num_output_tokens: expected beyond them (OutputLengths).
            prefill: where the prompt is computed; None: on the decode worker itself.
            session: "" for none.
            max_itl_s: what a step with this request may take at most, where others run.
            yields: that counts only beside urgent ones, and for the second that yields there; and
                it goes where others that yield are, rather than where it would be fastest.

        Returns:
            None when no worker has room for prompt and expected output.
        """
        loads, last = self._loads, self._sessions.get(session)
        sticky = last.decode if last is not None else None
        source = loads.get(prefill)
        candidates: dict[WorkerKey, int] = {}
        if sticky is not None and sticky in loads.by_itl:
            candidates[sticky] = match.blocks_of(sticky)
        candidates |= match.longest(_NUM_HOLDERS, loads.open_decode)
        # The fastest, the one with most room (without which none has any), the one nearby.
        near = loads.fastest_on(source.traits.host_id) if source is not None else None
        for idle in (loads.by_itl.least(), loads.by_room.least(), near):
            if idle is not None and idle not in candidates:
                candidates[idle] = match.blocks_of(idle)
        best: _Target | None = None
        least = math.inf
        for worker, num_blocks in candidates.items():
            found = self._target(loads.entries[worker], num_blocks, num_tokens, num_output_tokens)
            if found is None:
                continue
            entry, itl_s = found.entry, found.itl_s
            if itl_s > max_itl_s and entry.num_decodes and not (yields and entry.may_yield):
                continue
            rest = num_tokens - found.num_cached_tokens
            cost = itl_s * num_output_tokens + self._begin_s(source, entry, rest)
            if cost < least:
                least, best = cost, found
        packed = loads.get(self._packed) if yields and self._urgent else None
        if best is not None and packed is not None and packed.key in loads.by_itl:
            num_blocks = match.blocks_of(packed.key)
            found = self._target(packed, num_blocks, num_tokens, num_output_tokens)
            if found is not None and self._joins(found, best, source, max_itl_s):
                best = found
        if best is None:
            return None
        return DecodeChoice(
            best.entry.key, best.itl_s, best.num_kv_tokens, best.num_cached_tokens, num_tokens
        )

    @staticmethod
    def _target(
        entry: WorkerLoad, num_blocks: int, num_tokens: int, num_output_tokens: int
    ) -> _Target | None:
        """A worker that holds so many blocks of the prompt; None when it has no room."""
        block_size = entry.traits.block_size_tokens
        needed = -(-(num_tokens + num_output_tokens) // block_size) * block_size
        # One that needs more than a worker has is the engine's to refuse.
        if needed > entry.free_tokens and entry.num_decodes:
            return None
        cached = min(num_blocks * block_size, num_tokens)
        return _Target(entry, entry.itl_with_s(1, needed), needed, cached)

    def _joins(
        self, packed: _Target, best: _Target, source: WorkerLoad | None, max_itl_s: float
    ) -> bool:
        """Whether an output that yields goes where the last one went, and not to the fastest.

        An output that joins a worker waits for the step that runs there: half of one on average,
        the longest gap that it has. Outputs that yield keep a worker busy all the time; put
        together they leave others idle for the urgent ones to begin on. Not at the price of a
        prefix that is held elsewhere, or of a way to another host.
        """
        entry, other = packed.entry, best.entry
        if entry.num_decodes == entry.num_urgent or packed.itl_s > max_itl_s:
            return False
        if entry.num_urgent and packed.itl_s > _PACKED_ITL * best.itl_s:
            return False
        is_near = source is not None and source.traits.host_id == other.traits.host_id
        return packed.num_cached_tokens >= best.num_cached_tokens and (
            not is_near or entry.traits.host_id == other.traits.host_id
        )

    def _begin_s(self, source: WorkerLoad | None, target: WorkerLoad, num_tokens: int) -> float:
        """Until a worker has so many more of a prompt's tokens: sent there, or computed there."""
        if source is None:
            return target.traits.latency.prefill_s(max(1, num_tokens))
        near = source.traits.host_id == target.traits.host_id
        speed = _MEMORY_BYTES_PER_S if near else _NETWORK_BYTES_PER_S
        return num_tokens * source.traits.kv_bytes_per_token / speed

    def check_integrity(self) -> None:
        """Raises AssertionError when sums, masks or owners differ from what they stand for."""
        assert self._urgent <= self._decoding.keys()
        self.index.check_integrity()
        self._loads.check_integrity()
