"""Which request is next: two lanes, and in each of them tenants in the order of fairness.

Interactive goes first. While both lanes have work to start, batch gets its share of the tokens all
the same; what interactive cannot use, batch gets whole.

Requests of different fleets wait for different workers. Each fleet therefore has queues of its
own, so that a fleet without room does not hold up the requests of another fleet. The limits of
lanes and tenants count the requests of all fleets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

from baton.coordinator.lanes.fleet_queues import FleetQueues, LaneQueue
from baton.coordinator.lanes.tenants import Tenant, TenantQueue, Tenants, Ticket
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES, Lane, lane_config
from baton.coordinator.state.requests import Request, RequestKey, Submission
from baton.runtime.config import LanesConfig, TenantConfig
from baton.runtime.errors import ResourceExhausted
from baton.v1 import common_pb2

# Why a request was refused that more workers would not have let in either.
TENANT_RATE = "TENANT_RATE"

_INTERACTIVE, _BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH


class Lanes:
    """Orders the requests that wait, and charges tenants for those that run.

    It knows a request from its admission to its end. A tenant is charged for a prompt when the
    request is dispatched, and for output tokens as they come. It has an account and a turn of its
    own in each lane. While it has as many requests running as it may, it is out of the order, and
    what it cannot use meanwhile is not saved up for it.

    A request is submitted to a lane and ordered in one: a long prompt that was submitted to the
    interactive lane is ordered in the batch lane.

    Args:
        config: limits and shares of the lanes.
        defaults: the configuration of tenants that `tenants` does not name.
        tenants: configurations by the tenant's name.

    Attributes:
        now: when the event happened that is being handled, by the core's clock; whoever calls
            sets it first.
    """

    def __init__(
        self,
        config: LanesConfig,
        defaults: TenantConfig | None = None,
        tenants: Mapping[str, TenantConfig] | None = None,
    ) -> None:
        self._prompt_weight = config.prompt_token_weight
        self._output_weight = config.output_token_weight
        self._long_prompt_tokens = config.long_prompt_tokens
        self._max_running = {lane: lane_config(config, lane).max_running for lane in LANES}
        self._batch_share = config.batch.share
        self._tenants = Tenants(defaults or TenantConfig(), tenants or {}, self._must_remember)
        self._fleets: dict[Fleet, FleetQueues] = {}
        self._tickets: dict[RequestKey, Ticket] = {}
        # By the lane they were submitted to, longest waiting first.
        self._waiting: dict[Lane, OrderedDict[RequestKey, Request]] = {
            lane: OrderedDict() for lane in LANES
        }
        # By the lane they are ordered in.
        self._num_running = dict.fromkeys(LANES, 0)
        self._num_pushed = 0
        self.now = 0.0
        # Queues whose first request could not be placed in this round.
        self._passed: set[LaneQueue] = set()

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    def num_queued(self, lane: Lane) -> int:
        """How many requests wait that were submitted to a lane."""
        return len(self._waiting[lane])

    def oldest(self, lane: Lane) -> Request | None:
        """The request that has waited for longest of those submitted to a lane."""
        return next(iter(self._waiting[lane].values()), None)

    @property
    def num_tenants(self) -> int:
        """How many tenants are remembered."""
        return len(self._tenants)

    # ---- How long requests wait

    def waiting_s(self, lane: Lane, fleet: Fleet) -> float:
        """Seconds of prefill work that wait for a fleet in requests submitted to a lane."""
        queues = self._fleets.get(fleet)
        return queues.submitted_work_us[lane] / 1e6 if queues is not None else 0.0

    def wait_s(
        self, submission: Submission, fleet: Fleet, work_s: float, num_workers: int
    ) -> float:
        """How long a request that comes now would wait for its turn, in seconds.

        Args:
            submission: the request, which is not queued.
            fleet: The fleet that it would wait for.
            work_s: its own prefill work, in seconds.
            num_workers: how many workers compute prompts.
        """
        queues = self._fleets.get(fleet)
        if queues is None:
            return 0.0
        queue = queues.of(submission.ordered_in(self._long_prompt_tokens))
        # Seconds of prefill work that can leave the queue in a second.
        most_per_s, first_s = num_workers * (1 - self._batch_share), 0.0
        if queue is queues.batch:
            first_s = queues.interactive.work.work_s / most_per_s
            most_per_s = num_workers
        weight = self._tenants.config(submission.tenant).weight
        ahead_s = queue.ahead_s(self._tenants.find(submission.tenant), weight, work_s)
        wait_s = first_s + ahead_s / most_per_s
        if queue.work.work_s:
            # Where something else than prefill workers is short, less leaves than could.
            per_s = queue.work.per_s(most_per_s, self.now)
            wait_s = max(wait_s, (ahead_s + work_s) / per_s - work_s / most_per_s)
        return wait_s

    def slot_wait_s(self, submission: Submission) -> float | None:
        """How long a request would wait until its tenant may have one more running, in seconds.

        Args:
            submission: the request, which is not queued.

        Returns:
            None where the tenant may have one more running now.
        """
        tenant = self._tenants.find(submission.tenant)
        if tenant is None or tenant.slots is None:
            return None
        lane = submission.ordered_in(self._long_prompt_tokens)
        before = {lane, _INTERACTIVE}
        num_waiting = sum(
            len(one) for one in tenant.queues.values() if one.lane_queue.lane in before
        )
        return tenant.slots.wait_s(num_waiting, self.now)

    # ---- In

    def rate_error(self, tenant: str, num_tokens: int, now: float) -> ResourceExhausted | None:
        """Why a tenant's rate does not allow a request of so many tokens now; None: it does."""
        known = self._tenants.find(tenant)
        if known is None or known.bucket is None:
            return None
        wait_s = known.bucket.wait_s(num_tokens, now)
        if not wait_s:
            return None
        return ResourceExhausted(
            f"tenant {tenant!r} is over its {known.config.tokens_per_s:g} tokens/s; "
            f"{num_tokens} more are allowed in {wait_s:.3g} s",
            reason=TENANT_RATE,
            retry_after_s=wait_s,
        )

    def push(self, request: Request, now: float, num_tokens: int = 0, work_s: float = 0.0) -> None:
        """Queues a new request, or one that was dispatched and comes back.

        Args:
            request: a request that does not wait.
            now: by the core's clock.
            num_tokens: of a new one: prompt and the most output it may have. They are taken from
                its tenant's rate, and what it did not use is given back when it ends.
            work_s: its prefill work, in seconds.
        """
        ticket = self._tickets.get(request.key)
        if ticket is None:
            ticket = self._new_ticket(request, now, num_tokens)
        else:
            assert not ticket.is_queued
            self._stopped(ticket)
        ticket.is_queued = True
        ticket.has_returned = request.attempt > 0 or len(request.token_ids) > 0
        ticket.work_us, ticket.queued_at = round(work_s * 1e6), now
        self._put_in(ticket)
        waiting = self._waiting[request.submission.lane]
        waiting[request.key] = request
        if request.attempt:
            waiting.move_to_end(request.key, last=False)
        self._reorder(ticket.queue.tenant)

    def changed_fleet(self, request: Request) -> None:
        """Moves a waiting request, whose fleet has changed, to the queue of its new fleet."""
        ticket = self._tickets[request.key]
        tenant, lane = ticket.queue.tenant, ticket.queue.lane_queue.lane
        self._take_out(ticket)
        self._reorder(tenant)
        ticket.queue = tenant.queue(self._queues_of(request.fleet).of(lane))
        ticket.owed_per_token = 0.0
        self._put_in(ticket)
        self._reorder(tenant)

    # ---- Next

    def candidates(self) -> Iterator[Request]:
        """Who is next, one after another, while places are being given.

        One that still waits when the next is asked for could not be placed: its queue is passed
        over for the rest of the round, since whoever is behind must not take its place, and the
        others go on.
        """
        self._passed.clear()
        try:
            while (ticket := self._next()) is not None:
                yield ticket.request
                if ticket.is_queued:
                    self._passed.add(ticket.queue.lane_queue)
        finally:
            self._passed.clear()

    def is_due(self, request: Request) -> bool:
        """Whether a candidate is a batch request that goes before interactive ones: it is owed.

        Args:
            request: the candidate at hand.
        """
        queue = self._tickets[request.key].queue.lane_queue
        return queue.lane == _BATCH and self._other_waits(queue)

    def pass_over(self, fleet: Fleet) -> None:
        """Offers no more requests of a fleet in this round."""
        queues = self._fleets[fleet]
        self._passed.update((queues.interactive, queues.batch))

    def dispatched(self, request: Request, num_prompt_tokens: int) -> bool:
        """A waiting request goes to its workers: its tenant is charged for its prompt.

        Args:
            request: a request that waits.
            num_prompt_tokens: tokens to be computed: the prompt, and known output with it.

        Returns:
            Whether it is a batch request whose place an interactive one might have had: the place
            was owed to it.
        """
        ticket = self._tickets[request.key]
        queue, lane_queue = ticket.queue, ticket.queue.lane_queue
        is_batch, other_waits = lane_queue.lane == _BATCH, self._other_waits(lane_queue)
        # With the other lane empty, or passed over, the place was nobody else's: it puts the lane
        # into nobody's debt.
        ticket.owed_per_token = 0.0
        if other_waits:
            trickle = lane_queue.fleet_queues.trickle
            ticket.owed_per_token = -1.0 if is_batch else trickle.per_token
        self._stop_waiting(ticket)
        queue.tenant.started(self.now)
        self._num_running[lane_queue.lane] += 1
        lane_queue.order.took_turn(queue)
        ticket.num_charged_tokens += num_prompt_tokens
        self._charge(ticket, num_prompt_tokens * self._prompt_weight)
        self._reorder(queue.tenant)
        return is_batch and other_waits

    def forget(self, fleet: Fleet) -> None:
        """Removes the queues of a fleet that has no requests."""
        queues = self._fleets.pop(fleet, None)
        if queues is not None:
            for tenant in self._tenants:
                tenant.queues.pop(queues.interactive, None)
                tenant.queues.pop(queues.batch, None)

    # ---- Running

    def served(self, request: Request, num_output_tokens: int) -> None:
        """Charges a tenant for output tokens; does nothing for a request that has ended."""
        ticket = self._tickets.get(request.key)
        if ticket is not None:
            self._charge(ticket, num_output_tokens * self._output_weight)

    def cached(self, request: Request, num_tokens: int) -> None:
        """Gives back what was charged for prompt tokens that came from a prefix cache.

        Args:
            request: only the first call for an attempt counts.
            num_tokens: how many came from the cache.
        """
        ticket = self._tickets.get(request.key)
        if ticket is None:
            return
        num_back, ticket.num_charged_tokens = min(num_tokens, ticket.num_charged_tokens), 0
        if num_back:
            cost, lane_queue = num_back * self._prompt_weight, ticket.queue.lane_queue
            lane_queue.order.credit(ticket.queue, cost)
            lane_queue.fleet_queues.trickle.owed -= cost * ticket.owed_per_token

    def ended(self, request: Request, now: float) -> None:
        """A request ended, wherever it was; idempotent.

        Its tenant's rate gets back what was reserved and neither computed nor generated: everything
        when it was never dispatched.
        """
        ticket = self._tickets.pop(request.key, None)
        if ticket is None:
            return
        tenant = ticket.queue.tenant
        if ticket.is_queued:
            self._stop_waiting(ticket)
            if tenant.slots is not None:
                tenant.slots.gave_up()
        else:
            self._stopped(ticket)
        if tenant.bucket is not None:
            num_used = 0
            if request.attempt:
                num_used = request.num_tokens
            tenant.bucket.give_back(ticket.num_reserved_tokens - num_used, now)
        self._reorder(tenant)
        if tenant.idle:
            self._tenants.rest(tenant, now)

    # ---- Whose turn it is

    def _next(self) -> Ticket | None:
        """Returns the oldest of the fleets' next tickets."""
        found = None
        for queues in self._fleets.values():
            ticket = self._next_of(queues)
            if ticket is not None and (found is None or ticket.order < found.order):
                found = ticket
        return found

    def _next_of(self, queues: FleetQueues) -> Ticket | None:
        interactive, batch = self._head(queues.interactive), self._head(queues.batch)
        if interactive is None or batch is None:
            return interactive or batch
        request = batch.request
        num_tokens = request.num_tokens
        due = queues.trickle.is_due(num_tokens * self._prompt_weight)
        return batch if due else interactive

    def _head(self, lane_queue: LaneQueue) -> Ticket | None:
        """Returns the next ticket of a lane's queue; None if it has none that may run now."""
        lane = lane_queue.lane
        limit = self._max_running[lane]
        if lane_queue in self._passed or (limit is not None and self._num_running[lane] >= limit):
            return None
        queue = lane_queue.order.first()
        return queue.first() if queue is not None else None

    def _other_waits(self, lane_queue: LaneQueue) -> bool:
        """Whether the other lane has a request of the same fleet that could go now."""
        return self._head(lane_queue.fleet_queues.beside(lane_queue)) is not None

    def _reorder(self, tenant: Tenant) -> None:
        """Puts a tenant's queues into the orders of their lanes, or takes them out."""
        can_run = tenant.can_run
        for lane_queue, queue in tenant.queues.items():
            if can_run and len(queue):
                if queue.item is None:
                    lane_queue.join(queue, self.now)
            elif queue.item is not None:
                lane_queue.leave(queue, self.now)

    # ---- Tickets in and out

    def _new_ticket(self, request: Request, now: float, num_tokens: int) -> Ticket:
        submission = request.submission
        tenant = self._tenants.awake(submission.tenant, now)
        if tenant.bucket is not None:
            tenant.bucket.take(num_tokens, now)
        self._num_pushed += 1
        lane = submission.ordered_in(self._long_prompt_tokens)
        queue = tenant.queue(self._queues_of(request.fleet).of(lane))
        ticket = Ticket(request, queue, self._num_pushed, num_tokens)
        self._tickets[request.key] = ticket
        return ticket

    def _queues_of(self, fleet: Fleet) -> FleetQueues:
        """Returns the queues of a fleet; creates them at the first use."""
        queues = self._fleets.get(fleet)
        if queues is None:
            queues = self._fleets[fleet] = FleetQueues(fleet, self._batch_share)
        return queues

    def _put_in(self, ticket: Ticket) -> None:
        queue, work_us = ticket.queue, ticket.work_us
        queue.push(ticket)
        queue.work_us += work_us
        lane_queue = queue.lane_queue
        if queue.item is not None:
            lane_queue.work.add(work_us, self.now)
        lane_queue.fleet_queues.submitted_work_us[ticket.request.submission.lane] += work_us

    def _take_out(self, ticket: Ticket) -> None:
        queue, work_us = ticket.queue, ticket.work_us
        # Who goes at once has not waited, and tells nothing of how long that takes.
        has_waited = ticket.queued_at < self.now
        queue.remove(ticket)
        queue.work_us -= work_us
        lane_queue = queue.lane_queue
        if queue.item is not None:
            lane_queue.work.remove(work_us, self.now, left=has_waited)
        lane_queue.fleet_queues.submitted_work_us[ticket.request.submission.lane] -= work_us

    def _stop_waiting(self, ticket: Ticket) -> None:
        ticket.is_queued = False
        self._take_out(ticket)
        del self._waiting[ticket.request.submission.lane][ticket.request.key]

    def _stopped(self, ticket: Ticket) -> None:
        """A dispatched request runs no longer."""
        ticket.queue.tenant.stopped(self.now)
        self._num_running[ticket.queue.lane_queue.lane] -= 1

    # ---- What is charged and remembered

    def _charge(self, ticket: Ticket, cost: float) -> None:
        queue = ticket.queue
        lane_queue = queue.lane_queue
        lane_queue.order.charge(queue, cost)
        if ticket.owed_per_token:
            lane_queue.fleet_queues.trickle.owed += cost * ticket.owed_per_token
        elif lane_queue.lane == _BATCH:
            lane_queue.fleet_queues.trickle.got(cost)

    def _must_remember(self, tenant: Tenant, now: float) -> bool:
        """Whether an idle tenant, were it forgotten, would come back better or worse off."""
        # What it was served still puts it behind others.
        if any(one.counter > one.lane_queue.order.level() for one in tenant.queues.values()):
            return True
        # How long its requests run is not known of a new one.
        if tenant.slots is not None and tenant.slots.has_history:
            return True
        return tenant.bucket is not None and not tenant.bucket.full(now)

    # ---- Integrity

    def check_integrity(self) -> None:
        """Raises AssertionError when a request is lost or counted twice."""
        queued = [ticket for ticket in self._tickets.values() if ticket.is_queued]
        assert len(queued) == len(self)
        assert sum(self._num_running.values()) == len(self._tickets) - len(queued)
        assert all(one.queue is one.queue.tenant.queues[one.queue.lane_queue] for one in queued)
        queues = {id(ticket.queue): ticket.queue for ticket in self._tickets.values()}
        assert sum(map(len, queues.values())) == len(queued)
        for queue in queues.values():
            assert (queue.item is not None) == (len(queue) > 0 and queue.tenant.can_run)
        running = Counter(
            ticket.queue.tenant.name for ticket in self._tickets.values() if not ticket.is_queued
        )
        assert all(tenant.num_running == running[tenant.name] for tenant in self._tenants)
        self._check_fleets()
        self._check_work(queued)
        self._tenants.check_integrity()

    def _check_fleets(self) -> None:
        for ticket in self._tickets.values():
            fleet_queues = ticket.queue.lane_queue.fleet_queues
            assert fleet_queues is self._fleets.get(ticket.request.fleet)
        for fleet, fleet_queues in self._fleets.items():
            assert fleet_queues.fleet is fleet
            for lane_queue in (fleet_queues.interactive, fleet_queues.batch):
                queues = [one.queues.get(lane_queue) for one in self._tenants]
                inside = [one for one in queues if one is not None and one.item is not None]
                lane_queue.check_integrity(inside)

    def _check_work(self, queued: list[Ticket]) -> None:
        of_queues, submitted = Counter[TenantQueue](), Counter[tuple[Fleet, Lane]]()
        for ticket in queued:
            of_queues[ticket.queue] += ticket.work_us
            request = ticket.request
            submitted[request.fleet, request.submission.lane] += ticket.work_us
        for tenant in self._tenants:
            assert all(one.work_us == of_queues[one] for one in tenant.queues.values())
        for fleet, queues in self._fleets.items():
            for lane, work_us in queues.submitted_work_us.items():
                assert work_us == submitted[fleet, lane]
