"""Fleets: the groups of workers that can serve each other's requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from baton.coordinator.state.requests import Request, WorkerKey
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.workers import AttachedWorkers, Worker


class Fleet:
    """Workers of one revision: they run the same model with the same engine arguments.

    A request belongs to one fleet. It waits for the fleet's workers, runs on the fleet's workers,
    and is moved to another fleet only while it has no output. Fleets are compared and hashed by
    identity.

    Attributes:
        name: The revision's name, which workers report as Hello.revision.
        revision: Launch configuration of its workers.
        workers: Its attached workers. Only the WorkerRegistry adds and removes them.
        num_requests: Requests of this fleet that have not ended. Only the RequestTable changes it.
    """

    __slots__ = ("_attached", "name", "num_requests", "revision", "workers")

    def __init__(self, revision: Revision, *, elastic: bool) -> None:
        self.name, self.revision = revision.name, revision
        self._attached: dict[WorkerKey | None, Worker] = {}
        self.workers = AttachedWorkers(self._attached, elastic=elastic)
        self.num_requests = 0

    def __repr__(self) -> str:
        return f"Fleet({self.name!r})"

    def add(self, worker: Worker) -> None:
        """Adds a worker that attaches."""
        self._attached[worker.key] = worker
        self.workers.recount()

    def remove(self, worker: Worker) -> None:
        """Removes a worker that is no longer attached."""
        del self._attached[worker.key]
        self.workers.recount()


class Fleets:
    """Owns the fleets.

    A fleet is created when a worker or a request names it, or a rollout starts. The core forgets
    a fleet that has no worker and no request and takes no part in a rollout.

    Args:
        stable: Name of the stable fleet.
        elastic: Whether any worker of a fleet computes prompts and decodes.

    Attributes:
        elastic: As above.
        stable: The fleet that serves all requests that no rollout sends elsewhere. It always
            exists; the scaler sizes its pools.
    """

    def __init__(self, stable: str, *, elastic: bool = False) -> None:
        self.elastic = elastic
        self._by_name: dict[str, Fleet] = {}
        self.stable = self.named(stable)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Fleet]:
        return iter(tuple(self._by_name.values()))

    def find(self, name: str) -> Fleet | None:
        """Returns the fleet of a name, or None."""
        return self._by_name.get(name)

    def named(self, name: str) -> Fleet:
        """Returns the fleet of a name; creates it if it does not exist."""
        fleet = self._by_name.get(name)
        if fleet is None:
            fleet = self._by_name[name] = Fleet(Revision(name), elastic=self.elastic)
        return fleet

    def unused(self) -> list[Fleet]:
        """Returns the fleets without a worker and without a request, except the stable fleet."""
        return [
            fleet
            for fleet in self
            if fleet is not self.stable and not fleet.num_requests and not len(fleet.workers)
        ]

    def forget(self, fleet: Fleet) -> None:
        """Removes an unused fleet."""
        del self._by_name[fleet.name]

    def check_integrity(self, workers: Iterable[Worker], requests: Iterable[Request]) -> None:
        """Raises AssertionError when a worker or a request is not in exactly one fleet.

        Args:
            workers: All attached workers.
            requests: All requests that have not ended.
        """
        num_workers, num_requests = Counter[Fleet](), Counter[Fleet]()
        for worker in workers:
            assert worker.fleet.workers.get(worker.key) is worker
            num_workers[worker.fleet] += 1
        for request in requests:
            num_requests[request.fleet] += 1
        for fleet in self:
            fleet.workers.check_integrity()
            assert len(fleet.workers) == num_workers.pop(fleet, 0)
            assert fleet.num_requests == num_requests.pop(fleet, 0)
        assert not num_workers
        assert not num_requests
        assert self._by_name[self.stable.name] is self.stable
