"""Decides which request is next: two lanes, and in each lane the tenants ordered by fairness.

A tenant's requests go in the order in which their first tokens are due (see TenantQueue).

Interactive requests whose client has a part of the output go before all others. Otherwise the
interactive lane goes first. While both lanes have requests to start, the batch lane gets its share
of the tokens; while only the batch lane has, it may use everything.

Requests of different fleets wait for different workers. Each fleet therefore has queues of its
own, so that a fleet without room does not hold up the requests of another fleet. The limits of
lanes and tenants count the requests of all fleets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

from baton.coordinator.lanes.fleet_queues import FleetQueues, LaneQueue
from baton.coordinator.lanes.running_limit import RunningLimit
from baton.coordinator.lanes.tenants import (
    InterruptedQueue,
    QueueEntry,
    Tenant,
    TenantQueue,
    Tenants,
)
from baton.coordinator.lanes.waits import LaneWaits
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES, Lane, lane_config
from baton.coordinator.state.requests import Request, RequestKey
from baton.runtime.config import LanesConfig, TenantConfig
from baton.runtime.errors import ResourceExhausted
from baton.runtime.fair_places import FairPlaces
from baton.v1 import common_pb2

# Error reason of a request that more workers would not have admitted either.
TENANT_RATE = "TENANT_RATE"

_BATCH = common_pb2.LANE_BATCH


class Lanes:
    """Orders waiting requests, and charges tenants for the tokens that they are served.

    The core calls the lanes from a request's admission to its end; its dispatcher asks for the next
    request. A tenant has one account per lane and fleet. The prompt
    is charged when the request is dispatched, output tokens as they are generated. A tenant at its
    concurrency limit is not in the order, and its unused share does not accumulate.

    A request is submitted to one lane and may be ordered in the other: a long prompt that was
    submitted to the interactive lane is ordered in the batch lane.

    Args:
        clock: Time of the event that the core handles.
        config: Limits and shares of the lanes.
        defaults: Configuration of tenants that are not in `tenants`.
        tenants: Configurations by the tenant's name.

    Attributes:
        waits: Says for what and for how long requests wait.
    """

    def __init__(
        self,
        clock: CoreClock,
        config: LanesConfig,
        defaults: TenantConfig | None = None,
        tenants: Mapping[str, TenantConfig] | None = None,
    ) -> None:
        self._clock = clock
        self._prompt_weight = config.prompt_token_weight
        self._output_weight = config.output_token_weight
        self._long_prompt_tokens = config.long_prompt_tokens
        self._batch_share = config.batch.share
        self._tenants = Tenants(defaults or TenantConfig(), tenants or {}, self._must_remember)
        self._fleets: dict[Fleet, FleetQueues] = {}
        self._entries: dict[RequestKey, QueueEntry] = {}
        # By the lane that they were submitted to, longest wait first. A request that ran meanwhile
        # waits anew. The first entry of a dict is slow to find after deletions in front of it.
        self._waiting: dict[Lane, OrderedDict[RequestKey, Request]] = {
            lane: OrderedDict() for lane in LANES
        }
        # The places of those requests.
        self._places = {
            lane: FairPlaces(lane_config(config, lane).max_queued, self._weight_of)
            for lane in LANES
        }
        # Requests that have not ended, by the lane that they were submitted to.
        self._num_open = dict.fromkeys(LANES, 0)
        # By the lane that they are ordered in.
        self._limits = {lane: RunningLimit(lane_config(config, lane).max_running) for lane in LANES}
        self.waits = LaneWaits(config, self._tenants, self._fleets, self._limits, self._places)
        self._num_pushed = 0
        # Queues that yield no more requests in this round.
        self._skipped: set[LaneQueue | InterruptedQueue] = set()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def num_queued(self, lane: Lane) -> int:
        """Returns how many requests wait that were submitted to a lane."""
        return len(self._waiting[lane])

    def num_queued_of(self, lane: Lane, tenant: str) -> int:
        """Returns how many requests of a tenant wait that were submitted to a lane."""
        return self._places[lane].num_of(tenant)

    def num_queued_for(self, lane: Lane, fleet: Fleet) -> int:
        """Returns how many requests that were submitted to a lane wait for a fleet's workers."""
        queues = self._fleets.get(fleet)
        return queues.num_submitted[lane] if queues is not None else 0

    def num_open(self, lane: Lane) -> int:
        """Returns how many requests have not ended that were submitted to a lane."""
        return self._num_open[lane]

    def has_room(self, lane: Lane, tenant: str) -> bool:
        """Whether a new request of a tenant may wait in a lane."""
        return self._places[lane].has_room(tenant)

    def oldest(self, lane: Lane) -> Request | None:
        """Returns the request that has waited longest, since it ran last if it has run.

        Only requests that were submitted to the lane count.
        """
        return next(iter(self._waiting[lane].values()), None)

    def without_token(self, lane: Lane) -> list[Request]:
        """Returns the waiting requests that were submitted to a lane and have no token yet."""
        return [one for one in self._waiting[lane].values() if not len(one.token_ids)]

    def reached_limit(self, request: Request) -> str:
        """Returns which limit keeps a waiting request from running, in words; empty: none does."""
        return self.waits.reached_limit(self._entries[request.key])

    # ---- Queueing

    def rate_error(self, tenant: str, num_tokens: int) -> ResourceExhausted | None:
        """Returns why a tenant's rate limit refuses this many tokens now; None if it does not."""
        known = self._tenants.find(tenant)
        if known is None or known.bucket is None:
            return None
        wait_s = known.bucket.wait_s(num_tokens, self._clock.now)
        if not wait_s:
            return None
        return ResourceExhausted(
            f"tenant {tenant!r} is over its {known.config.tokens_per_s:g} tokens/s; "
            f"{num_tokens} more are allowed in {wait_s:.3g} s",
            reason=TENANT_RATE,
            retry_after_s=wait_s,
        )

    def push(self, request: Request, num_tokens: int = 0, work_s: float = 0.0) -> None:
        """Queues a new request, or a dispatched request that waits again.

        Args:
            request: A request that does not wait.
            num_tokens: For a new request: tokens of its prompt and of its longest output. They are
                taken from the tenant's rate limit; unused tokens are returned when it ends.
            work_s: Its prefill work, in seconds.
        """
        entry = self._entries.get(request.key)
        if entry is None:
            entry = self._new_entry(request, num_tokens)
        else:
            assert not entry.is_queued
            self._stopped(entry)
            if request.is_late:
                # It was dispatched in spite of being late. It now waits in its lane like any other
                # request, and may be deferred again.
                request.is_late = False
                queues = entry.queue.lane_queue.fleet_queues
                entry.queue = entry.queue.tenant.queue(queues.interactive)
        entry.is_queued = True
        entry.has_returned = request.attempt > 0 or len(request.token_ids) > 0
        entry.is_interrupted = request.goes_first
        entry.work_us, entry.queued_at = round(work_s * 1e6), self._clock.now
        self._put_in(entry)
        self._places[request.submission.lane].take(entry.queue.tenant.name)
        self._waiting[request.submission.lane][request.key] = request
        request.was_held |= self.waits.is_held(entry)
        self._reorder(entry.queue.tenant)

    def changed_fleet(self, request: Request) -> None:
        """Moves a waiting request, whose fleet has changed, to the queue of its new fleet."""
        entry = self._entries[request.key]
        lane = entry.queue.lane_queue.lane
        queues = self._queues_of(request.fleet)
        self._move(entry, queues.late if request.is_late else queues.of(lane))

    # ---- Dispatching

    def candidates(self) -> Iterator[Request]:
        """Yields the next request, again and again, during a round of dispatching.

        A request that still waits when the next one is requested could not be placed. Its queue is
        then skipped for the rest of the round, because a request after it must not take its place.
        Other queues continue. Interrupted requests go first but hold up no others, because one that
        fits nowhere would stop all until it fails.
        """
        self._begin_round()
        try:
            while (entry := self._next()) is not None:
                lane_queue, is_interrupted = entry.queue.lane_queue, entry.is_interrupted
                yield entry.request
                if not entry.is_queued or entry.queue.lane_queue is not lane_queue:
                    continue
                if is_interrupted:
                    lane_queue.fleet_queues.interrupted.pass_over(entry)
                else:
                    self._skipped.add(lane_queue)
        finally:
            self._begin_round()

    def defer(self, request: Request) -> None:
        """Moves a waiting interactive request after all others: it cannot be in time any more.

        Late requests are in the order of their arrival. The next request of its queue gets its
        turn.
        """
        entry = self._entries[request.key]
        request.is_late = True
        self._move(entry, entry.queue.lane_queue.fleet_queues.late)

    def is_due(self, request: Request) -> bool:
        """Whether a candidate is a batch request that goes before waiting interactive requests.

        It goes first if the batch lane has got less than its share of the tokens.

        Args:
            request: The request that `candidates` has yielded.
        """
        entry = self._entries[request.key]
        queue = entry.queue.lane_queue
        return queue.lane == _BATCH and not entry.is_interrupted and self._other_waits(queue)

    def skip(self, fleet: Fleet) -> None:
        """Yields no more requests of a fleet in this round."""
        queues = self._fleets[fleet]
        self._skipped.update((queues.interrupted, queues.interactive, queues.batch, queues.late))

    def dispatched(self, request: Request, num_prompt_tokens: int) -> bool:
        """A waiting request is dispatched: its tenant is charged for its prompt.

        Args:
            request: A request that waits.
            num_prompt_tokens: Tokens to be computed: the prompt and known output.

        Returns:
            Whether it is a batch request that went before a waiting interactive one, because the
            batch lane had got less than its share of the tokens.
        """
        entry = self._entries[request.key]
        queue, lane_queue = entry.queue, entry.queue.lane_queue
        is_batch, other_waits = lane_queue.lane == _BATCH, self._other_waits(lane_queue)
        # If the other lane is empty or skipped, this request delays no other and adds no debt.
        entry.owed_per_token = 0.0
        if other_waits:
            deficit = lane_queue.fleet_queues.deficit
            entry.owed_per_token = -1.0 if is_batch else deficit.per_token
        self._stop_waiting(entry)
        queue.tenant.started(self._clock.now)
        self._limits[lane_queue.lane].num_running += 1
        lane_queue.order.took_turn(queue)
        entry.num_charged_tokens += num_prompt_tokens
        self._charge(entry, num_prompt_tokens * self._prompt_weight)
        self._reorder(queue.tenant)
        return is_batch and other_waits

    # ---- Running

    def served(self, request: Request, num_output_tokens: int) -> None:
        """Charges a tenant for output tokens; ignores a request that has ended."""
        entry = self._entries.get(request.key)
        if entry is not None:
            self._charge(entry, num_output_tokens * self._output_weight)

    def cached(self, request: Request, num_tokens: int) -> None:
        """Gives back the charge for prompt tokens that came from a prefix cache.

        Args:
            request: A dispatched request; only the first call of an attempt counts.
            num_tokens: Number of prompt tokens from the cache.
        """
        entry = self._entries.get(request.key)
        if entry is None:
            return
        num_back, entry.num_charged_tokens = min(num_tokens, entry.num_charged_tokens), 0
        if num_back:
            cost, lane_queue = num_back * self._prompt_weight, entry.queue.lane_queue
            lane_queue.order.credit(entry.queue, cost)
            lane_queue.fleet_queues.deficit.owed -= cost * entry.owed_per_token

    def reserve_only(self, request: Request, num_tokens: int) -> None:
        """Returns reserved tokens beyond `num_tokens` to the tenant's rate limit.

        Args:
            request: A request that has not ended.
            num_tokens: Most tokens that its prompt and output can have.
        """
        entry = self._entries[request.key]
        num_back = max(0, entry.num_reserved_tokens - num_tokens)
        entry.num_reserved_tokens -= num_back
        if (bucket := entry.queue.tenant.bucket) is not None:
            bucket.give_back(num_back, self._clock.now)

    def ended(self, request: Request) -> None:
        """A waiting or dispatched request has ended; idempotent.

        The tenant's rate limit gets the reserved tokens back that were neither computed nor
        generated: all of them if the request was never dispatched.
        """
        entry = self._entries.pop(request.key, None)
        if entry is None:
            return
        tenant = entry.queue.tenant
        self._num_open[request.submission.lane] -= 1
        if entry.is_queued:
            self._stop_waiting(entry)
            if tenant.slots is not None:
                tenant.slots.waiter_left()
        else:
            self._stopped(entry)
        if tenant.bucket is not None:
            num_used = 0
            if request.attempt:
                num_used = request.num_tokens
            tenant.bucket.give_back(entry.num_reserved_tokens - num_used, self._clock.now)
        self._reorder(tenant)
        if tenant.idle:
            self._tenants.mark_idle(tenant)

    def forget(self, fleet: Fleet) -> None:
        """Removes the queues of a fleet that has no requests."""
        queues = self._fleets.pop(fleet, None)
        if queues is not None:
            for tenant in self._tenants:
                tenant.queues.pop(queues.interactive, None)
                tenant.queues.pop(queues.batch, None)
                tenant.queues.pop(queues.late, None)

    # ---- Turns

    def _begin_round(self) -> None:
        self._skipped.clear()
        for queues in self._fleets.values():
            queues.interrupted.begin_round()

    def _next(self) -> QueueEntry | None:
        """Returns the oldest of the fleets' next entries."""
        found = None
        for queues in self._fleets.values():
            entry = self._next_of(queues)
            if entry is not None and (found is None or entry.order < found.order):
                found = entry
        return found

    def _next_of(self, queues: FleetQueues) -> QueueEntry | None:
        if len(queues.interrupted) and queues.interrupted not in self._skipped:
            interrupted = queues.interrupted.first()
            if interrupted is not None:
                return interrupted
            self._skipped.add(queues.interrupted)
        interactive = self._head(queues.interactive) or self._head(queues.late)
        batch = self._head(queues.batch)
        if interactive is None or batch is None:
            return interactive or batch
        request = batch.request
        num_tokens = request.num_tokens
        due = queues.deficit.is_due(num_tokens * self._prompt_weight)
        return batch if due else interactive

    def _head(self, lane_queue: LaneQueue) -> QueueEntry | None:
        """Returns the next entry of a lane's queue; None if it has none that may run now."""
        if lane_queue in self._skipped or self._limits[lane_queue.lane].is_reached:
            return None
        queue = lane_queue.order.first()
        return queue.first() if queue is not None else None

    def _other_waits(self, lane_queue: LaneQueue) -> bool:
        """Whether the other lane has a request of the same fleet that could go now."""
        return any(self._head(one) for one in lane_queue.fleet_queues.beside(lane_queue))

    def _reorder(self, tenant: Tenant) -> None:
        """Adds a tenant's queues to the orders of their lanes, or removes them."""
        can_run = tenant.can_run
        for lane_queue, queue in tenant.queues.items():
            if can_run and len(queue):
                if queue.item is None:
                    lane_queue.join(queue, self._clock.now)
            elif queue.item is not None:
                lane_queue.leave(queue, self._clock.now)

    # ---- Entries

    def _move(self, entry: QueueEntry, lane_queue: LaneQueue) -> None:
        """Moves a waiting entry to another queue."""
        tenant = entry.queue.tenant
        self._take_out(entry)
        self._reorder(tenant)
        entry.queue = tenant.queue(lane_queue)
        entry.owed_per_token = 0.0
        self._put_in(entry)
        self._reorder(tenant)

    def _new_entry(self, request: Request, num_tokens: int) -> QueueEntry:
        now = self._clock.now
        submission = request.submission
        tenant = self._tenants.activate(submission.tenant, now)
        if tenant.bucket is not None:
            tenant.bucket.take(num_tokens, now)
        self._num_pushed += 1
        lane = submission.ordered_in(self._long_prompt_tokens)
        queue = tenant.queue(self._queues_of(request.fleet).of(lane))
        entry = QueueEntry(request, queue, self._num_pushed, num_tokens)
        self._entries[request.key] = entry
        self._num_open[submission.lane] += 1
        return entry

    def _queues_of(self, fleet: Fleet) -> FleetQueues:
        """Returns the queues of a fleet; creates them at the first use."""
        queues = self._fleets.get(fleet)
        if queues is None:
            queues = self._fleets[fleet] = FleetQueues(fleet, self._batch_share)
        return queues

    def _put_in(self, entry: QueueEntry) -> None:
        queue, work_us = entry.queue, entry.work_us
        queues = queue.lane_queue.fleet_queues
        queues.submitted_work_us[entry.request.submission.lane] += work_us
        queues.num_submitted[entry.request.submission.lane] += 1
        if entry.is_interrupted:
            queues.interrupted.push(entry)
            return
        queue.push(entry, self._clock.now)
        queue.work_us += work_us
        if queue.item is not None:
            queue.lane_queue.work.add(work_us, self._clock.now)

    def _take_out(self, entry: QueueEntry) -> None:
        queue, work_us = entry.queue, entry.work_us
        queues = queue.lane_queue.fleet_queues
        queues.submitted_work_us[entry.request.submission.lane] -= work_us
        queues.num_submitted[entry.request.submission.lane] -= 1
        if entry.is_interrupted:
            queues.interrupted.remove(entry)
            return
        # A request that is dispatched at once has not waited: it does not count for the rate.
        has_waited = entry.queued_at < self._clock.now
        queue.remove(entry)
        queue.work_us -= work_us
        if queue.item is not None:
            queue.lane_queue.work.remove(work_us, self._clock.now, left=has_waited)

    def _stop_waiting(self, entry: QueueEntry) -> None:
        self._take_out(entry)
        entry.is_queued = entry.is_interrupted = False
        lane = entry.request.submission.lane
        del self._waiting[lane][entry.request.key]
        self._places[lane].give_back(entry.queue.tenant.name)

    def _stopped(self, entry: QueueEntry) -> None:
        """A dispatched request no longer runs."""
        entry.queue.tenant.stopped(self._clock.now)
        self._limits[entry.queue.lane_queue.lane].num_running -= 1

    def _weight_of(self, tenant: str) -> float:
        return self._tenants.config(tenant).weight

    # ---- Charges

    def _charge(self, entry: QueueEntry, cost: float) -> None:
        queue = entry.queue
        lane_queue = queue.lane_queue
        lane_queue.order.charge(queue, cost)
        if entry.owed_per_token:
            lane_queue.fleet_queues.deficit.owed += cost * entry.owed_per_token
        elif lane_queue.lane == _BATCH:
            lane_queue.fleet_queues.deficit.used_idle(cost)

    def _must_remember(self, tenant: Tenant) -> bool:
        """Whether forgetting an idle tenant would change how its later requests are treated."""
        # Its counter is above the others' level.
        if any(one.counter > one.lane_queue.order.level() for one in tenant.queues.values()):
            return True
        # The run times of its requests would have to be measured again.
        if tenant.slots is not None and tenant.slots.has_history:
            return True
        return tenant.bucket is not None and not tenant.bucket.full(self._clock.now)

    # ---- Integrity

    def check_integrity(self) -> None:
        """Raises AssertionError when a request is lost, counted twice or in a wrong queue."""
        queued = [entry for entry in self._entries.values() if entry.is_queued]
        assert len(queued) == len(self)
        num_running = sum(limit.num_running for limit in self._limits.values())
        assert num_running == len(self._entries) - len(queued)
        assert all(one.queue is one.queue.tenant.queues[one.queue.lane_queue] for one in queued)
        queues = {id(entry.queue): entry.queue for entry in self._entries.values()}
        num_interrupted = sum(len(one.interrupted) for one in self._fleets.values())
        assert sum(map(len, queues.values())) == len(queued) - num_interrupted
        for queue in queues.values():
            assert (queue.item is not None) == (len(queue) > 0 and queue.tenant.can_run)
        running = Counter(
            entry.queue.tenant.name for entry in self._entries.values() if not entry.is_queued
        )
        assert all(tenant.num_running == running[tenant.name] for tenant in self._tenants)
        interrupted = Counter(one.queue.tenant.name for one in queued if one.is_interrupted)
        assert all(one.num_interrupted == interrupted[one.name] for one in self._tenants)
        for lane, places in self._places.items():
            waiting = Counter(one.submission.tenant for one in self._waiting[lane].values())
            places.check_integrity(waiting)
            mine = (one for one in self._entries.values() if one.request.submission.lane == lane)
            assert self._num_open[lane] == sum(1 for _ in mine)
        self._check_fleets()
        self._check_work(queued)
        self._tenants.check_integrity()

    def _check_fleets(self) -> None:
        for entry in self._entries.values():
            fleet_queues = entry.queue.lane_queue.fleet_queues
            assert fleet_queues is self._fleets.get(entry.request.fleet)
        for fleet, fleet_queues in self._fleets.items():
            assert fleet_queues.fleet is fleet
            entries = list(fleet_queues.interrupted)
            assert all(one.is_queued and one.is_interrupted for one in entries)
            assert all(one.queue.lane_queue.fleet_queues is fleet_queues for one in entries)
            assert fleet_queues.interrupted.work_us == sum(one.work_us for one in entries)
            for lane_queue in (fleet_queues.interactive, fleet_queues.batch, fleet_queues.late):
                queues = [one.queues.get(lane_queue) for one in self._tenants]
                inside = [one for one in queues if one is not None and one.item is not None]
                lane_queue.check_integrity(inside)

    def _check_work(self, queued: list[QueueEntry]) -> None:
        of_queues, submitted = Counter[TenantQueue](), Counter[tuple[Fleet, Lane]]()
        num_submitted = Counter[tuple[Fleet, Lane]]()
        for entry in queued:
            if not entry.is_interrupted:
                of_queues[entry.queue] += entry.work_us
            request = entry.request
            submitted[request.fleet, request.submission.lane] += entry.work_us
            num_submitted[request.fleet, request.submission.lane] += 1
        for tenant in self._tenants:
            assert all(one.work_us == of_queues[one] for one in tenant.queues.values())
        for fleet, queues in self._fleets.items():
            for lane, work_us in queues.submitted_work_us.items():
                assert work_us == submitted[fleet, lane]
                assert queues.num_submitted[lane] == num_submitted[fleet, lane]
