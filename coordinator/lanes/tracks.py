"""What waits for the workers of one revision: a track for each lane, and how the two share."""

from __future__ import annotations

import math

from baton.coordinator.lanes.fairness import FairOrder, Trickle
from baton.coordinator.lanes.lane_work import WaitingWork
from baton.coordinator.lanes.tenants import Tenant, TenantQueue
from baton.coordinator.state.lanes import Lane
from baton.v1 import common_pb2


class Track:
    """The requests of one lane and one revision: they wait for the same workers.

    Attributes:
        lane: the lane that its requests are ordered in.
        revision: the revision whose workers they wait for.
        order: the queues with a request that its tenant may run now, in the order of fairness.
        work: the prefill work that waits in those queues.
        weight: the sum of the weights of those queues' tenants.
    """

    __slots__ = ("lane", "order", "revision", "weight", "work")

    def __init__(self, lane: Lane, revision: str) -> None:
        self.lane, self.revision = lane, revision
        self.order: FairOrder[TenantQueue] = FairOrder()
        self.work = WaitingWork()
        self.weight = 0.0

    def join(self, queue: TenantQueue, now: float) -> None:
        """Puts a queue into the order."""
        self.order.join(queue)
        self.weight += queue.weight
        self.work.add(queue.work_us, now)

    def leave(self, queue: TenantQueue, now: float) -> None:
        """Takes a queue out of the order; its requests wait on."""
        self.order.leave(queue)
        self.weight -= queue.weight
        self.work.remove(queue.work_us, now, left=False)

    def ahead_s(self, tenant: Tenant | None, weight: float, work_s: float) -> float:
        """How much prefill work of this track goes before a request that comes now.

        Other tenants go first only as far as fairness has it: each gets as much, for its weight,
        as the request's own tenant gets up to and with the request.

        Args:
            tenant: the request's own; None: it has nothing waiting.
            weight: that tenant's.
            work_s: prefill work of the request itself, in seconds.

        Returns:
            Seconds of prefill work, on one worker.
        """
        queue = tenant.queues.get(self) if tenant is not None else None
        own_s = queue.work_us / 1e6 if queue is not None else 0.0
        others_s, weights = self.work.work_s, self.weight
        if queue is not None and queue.item is not None:
            others_s -= own_s
        else:
            weights += weight
        if queue is not None and own_s and queue.tenant.slots is not None:
            # What has no slot does not go before it now: Lanes.slot_wait_s counts that.
            own_s *= min(1.0, queue.tenant.slots.num_free / len(queue))
        return min(others_s + own_s, (own_s + work_s) * weights / weight - work_s)

    def check_integrity(self, inside: list[TenantQueue]) -> None:
        """Raises AssertionError when a sum differs from what it is the sum of.

        Args:
            inside: the queues that should be in the order.
        """
        assert len(inside) == len(self.order)
        self.order.check_integrity()
        assert math.isclose(self.weight, sum(one.weight for one in inside), abs_tol=1e-6)
        work_us = sum(one.work_us for one in inside)
        assert math.isclose(self.work.work_s, work_us / 1e6, abs_tol=1e-9)


class RevisionTracks:
    """The two tracks of one revision.

    Args:
        revision: its name.
        batch_share: the share of tokens that batch gets while both lanes have work.

    Attributes:
        interactive, batch: the tracks.
        trickle: what the batch track is owed.
        num_tickets: requests of the revision that have not ended.
        submitted_work_us: prefill work that waits, by the lane that it was submitted to, in whole
            microseconds: sums of floats would drift.
    """

    __slots__ = ("batch", "interactive", "num_tickets", "submitted_work_us", "trickle")

    def __init__(self, revision: str, batch_share: float) -> None:
        self.interactive = Track(common_pb2.LANE_INTERACTIVE, revision)
        self.batch = Track(common_pb2.LANE_BATCH, revision)
        self.trickle = Trickle(batch_share)
        self.num_tickets = 0
        self.submitted_work_us: dict[Lane, int] = {
            common_pb2.LANE_INTERACTIVE: 0,
            common_pb2.LANE_BATCH: 0,
        }

    def of(self, lane: Lane) -> Track:
        return self.batch if lane == common_pb2.LANE_BATCH else self.interactive

    def beside(self, track: Track) -> Track:
        """The other lane's track."""
        return self.interactive if track is self.batch else self.batch
