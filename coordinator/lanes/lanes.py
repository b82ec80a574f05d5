"""Which request is next: two lanes, and in each of them tenants in the order of fairness.

Interactive goes first. While both lanes have work to start, batch gets its share of the tokens all
the same; what interactive cannot use, batch gets whole.

Requests of different revisions wait for different workers: each revision has an order of its own,
so that none is held up by another that has no room. What a lane and a tenant may have is counted
over all of them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

from baton.coordinator.core.request import Request, RequestKey, Submission
from baton.coordinator.lanes.fairness import FairOrder, Trickle
from baton.coordinator.lanes.lane_work import WaitingWork
from baton.coordinator.lanes.tenants import Lane, Tenant, TenantQueue, Tenants, Ticket, Track
from baton.runtime.config import LaneConfig, LanesConfig, TenantConfig
from baton.runtime.errors import ResourceExhausted
from baton.runtime.names import FIRST_REVISION
from baton.v1 import common_pb2

# Why a request was refused that more workers would not have let in either.
TENANT_RATE = "TENANT_RATE"

_INTERACTIVE, _BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
LANES: tuple[Lane, ...] = (_INTERACTIVE, _BATCH)


def lane_config(config: LanesConfig, lane: Lane) -> LaneConfig:
    return config.batch if lane == _BATCH else config.interactive


class _TrackWait:
    """Of the tenants in one order.

    Attributes:
        weight: of all of them.
    """

    __slots__ = ("weight", "work")

    def __init__(self) -> None:
        self.work = WaitingWork()
        self.weight = 0.0

    def joined(self, queue: TenantQueue, now: float) -> None:
        self.weight += queue.weight
        self.work.add(queue.work_us, now)

    def left(self, queue: TenantQueue, now: float) -> None:
        self.weight -= queue.weight
        self.work.remove(queue.work_us, now, left=False)


class Lanes:
    """Requests from their admission to their end: those that wait, and what the others cost.

    A tenant is charged for its prompt when the request is dispatched and for each output token as
    it comes. It waits its turn in each lane by itself. It is out of the order while it has as many
    running as it may, so that what it cannot use is not saved up for it.

    Args:
        config: limits and shares of the lanes.
        defaults: of tenants that are not named.
        tenants: by name.

    Attributes:
        now: when that happens which is told, by the core's clock.
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
        self._tenants = Tenants(defaults or TenantConfig(), tenants or {}, self._matters)
        self._current: frozenset[str] = frozenset({FIRST_REVISION})
        self._share = config.batch.share
        # By revision: how many tickets, its tracks' orders, and what its batch lane is owed.
        self._num_tickets: Counter[str] = Counter()
        self._orders: dict[Track, FairOrder[TenantQueue]] = {}
        # Of those in each order: what waits, and their weights.
        self._waits: dict[Track, _TrackWait] = {}
        self._trickles: dict[str, Trickle] = {}
        self._tickets: dict[RequestKey, Ticket] = {}
        # By the lane they were submitted to, longest waiting first.
        self._waiting: dict[Lane, OrderedDict[RequestKey, Request]] = {
            lane: OrderedDict() for lane in LANES
        }
        # By the lane they are ordered in.
        self._num_running = dict.fromkeys(LANES, 0)
        self._num_pushed = 0
        # Of prefill that waits, by the lane it was submitted to, and revision; whole microseconds.
        self._work_us: Counter[Track] = Counter()
        self.now = 0.0
        # Tracks whose first request could not be placed in this round.
        self._passed: set[Track] = set()

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting.values()))

    def num_queued(self, lane: Lane) -> int:
        return len(self._waiting[lane])

    def oldest(self, lane: Lane) -> Request | None:
        """The one that has waited for longest."""
        return next(iter(self._waiting[lane].values()), None)

    @property
    def num_tenants(self) -> int:
        """Remembered ones."""
        return len(self._tenants)

    # ---- What waits

    def waiting_s(self, lane: Lane, revision: str) -> float:
        """Seconds of prefill work that were submitted to a lane, and wait."""
        return self._work_us[lane, revision] / 1e6

    def wait_s(
        self, submission: Submission, revision: str, work_s: float, num_workers: int
    ) -> float:
        """How long a request would wait here that is submitted now, in seconds.

        Others go first as far as fairness has them: each tenant with as much, for its weight, as
        the request's own has by then. And it leaves no faster than what waits has left of late.

        Args:
            submission: not queued.
            revision: that it would be on.
            work_s: its own, of prefill.
            num_workers: that compute prompts.
        """
        lane = self._lane_of(submission.lane, len(submission.prompt_token_ids))
        track = lane, revision
        wait = self._waits.get(track)
        if wait is None:
            return 0.0
        most_per_s, before_s = num_workers * (1 - self._share), 0.0
        if lane == _BATCH:
            before_s = self._waits[_INTERACTIVE, revision].work.work_s / most_per_s
            most_per_s = num_workers
        tenant, ahead_s = self._tenants.find(submission.tenant), wait.work.work_s
        queue = tenant.queues.get(track) if tenant is not None else None
        own_s, weight, weights = 0.0, self._tenants.config(submission.tenant).weight, wait.weight
        if queue is not None:
            own_s = queue.work_us / 1e6
        if queue is None or queue.item is None:
            weights += weight
        else:
            ahead_s -= own_s
        if queue is not None and own_s and queue.tenant.slots is not None:
            # What has no slot does not go before it now; see slot_wait_s.
            own_s *= min(1.0, queue.tenant.slots.num_free / len(queue))
        ahead_s = min(ahead_s + own_s, (own_s + work_s) * weights / weight - work_s)
        found = before_s + ahead_s / most_per_s
        if wait.work.work_s:
            # Where prefill workers are not what is short.
            lasts_s = (ahead_s + work_s) / wait.work.per_s(most_per_s, self.now)
            found = max(found, lasts_s - work_s / most_per_s)
        return found

    def slot_wait_s(self, submission: Submission) -> float | None:
        """How long it waits until its tenant may have one more running, in seconds; None: it may.

        Args:
            submission: not queued.
        """
        tenant = self._tenants.find(submission.tenant)
        if tenant is None or tenant.slots is None:
            return None
        lane = self._lane_of(submission.lane, len(submission.prompt_token_ids))
        before = {lane, _INTERACTIVE}
        num_waiting = sum(len(one) for track, one in tenant.queues.items() if track[0] in before)
        return tenant.slots.wait_s(num_waiting, self.now)

    # ---- In

    def rate_error(self, tenant: str, num_tokens: int, now: float) -> ResourceExhausted | None:
        """Why the tenant's rate does not allow a request of so many tokens now."""
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
            request: not waiting.
            now: by the core's clock.
            num_tokens: of a new one: prompt and the most output it may have. They are taken from
                its tenant's rate, and what it did not use is given back when it ends.
            work_s: of prefill.
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
        self._follow(ticket)
        self._enqueue(ticket)
        waiting = self._waiting[request.submission.lane]
        waiting[request.key] = request
        if request.attempt:
            waiting.move_to_end(request.key, last=False)
        self._reorder(ticket.queue.tenant)

    def changed_revision(self, request: Request) -> None:
        """A waiting request is on another revision from now on."""
        ticket = self._tickets[request.key]
        self._take_out(ticket)
        self._reorder(ticket.queue.tenant)
        self._follow(ticket)
        self._enqueue(ticket)
        self._reorder(ticket.queue.tenant)

    # ---- Next

    def candidates(self) -> Iterator[Request]:
        """Who is next, one after another, while places are being given.

        One that still waits when the next is asked for could not be placed: its track is passed
        over for the rest of the round, since whoever is behind must not take its place, and the
        others go on.
        """
        self._passed.clear()
        try:
            while (ticket := self._next()) is not None:
                yield ticket.request
                if ticket.is_queued:
                    self._passed.add(ticket.track)
        finally:
            self._passed.clear()

    def is_due(self, request: Request) -> bool:
        """Whether a batch request goes before interactive ones that could go too: it is owed that.

        Args:
            request: the candidate at hand.
        """
        ticket = self._tickets[request.key]
        return ticket.lane == _BATCH and self._other_waits(ticket)

    def pass_over(self, revision: str) -> None:
        """Nothing more of a revision is to be placed in this round."""
        self._passed.update((lane, revision) for lane in LANES)

    def dispatched(self, request: Request, num_prompt_tokens: int) -> bool:
        """A waiting request goes to its workers.

        Args:
            request: waiting.
            num_prompt_tokens: to be computed: prompt, and known tokens with it.

        Returns:
            Whether the place was owed to it: interactive requests wait that might have had it.
        """
        ticket = self._tickets[request.key]
        lane, queue = ticket.lane, ticket.queue
        other_waits = self._other_waits(ticket)
        # With the other lane empty, or passed over, the place was nobody else's: it puts the lane
        # into nobody's debt.
        ticket.owed_per_token = 0.0
        if other_waits:
            ticket.owed_per_token = -1.0 if lane == _BATCH else self._trickle(ticket).per_token
        self._dequeue(ticket)
        queue.tenant.started(self.now)
        self._num_running[lane] += 1
        self._orders[ticket.track].took_turn(queue)
        ticket.num_charged_tokens += num_prompt_tokens
        self._charge(ticket, num_prompt_tokens * self._prompt_weight)
        self._reorder(queue.tenant)
        return lane == _BATCH and other_waits

    def set_current(self, revisions: frozenset[str]) -> None:
        """Those that get new requests; of others nothing is kept once they have none."""
        self._current = revisions
        for revision in self._trickles.keys() - revisions:
            if not self._num_tickets[revision]:
                self._forget(revision)

    # ---- Running

    def served(self, request: Request, num_output_tokens: int) -> None:
        """Output tokens of a request; of one that has ended they do not count."""
        ticket = self._tickets.get(request.key)
        if ticket is not None:
            self._charge(ticket, num_output_tokens * self._output_weight)

    def cached(self, request: Request, num_tokens: int) -> None:
        """So many of its prompt tokens came from a prefix cache: who was charged gets them back."""
        ticket = self._tickets.get(request.key)
        if ticket is None:
            return
        num_back, ticket.num_charged_tokens = min(num_tokens, ticket.num_charged_tokens), 0
        if num_back:
            cost = num_back * self._prompt_weight
            self._orders[ticket.track].credit(ticket.queue, cost)
            self._trickle(ticket).owed -= cost * ticket.owed_per_token

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
            self._dequeue(ticket)
            if tenant.slots is not None:
                tenant.slots.gave_up()
        else:
            self._stopped(ticket)
        if tenant.bucket is not None:
            num_used = 0
            if request.attempt:
                num_used = request.num_prompt_tokens + len(request.token_ids)
            tenant.bucket.give_back(ticket.num_reserved_tokens - num_used, now)
        self._reorder(tenant)
        self._left(ticket.track[1])
        if tenant.idle:
            self._tenants.rest(tenant, now)

    def check_integrity(self) -> None:
        """Raises AssertionError when a request is lost or counted twice."""
        queued = [ticket for ticket in self._tickets.values() if ticket.is_queued]
        assert len(queued) == len(self)
        assert sum(self._num_running.values()) == len(self._tickets) - len(queued)
        queues = {id(ticket.queue): ticket.queue for ticket in self._tickets.values()}
        assert sum(map(len, queues.values())) == len(queued)
        for track, order in self._orders.items():
            inside = [
                one
                for tenant in self._tenants
                for at, one in tenant.queues.items()
                if at == track and one.item is not None
            ]
            assert len(inside) == len(order)
            wait = self._waits[track]
            assert math.isclose(wait.weight, sum(one.weight for one in inside), abs_tol=1e-6)
            assert math.isclose(
                wait.work.work_s, sum(one.work_us for one in inside) / 1e6, abs_tol=1e-9
            )
        for queue in queues.values():
            assert (queue.item is not None) == (len(queue) > 0 and queue.tenant.can_run)
        of_queues, of_lanes, running = Counter[int](), Counter[Track](), Counter[str]()
        for ticket in self._tickets.values():
            if ticket.is_queued:
                of_queues[id(ticket.queue)] += ticket.work_us
                submitted_to = ticket.request.submission.lane
                of_lanes[submitted_to, ticket.track[1]] += ticket.work_us
            else:
                running[ticket.queue.tenant.name] += 1
        assert all(amount == of_lanes[at] for at, amount in self._work_us.items())
        for tenant in self._tenants:
            assert tenant.num_running == running[tenant.name]
            for one in tenant.queues.values():
                assert one.work_us == of_queues[id(one)]
        tracks = {ticket.track for ticket in self._tickets.values()}
        assert all(ticket.queue is ticket.queue.tenant.queues[ticket.track] for ticket in queued)
        assert tracks <= self._orders.keys()
        counts = Counter(ticket.track[1] for ticket in self._tickets.values())
        assert +self._num_tickets == counts
        assert self._trickles.keys() <= self._current | counts.keys()
        for order in self._orders.values():
            order.check_integrity()
        self._tenants.check_integrity()

    # ---- Inside

    def _new_ticket(self, request: Request, now: float, num_tokens: int) -> Ticket:
        submission = request.submission
        lane = self._lane_of(submission.lane, request.num_prompt_tokens)
        tenant = self._tenants.awake(submission.tenant, now)
        if tenant.bucket is not None:
            tenant.bucket.take(num_tokens, now)
        self._num_pushed += 1
        track = lane, request.revision
        self._join(request.revision)
        ticket = Ticket(request, lane, tenant.queue(track), self._num_pushed, num_tokens)
        self._tickets[request.key] = ticket
        return ticket

    def _next(self) -> Ticket | None:
        """Of the revisions' next ones the one that has been there for longest."""
        found = None
        for revision in self._trickles:
            ticket = self._next_of(revision)
            if ticket is not None and (found is None or ticket.order < found.order):
                found = ticket
        return found

    def _next_of(self, revision: str) -> Ticket | None:
        interactive, batch = self._head((_INTERACTIVE, revision)), self._head((_BATCH, revision))
        if interactive is None or batch is None:
            return interactive or batch
        request = batch.request
        num_tokens = request.num_prompt_tokens + len(request.token_ids)
        due = self._trickles[revision].is_due(num_tokens * self._prompt_weight)
        return batch if due else interactive

    def _head(self, track: Track) -> Ticket | None:
        """Whose turn it is in a track; None when it has nothing to run, or cannot."""
        lane = track[0]
        limit = self._max_running[lane]
        if track in self._passed or (limit is not None and self._num_running[lane] >= limit):
            return None
        queue = self._orders[track].first()
        return queue.first() if queue is not None else None

    def _other_waits(self, ticket: Ticket) -> bool:
        """Whether the other lane of its revision has something that could go now."""
        other = _INTERACTIVE if ticket.lane == _BATCH else _BATCH
        return self._head((other, ticket.track[1])) is not None

    def _trickle(self, ticket: Ticket) -> Trickle:
        return self._trickles[ticket.track[1]]

    def _join(self, revision: str) -> None:
        """The revision has one ticket more."""
        self._num_tickets[revision] += 1
        if revision not in self._trickles:
            self._trickles[revision] = Trickle(self._share)
            self._orders |= {(lane, revision): FairOrder() for lane in LANES}
            self._waits |= {(lane, revision): _TrackWait() for lane in LANES}

    def _left(self, revision: str) -> None:
        """The revision has one ticket less."""
        self._num_tickets[revision] -= 1
        if not self._num_tickets[revision] and revision not in self._current:
            self._forget(revision)

    def _forget(self, revision: str) -> None:
        del self._num_tickets[revision], self._trickles[revision]
        for lane in LANES:
            del self._orders[lane, revision], self._waits[lane, revision]
            self._work_us.pop((lane, revision), None)
            for tenant in self._tenants:
                tenant.queues.pop((lane, revision), None)

    def _follow(self, ticket: Ticket) -> None:
        """Into the queue of its request's revision, before it is pushed."""
        before, revision = ticket.track[1], ticket.request.revision
        if before == revision:
            return
        self._join(revision)
        ticket.track = ticket.lane, revision
        ticket.queue = ticket.queue.tenant.queue(ticket.track)
        ticket.owed_per_token = 0.0
        self._left(before)

    def _charge(self, ticket: Ticket, cost: float) -> None:
        self._orders[ticket.track].charge(ticket.queue, cost)
        if ticket.owed_per_token:
            self._trickle(ticket).owed += cost * ticket.owed_per_token
        elif ticket.lane == _BATCH:
            self._trickle(ticket).got(cost)

    def _enqueue(self, ticket: Ticket) -> None:
        queue, work_us, now = ticket.queue, ticket.work_us, self.now
        queue.push(ticket)
        queue.work_us += work_us
        if queue.item is not None:
            self._waits[ticket.track].work.add(work_us, now)
        self._work_us[ticket.request.submission.lane, ticket.track[1]] += work_us

    def _take_out(self, ticket: Ticket) -> None:
        queue, work_us, now = ticket.queue, ticket.work_us, self.now
        # Who goes at once has not waited, and tells nothing of how long that takes.
        left = ticket.queued_at < now
        queue.remove(ticket)
        queue.work_us -= work_us
        if queue.item is not None:
            self._waits[ticket.track].work.remove(work_us, now, left=left)
        self._work_us[ticket.request.submission.lane, ticket.track[1]] -= work_us

    def _lane_of(self, lane: Lane, num_prompt_tokens: int) -> Lane:
        """Where it is ordered."""
        return _BATCH if 0 < self._long_prompt_tokens < num_prompt_tokens else lane

    def _dequeue(self, ticket: Ticket) -> None:
        ticket.is_queued = False
        self._take_out(ticket)
        del self._waiting[ticket.request.submission.lane][ticket.request.key]

    def _stopped(self, ticket: Ticket) -> None:
        ticket.queue.tenant.stopped(self.now)
        self._num_running[ticket.lane] -= 1

    def _reorder(self, tenant: Tenant) -> None:
        """Puts a tenant's queues into the order of their lanes, or takes them out."""
        can_run = tenant.can_run
        for track, queue in tenant.queues.items():
            order = self._orders[track]
            if can_run and len(queue):
                if queue.item is None:
                    if track[0] == _BATCH and not len(order):
                        self._trickles[track[1]].lane_begins()
                    order.join(queue)
                    self._waits[track].joined(queue, self.now)
            elif queue.item is not None:
                order.leave(queue)
                self._waits[track].left(queue, self.now)

    def _matters(self, tenant: Tenant, now: float) -> bool:
        ahead = any(
            queue.counter > self._orders[track].level() for track, queue in tenant.queues.items()
        )
        # How long its requests run is not known of a new one.
        measured = tenant.slots is not None and tenant.slots.has_history
        return ahead or measured or (tenant.bucket is not None and not tenant.bucket.full(now))
