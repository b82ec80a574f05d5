"""Chooses the workers of a request by weighing cached prefixes against queued work.

Every cost is in seconds. Every choice compares only a few candidates: the workers with the longest
cached prefixes, the session's last worker and the least loaded worker. Therefore a decision costs
the same with ten workers and with a thousand. The core decides which requests may run and when;
this module only decides where.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.coordinator.routing.choices import DecodeChoice, Fetch, Placement, PrefillChoice
from baton.coordinator.routing.kv_speeds import KvSpeed, measured_speeds
from baton.coordinator.routing.load_index import LoadIndex
from baton.coordinator.routing.prefix_index import PrefixIndex, Tier
from baton.coordinator.routing.prefix_match import NOTHING_HELD, HeldPrefix, PrefixMatch
from baton.coordinator.routing.transfers import Transfers
from baton.coordinator.routing.worker_load import (
    ANYTHING_AHEAD,
    Ahead,
    PromptHits,
    WorkerLoad,
    WorkerTraits,
)
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import PredictedSpeeds, SessionKey, WorkerKey
from baton.runtime.step_budget import StepTargets
from baton.v1 import cluster_pb2

# Number of candidates with the longest prefixes, per choice.
_NUM_HOLDERS = 3
# Number of workers from which a prompt's beginning may be fetched, per choice.
_NUM_SOURCES = 2
# Seconds of a fetch beyond the waits and the bytes: messages, and opening the handoff.
_FETCH_BASE_S = 0.005
# Shortest time that a fetch gets before the prompt is computed instead, in seconds.
_LEAST_FETCH_TIMEOUT_S = 0.1
# Extra weight of a second of prefill work compared with a second of waiting. Waiting delays only
# this request. Recomputing a prefix that another worker has cached also delays later requests and
# evicts other prefixes from the cache.
_WORK_WEIGHT = 4.0
# Batch requests are packed onto a worker with urgent requests only if its steps are at most this
# many times as long as on the fastest worker.
_PACKED_ITL = 1.15
# Maximum number of sessions; the least recently used are dropped.
_MAX_SESSIONS = 65536
# Tiers by their value in CacheEvents; reports of other tiers are ignored.
_TIERS = {
    cluster_pb2.CACHE_TIER_UNSPECIFIED: Tier.DEVICE,
    cluster_pb2.CACHE_TIER_HOST: Tier.HOST,
    cluster_pb2.CACHE_TIER_DISK: Tier.DISK,
}


@dataclass(slots=True)
class _Session:
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None


class _Target(NamedTuple):
    """A decode worker with room for a request.

    Attributes:
        entry: load of the worker.
        itl_s: predicted seconds per step with the request.
        num_kv_tokens: KV tokens that the request needs.
        hits: tokens of the request that the worker holds.
    """

    entry: WorkerLoad
    itl_s: float
    num_kv_tokens: int
    hits: PromptHits


class Router:
    """Owns the load entries of all workers, the prefix index and the sessions.

    The caller assigns the choices it accepts, passes on the workers' reports, and releases every
    request once.

    Args:
        max_prefill_requests: Limit of prompts assigned to one worker.
        max_decode_requests: Limit of decodes assigned to one worker; the engine's own limit of
            requests per step (max_seqs) applies too.
        step_targets: Targets of the workers' steps in an elastic cell; None elsewhere.
        fetches: Whether workers may fetch the beginning of a prompt from other workers.

    Attributes:
        index: prefix index; `apply_cache` updates it.
        transfers: measured speeds between workers.
    """

    def __init__(
        self,
        max_prefill_requests: int,
        max_decode_requests: int,
        step_targets: StepTargets | None = None,
        *,
        fetches: bool = True,
    ) -> None:
        self.index = PrefixIndex()
        self.transfers = Transfers()
        self._fetches = fetches
        self._loads = LoadIndex(max_prefill_requests, max_decode_requests, step_targets)
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        # Number of decodes, on all workers, that batch requests yield to.
        self._num_urgent = 0
        # The worker that got the most recent batch decode.
        self._packed: WorkerKey | None = None

    @property
    def now(self) -> float:
        """Time by the core's clock; the caller sets it before each use."""
        return self._loads.now

    @now.setter
    def now(self, now: float) -> None:
        self._loads.now = self.transfers.now = now

    @property
    def step_targets(self) -> StepTargets | None:
        """Targets of the workers' steps in an elastic cell; None elsewhere."""
        return self._loads.step_targets

    def set_step_targets(self, targets: StepTargets) -> None:
        """Changes the targets of the workers' steps; only in an elastic cell."""
        self._loads.set_step_targets(targets)

    # ---- Members.

    def add_worker(self, worker: WorkerKey, traits: WorkerTraits, pool: Pool | None) -> None:
        """Adds a worker whose cache is empty or not known yet; `pool` as in `set_pool`."""
        size = traits.block_size_tokens
        self.index.add(
            worker,
            traits.kv_tokens // size,
            traits.host_kv_tokens // size,
            traits.disk_kv_tokens // size,
        )
        self._loads.add(WorkerLoad(worker, traits, self.index.bit(worker)))
        self.set_pool(worker, pool)

    def set_pool(self, worker: WorkerKey, pool: Pool | None) -> None:
        """Sets the pool that a worker gets work from; None: the worker gets no new work.

        The worker keeps the requests it has.
        """
        self._loads.set_pool(worker, pool)

    def pool(self, worker: WorkerKey) -> Pool | None:
        """The pool that a worker gets work from; None: the worker gets no work."""
        return self._loads.pool(worker)

    def remove_worker(self, worker: WorkerKey) -> None:
        """Removes a worker; its requests must still be released. Idempotent."""
        if (entry := self._loads.get(worker)) is not None:
            self._num_urgent -= entry.num_urgent
            self._loads.remove(worker)
            self.index.forget(worker)
            self.transfers.forget(worker)

    def load(self, worker: WorkerKey) -> WorkerLoad | None:
        """Load of a worker, read-only for the caller; None: the worker is unknown."""
        return self._loads.get(worker)

    @property
    def num_prefill_workers(self) -> int:
        """Number of workers in the prefill pool, including full workers."""
        return self._loads.num_prefill_workers

    @property
    def prompt_speed(self) -> float:
        """Speed of all workers that compute prompts together; an idle worker counts 1."""
        return self._loads.prompt_speed

    def idlest_prefill(self) -> WorkerLoad | None:
        """The prefill worker with the shortest queue; None if all are full."""
        return self._loads.get(self._loads.by_queue.least())

    def most_yielding(self) -> WorkerLoad | None:
        """The decode worker that would have most KV room after preempting its batch decodes.

        None if no worker has a decode that can be preempted.
        """
        return self._loads.get(self._loads.by_yielding.least())

    def most_decodes(self, entry: WorkerLoad) -> int:
        """Maximum number of requests on a decode worker, regardless of its KV room."""
        return self._loads.most_decodes(entry)

    def longest_prefill(self, match: PrefixMatch) -> HeldPrefix:
        """Longest prefix of a prompt on any prefill worker with room."""
        return _longest(match, self._loads.open_prefill)

    def longest_decode(self, match: PrefixMatch) -> HeldPrefix:
        """Longest prefix of a prompt on any decode worker with room."""
        return _longest(match, self._loads.open_decode)

    def report_kv(self, worker: WorkerKey, kv_tokens_used: int) -> None:
        """Updates a worker's load from the number of KV tokens that it reports as used."""
        if (entry := self._loads.get(worker)) is not None:
            entry.report(kv_tokens_used)
            self._loads.file(entry)

    def report_loads(
        self, worker: WorkerKey, host: cluster_pb2.TierLoads, disk: cluster_pb2.TierLoads
    ) -> None:
        """Measures a worker's speed by its loads since its last report."""
        if (entry := self._loads.get(worker)) is None:
            return
        for tier, loads in ((Tier.HOST, host), (Tier.DISK, disk)):
            seconds = loads.duration_us / 1e6
            entry.load_speeds.took(tier, loads.num_bytes, seconds, self.now)

    def predicted_speeds(self, placement: Placement) -> PredictedSpeeds:
        """The speeds by which the loads and the fetch of a placement were predicted."""
        reader = placement.reader
        choice = reader or placement.decode
        entry = self._loads.get(choice.worker) if choice is not None else None
        if choice is None or entry is None:
            return PredictedSpeeds()
        host, disk = (
            entry.load_speeds.bytes_per_s(tier, self.now) if num_tokens else 0.0
            for tier, num_tokens in (
                (Tier.HOST, choice.num_host_tokens),
                (Tier.DISK, choice.num_disk_tokens),
            )
        )
        if reader is None or (fetch := reader.fetch) is None or not fetch.sending_s:
            return PredictedSpeeds(host, disk)
        num_bytes = fetch.num_sent_tokens * entry.traits.kv_bytes_per_token
        return PredictedSpeeds(host, disk, num_bytes / fetch.sending_s)

    def kv_speeds(self) -> Iterator[KvSpeed]:
        """Yields the measured speeds at which the workers get KV blocks."""
        return measured_speeds(tuple(self._loads.entries.values()), self.transfers)

    def apply_cache(self, worker: WorkerKey, changes: cluster_pb2.CacheEvents) -> None:
        """Applies changes of one tier of a worker to the index."""
        tier = _TIERS.get(changes.tier)
        if tier is None:
            return
        if changes.reset:
            self.index.cleared(worker, tier)
        self.index.removed(worker, changes.removed, tier)
        self.index.stored(worker, changes.stored, tier)

    # ---- Requests.

    def match(self, prompt_hashes: Sequence[int]) -> PrefixMatch:
        """The prefix of a prompt that each worker holds; valid until the next change."""
        return self.index.match(prompt_hashes)

    def assign_prefill(
        self,
        request_id: str,
        choice: PrefillChoice,
        prompt_hashes: Sequence[int],
        session: SessionKey | None = None,
        due_at: float = math.inf,
    ) -> None:
        """Adds a prompt to the load of its chosen worker.

        Args:
            request_id: ID of the request.
            choice: choice that the router or the placement rule returned for the request.
            prompt_hashes: hashes of the prompt's blocks.
            session: the session; None means no session.
            due_at: when the first token is due, by the core's clock; infinite: no target.
        """
        entry = self._loads.entries[choice.worker]
        entry.assign_prefill(request_id, choice.work_s, choice.num_work_tokens, self.now, due_at)
        if choice.fetch is not None:
            fetch = choice.fetch
            near = self.near(fetch.holder, choice.worker)
            self.transfers.begins(fetch.holder, fetch.sending_s, near=near)
        self.index.expect(request_id, choice.worker, prompt_hashes)
        self._loads.file(entry)
        if session is not None:
            self._session(session).prefill = choice.worker

    def assign_decode(
        self,
        request_id: str,
        choice: DecodeChoice,
        session: SessionKey | None = None,
        *,
        urgent: bool = False,
        yields: bool = False,
        num_mean_tokens: int | None = None,
    ) -> None:
        """Adds a decode to the load of its chosen worker.

        Args:
            request_id: ID of the request.
            choice: choice that `choose_decode` returned for the request.
            session: the session; None means no session.
            urgent: whether batch requests yield to this request.
            yields: whether this request can be preempted for an urgent request.
            num_mean_tokens: KV tokens that the request has at half of its mean output; None: as
                many as are reserved.
        """
        entry = self._loads.entries[choice.worker]
        entry.assign_decode(
            request_id,
            choice.num_kv_tokens,
            urgent=urgent,
            yields=yields,
            num_mean_tokens=num_mean_tokens,
        )
        if urgent:
            self._num_urgent += 1
        else:
            self._packed = choice.worker
        self._loads.file(entry)
        if session is not None:
            self._session(session).decode = choice.worker

    def hold(self, request_id: str, worker: WorkerKey, num_tokens: int) -> None:
        """Adds a decode that a worker continues and of which only the size is known."""
        entry = self._loads.entries[worker]
        entry.assign_decode(request_id, num_tokens)
        entry.arrive(request_id)
        self._loads.file(entry)

    def hold_up(self, choice: DecodeChoice, share: float) -> None:
        """Records a prompt that delays a decode worker's requests; see WorkerLoad.hold_up."""
        self._loads.entries[choice.worker].hold_up(choice.num_new_tokens, share, self.now)

    def first_token(
        self, request_id: str, prefill: WorkerKey | None, decode: WorkerKey | None
    ) -> None:
        """Records that a prompt is computed; idempotent.

        The caller must have applied the worker's cache events before.

        Args:
            request_id: ID of the request.
            prefill: worker passed to `assign_prefill`; None: no worker.
            decode: worker passed to `assign_decode`; None: no worker.
        """
        self._end_prefill(request_id, prefill if prefill is not None else decode)
        if (entry := self._loads.get(decode)) is not None:
            entry.arrive(request_id)

    def outgrows(self, request_id: str, decode: WorkerKey | None, num_tokens: int) -> bool:
        """Whether a request needs more KV tokens than are reserved on its worker."""
        entry = self._loads.get(decode)
        return entry is not None and entry.outgrows(request_id, num_tokens)

    def grow(self, request_id: str, decode: WorkerKey | None, num_tokens: int) -> None:
        """Reserves KV room for at least this many tokens of a request, in whole blocks."""
        if (entry := self._loads.get(decode)) is not None:
            entry.grow(request_id, entry.in_blocks(num_tokens))
            self._loads.file(entry)

    def release(self, request_id: str, prefill: WorkerKey | None, decode: WorkerKey | None) -> None:
        """Removes a request from its workers' loads; idempotent. Arguments as in `first_token`."""
        self._end_prefill(request_id, prefill if prefill is not None else decode)
        if (entry := self._loads.get(decode)) is not None:
            self._num_urgent -= entry.end_decode(request_id)
            self._loads.file(entry)

    def _end_prefill(self, request_id: str, prefill: WorkerKey | None) -> None:
        self.index.settle(request_id)
        if (entry := self._loads.get(prefill)) is not None:
            entry.end_prefill(request_id, self.now)
            self._loads.file(entry)

    def forget_session(self, session: SessionKey) -> None:
        """Forgets which workers a session had; idempotent."""
        self._sessions.pop(session, None)

    def _last_of(self, session: SessionKey | None) -> _Session:
        """Returns the last workers of a session."""
        found = self._sessions.get(session) if session is not None else None
        return found or _Session()

    def _session(self, session: SessionKey) -> _Session:
        found = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return found

    # ---- Choices.

    def elastic_candidates(
        self, match: PrefixMatch, session: SessionKey | None
    ) -> list[tuple[WorkerLoad, HeldPrefix]]:
        """Workers that a placement in an elastic cell compares.

        Returns:
            The workers of the least loaded group that get work, the workers with the longest
            prefixes, and the session's last workers. With each, the prefix that it holds.
        """
        loads = self._loads
        group = loads.least_loaded_group()
        found = {entry.key: entry for entry in group if loads.pool(entry.key) is not None}
        if loads.num_groups > 1:
            last = self._last_of(session)
            holders = match.holders(_NUM_HOLDERS, loads.open_prefill | loads.open_decode)
            for worker in (*holders, last.prefill, last.decode):
                entry = loads.get(worker)
                if entry is not None and loads.pool(entry.key) is not None:
                    found[entry.key] = entry
        return [(entry, match.held_by(worker)) for worker, entry in found.items()]

    def takes_prompts(self, entry: WorkerLoad) -> bool:
        """Whether a worker is below its limit of prompts."""
        return bool(self._loads.open_prefill & entry.bit)

    def takes_decodes(self, entry: WorkerLoad) -> bool:
        """Whether a worker is below its limit of decodes."""
        return bool(self._loads.open_decode & entry.bit)

    def near(self, one: WorkerKey, other: WorkerKey) -> bool:
        """Whether two workers are on one host, as far as known."""
        first, second = self._loads.get(one), self._loads.get(other)
        return (
            first is not None
            and second is not None
            and first.traits.host_id == second.traits.host_id
        )

    def sources(self, match: PrefixMatch) -> dict[WorkerKey, HeldPrefix]:
        """Workers that the beginning of a prompt may be fetched from, with what they hold."""
        if not self._fetches:
            return {}
        return match.storers(_NUM_SOURCES, self._loads.open_prefill | self._loads.open_decode)

    def fetch(
        self,
        match: PrefixMatch,
        sources: Mapping[WorkerKey, HeldPrefix],
        reader: WorkerLoad,
        num_tokens: int,
        hits: PromptHits,
    ) -> Fetch | None:
        """The fetch that leaves a reader the least to do; None: no worker holds more than it.

        Args:
            match: prefix match of the prompt.
            sources: result of `sources`.
            reader: load of the worker that computes the prompt.
            num_tokens: tokens of the prompt.
            hits: tokens of the prompt that the reader holds.
        """
        traits = reader.traits
        size, per_token = traits.block_size_tokens, traits.kv_bytes_per_token
        if not per_token or not traits.sends_prefixes:
            return None
        # Two tokens are left to compute: the first one in the step that loads the fetched blocks.
        # A prompt that ends in that step could not be handed over before its blocks are verified.
        usable = (num_tokens - 2) // size * size
        best, least = None, math.inf
        for skip, num_own in self._skips(match, reader, hits, usable):
            for key, held in sources.items():
                holder = self._loads.entries[key]
                most_bytes = min(holder.traits.max_send_bytes, traits.max_receive_bytes)
                most_tokens = most_bytes // (per_token * size) * size
                end = min(held.num_total * size, usable, skip + most_tokens)
                if key == reader.key or end <= max(skip, hits.num_tokens):
                    continue
                near = holder.traits.host_id == traits.host_id
                num_bytes = (end - skip) * per_token
                sending_s = self.transfers.seconds((key, reader.key), num_bytes, near=near)
                wait_s = max(self.transfers.wait_s(key), holder.one_step_s(self.now))
                num_stored = max(0, end - held.num_device * size)
                num_disk = min(held.num_disk * size, num_stored)
                load_s = holder.load_s(num_stored - num_disk, num_disk, self.now)
                fetch_s = _FETCH_BASE_S + wait_s + load_s + sending_s
                if num_own:
                    # The reader loads its own blocks meanwhile, in a step of its own.
                    own_s = reader.load_s(num_own, 0, self.now) + reader.one_step_s(self.now)
                    fetch_s = max(fetch_s, own_s)
                total_s = fetch_s + traits.latency.prefill_s(num_tokens - end)
                if total_s < least:
                    least = total_s
                    best = Fetch(key, end, skip, fetch_s, sending_s, host_tokens=num_own)
        return best

    @staticmethod
    def _skips(
        match: PrefixMatch, reader: WorkerLoad, hits: PromptHits, usable: int
    ) -> list[tuple[int, int]]:
        """Prompt tokens that a fetch may leave out because its reader has them.

        Args:
            match: prefix match of the prompt.
            reader: load of the worker that computes the prompt.
            hits: tokens of the prompt that the reader holds.
            usable: tokens of the prompt that need not be computed; whole blocks.

        Returns:
            Pairs of tokens to leave out, and those of them that the reader loads from host memory.
        """
        if not (hits.num_cached or hits.num_host):
            return [(0, 0)]
        own, size = match.stored_by(reader.key), reader.traits.block_size_tokens
        on_device = min(own.num_device * size, usable)
        with_host = min(own.num_total * size, usable)
        # A load from disk takes too long to hold the blocks behind it in staging.
        if with_host == on_device or own.num_disk:
            return [(on_device, 0)]
        return [(on_device, 0), (with_host, with_host - on_device)]

    def fetching(self, own: PrefillChoice, fetch: Fetch, work_s: float) -> PrefillChoice:
        """A choice with a fetch instead of what the worker holds itself.

        Args:
            own: the same worker without the fetch.
            fetch: the fetch.
            work_s: seconds of the computation that is left.
        """
        num_held = own.num_cached_tokens + own.num_host_tokens + own.num_disk_tokens
        num_tokens = own.num_work_tokens + num_held
        saved_s = own.work_s - work_s
        timeout_s = max(saved_s, 2 * fetch.fetch_s, _LEAST_FETCH_TIMEOUT_S)
        # A part of the fetch pays if its computation takes longer than the fetch.
        share = min(1.0, fetch.fetch_s / saved_s) if saved_s > 0 else 1.0
        size = self._loads.entries[own.worker].traits.block_size_tokens
        least_tokens = num_held + math.ceil((fetch.num_tokens - num_held) * share / size) * size
        return PrefillChoice(
            own.worker,
            fetch.fetch_s + work_s,
            work_s,
            num_tokens - fetch.num_tokens,
            fetch.skip_tokens - fetch.host_tokens,
            fetch.host_tokens,
            fetch=fetch._replace(
                timeout_s=timeout_s, least_tokens=min(fetch.num_tokens, least_tokens)
            ),
        )

    def choose_prefill(
        self,
        match: PrefixMatch,
        num_tokens: int,
        session: SessionKey | None = None,
        ahead: Ahead = ANYTHING_AHEAD,
        *,
        may_fetch: bool = True,
    ) -> PrefillChoice | None:
        """The prefill worker with the least cost: queue and load time plus weighted prefill work.

        Among workers with equal costs the session's last worker comes first, then the worker with
        the longest prefix, then the least loaded worker.

        Args:
            match: prefix match of the prompt.
            num_tokens: tokens of the prompt.
            session: the session; None means no session.
            ahead: limit of the work queued on the worker. Requests beyond it wait in the
                coordinator, where they can still be reordered.
            may_fetch: whether the worker may fetch the prompt's beginning from another worker.

        Returns:
            None if every worker is full.
        """
        loads = self._loads
        best: PrefillChoice | None = None
        least, factor = math.inf, 1 + _WORK_WEIGHT
        sources = self.sources(match) if may_fetch else {}
        for worker, held in self._prefill_candidates(match, session).items():
            entry = loads.entries[worker]
            traits = entry.traits
            if entry.is_full(ahead, self.now):
                continue
            size = traits.block_size_tokens
            # The worker always computes the last token, because it yields the first output token.
            hits = traits.hits(held, (num_tokens - 1) // size * size)
            work_s = traits.latency.prefill_s(num_tokens - hits.num_tokens)
            queued_s = entry.queued_s(self.now)
            wait_s = queued_s + entry.load_s(hits.num_host, hits.num_disk, self.now)
            cost = wait_s + work_s * factor
            own = PrefillChoice(
                worker, wait_s + work_s, work_s, num_tokens - hits.num_tokens, *hits
            )
            if cost < least:
                least, best = cost, own
            if not sources:
                continue
            if (fetch := self.fetch(match, sources, entry, num_tokens, hits)) is not None:
                work_s = traits.latency.prefill_s(num_tokens - fetch.num_tokens)
                # The prompt is fetched while those ahead of it are computed.
                wait_s = max(queued_s, fetch.fetch_s)
                if wait_s + work_s * factor < least:
                    least = wait_s + work_s * factor
                    best = self.fetching(own, fetch, work_s)._replace(predicted_s=wait_s + work_s)
        return best

    def by_handoff(self, worker: WorkerKey, to: WorkerKey, num_tokens: int) -> PrefillChoice:
        """Predicts the cost for a worker to hand over a request that it was decoding.

        The worker recomputes the tokens of the last block that is not full.

        Args:
            worker: worker of any pool; its engine keeps the KV blocks it has computed.
            to: worker that continues the request.
            num_tokens: tokens of the prompt and of the output generated so far.
        """
        entry = self._loads.entries[worker]
        traits = entry.traits
        cached = (num_tokens - 1) // traits.block_size_tokens * traits.block_size_tokens
        work_s = traits.latency.prefill_s(num_tokens - cached)
        # This handoff is sent after the computation; other handoffs are sent during the prefill.
        num_bytes = num_tokens * traits.kv_bytes_per_token
        sent_s = self.transfers.handoff_s((worker, to), num_bytes, near=self.near(worker, to))
        step_s = entry.itl_with_s(0, 0) if entry.num_decodes else 0.0
        predicted_s = entry.queued_s(self.now) + step_s + work_s + sent_s
        return PrefillChoice(entry.key, predicted_s, work_s, num_tokens - cached, cached)

    def prefill_candidates(
        self, match: PrefixMatch, session: SessionKey | None = None
    ) -> list[WorkerLoad]:
        """The loads of the workers that `choose_prefill` compares."""
        return [self._loads.entries[one] for one in self._prefill_candidates(match, session)]

    def _prefill_candidates(
        self, match: PrefixMatch, session: SessionKey | None
    ) -> dict[WorkerKey, HeldPrefix]:
        """The workers that `choose_prefill` compares, with the prefix that each holds."""
        loads, sticky = self._loads, self._last_of(session).prefill
        candidates: dict[WorkerKey, HeldPrefix] = {}
        if sticky is not None and sticky in loads.by_queue:
            candidates[sticky] = match.held_by(sticky)
        candidates |= match.holders(_NUM_HOLDERS, loads.open_prefill)
        idlest = loads.by_queue.least()
        if idlest is not None and idlest not in candidates:
            candidates[idlest] = match.held_by(idlest)
        return candidates

    def choose_decode(
        self,
        match: PrefixMatch,
        num_tokens: int,
        num_output_tokens: int,
        *,
        prefill: WorkerKey | None = None,
        session: SessionKey | None = None,
        max_itl_s: float = math.inf,
        yields: bool = False,
    ) -> DecodeChoice | None:
        """The worker with the least predicted time for the whole output, including the handoff.

        Args:
            match: prefix match of the prompt.
            num_tokens: tokens of the prompt and of the output generated so far.
            num_output_tokens: expected number of further output tokens (OutputLengths).
            prefill: the worker that computes the prompt; None: the decode worker itself.
            session: the session; None means no session.
            max_itl_s: desired maximum step time on a worker that also runs other requests. If it is
                exceeded on all workers, the request goes to the fastest worker.
            yields: whether this is a batch request. A batch request is not placed on a worker
                that exceeds `max_itl_s` and runs both urgent requests and another batch request.
                It prefers a worker with other batch requests to the fastest worker.

        Returns:
            None if no worker has room for the prompt and the expected output.
        """
        source = self._loads.get(prefill)
        best: _Target | None = None
        least = True, math.inf
        for worker, held in self._decode_candidates(match, session, source, apart=yields).items():
            entry = self._loads.entries[worker]
            found = self._target(entry, held, num_tokens, num_output_tokens)
            if found is None:
                continue
            is_slow = found.itl_s > max_itl_s and entry.num_decodes > 0
            if yields and is_slow and not entry.may_yield:
                continue
            cost = found.itl_s * num_output_tokens + self._begin_s(source, found, num_tokens)
            if (is_slow and not yields, cost) < least:
                least, best = (is_slow and not yields, cost), found
        if best is None:
            return None
        packed = self._loads.get(self._packed) if yields and self._num_urgent else None
        if packed is not None and packed.key in self._loads.by_itl:
            held = match.held_by(packed.key)
            found = self._target(packed, held, num_tokens, num_output_tokens)
            if found is not None and self._joins(found, best, source, max_itl_s):
                best = found
        return DecodeChoice(
            best.entry.key,
            best.itl_s,
            best.num_kv_tokens,
            best.hits.num_cached,
            num_tokens,
            best.hits.num_host,
            best.hits.num_disk,
        )

    def _decode_candidates(
        self,
        match: PrefixMatch,
        session: SessionKey | None,
        source: WorkerLoad | None,
        *,
        apart: bool,
    ) -> dict[WorkerKey, HeldPrefix]:
        """The workers that `choose_decode` compares, with the prefix that each holds.

        These are: the session's last worker, the workers with the longest prefixes, the fastest
        worker, the worker with most room (if it has no room, no worker has), the fastest worker on
        the prefill worker's host, and for a batch request (`apart`) the fastest worker without
        urgent requests.
        """
        loads, sticky = self._loads, self._last_of(session).decode
        candidates: dict[WorkerKey, HeldPrefix] = {}
        if sticky is not None and sticky in loads.by_itl:
            candidates[sticky] = match.held_by(sticky)
        candidates |= match.holders(_NUM_HOLDERS, loads.open_decode)
        near = loads.fastest_on(source.traits.host_id) if source is not None else None
        alone = loads.by_itl_apart.least() if apart else None
        for idle in (loads.by_itl.least(), loads.by_room.least(), near, alone):
            if idle is not None and idle not in candidates:
                candidates[idle] = match.held_by(idle)
        return candidates

    @staticmethod
    def _target(
        entry: WorkerLoad, held: HeldPrefix, num_tokens: int, num_output_tokens: int
    ) -> _Target | None:
        """Predicted step time and KV use of a request on a worker; None if it has no room.

        Args:
            entry: load of the worker.
            held: prefix of the prompt that the worker holds.
            num_tokens: tokens of the prompt and of the output generated so far.
            num_output_tokens: expected number of further output tokens.
        """
        needed = entry.in_blocks(num_tokens + num_output_tokens)
        # An empty worker takes any request; the engine refuses a request that is too large for it.
        if needed > entry.free_tokens and entry.num_decodes:
            return None
        hits = entry.traits.hits(held, num_tokens)
        return _Target(entry, entry.itl_with_s(1, needed), needed, hits)

    def _joins(
        self, packed: _Target, best: _Target, source: WorkerLoad | None, max_itl_s: float
    ) -> bool:
        """Whether a batch request joins the previous batch request instead of the fastest worker.

        A request that joins a worker waits for the end of the running step, on average half a step.
        Batch requests keep a worker busy all the time. Packing them on few workers leaves other
        workers idle for urgent requests. They are not packed if that loses a cached prefix or
        makes the handoff cross hosts.
        """
        entry, other = packed.entry, best.entry
        if entry.num_decodes == entry.num_urgent or packed.itl_s > max_itl_s:
            return False
        if entry.num_urgent and packed.itl_s > _PACKED_ITL * best.itl_s:
            return False
        is_near = source is not None and source.traits.host_id == other.traits.host_id
        return packed.hits.num_cached >= best.hits.num_cached and (
            not is_near or entry.traits.host_id == other.traits.host_id
        )

    def _begin_s(self, source: WorkerLoad | None, target: _Target, num_tokens: int) -> float:
        """Seconds until the target has a prompt of `num_tokens` tokens.

        It gets the tokens that it has not cached by handoff, or loads and computes them.
        """
        traits = target.entry.traits
        if source is None:
            return target.entry.prompt_s(num_tokens, target.hits, self.now)
        near = source.traits.host_id == traits.host_id
        num_bytes = (num_tokens - target.hits.num_cached) * source.traits.kv_bytes_per_token
        return self.transfers.handoff_s((source.key, target.entry.key), num_bytes, near=near)

    def check_integrity(self) -> None:
        """Raises AssertionError if sums or masks differ from the entries they summarize."""
        assert self._num_urgent == sum(one.num_urgent for one in self._loads.entries.values())
        self.index.check_integrity()
        self._loads.check_integrity()


def _longest(match: PrefixMatch, among: int) -> HeldPrefix:
    """Longest prefix on any worker in a mask."""
    found = match.holders(1, among).values()
    return max(found, key=lambda held: (held.num_total, held.num_device), default=NOTHING_HELD)
