"""Keeps the coordinator's view of a fleet's workers: their loads, cached prefixes and sessions.

The placement rules read it: strict/rule.py for workers with fixed roles, elastic/rule.py for
elastic cells. It chooses no workers itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.coordinator.routing.choices import DecodeChoice, Placement, PrefillChoice
from baton.coordinator.routing.loads.kv_forecast import KvForecast
from baton.coordinator.routing.loads.kv_speeds import KvSpeed, measured_speeds
from baton.coordinator.routing.loads.load_index import LoadIndex
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.loads.worker_traits import WorkerTraits
from baton.coordinator.routing.prefixes.prefix_index import PrefixIndex, Tier
from baton.coordinator.routing.prefixes.prefix_match import NOTHING_HELD, HeldPrefix, PrefixMatch
from baton.coordinator.routing.speeds.transfers import Transfers
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import PredictedSpeeds, RequestKey, SessionKey, WorkerKey
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2

# Maximum number of sessions; the least recently used are dropped.
_MAX_SESSIONS = 65536
# Tiers by their value in CacheEvents; reports of other tiers are ignored.
_TIERS = {
    cluster_pb2.CACHE_TIER_UNSPECIFIED: Tier.DEVICE,
    cluster_pb2.CACHE_TIER_HOST: Tier.HOST,
    cluster_pb2.CACHE_TIER_DISK: Tier.DISK,
}


@dataclass(slots=True)
class LastWorkers:
    """The workers that a session's latest requests were placed on; None: no worker."""

    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None


class FleetView:
    """Owns the load entries of all workers, the prefix index and the sessions.

    The caller assigns the choices it accepts, passes on the workers' reports, and releases every
    request once.

    Args:
        clock: Time of the event that the core handles.
        max_prefill_requests: Limit of prompts assigned to one worker.
        max_decode_requests: Limit of decodes assigned to one worker; the engine's own limit of
            requests per step (max_seqs) applies too.
        step_targets: Targets of the workers' steps in an elastic cell; None elsewhere.

    Attributes:
        loads: load of each worker, and the least loaded ones; read-only for the placement rules.
        index: prefix index; `apply_cache` updates it.
        transfers: measured speeds between workers.
    """

    def __init__(
        self,
        clock: CoreClock,
        max_prefill_requests: int,
        max_decode_requests: int,
        step_targets: StepTargets | None = None,
    ) -> None:
        self._clock = clock
        self.index = PrefixIndex()
        self.transfers = Transfers(clock)
        self.loads = LoadIndex(clock, max_prefill_requests, max_decode_requests, step_targets)
        self._sessions: OrderedDict[SessionKey, LastWorkers] = OrderedDict()
        # Number of interactive decodes on all workers.
        self._num_interactive = 0
        # The worker that got the most recent batch decode.
        self._last_batch: WorkerKey | None = None

    @property
    def now(self) -> float:
        """Time by the core's clock."""
        return self._clock.now

    def tidy(self) -> None:
        """Removes some blocks of workers that have left from the prefix index; see PrefixIndex."""
        self.index.tidy(self.now)

    # ---- Workers

    def add_worker(self, worker: WorkerKey, traits: WorkerTraits, pool: Pool | None) -> None:
        """Adds a worker with an empty or unknown cache; `pool` as in `LoadIndex.set_pool`."""
        size = traits.block_size_tokens
        self.index.add(
            worker,
            traits.kv_tokens // size,
            traits.host_kv_tokens // size,
            traits.disk_kv_tokens // size,
        )
        self.loads.add(WorkerLoad(worker, traits, self.index.bit(worker)))
        self.loads.set_pool(worker, pool)

    def remove_worker(self, worker: WorkerKey) -> None:
        """Removes a worker; its requests must still be released. Idempotent."""
        if (entry := self.loads.get(worker)) is not None:
            self._num_interactive -= entry.decodes.num_interactive
            self.loads.remove(worker)
            self.index.forget(worker)
            self.transfers.forget(worker)

    def longest_prefill(self, match: PrefixMatch) -> HeldPrefix:
        """Longest prefix of a prompt on any prefill worker with room."""
        return _longest(match, self.loads.open_prefill)

    def longest_decode(self, match: PrefixMatch) -> HeldPrefix:
        """Longest prefix of a prompt on any decode worker with room."""
        return _longest(match, self.loads.open_decode)

    @property
    def num_interactive(self) -> int:
        """Number of interactive decodes on all workers."""
        return self._num_interactive

    @property
    def last_batch(self) -> WorkerLoad | None:
        """The worker that got the latest batch decode; None while none is interactive."""
        return self.loads.get(self._last_batch) if self._num_interactive else None

    def report_kv(self, worker: WorkerKey, kv_tokens_used: int) -> None:
        """Updates a worker's load from the number of KV tokens that it reports as used."""
        if (entry := self.loads.get(worker)) is not None:
            entry.report(kv_tokens_used)
            self.loads.update(entry)

    def report_tier_loads(
        self, worker: WorkerKey, host: cluster_pb2.TierLoads, disk: cluster_pb2.TierLoads
    ) -> None:
        """Updates the measured speeds of a worker's loads since its last report."""
        if (entry := self.loads.get(worker)) is None:
            return
        for tier, loads in ((Tier.HOST, host), (Tier.DISK, disk)):
            seconds = loads.duration_us / 1e6
            entry.tier_speeds.observe(tier, loads.num_bytes, seconds, self.now)

    def predicted_speeds(self, placement: Placement) -> PredictedSpeeds:
        """The speeds by which the loads and the fetch of a placement were predicted."""
        choice, fetch = placement.prefill, placement.prefill.fetch
        entry = self.loads.entries[choice.worker]
        host, disk = (
            entry.tier_speeds.bytes_per_s(tier, self.now) if num_tokens else 0.0
            for tier, num_tokens in (
                (Tier.HOST, choice.hits.num_host),
                (Tier.DISK, choice.hits.num_disk),
            )
        )
        if fetch is None or not fetch.sending_s:
            return PredictedSpeeds(host, disk)
        num_bytes = fetch.num_sent_tokens * entry.traits.kv_bytes_per_token
        return PredictedSpeeds(host, disk, num_bytes / fetch.sending_s)

    def kv_speeds(self) -> Iterator[KvSpeed]:
        """Yields the measured speeds at which the workers get KV blocks."""
        return measured_speeds(tuple(self.loads.entries.values()), self.transfers)

    def apply_cache(self, worker: WorkerKey, changes: cluster_pb2.CacheEvents) -> None:
        """Applies changes of one tier of a worker to the index."""
        tier = _TIERS.get(changes.tier)
        if tier is None:
            return
        if changes.reset:
            self.index.cleared(worker, tier)
        self.index.removed(worker, changes.removed, tier)
        self.index.stored(worker, changes.stored, tier)

    # ---- Requests

    def match(self, prompt_hashes: Sequence[int]) -> PrefixMatch:
        """The prefix of a prompt that each worker holds; valid until the next change."""
        return self.index.match(prompt_hashes)

    def assign_prefill(
        self,
        request: RequestKey,
        choice: PrefillChoice,
        prompt_hashes: Sequence[int],
        session: SessionKey | None = None,
        due_at: float = math.inf,
        *,
        is_batch: bool = False,
    ) -> None:
        """Adds a prompt to the load of its chosen worker.

        Args:
            request: key of the request.
            choice: choice that the placement rule made for the request.
            prompt_hashes: hashes of the prompt's blocks.
            session: the session; None means no session.
            due_at: when the first token is due, by the core's clock; infinite: no target.
            is_batch: whether it is a batch request.
        """
        entry = self.loads.entries[choice.worker]
        entry.assign_prefill(
            request,
            choice.work_s,
            choice.num_work_tokens,
            self.now,
            due_at,
            is_batch=is_batch,
        )
        if choice.fetch is not None:
            fetch = choice.fetch
            near = self.near(fetch.holder, choice.worker)
            self.transfers.begins(fetch.holder, fetch.sending_s, near=near)
        self.index.expect(request, choice.worker, prompt_hashes)
        self.loads.update_prompts(entry)
        if session is not None:
            self._session(session).prefill = choice.worker

    def assign_decode(
        self,
        request: RequestKey,
        choice: DecodeChoice,
        session: SessionKey | None = None,
        *,
        is_interactive: bool = False,
        can_be_parked: bool = False,
        num_mean_tokens: int | None = None,
        forecast: KvForecast | None = None,
    ) -> None:
        """Adds a decode to the load of its chosen worker.

        Args:
            request: key of the request.
            choice: choice that the placement rule made for the request.
            session: the session; None means no session.
            is_interactive: whether it is an interactive request.
            can_be_parked: whether it is a batch request that may be parked for interactive ones.
            num_mean_tokens: KV tokens that the request has on average while it decodes; None: as
                many as the choice says.
            forecast: its KV tokens after further steps; None: it always has as many as the choice
                says.
        """
        entry = self.loads.entries[choice.worker]
        entry.decodes.add(
            request,
            choice.num_kv_tokens,
            is_interactive=is_interactive,
            can_be_parked=can_be_parked,
            num_mean_tokens=num_mean_tokens,
            forecast=forecast,
        )
        if is_interactive:
            self._num_interactive += 1
        else:
            self._last_batch = choice.worker
        self.loads.update(entry)
        if session is not None:
            self._session(session).decode = choice.worker

    def hold(self, request: RequestKey, worker: WorkerKey, num_tokens: int) -> None:
        """Adds a decode that a worker continues for an earlier coordinator.

        Args:
            request: key of the request.
            worker: the worker.
            num_tokens: KV tokens of the request so far.
        """
        entry = self.loads.entries[worker]
        entry.decodes.add(request, num_tokens)
        entry.decodes.arrive(request)
        self.loads.update(entry)

    def first_token(
        self, request: RequestKey, prefill: WorkerKey | None, decode: WorkerKey | None
    ) -> None:
        """Records that a prompt is computed; idempotent.

        The caller must have applied the worker's cache events before.

        Args:
            request: key of the request.
            prefill: worker passed to `assign_prefill`; None: no worker.
            decode: worker passed to `assign_decode`; None: no worker.
        """
        self.index.settle(request)
        if (entry := self._prompt_worker(prefill, decode)) is not None:
            entry.prompt_computed(request, self.now)
            self.loads.update_prompts(entry)
        if (entry := self.loads.get(decode)) is not None:
            entry.decodes.arrive(request)

    def record_tokens(self, request: RequestKey, decode: WorkerKey | None, num_tokens: int) -> None:
        """Records the KV tokens that a request has on its worker now.

        The speed of prompts beside the decodes is updated with the next assignment or release.
        Cells that spread their outputs over all workers record nothing: streams catch up there
        after long steps, and prompts that waited for shorter ones were late more often.
        """
        entry, targets = self.loads.get(decode), self.loads.step_targets
        if entry is None or (targets is not None and targets.shares_workers(entry.single_step_s)):
            return
        entry.decodes.record_tokens(request, num_tokens)

    def outgrows(self, request: RequestKey, decode: WorkerKey | None, num_tokens: int) -> bool:
        """Whether a request has so many KV tokens that `grow` is due."""
        entry = self.loads.get(decode)
        return entry is not None and entry.decodes.outgrows(
            request, num_tokens, is_tight=entry.is_tight
        )

    def grow(
        self,
        request: RequestKey,
        decode: WorkerKey | None,
        num_tokens: int,
        forecast: KvForecast | None = None,
    ) -> None:
        """Expects at least this many tokens of a request, and takes a new forecast of it."""
        if (entry := self.loads.get(decode)) is not None:
            entry.decodes.grow(request, entry.in_blocks(num_tokens), forecast)
            self.loads.update(entry)

    def release(
        self, request: RequestKey, prefill: WorkerKey | None, decode: WorkerKey | None
    ) -> None:
        """Removes a request from its workers' loads; idempotent. Arguments as in `first_token`.

        A prompt without a first token so far will have none.
        """
        self.index.settle(request)
        if (entry := self._prompt_worker(prefill, decode)) is not None:
            entry.drop_prompt(request, self.now)
            self.loads.update_prompts(entry)
        if (entry := self.loads.get(decode)) is not None:
            self._num_interactive -= entry.decodes.end(request)
            self.loads.update(entry)

    def _prompt_worker(
        self, prefill: WorkerKey | None, decode: WorkerKey | None
    ) -> WorkerLoad | None:
        """Load of the worker that computes a request's prompt; arguments as in `first_token`."""
        return self.loads.get(prefill if prefill is not None else decode)

    def forget_session(self, session: SessionKey) -> None:
        """Forgets which workers a session had; idempotent."""
        self._sessions.pop(session, None)

    def last_of(self, session: SessionKey | None) -> LastWorkers:
        """The last workers of a session; None: no session."""
        found = self._sessions.get(session) if session is not None else None
        return found or LastWorkers()

    def _session(self, session: SessionKey) -> LastWorkers:
        found = self._sessions.setdefault(session, LastWorkers())
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return found

    # ---- Queries of the placement rules

    def takes_prompts(self, entry: WorkerLoad) -> bool:
        """Whether a worker is below its limit of prompts."""
        return bool(self.loads.open_prefill & entry.bit)

    def takes_decodes(self, entry: WorkerLoad) -> bool:
        """Whether a worker is below its limit of decodes."""
        return bool(self.loads.open_decode & entry.bit)

    def has_room(self, entry: WorkerLoad, num_tokens: int) -> bool:
        """Whether a worker has room for this many KV tokens; one without decodes always has."""
        return self.takes_decodes(entry) and _holds(entry, num_tokens, entry.free_tokens)

    def has_safe_room(self, entry: WorkerLoad, num_tokens: int) -> bool:
        """Whether a worker has room for this many KV tokens although some outputs become long."""
        return _holds(entry, num_tokens, entry.surely_free_tokens)

    def near(self, one: WorkerKey, other: WorkerKey) -> bool:
        """Whether two workers are on one host, as far as known."""
        first, second = self.loads.get(one), self.loads.get(other)
        return first is not None and second is not None and first.traits.is_near(second.traits)

    def check_integrity(self) -> None:
        """Raises AssertionError if sums or masks differ from the entries they summarize."""
        assert self._num_interactive == sum(
            one.decodes.num_interactive for one in self.loads.entries.values()
        )
        self.index.check_integrity()
        self.loads.check_integrity()


def _longest(match: PrefixMatch, among: int) -> HeldPrefix:
    """Longest prefix on any worker in a mask."""
    found = match.holders(1, among).values()
    return max(found, key=lambda held: (held.num_total, held.num_device), default=NOTHING_HELD)


def _holds(entry: WorkerLoad, num_tokens: int, free_tokens: int) -> bool:
    """Whether a worker with this many free KV tokens has room; one without decodes always has."""
    left = free_tokens - entry.in_blocks(num_tokens)
    return not entry.num_decodes or (left >= 0 and left >= entry.passing_tokens)
