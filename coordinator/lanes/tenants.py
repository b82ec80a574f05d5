"""The tenants that are remembered, and what each has waiting and running."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from baton.coordinator.lanes.fairness import Account, TokenBucket
from baton.coordinator.lanes.slots import Slots
from baton.coordinator.state.requests import Request, RequestKey
from baton.runtime.config import TenantConfig

if TYPE_CHECKING:
    from baton.coordinator.lanes.fleet_queues import LaneQueue

# Where more tenants than this have no request, the one idle for longest is forgotten, whatever it
# owes.
_MAX_IDLE = 4096
_BURST_S = 10.0


class Ticket:
    """One request's place, from its admission to its end: it waits, or it was dispatched.

    Args:
        request: the request.
        queue: where it is to wait.
        number: counts tickets up.
        num_tokens: see `num_reserved_tokens`.

    Attributes:
        queue: where it waits, or waited; what it is served is charged there.
        order: sorts requests that were dispatched and came back: by arrival, and by `number` where
            two arrived at the same time.
        is_queued: True while it waits, False once it was dispatched.
        has_returned: whether it was dispatched before (by this coordinator or another): such
            requests go before new ones.
        queued_at: when it was queued last, by the core's clock.
        work_us: prefill work that it had then, in whole microseconds.
        num_reserved_tokens: what was taken from its tenant's rate when it was admitted.
        num_charged_tokens: prompt tokens that its tenant was charged, while it is not yet known
            how many of them came from a prefix cache; 0 after that.
        owed_per_token: what each weighted token that it is served adds to what the batch lane is
            owed.
    """

    __slots__ = (
        "has_returned",
        "is_queued",
        "num_charged_tokens",
        "num_reserved_tokens",
        "order",
        "owed_per_token",
        "queue",
        "queued_at",
        "request",
        "work_us",
    )

    def __init__(self, request: Request, queue: TenantQueue, number: int, num_tokens: int) -> None:
        self.request, self.queue = request, queue
        self.order = request.submission.arrived_at, number
        self.num_reserved_tokens, self.num_charged_tokens = num_tokens, 0
        self.is_queued = self.has_returned = False
        self.owed_per_token = self.queued_at = 0.0
        self.work_us = 0


def _order(ticket: Ticket) -> tuple[float, int]:
    return ticket.order


class TenantQueue(Account):
    """The requests of one tenant that wait in one lane for one fleet, and its account there.

    Attributes:
        lane_queue: The lane's queue that it is part of.
        work_us: prefill work that waits, in whole microseconds: sums of floats would drift.
    """

    __slots__ = ("_fresh", "_returned", "lane_queue", "tenant", "work_us")

    def __init__(self, tenant: Tenant, lane_queue: LaneQueue) -> None:
        super().__init__(tenant.config.weight)
        self.tenant, self.lane_queue = tenant, lane_queue
        self.work_us = 0
        self._fresh: OrderedDict[RequestKey, Ticket] = OrderedDict()
        self._returned: list[Ticket] = []

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._fresh) + len(self._returned)

    def first(self) -> Ticket:
        """The next request: returned ones by their arrival, then new ones as they were pushed.

        Raises:
            StopIteration: nothing waits.
        """
        return self._returned[0] if self._returned else next(iter(self._fresh.values()))

    def push(self, ticket: Ticket) -> None:
        if ticket.has_returned:
            insort(self._returned, ticket, key=_order)
        else:
            self._fresh[ticket.request.key] = ticket

    def remove(self, ticket: Ticket) -> None:
        if ticket.has_returned:
            del self._returned[bisect_left(self._returned, ticket.order, key=_order)]
        else:
            del self._fresh[ticket.request.key]


class Tenant:
    """Whom requests are charged to.

    Attributes:
        queues: Its waiting requests, by the lane's queue; created at the first use.
        num_running: its requests that are dispatched and have not ended.
        bucket: its rate; None: the rate has no limit.
        slots: the requests that it may have running; None: their number has no limit.
    """

    __slots__ = ("bucket", "config", "name", "num_running", "queues", "slots")

    def __init__(self, name: str, config: TenantConfig, now: float) -> None:
        self.name, self.config = name, config
        self.num_running = 0
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
    def can_run(self) -> bool:
        """Whether one more of its requests may be dispatched."""
        return self.slots is None or self.slots.num_free > 0

    def started(self, now: float) -> None:
        """One of its requests was dispatched."""
        self.num_running += 1
        if self.slots is not None:
            self.slots.took(now)

    def stopped(self, now: float) -> None:
        """One that was dispatched ended, or waits again."""
        self.num_running -= 1
        if self.slots is not None:
            self.slots.left(now)

    @property
    def idle(self) -> bool:
        """Whether it has no request, neither running nor waiting."""
        return not self.num_running and not any(map(len, self.queues.values()))


class Tenants:
    """The tenants that have requests, and a bounded number of idle ones that must be remembered.

    Args:
        defaults: the configuration of tenants that `named` does not name.
        named: configurations by the tenant's name.
        must_remember: whether an idle tenant must not be forgotten yet, at the given time.
    """

    def __init__(
        self,
        defaults: TenantConfig,
        named: Mapping[str, TenantConfig],
        must_remember: Callable[[Tenant, float], bool],
    ) -> None:
        self._defaults, self._named, self._must_remember = defaults, named, must_remember
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def find(self, name: str) -> Tenant | None:
        """The tenant; None when it is not remembered, so that it owes nothing."""
        return self._tenants.get(name)

    def config(self, name: str) -> TenantConfig:
        """The configuration of any tenant, remembered or not."""
        return self._named.get(name, self._defaults)

    def awake(self, name: str, now: float) -> Tenant:
        """The tenant of a new request: the one that is remembered, or a new one."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self.config(name), now)
        self._idle.pop(name, None)
        return tenant

    def rest(self, tenant: Tenant, now: float) -> None:
        """Files a tenant that has become idle.

        Each call looks at two of the idle ones, in turn, and forgets those that need not be
        remembered: so they do not pile up, and no call looks at all of them.
        """
        self._idle[tenant.name] = tenant
        for _ in range(min(2, len(self._idle))):
            name, oldest = self._idle.popitem(last=False)
            if len(self._idle) < _MAX_IDLE and self._must_remember(oldest, now):
                self._idle[name] = oldest
            else:
                del self._tenants[name]

    def check_integrity(self) -> None:
        """Raises AssertionError when an idle tenant is not filed as idle, or a slot is lost."""
        idle = {name for name, tenant in self._tenants.items() if tenant.idle}
        assert idle == self._idle.keys()
        assert len(idle) <= _MAX_IDLE
        for tenant in self._tenants.values():
            limit = tenant.config.max_concurrent
            if tenant.slots is not None and limit is not None:
                assert tenant.slots.num_free == max(0, limit - tenant.num_running)
