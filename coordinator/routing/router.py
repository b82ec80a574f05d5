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

from baton.coordinator.routing.choices import DecodeChoice, PrefillChoice
from baton.coordinator.routing.load_index import LoadIndex
from baton.coordinator.routing.prefix_index import PrefixIndex, PrefixMatch
from baton.coordinator.routing.worker_load import ANYTHING_AHEAD, Ahead, WorkerLoad, WorkerTraits
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import WorkerKey
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
        max_prefill_requests, max_decode_requests: of one worker, assigned at a time; also no more
            decodes than its engine has in its steps.

    Attributes:
        index: where prefixes are; fed by `apply_cache`.
        now: by the core's clock; set by whoever uses it, before it does.
    """

    def __init__(self, max_prefill_requests: int, max_decode_requests: int) -> None:
        self.now = 0.0
        self.index = PrefixIndex()
        self._loads = LoadIndex(max_prefill_requests, max_decode_requests)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # Decodes on all workers that batch requests yield to.
        self._num_urgent = 0
        # Where the last output that yields went.
        self._packed: WorkerKey | None = None

    # ---- Members.

    def add_worker(self, worker: WorkerKey, traits: WorkerTraits, pool: Pool | None) -> None:
        """Takes in a worker whose cache is empty, or not known yet; pool as in `set_pool`."""
        self.index.add(worker, traits.kv_tokens // traits.block_size_tokens)
        self._loads.add(WorkerLoad(worker, traits, self.index.bit(worker)))
        self.set_pool(worker, pool)

    def set_pool(self, worker: WorkerKey, pool: Pool | None) -> None:
        """Says which pool's work a worker is given from now on; None: none.

        It keeps what it has.
        """
        self._loads.set_pool(worker, pool)

    def pool(self, worker: WorkerKey) -> Pool | None:
        """The pool whose work a worker is given now; None: it is given none."""
        return self._loads.pool(worker)

    def remove_worker(self, worker: WorkerKey) -> None:
        """Forgets a worker that is gone; its requests are still to be released. Idempotent."""
        if (entry := self._loads.get(worker)) is not None:
            self._num_urgent -= entry.num_urgent
            self._loads.remove(worker)
            self.index.forget(worker)

    def load(self, worker: WorkerKey) -> WorkerLoad | None:
        """What is assigned to a worker, which the caller must not change; None: it is not known."""
        return self._loads.get(worker)

    @property
    def num_prefill_workers(self) -> int:
        """How many workers the prefill pool has, full ones included."""
        return self._loads.num_prefill_workers

    def idlest_prefill(self) -> WorkerLoad | None:
        """The prefill worker with the shortest queue; None when every one is full."""
        return self._loads.get(self._loads.by_queue.least())

    def most_yielding(self) -> WorkerLoad | None:
        """The decode worker with most KV room, had those left that can; None: none can."""
        return self._loads.get(self._loads.by_yielding.least())

    def most_decodes(self, entry: WorkerLoad) -> int:
        """How many requests a decode worker may have at a time, whatever KV room it has."""
        return self._loads.most_decodes(entry)

    def longest_prefill(self, match: PrefixMatch) -> int:
        """How many blocks of a prompt the prefill worker with room holds that holds most."""
        return max(match.longest(1, self._loads.open_prefill).values(), default=0)

    def longest_decode(self, match: PrefixMatch) -> int:
        """How many blocks of a prompt the decode worker with room holds that holds most."""
        return max(match.longest(1, self._loads.open_decode).values(), default=0)

    def report_kv(self, worker: WorkerKey, kv_tokens_used: int) -> None:
        """Takes in how many KV tokens a worker says that it holds."""
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
        """Which workers hold how much of a prompt; valid until the next change."""
        return self.index.match(prompt_hashes)

    def assign_prefill(
        self,
        request_id: str,
        choice: PrefillChoice,
        prompt_hashes: Sequence[int],
        session: str = "",
    ) -> None:
        """Counts a prompt on the worker that was chosen for it; "" is no session."""
        entry = self._loads.entries[choice.worker]
        entry.assign_prefill(request_id, choice.work_s, choice.num_work_tokens, self.now)
        self.index.expect(request_id, choice.worker, prompt_hashes)
        self._loads.file(entry)
        if session:
            self._session(session).prefill = choice.worker

    def assign_decode(
        self,
        request_id: str,
        choice: DecodeChoice,
        session: str = "",
        *,
        urgent: bool = False,
        yields: bool = False,
    ) -> None:
        """Counts an output on the worker that was chosen for it.

        Args:
            request_id: of the request.
            choice: what `choose_decode` returned for it.
            session: "" for none.
            urgent: whether batch requests yield to it.
            yields: whether it can be told to make room for an urgent one.
        """
        entry = self._loads.entries[choice.worker]
        entry.assign_decode(request_id, choice.num_kv_tokens, urgent=urgent, yields=yields)
        if urgent:
            self._num_urgent += 1
        else:
            self._packed = choice.worker
        self._loads.file(entry)
        if session:
            self._session(session).decode = choice.worker

    def hold(self, request_id: str, worker: WorkerKey, num_tokens: int) -> None:
        """Counts an output that a worker goes on with, and of which only its size is known."""
        entry = self._loads.entries[worker]
        entry.assign_decode(request_id, num_tokens)
        entry.arrive(request_id)
        self._loads.file(entry)

    def hold_up(self, choice: DecodeChoice, share: float) -> None:
        """A decode worker computes a prompt that its outputs feel; see WorkerLoad.hold_up."""
        self._loads.entries[choice.worker].hold_up(choice.num_new_tokens, share, self.now)

    def first_token(
        self, request_id: str, prefill: WorkerKey | None, decode: WorkerKey | None
    ) -> None:
        """A prompt is computed, and its worker's cache events have come before; idempotent.

        Args:
            request_id: of the request.
            prefill: the worker that `assign_prefill` counted the prompt on; None: no worker.
            decode: the worker that `assign_decode` counted the output on; None: no worker.
        """
        self._end_prefill(request_id, prefill)
        if (entry := self._loads.get(decode)) is not None:
            entry.arrive(request_id)

    def outgrows(self, request_id: str, decode: WorkerKey | None, num_tokens: int) -> bool:
        """Whether prompt and output of a request need more than is reserved on its worker."""
        entry = self._loads.get(decode)
        return entry is not None and entry.outgrows(request_id, num_tokens)

    def grow(self, request_id: str, decode: WorkerKey | None, num_tokens: int) -> None:
        """Reserves KV room for at least so many tokens of a request, in whole blocks."""
        if (entry := self._loads.get(decode)) is not None:
            entry.grow(request_id, entry.in_blocks(num_tokens))
            self._loads.file(entry)

    def release(self, request_id: str, prefill: WorkerKey | None, decode: WorkerKey | None) -> None:
        """A request has ended, or leaves its workers; idempotent. Arguments as in `first_token`."""
        self._end_prefill(request_id, prefill)
        if (entry := self._loads.get(decode)) is not None:
            self._num_urgent -= entry.end_decode(request_id)
            self._loads.file(entry)

    def _end_prefill(self, request_id: str, prefill: WorkerKey | None) -> None:
        self.index.settle(request_id)
        if (entry := self._loads.get(prefill)) is not None:
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
        """The worker that is predicted to be done first, its work counted more than its queue.

        Between equals it is the session's last worker, then the one with the longest prefix, then
        the least loaded.

        Args:
            match: of the prompt.
            num_tokens: how many tokens the prompt has.
            session: "" for none.
            ahead: how much work a worker may have and still be chosen: what waits in the
                coordinator can still be reordered.

        Returns:
            None when every worker is full.
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

    def by_handoff(self, worker: WorkerKey, num_tokens: int) -> PrefillChoice:
        """What a worker needs to hand over an output that it was at work on.

        It computes the last of its tokens once more, and the rest of a block.

        Args:
            worker: of any pool; its engine keeps what it computed.
            num_tokens: how many tokens prompt and known output have.
        """
        entry = self._loads.entries[worker]
        traits = entry.traits
        cached = (num_tokens - 1) // traits.block_size_tokens * traits.block_size_tokens
        work_s = traits.latency.prefill_s(num_tokens - cached)
        # All of it is sent only then, where other handoffs are sent while a prompt is computed.
        sent_s = num_tokens * traits.kv_bytes_per_token / _NETWORK_BYTES_PER_S
        step_s = entry.itl_with_s(0, 0) if entry.num_decodes else 0.0
        predicted_s = entry.queued_s(self.now) + step_s + work_s + sent_s
        return PrefillChoice(entry.key, predicted_s, work_s, num_tokens - cached, cached)

    def prefill_candidates(self, match: PrefixMatch, session: str = "") -> list[WorkerLoad]:
        """The workers that `choose_prefill` compares."""
        return [self._loads.entries[one] for one in self._prefill_candidates(match, session)]

    def _prefill_candidates(self, match: PrefixMatch, session: str) -> dict[WorkerKey, int]:
        """The same, with how many blocks of the prompt each holds."""
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
        """The worker with the least predicted time for the whole output, the handoff included.

        Args:
            match: of the prompt.
            num_tokens: how many tokens prompt and known output have.
            num_output_tokens: how many more are expected (OutputLengths).
            prefill: where the prompt is computed; None: on the decode worker itself.
            session: "" for none.
            max_itl_s: what a step with this request should take at most, where others run. Where it
                takes longer everywhere the request goes where it would be fastest.
            yields: whether it is a batch request. It waits where `max_itl_s` is exceeded and urgent
                outputs and another batch output run; and it goes where other batch outputs are,
                rather than where it would be fastest.

        Returns:
            None when no worker has room for prompt and expected output.
        """
        source = self._loads.get(prefill)
        best: _Target | None = None
        least = True, math.inf
        for worker, num_blocks in self._decode_candidates(
            match, session, source, apart=yields
        ).items():
            entry = self._loads.entries[worker]
            found = self._target(entry, num_blocks, num_tokens, num_output_tokens)
            if found is None:
                continue
            is_slow = found.itl_s > max_itl_s and entry.num_decodes > 0
            if yields and is_slow and not entry.may_yield:
                continue
            rest = num_tokens - found.num_cached_tokens
            cost = found.itl_s * num_output_tokens + self._begin_s(source, entry, rest)
            if (is_slow and not yields, cost) < least:
                least, best = (is_slow and not yields, cost), found
        if best is None:
            return None
        packed = self._loads.get(self._packed) if yields and self._num_urgent else None
        if packed is not None and packed.key in self._loads.by_itl:
            num_blocks = match.blocks_of(packed.key)
            found = self._target(packed, num_blocks, num_tokens, num_output_tokens)
            if found is not None and self._joins(found, best, source, max_itl_s):
                best = found
        return DecodeChoice(
            best.entry.key, best.itl_s, best.num_kv_tokens, best.num_cached_tokens, num_tokens
        )

    def _decode_candidates(
        self, match: PrefixMatch, session: str, source: WorkerLoad | None, *, apart: bool
    ) -> dict[WorkerKey, int]:
        """The workers that `choose_decode` compares, and how many blocks of the prompt each holds.

        These are the session's last one, those that hold most of the prompt, the fastest, the one
        with most room (without which none has any), the fastest on the prefill worker's host, and
        for a batch request (`apart`) the fastest that has no urgent outputs.
        """
        loads, last = self._loads, self._sessions.get(session)
        sticky = last.decode if last is not None else None
        candidates: dict[WorkerKey, int] = {}
        if sticky is not None and sticky in loads.by_itl:
            candidates[sticky] = match.blocks_of(sticky)
        candidates |= match.longest(_NUM_HOLDERS, loads.open_decode)
        near = loads.fastest_on(source.traits.host_id) if source is not None else None
        alone = loads.by_itl_apart.least() if apart else None
        for idle in (loads.by_itl.least(), loads.by_room.least(), near, alone):
            if idle is not None and idle not in candidates:
                candidates[idle] = match.blocks_of(idle)
        return candidates

    @staticmethod
    def _target(
        entry: WorkerLoad, num_blocks: int, num_tokens: int, num_output_tokens: int
    ) -> _Target | None:
        """What a request would take on a worker; None when the worker has no room.

        Args:
            entry: of the worker.
            num_blocks: how many blocks of the prompt it holds.
            num_tokens: how many tokens prompt and known output have.
            num_output_tokens: how many more are expected.
        """
        needed = entry.in_blocks(num_tokens + num_output_tokens)
        # A request that needs more than a whole worker has is the engine's to refuse.
        if needed > entry.free_tokens and entry.num_decodes:
            return None
        cached = min(num_blocks * entry.traits.block_size_tokens, num_tokens)
        return _Target(entry, entry.itl_with_s(1, needed), needed, cached)

    def _joins(
        self, packed: _Target, best: _Target, source: WorkerLoad | None, max_itl_s: float
    ) -> bool:
        """Whether a batch output goes where the last one went, and not to the fastest worker.

        An output that joins a worker waits for the step that runs there, half of one on average:
        the longest gap that it has. Batch outputs keep a worker busy all the time; put together
        they leave others idle for urgent outputs to begin on. They are not put together at the
        price of a prefix that is held elsewhere, or of a way to another host.
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
        """Seconds until a worker has so many tokens of a prompt: sent there, or computed there."""
        if source is None:
            return target.traits.latency.prefill_s(max(1, num_tokens))
        near = source.traits.host_id == target.traits.host_id
        speed = _MEMORY_BYTES_PER_S if near else _NETWORK_BYTES_PER_S
        return num_tokens * source.traits.kv_bytes_per_token / speed

    def check_integrity(self) -> None:
        """Raises AssertionError when sums, masks or owners differ from what they stand for."""
        assert self._num_urgent == sum(one.num_urgent for one in self._loads.entries.values())
        self.index.check_integrity()
        self._loads.check_integrity()
