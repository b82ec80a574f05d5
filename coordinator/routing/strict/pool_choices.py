"""Chooses one prefill worker for a prompt, or one decode worker for an output.

Every cost is in seconds: cached prefixes are weighed against queued work. Every choice compares
only a few candidates: the workers with the longest cached prefixes, the session's last worker and
the least loaded worker. Therefore a decision costs the same with ten workers and with a thousand.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from baton.coordinator.routing.choices import DecodeChoice, PrefillChoice
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import NO_QUEUE_LIMIT, QueueLimit, WorkerLoad
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prefixes.prefix_match import NUM_HOLDERS, HeldPrefix, PrefixMatch
from baton.coordinator.routing.request_needs import DecodeNeeds
from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.requests import PromptHits, SessionKey, WorkerKey
from baton.v1 import common_pb2

# Limit of prefill work queued on one worker, by lane, in steps. With two steps the engine stays
# busy while its answer to the first step is on its way. The batch limit is one step, so that an
# interactive prompt waits for at most one batch step.
QUEUE_LIMITS: dict[Lane, QueueLimit] = {
    common_pb2.LANE_INTERACTIVE: QueueLimit(2.0, predicts_progress=True),
    common_pb2.LANE_BATCH: QueueLimit(1.0, predicts_progress=False),
}
# Extra weight of a second of prefill work compared with a second of waiting. Waiting delays only
# this request. Recomputing a prefix that another worker has cached also delays later requests and
# evicts other prefixes from the cache.
_WORK_WEIGHT = 4.0
# A batch request joins the latest one on a worker with interactive requests only if steps there are
# at most this many times as long as on the fastest worker.
_JOIN_ITL = 1.15


class _Target(NamedTuple):
    """A decode worker with room for a request.

    Attributes:
        entry: load of the worker.
        step_s: predicted seconds per decode step with the request.
        num_kv_tokens: KV tokens that the request needs.
        hits: tokens of the request that the worker holds.
    """

    entry: WorkerLoad
    step_s: float
    num_kv_tokens: int
    hits: PromptHits


class PoolChoices:
    """Chooses workers from the prefill pool and from the decode pool of one fleet.

    Args:
        view: View of one fleet's workers.
        fetches: Fetches between these workers.
    """

    def __init__(self, view: FleetView, fetches: PrefixFetches) -> None:
        self._view, self._fetches = view, fetches

    def choose_prefill(
        self,
        match: PrefixMatch,
        num_tokens: int,
        session: SessionKey | None = None,
        limit: QueueLimit = NO_QUEUE_LIMIT,
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
            limit: limit of the work queued on the worker. Requests beyond it wait in the
                coordinator, where they can still be reordered.
            may_fetch: whether the worker may fetch the prompt's beginning from another worker.

        Returns:
            None if every worker is full.
        """
        loads = self._view.loads
        best: PrefillChoice | None = None
        least, factor = math.inf, 1 + _WORK_WEIGHT
        sources = self._fetches.sources(match) if may_fetch else {}
        for worker, held in self._prefill_candidates(match, session).items():
            entry = loads.entries[worker]
            traits = entry.traits
            if entry.is_full(limit, self._view.now):
                continue
            hits = traits.hits(held, traits.reusable_tokens(num_tokens))
            work_s = traits.latency.prefill_s(num_tokens - hits.num_tokens)
            queued_s = entry.queued_s(self._view.now)
            wait_s = queued_s + entry.tier_load_s(hits, self._view.now)
            cost = wait_s + work_s * factor
            own = PrefillChoice(worker, wait_s + work_s, work_s, num_tokens - hits.num_tokens, hits)
            if cost < least:
                least, best = cost, own
            if not sources:
                continue
            if (fetch := self._fetches.best(match, sources, entry, num_tokens, hits)) is not None:
                work_s = traits.latency.prefill_s(num_tokens - fetch.num_tokens)
                # The prompt is fetched while the worker computes the prompts ahead of it.
                wait_s = max(queued_s, fetch.fetch_s)
                if wait_s + work_s * factor < least:
                    least = wait_s + work_s * factor
                    best = self._fetches.choice(own, fetch, work_s)._replace(ttft_s=wait_s + work_s)
        return best

    def takes_prompt(
        self, match: PrefixMatch, session: SessionKey | None, limit: QueueLimit
    ) -> bool:
        """Whether `choose_prefill` would find a worker; arguments as there."""
        entries, now = self._view.loads.entries, self._view.now
        return any(
            not entries[worker].is_full(limit, now)
            for worker in self._prefill_candidates(match, session)
        )

    def takes_only_interactive(self, match: PrefixMatch, session: SessionKey | None) -> bool:
        """Whether a worker would take an interactive prompt, but none takes a batch prompt."""
        batch, interactive = (
            self.takes_prompt(match, session, QUEUE_LIMITS[lane])
            for lane in (common_pb2.LANE_BATCH, common_pb2.LANE_INTERACTIVE)
        )
        return interactive and not batch

    def _prefill_candidates(
        self, match: PrefixMatch, session: SessionKey | None
    ) -> dict[WorkerKey, HeldPrefix]:
        """The workers that `choose_prefill` compares, with the prefix that each holds."""
        loads, sticky = self._view.loads, self._view.last_of(session).prefill
        candidates: dict[WorkerKey, HeldPrefix] = {}
        if sticky is not None and sticky in loads.by_queue:
            candidates[sticky] = match.held_by(sticky)
        candidates |= match.holders(NUM_HOLDERS, loads.open_prefill)
        idlest = loads.by_queue.least()
        if idlest is not None and idlest not in candidates:
            candidates[idlest] = match.held_by(idlest)
        return candidates

    def choose_decode(
        self,
        match: PrefixMatch,
        needs: DecodeNeeds,
        *,
        prefill: WorkerKey | None = None,
    ) -> DecodeChoice | None:
        """The worker with the least predicted time for the whole output, including the handoff.

        If `needs.max_itl_s` is exceeded on all workers, the request goes to the fastest worker. A
        batch request is not placed on a worker that exceeds it and runs both interactive requests
        and another batch request. It prefers a worker with other batch requests to the fastest one.

        Args:
            match: prefix match of the prompt.
            needs: needs of the request.
            prefill: the worker that computes the prompt; None: the decode worker itself.

        Returns:
            None if no worker has room for the prompt and the expected output.
        """
        num_tokens, num_output_tokens, max_itl_s, is_batch, session = needs
        source = self._view.loads.get(prefill)
        best: _Target | None = None
        least = True, math.inf
        for worker, held in self._decode_candidates(match, session, source, apart=is_batch).items():
            entry = self._view.loads.entries[worker]
            found = self._target(entry, held, num_tokens, num_output_tokens)
            if found is None:
                continue
            is_slow = found.step_s > max_itl_s and entry.num_decodes > 0
            if is_batch and is_slow and not entry.decodes.batch_may_join:
                continue
            cost = found.step_s * num_output_tokens + self._begin_s(source, found, num_tokens)
            if (is_slow and not is_batch, cost) < least:
                least, best = (is_slow and not is_batch, cost), found
        if best is None:
            return None
        latest = self._view.last_batch if is_batch else None
        if latest is not None and latest.key in self._view.loads.by_itl:
            held = match.held_by(latest.key)
            found = self._target(latest, held, num_tokens, num_output_tokens)
            if found is not None and self._joins(found, best, source, max_itl_s):
                best = found
        return DecodeChoice(best.entry.key, best.step_s, best.num_kv_tokens, num_tokens, best.hits)

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
        interactive requests.
        """
        loads, sticky = self._view.loads, self._view.last_of(session).decode
        candidates: dict[WorkerKey, HeldPrefix] = {}
        if sticky is not None and sticky in loads.by_itl:
            candidates[sticky] = match.held_by(sticky)
        candidates |= match.holders(NUM_HOLDERS, loads.open_decode)
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
        return _Target(entry, entry.reserved_step_s(1, needed), needed, hits)

    def _joins(
        self, latest: _Target, best: _Target, source: WorkerLoad | None, max_itl_s: float
    ) -> bool:
        """Whether a batch request joins the previous batch request instead of the fastest worker.

        A request that joins a worker waits for the end of the running step, on average half a step.
        Batch requests keep a worker busy all the time. Packing them on few workers leaves other
        workers idle for interactive requests. They do not join if that loses a cached prefix or
        makes the handoff cross hosts.
        """
        entry, other = latest.entry, best.entry
        if entry.num_decodes == entry.decodes.num_interactive or latest.step_s > max_itl_s:
            return False
        if entry.decodes.num_interactive and latest.step_s > _JOIN_ITL * best.step_s:
            return False
        is_near = source is not None and source.traits.is_near(other.traits)
        return latest.hits.num_device >= best.hits.num_device and (
            not is_near or entry.traits.is_near(other.traits)
        )

    def _begin_s(self, source: WorkerLoad | None, target: _Target, num_tokens: int) -> float:
        """Seconds until the target has a prompt of `num_tokens` tokens.

        It gets the tokens that it has not cached by handoff, or loads and computes them.
        """
        traits = target.entry.traits
        if source is None:
            return target.entry.prompt_s(num_tokens, target.hits, self._view.now)
        near = source.traits.is_near(traits)
        num_bytes = (num_tokens - target.hits.num_device) * source.traits.kv_bytes_per_token
        return self._view.transfers.handoff_s((source.key, target.entry.key), num_bytes, near=near)

    def by_handoff(
        self, worker: WorkerKey, to: WorkerKey, num_tokens: int, *, computes_all: bool = False
    ) -> PrefillChoice:
        """Predicts the cost for a worker to hand over a request that it was decoding.

        The worker recomputes the tokens of the last block that is not full.

        Args:
            worker: worker of any pool; its engine keeps the KV blocks it has computed.
            to: worker that continues the request.
            num_tokens: tokens of the prompt and of the output generated so far.
            computes_all: whether the worker recomputes all tokens.

        Returns:
            A choice whose `ttft_s` ends when the other worker can continue.
        """
        entry = self._view.loads.entries[worker]
        traits = entry.traits
        cached = 0 if computes_all else traits.reusable_tokens(num_tokens)
        work_s = traits.latency.prefill_s(num_tokens - cached)
        # This handoff is sent after the computation; other handoffs are sent during the prefill.
        num_bytes = num_tokens * traits.kv_bytes_per_token
        sent_s = self._view.transfers.handoff_s(
            (worker, to), num_bytes, near=self._view.near(worker, to)
        )
        step_s = entry.reserved_step_s() if entry.num_decodes else 0.0
        ttft_s = entry.queued_s(self._view.now) + step_s + work_s + sent_s
        hits = PromptHits(num_device=cached)
        return PrefillChoice(entry.key, ttft_s, work_s, num_tokens - cached, hits)
