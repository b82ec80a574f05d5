"""The tenants that are remembered, and what each has waiting and running."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from baton.coordinator.core.request import Request, RequestKey
from baton.coordinator.lanes.fairness import Account, TokenBucket
from baton.coordinator.lanes.slots import Slots
from baton.runtime.config import TenantConfig
from baton.v1 import common_pb2

Lane: TypeAlias = "common_pb2.Lane.ValueType"
Track: TypeAlias = tuple[Lane, str]
"""A lane's requests of one revision: only they wait for the same workers."""

# Beyond so many without a request the one idle for longest is forgotten, owing or not.
_MAX_IDLE = 4096
_BURST_S = 10.0


class Ticket:
    """One request's place: it waits, or it was dispatched.

    Attributes:
        lane: the one it is ordered in.
        track: the same, and its request's revision.
        order: sorts those that came back: arrival, then a number that tells equals apart.
        num_reserved_tokens: what was taken from its tenant's rate.
        num_charged_tokens: of its prompt, until it is known how many of them were cached.
        has_returned: goes before new ones.
        is_queued: waits; else it was dispatched.
        owed_per_token: what each of its weighted tokens adds to what the batch lane is owed.
        work_us: of prefill, since it was last queued; microseconds.
        queued_at: when that was, by the core's clock.
    """

    __slots__ = (
        "has_returned",
        "is_queued",
        "lane",
        "num_charged_tokens",
        "num_reserved_tokens",
        "order",
        "owed_per_token",
        "queue",
        "queued_at",
        "request",
        "track",
        "work_us",
    )

    def __init__(
        self, request: Request, lane: Lane, queue: TenantQueue, number: int, num_tokens: int
    ) -> None:
        self.request, self.lane, self.queue = request, lane, queue
        self.track = lane, request.revision
        self.order = request.submission.arrived_at, number
        self.num_reserved_tokens, self.num_charged_tokens = num_tokens, 0
        self.is_queued = self.has_returned = False
        self.owed_per_token = self.queued_at = 0.0
        self.work_us = 0


def _order(ticket: Ticket) -> tuple[float, int]:
    return ticket.order


class TenantQueue(Account):
    """What one tenant has waiting in one track, and what it was served there.

    Attributes:
        work_us: of prefill, that waits; whole microseconds: sums of floats would drift.
    """

    __slots__ = ("_fresh", "_returned", "tenant", "work_us")

    def __init__(self, tenant: Tenant) -> None:
        super().__init__(tenant.config.weight)
        self.tenant = tenant
        self.work_us = 0
        self._fresh: OrderedDict[RequestKey, Ticket] = OrderedDict()
        self._returned: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    def first(self) -> Ticket:
        """Those that came back by arrival, then the others as they were pushed."""
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
    """Who requests are accounted to.

    Attributes:
        queues: by track, made when first used.
        bucket: None without a limit of its rate.
        slots: None: as many of its requests may run as there are.
    """

    __slots__ = ("bucket", "config", "name", "num_running", "queues", "slots")

    def __init__(self, name: str, config: TenantConfig, now: float) -> None:
        self.name, self.config = name, config
        self.num_running = 0
        limit = config.max_concurrent
        self.slots = Slots(limit, now) if limit is not None else None
        self.queues: dict[Track, TenantQueue] = {}
        self.bucket: TokenBucket | None = None
        if config.tokens_per_s is not None:
            burst_tokens = config.burst_tokens or config.tokens_per_s * _BURST_S
            self.bucket = TokenBucket(config.tokens_per_s, burst_tokens, now)

    def queue(self, track: Track) -> TenantQueue:
        queue = self.queues.get(track)
        if queue is None:
            queue = self.queues[track] = TenantQueue(self)
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
        return not self.num_running and not any(map(len, self.queues.values()))


class Tenants:
    """At most as many as have requests, and a bounded number of others.

    Args:
        defaults: of tenants that are not named.
        named: by name.
        matters: whether an idle tenant must be remembered at that time: what it was served still
            puts it behind others, its rate is not full, or waits for its slots are foreseen by it.
    """

    def __init__(
        self,
        defaults: TenantConfig,
        named: Mapping[str, TenantConfig],
        matters: Callable[[Tenant, float], bool],
    ) -> None:
        self._defaults, self._named, self._matters = defaults, named, matters
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def find(self, name: str) -> Tenant | None:
        """None: it is not remembered, so it owes nothing."""
        return self._tenants.get(name)

    def config(self, name: str) -> TenantConfig:
        """Of any tenant, remembered or not."""
        return self._named.get(name, self._defaults)

    def awake(self, name: str, now: float) -> Tenant:
        """A tenant that has a request, remembered or new."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self.config(name), now)
        self._idle.pop(name, None)
        return tenant

    def rest(self, tenant: Tenant, now: float) -> None:
        """A tenant became idle. Two of the idle ones are looked at: so none stays for long."""
        self._idle[tenant.name] = tenant
        for _ in range(min(2, len(self._idle))):
            name, oldest = self._idle.popitem(last=False)
            if len(self._idle) < _MAX_IDLE and self._matters(oldest, now):
                self._idle[name] = oldest
            else:
                del self._tenants[name]

    def check_integrity(self) -> None:
        """Raises AssertionError when one is idle and not counted so, or a slot is lost."""
        idle = {name for name, tenant in self._tenants.items() if tenant.idle}
        assert idle == self._idle.keys()
        assert len(idle) <= _MAX_IDLE
        for tenant in self._tenants.values():
            limit = tenant.config.max_concurrent
            if tenant.slots is not None and limit is not None:
                assert tenant.slots.num_free == max(0, limit - tenant.num_running)
