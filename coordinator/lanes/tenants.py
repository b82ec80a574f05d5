"""Tenants with requests or debts, and the requests that each has waiting and running."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from baton.coordinator.lanes.fairness import Account, TokenBucket
from baton.coordinator.lanes.slots import Slots
from baton.coordinator.state.requests import Request
from baton.runtime.config import TenantConfig

if TYPE_CHECKING:
    from baton.coordinator.lanes.fleet_queues import LaneQueue

# Above this number of idle tenants, the tenant that is idle for longest is forgotten with its debt.
_MAX_IDLE = 4096
# Default burst of a rate limit, in seconds of its rate.
_BURST_S = 10.0


class QueueEntry:
    """One request in the lanes, from its admission to its end: waiting or dispatched.

    Args:
        request: The request.
        queue: The tenant's queue that it waits in.
        number: Sequence number of the entry.
        num_tokens: See `num_reserved_tokens`.

    Attributes:
        queue: The tenant's queue that it waits or waited in; served tokens are charged there.
        order: Sort key of requests that were dispatched and came back: arrival, then `number`.
        turn: Sort key of new requests; set by TenantQueue.
        is_queued: True while it waits, False once it was dispatched.
        is_interrupted: Whether it waits in the InterruptedQueue of its fleet instead of `queue`.
        has_returned: Whether it was dispatched before, by this coordinator or an earlier one. Such
            requests go before new ones.
        queued_at: When it was queued last, by the core's clock.
        work_us: Prefill work that it had then, in microseconds.
        num_reserved_tokens: Tokens taken from the tenant's rate limit at its admission.
        num_charged_tokens: Prompt tokens charged to the tenant; 0 once it is known how many of
            them came from a prefix cache.
        owed_per_token: Change of BatchDeficit.owed per weighted token that it is served.
    """

    __slots__ = (
        "has_returned",
        "is_interrupted",
        "is_queued",
        "num_charged_tokens",
        "num_reserved_tokens",
        "order",
        "owed_per_token",
        "queue",
        "queued_at",
        "request",
        "turn",
        "work_us",
    )

    def __init__(self, request: Request, queue: TenantQueue, number: int, num_tokens: int) -> None:
        self.request, self.queue = request, queue
        self.order = request.submission.arrived_at, number
        self.turn = 0.0, 0
        self.num_reserved_tokens, self.num_charged_tokens = num_tokens, 0
        self.is_queued = self.has_returned = self.is_interrupted = False
        self.owed_per_token = self.queued_at = 0.0
        self.work_us = 0


def _order(entry: QueueEntry) -> tuple[float, int]:
    return entry.order


def _turn(entry: QueueEntry) -> tuple[float, int]:
    return entry.turn


class TenantQueue(Account):
    """The requests of one tenant that wait in one lane for one fleet, and its account there.

    New requests go in the order in which they are pushed. A request whose TTFT target grows with
    its prompt goes as if it had been pushed later by that part of its target. With one target for
    all prompts, the first tokens are due in the order of arrival; with targets that grow, this
    keeps requests in the order in which their first tokens are due (earliest deadline first).

    Attributes:
        lane_queue: The lane's queue that it is part of.
        work_us: Prefill work that waits, in integer microseconds: sums of floats would drift.
    """

    __slots__ = ("_fresh", "_num_pushed", "_returned", "lane_queue", "tenant", "work_us")

    def __init__(self, tenant: Tenant, lane_queue: LaneQueue) -> None:
        super().__init__(tenant.config.weight)
        self.tenant, self.lane_queue = tenant, lane_queue
        self.work_us = 0
        self._fresh: list[QueueEntry] = []
        self._returned: list[QueueEntry] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._fresh) + len(self._returned)

    def first(self) -> QueueEntry:
        """Returns the next entry: returned ones by arrival, then new ones.

        Raises:
            IndexError: No request waits.
        """
        return self._returned[0] if self._returned else self._fresh[0]

    def push(self, entry: QueueEntry, now: float) -> None:
        if entry.has_returned:
            insort(self._returned, entry, key=_order)
            return
        self._num_pushed += 1
        # Late requests cannot be in time any more, so they keep their order.
        growth_s = 0.0 if entry.request.is_late else entry.request.growth_s
        entry.turn = now + growth_s, self._num_pushed
        insort(self._fresh, entry, key=_turn)

    def remove(self, entry: QueueEntry) -> None:
        if entry.has_returned:
            del self._returned[bisect_left(self._returned, entry.order, key=_order)]
        else:
            del self._fresh[bisect_left(self._fresh, entry.turn, key=_turn)]

    def work_before_us(self, turn_at: float) -> int:
        """Prefill work that goes before a new request, in microseconds.

        Args:
            turn_at: Time at which the request would be pushed, plus its Request.growth_s.
        """
        after = self._fresh[bisect_right(self._fresh, (turn_at, math.inf), key=_turn) :]
        return self.work_us - sum(entry.work_us for entry in after)


def _room_needs(request: Request) -> tuple[int, float]:
    """Returns the tokens that a request has, and the limit of its further output."""
    sampling, num_more = request.submission.sampling, math.inf
    if sampling.HasField("max_tokens"):
        num_more = sampling.max_tokens - len(request.token_ids)
    return request.num_tokens, num_more


class InterruptedQueue:
    """Interactive requests of all tenants that wait with a part of their output, by arrival.

    They go before all other requests, because they ran before: no share of tokens and no limit of
    their lane holds them back, and twice the limit of their tenant does (Tenant.may_continue).

    A request that cannot be placed does not hold up those after it.

    Attributes:
        work_us: Prefill work that waits, in integer microseconds.
    """

    __slots__ = ("_entries", "_unplaced", "work_us")

    def __init__(self) -> None:
        self._entries: list[QueueEntry] = []
        # The needs of requests that could not be placed in this round.
        self._unplaced: list[tuple[int, float]] = []
        self.work_us = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(self._entries)

    def first(self) -> QueueEntry | None:
        """Returns the first request by arrival that may run and is not passed over; or None.

        A request is passed over if one that needs no more room could not be placed in this round.
        A round thus tries few of many requests.
        """
        may_run = (one for one in self._entries if one.queue.tenant.may_continue)
        return next((one for one in may_run if not self._is_passed_over(one)), None)

    def pass_over(self, entry: QueueEntry) -> None:
        """A request could not be placed: it is not tried again before `begin_round`."""
        self._unplaced.append(_room_needs(entry.request))

    def begin_round(self) -> None:
        """All requests may be tried again."""
        self._unplaced.clear()

    def _is_passed_over(self, entry: QueueEntry) -> bool:
        if not self._unplaced:
            return False
        num_tokens, num_more = _room_needs(entry.request)
        return any(num_tokens >= tokens and num_more >= more for tokens, more in self._unplaced)

    def push(self, entry: QueueEntry) -> None:
        insort(self._entries, entry, key=_order)
        self.work_us += entry.work_us
        entry.queue.tenant.num_interrupted += 1

    def remove(self, entry: QueueEntry) -> None:
        del self._entries[bisect_left(self._entries, entry.order, key=_order)]
        self.work_us -= entry.work_us
        entry.queue.tenant.num_interrupted -= 1


class Tenant:
    """One tenant: requests are charged to it, and its limits apply to them.

    Attributes:
        queues: Its waiting requests, by the lane's queue; created at the first use.
        num_running: Number of its requests that are dispatched and have not ended.
        num_interrupted: Number of its requests that wait in the InterruptedQueue of a fleet.
        bucket: Its rate limit; None: no limit.
        slots: Its concurrency limit; None: no limit.
    """

    __slots__ = ("bucket", "config", "name", "num_interrupted", "num_running", "queues", "slots")

    def __init__(self, name: str, config: TenantConfig, now: float) -> None:
        self.name, self.config = name, config
        self.num_running = self.num_interrupted = 0
        limit = config.max_concurrent
        self.slots = Slots(limit, now) if limit is not None else None
        self.queues: dict[LaneQueue, TenantQueue] = {}
        self.bucket: TokenBucket | None = None
        if config.tokens_per_s is not None:
            burst_tokens = config.burst_tokens or config.tokens_per_s * _BURST_S
            self.bucket = TokenBucket(config.tokens_per_s, burst_tokens, now)

    def queue(self, lane_queue: LaneQueue) -> TenantQueue:
        """Returns its part of a lane's queue; creates it at the first use."""
        queue = self.queues.get(lane_queue)
        if queue is None:
            queue = self.queues[lane_queue] = TenantQueue(self, lane_queue)
        return queue

    @property
    def num_waiting(self) -> int:
        """Number of its requests that wait, in all lanes and for all fleets."""
        return sum(map(len, self.queues.values())) + self.num_interrupted

    @property
    def can_run(self) -> bool:
        """Whether one more of its requests may be dispatched."""
        return self.slots is None or self.slots.num_free > 0

    @property
    def may_continue(self) -> bool:
        """Whether one more of its interrupted requests may be dispatched.

        New requests may have taken the slots of interrupted ones, so that up to twice as many run.
        A client that breaks and resumes its streams again and again gets no more.
        """
        limit = self.config.max_concurrent
        return limit is None or self.num_running < 2 * limit

    def started(self, now: float) -> None:
        """One of its requests was dispatched."""
        self.num_running += 1
        if self.slots is not None:
            self.slots.acquire(now)

    def stopped(self, now: float) -> None:
        """One of its dispatched requests ended, or waits again."""
        self.num_running -= 1
        if self.slots is not None:
            self.slots.release(now)

    @property
    def idle(self) -> bool:
        """Whether it has neither running nor waiting requests."""
        return not self.num_running and not self.num_waiting


class Tenants:
    """Owns the tenants that have requests, and a limited number of idle tenants with debts.

    Args:
        defaults: Configuration of tenants that are not in `named`.
        named: Configurations by the tenant's name.
        must_remember: Returns whether an idle tenant must not be forgotten yet.
    """

    def __init__(
        self,
        defaults: TenantConfig,
        named: Mapping[str, TenantConfig],
        must_remember: Callable[[Tenant], bool],
    ) -> None:
        self._defaults, self._named, self._must_remember = defaults, named, must_remember
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def find(self, name: str) -> Tenant | None:
        """Returns a tenant; None if it is not remembered, so that it has no debt."""
        return self._tenants.get(name)

    def config(self, name: str) -> TenantConfig:
        """Returns the configuration of any tenant, remembered or not."""
        return self._named.get(name, self._defaults)

    def activate(self, name: str, now: float) -> Tenant:
        """Returns the tenant of a new request; creates it if it is not remembered."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self.config(name), now)
        self._idle.pop(name, None)
        return tenant

    def mark_idle(self, tenant: Tenant) -> None:
        """Notes that a tenant has become idle, and checks two idle tenants in turn.

        Tenants that need not be remembered are forgotten. Idle tenants therefore do not accumulate,
        and no call checks all of them.
        """
        self._idle[tenant.name] = tenant
        for _ in range(min(2, len(self._idle))):
            name, oldest = self._idle.popitem(last=False)
            if len(self._idle) < _MAX_IDLE and self._must_remember(oldest):
                self._idle[name] = oldest
            else:
                del self._tenants[name]

    def check_integrity(self) -> None:
        """Raises AssertionError when an idle tenant is not noted as idle, or a slot is lost."""
        idle = {name for name, tenant in self._tenants.items() if tenant.idle}
        assert idle == self._idle.keys()
        assert len(idle) <= _MAX_IDLE
        for tenant in self._tenants.values():
            limit = tenant.config.max_concurrent
            if tenant.slots is not None and limit is not None:
                assert tenant.slots.num_free == max(0, limit - tenant.num_running)
