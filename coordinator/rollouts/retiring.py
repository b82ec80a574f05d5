"""Revisions that leave: what they began ends there, and then their workers go.

An output that has begun is never gone on with by another revision: other weights would finish an
answer that is nobody's, and say that all is well. So it ends on its own, or fails and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from baton.coordinator.rollouts.requests import RolloutRequests
from baton.coordinator.scaling.launches import Launches
from baton.coordinator.state.pools import ROLE_OF, Pool
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

_DRAINING = cluster_pb2.WORKER_STATE_DRAINING
# Clients whose connection broke come back with what they have: until then there is still somebody.
_QUIET_S = 2.0


@dataclass(slots=True)
class _Leaving:
    """Times by the core's clock.

    Attributes:
        until: what has not ended then fails.
        busy_at: when a request of it was last there.
    """

    until: float
    why: str
    busy_at: float


def gone_error(revision: str) -> errors.Unavailable:
    """Of a request that no worker may go on with."""
    return errors.Unavailable(
        f"revision {revision!r} began this output and has no workers any more; another revision "
        "does not go on with it: submit the request anew",
        reason="REVISION_GONE",
    )


class Retiring:
    """Owns the revisions that leave.

    Args:
        drain: tells a worker to leave: itself, how long it may take in seconds, why, and the time.
    """

    def __init__(
        self,
        lifecycle: RolloutRequests,
        workers: WorkerRegistry,
        launches: Launches,
        drain: Callable[[Worker, float, str, float], None],
    ) -> None:
        self._lifecycle, self._workers, self._launches, self._drain = (
            lifecycle,
            workers,
            launches,
            drain,
        )
        self._leaving: dict[str, _Leaving] = {}

    def __len__(self) -> int:
        return len(self._leaving)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._leaving))

    def decodes(self, revision: str) -> bool:
        """Whether it has a decode worker that is not to leave."""
        return any(
            one.role == common_pb2.ROLE_DECODE and one.state != _DRAINING
            for one in self._workers.of(revision)
        )

    def awaits_decode(self, revision: str) -> bool:
        """Whether all decode workers that it is to keep only start now."""
        is_starting = self._launches.num_starting(Pool.DECODE, revision) > 0
        return is_starting and not self.decodes(revision)

    def begin(self, revision: str, why: str, drain_s: float, now: float) -> None:
        """It gets nothing new. What it has begun and not ended within `drain_s` fails."""
        self._leaving[revision] = _Leaving(now + drain_s, why, busy_at=now)

    def replace(self, revisions: Iterable[str], drain_s: float, now: float) -> None:
        """Others leave instead."""
        self._leaving.clear()
        for revision in revisions:
            self.begin(revision, "another revision has taken its place", drain_s, now)

    def advance(self, now: float) -> bool:
        """Goes on with it; whether one of them is gone for good."""
        before = len(self._leaving)
        for revision in self:
            self._let_go(revision, self._leaving[revision], now)
        return len(self._leaving) < before

    def _let_go(self, revision: str, leaving: _Leaving, now: float) -> None:
        """Those leave that are not needed, the last one of each pool when nothing is left to do.

        So what waits for another attempt there (a worker died, batch made room) has somewhere to
        go. Where the last decode worker drains already, that is the one that starts in its place.
        """
        # What waits here and has not begun is what the stable revision cannot compute.
        stays = [one for one in self._lifecycle.requests.all() if one.revision == revision]
        if now >= leaving.until:
            for request in stays:
                if len(request.token_ids):
                    self._lifecycle.fail(request, gone_error(revision), now)
                elif not request.waits:
                    # Nobody has seen anything of it: another revision may compute it.
                    self._lifecycle.move(request, now)
            stays = []
        if stays:
            leaving.busy_at = now
        is_needed = now < min(leaving.until, leaving.busy_at + _QUIET_S)
        if not (stays and self.awaits_decode(revision)):
            self._launches.give_up_all(revision)
        members = self._workers.of(revision)
        for role in ROLE_OF.values():
            there = [one for one in members if one.role == role and one.state != _DRAINING]
            there.sort(key=lambda one: (one.serving, len(one.ledger), one.id))
            if is_needed and there:
                there.pop()
            for worker in there:
                self._drain(worker, max(1.0, leaving.until - now), leaving.why, now)
        if not stays and not len(members):
            del self._leaving[revision]
