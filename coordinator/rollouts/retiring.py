"""Fleets that leave: they finish the outputs that they began, then their workers are drained.

No other fleet may continue such an output: its weights differ, so the answer would mix two models
without any error. The output therefore ends in its own fleet, or fails with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from baton.coordinator.scaling.launches import Launches
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.pools import POOL_OF, ROLE_OF
from baton.coordinator.state.workers import Worker
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

_DRAINING = cluster_pb2.WORKER_STATE_DRAINING
# A fleet without requests keeps its workers this long, so that clients with a broken connection can
# resume their requests.
_QUIET_S = 2.0


@dataclass(slots=True)
class _Leaving:
    """State of a fleet that leaves. Times are by the core's clock.

    Attributes:
        deadline: Requests that have not ended by then fail.
        reason: Why the fleet leaves; part of the drain commands to its workers.
        busy_at: When the fleet last had a request.
    """

    deadline: float
    reason: str
    busy_at: float


def gone_error(fleet: Fleet) -> errors.Unavailable:
    """The error of a request that has output and whose fleet has no workers any more."""
    return errors.Unavailable(
        f"revision {fleet.name!r} began this output and has no workers any more; no other revision "
        "can continue it: submit the request again",
        reason="REVISION_GONE",
    )


class Retiring:
    """Owns the fleets that leave. `Rollouts` adds fleets; the last worker's end removes them.

    Args:
        launches: Worker processes that were started here.
        drain: Tells a worker to leave: worker, time limit in seconds, reason.
    """

    def __init__(self, launches: Launches, drain: Callable[[Worker, float, str], None]) -> None:
        self._launches, self._drain = launches, drain
        self._leaving: dict[Fleet, _Leaving] = {}

    def __len__(self) -> int:
        return len(self._leaving)

    def __iter__(self) -> Iterator[Fleet]:
        return iter(tuple(self._leaving))

    def __contains__(self, fleet: Fleet) -> bool:
        return fleet in self._leaving

    def decodes(self, fleet: Fleet) -> bool:
        """Whether the fleet has a worker that can decode and is not draining."""
        return fleet.workers.able(common_pb2.ROLE_DECODE).since < math.inf

    def awaits_decode(self, fleet: Fleet) -> bool:
        """Whether a worker that can decode is starting, and all attached ones are draining."""
        roles = fleet.workers.roles_doing(common_pb2.ROLE_DECODE)
        is_starting = any(self._launches.num_starting(POOL_OF[role], fleet) for role in roles)
        return is_starting and not self.decodes(fleet)

    def begin(self, fleet: Fleet, reason: str, drain_s: float, now: float) -> None:
        """Lets a fleet leave: it gets no new requests, and has `drain_s` seconds for its own."""
        self._leaving[fleet] = _Leaving(now + drain_s, reason, busy_at=now)

    def replace(self, fleets: Iterable[Fleet], drain_s: float, now: float) -> None:
        """Replaces the fleets that leave by those that an earlier coordinator has recorded."""
        self._leaving.clear()
        for fleet in fleets:
            self.begin(fleet, "another revision has taken its place", drain_s, now)

    def overdue(self, now: float) -> list[Fleet]:
        """Returns the fleets whose requests must end now."""
        return [fleet for fleet, leaving in self._leaving.items() if now >= leaving.deadline]

    def advance(self, now: float) -> bool:
        """Drains workers that are not needed any more; returns whether a fleet has left."""
        before = len(self._leaving)
        for fleet in self:
            self._release(fleet, self._leaving[fleet], now)
        return len(self._leaving) < before

    def _release(self, fleet: Fleet, leaving: _Leaving, now: float) -> None:
        """Drains all workers but one per pool, and that one once the fleet has no requests.

        A request that waits for another attempt, because its worker died or because it made room
        for interactive requests, needs one worker of each pool. In an elastic cell any one worker
        is enough, and the second one is a spare. If the last worker that can decode is already
        draining, a worker that is starting takes its place.
        """
        stays = fleet.num_requests > 0 and now < leaving.deadline
        if stays:
            leaving.busy_at = now
        is_needed = now < min(leaving.deadline, leaving.busy_at + _QUIET_S)
        if not (stays and self.awaits_decode(fleet)):
            self._launches.give_up_all(fleet)
        for role in ROLE_OF.values():
            drainable = [
                one for one in fleet.workers if one.role == role and one.state != _DRAINING
            ]
            drainable.sort(key=lambda one: (one.serving, len(one.ledger), one.id))
            if is_needed and drainable:
                # The worker that stays: one that serves, if any does, with the most requests.
                drainable.pop()
            for worker in drainable:
                self._drain(worker, max(1.0, leaving.deadline - now), leaving.reason)
        if not stays and not len(fleet.workers):
            del self._leaving[fleet]
