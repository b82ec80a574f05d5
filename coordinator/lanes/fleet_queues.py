"""The requests that wait for one fleet's workers: one queue per lane, and how the lanes share."""

from __future__ import annotations

import math

from baton.coordinator.lanes.fairness import BatchDeficit, FairOrder
from baton.coordinator.lanes.lane_work import WaitingWork
from baton.coordinator.lanes.tenants import InterruptedQueue, Tenant, TenantQueue
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import Lane
from baton.v1 import common_pb2


class LaneQueue:
    """The requests of one lane that wait for the workers of one fleet.

    Attributes:
        lane: The lane that its requests are ordered in.
        fleet_queues: Both lanes' queues of its fleet.
        order: The tenants' queues with a request that its tenant may run now, ordered by fairness.
        work: The prefill work that waits in those queues.
        weight: Sum of the weights of those queues' tenants.
    """

    __slots__ = ("fleet_queues", "lane", "order", "weight", "work")

    def __init__(self, lane: Lane, fleet_queues: FleetQueues) -> None:
        self.lane, self.fleet_queues = lane, fleet_queues
        self.order: FairOrder[TenantQueue] = FairOrder()
        self.work = WaitingWork()
        self.weight = 0.0

    def join(self, queue: TenantQueue, now: float) -> None:
        """Puts a tenant's queue into the order."""
        if self.lane == common_pb2.LANE_BATCH and not len(self.order):
            self.fleet_queues.deficit.restart()
        self.order.join(queue)
        self.weight += queue.weight
        self.work.add(queue.work_us, now)

    def leave(self, queue: TenantQueue, now: float) -> None:
        """Takes a tenant's queue out of the order; its requests still wait."""
        self.order.leave(queue)
        self.weight -= queue.weight
        self.work.remove(queue.work_us, now, left=False)

    def ahead_s(self, tenant: Tenant | None, weight: float, work_s: float, turn_at: float) -> float:
        """Returns how much prefill work of this queue goes before a request that arrives now.

        Another tenant's work goes first only up to its fair share. While the request's own tenant
        gets the work up to the end of the request, another tenant gets that work times the ratio of
        their weights.

        Args:
            tenant: The request's tenant; None: the tenant is not remembered.
            weight: The weight of that tenant.
            work_s: Prefill work of the request itself, in seconds.
            turn_at: Sort key of the request in its tenant's queue; see TenantQueue.work_before_us.

        Returns:
            Seconds of prefill work on one worker.
        """
        queue = tenant.queues.get(self) if tenant is not None else None
        own_s = queue.work_before_us(turn_at) / 1e6 if queue is not None else 0.0
        others_s, weights = self.work.work_s, self.weight
        if queue is not None and queue.item is not None:
            others_s -= queue.work_us / 1e6
        else:
            weights += weight
        if queue is not None and own_s and queue.tenant.slots is not None:
            # Requests without a slot do not run now: LaneWaits.slot_s counts their time.
            own_s *= min(1.0, queue.tenant.slots.num_free / len(queue))
        return min(others_s + own_s, (own_s + work_s) * weights / weight - work_s)

    def check_integrity(self, inside: list[TenantQueue]) -> None:
        """Raises AssertionError when a sum differs from the sum of its parts.

        Args:
            inside: The tenants' queues that should be in the order.
        """
        assert len(inside) == len(self.order)
        self.order.check_integrity()
        assert math.isclose(self.weight, sum(one.weight for one in inside), abs_tol=1e-6)
        work_us = sum(one.work_us for one in inside)
        assert math.isclose(self.work.work_s, work_us / 1e6, abs_tol=1e-9)


class FleetQueues:
    """The lanes' queues of one fleet.

    Args:
        fleet: Fleet whose workers the requests wait for.
        batch_share: Share of tokens that the batch lane gets while both lanes have work, 0 to 1.

    Attributes:
        fleet: As above.
        interactive, batch: The queues.
        late: Interactive requests that cannot be in time any more; they go after the others.
        interrupted: Interactive requests that have a part of their output; they go before all.
        deficit: Tokens that the batch lane is owed.
        submitted_work_us: Prefill work that waits, in microseconds, by the lane that it was
            submitted to. Integers, because sums of floats would drift.
        num_submitted: Number of requests that wait, by the lane that they were submitted to.
    """

    __slots__ = (
        "batch",
        "deficit",
        "fleet",
        "interactive",
        "interrupted",
        "late",
        "num_submitted",
        "submitted_work_us",
    )

    def __init__(self, fleet: Fleet, batch_share: float) -> None:
        self.fleet = fleet
        self.interactive = LaneQueue(common_pb2.LANE_INTERACTIVE, self)
        self.batch = LaneQueue(common_pb2.LANE_BATCH, self)
        self.late = LaneQueue(common_pb2.LANE_INTERACTIVE, self)
        self.interrupted = InterruptedQueue()
        self.deficit = BatchDeficit(batch_share)
        self.submitted_work_us: dict[Lane, int] = {
            common_pb2.LANE_INTERACTIVE: 0,
            common_pb2.LANE_BATCH: 0,
        }
        self.num_submitted = dict.fromkeys(self.submitted_work_us, 0)

    def of(self, lane: Lane) -> LaneQueue:
        """Returns a lane's queue."""
        return self.batch if lane == common_pb2.LANE_BATCH else self.interactive

    def ordered_in(self, lane: Lane) -> tuple[LaneQueue, ...]:
        """Returns all queues of a lane."""
        return (self.batch,) if lane == common_pb2.LANE_BATCH else (self.interactive, self.late)

    def beside(self, queue: LaneQueue) -> tuple[LaneQueue, ...]:
        """Returns the other lane's queues."""
        return (self.interactive, self.late) if queue is self.batch else (self.batch,)
