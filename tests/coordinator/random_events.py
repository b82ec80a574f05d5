"""Random events for a random cell: clients, operator commands and faults."""

from __future__ import annotations

from collections.abc import Callable

from baton.coordinator.core.core import Core
from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.scaling_config import Targets
from baton.coordinator.state.workers import Worker
from baton.runtime.errors import ResourceExhausted
from tests.coordinator.random_cell import RandomCell
from tests.coordinator.random_clients import Client
from tests.coordinator.random_conditions import REVISIONS
from tests.coordinator.random_worker import DECODE, PREFILL, SERVING, RandomWorker

_MAX_WORKERS = 8


class RandomEvents:
    """Applies random events to a cell, one after the other.

    The operator sends only commands that the core accepts. In a cell without faults no event may
    cost a request its answer; for example, the last worker of a pool is not drained.
    """

    def __init__(self, cell: RandomCell) -> None:
        self._cell, self._rng = cell, cell.rng
        self._faults, self._launched = cell.conditions.faults, cell.conditions.launched
        clients = cell.clients
        peaceful: list[Callable[[], None]] = [
            *[self._submit] * 6, *[self._submit_some] * 2, clients.lose_session,
            clients.submit_twice, self._cancel, self._cancel_by_hand, self._flip, self._drain,
            self._scale, self._autoscale, self._set_targets, self._roll_out, self._share,
            self._promote, self._abort, self._stop_worker,
        ]  # fmt: skip
        faulty: list[Callable[[], None]] = [
            self._kill, self._freeze, self._wedge, self._cut, self._replace, self._declare_lost,
            self._read_too_slowly, self._lose_coordinator, self._stall,
        ]  # fmt: skip
        if not self._faults:
            faulty = [self._cut] if self._rng.random() < 0.5 else []
        self._all = peaceful + faulty

    def run(self, seconds: float) -> None:
        """Applies events with random pauses for this many seconds."""
        cell, rng = self._cell, self._rng
        cell.run(3.0)
        until = cell.now + seconds
        while cell.now < until:
            cell.run(rng.choice([0.001, 0.01, 0.1, 0.1, 0.5, 2.0]))
            if cell.coordinator.listens:
                rng.choice(self._all)()

    @property
    def _core(self) -> Core:
        return self._cell.coordinator.core

    def _post(self, event: ev.Event) -> None:
        self._cell.coordinator.post(event)

    # ---- Clients.

    def _submit(self) -> None:
        self._cell.clients.submit()

    def _submit_some(self) -> None:
        for _ in range(self._rng.randrange(3, 12)):
            self._submit()

    def _cancel(self) -> None:
        self._cell.clients.cancel(lambda client: self._post(ev.StreamCancelled(client.to)))

    def _cancel_by_hand(self) -> None:
        def cancel(client: Client) -> None:
            request = self._core.running_request(client.request_id, client.tenant)
            if request is not None:
                self._post(ev.RequestCancelled(request.key))

        self._cell.clients.cancel(cancel)

    def _read_too_slowly(self) -> None:
        slow = ResourceExhausted("reads too slowly", reason="SLOW_READER", retry_after_s=1.0)
        self._cell.clients.cancel(lambda client: self._post(ev.StreamFailed(client.to, slow)))

    # ---- Operator commands.

    def _any_attached(self) -> Worker | None:
        attached = list(self._core.workers)
        return self._rng.choice(attached) if attached else None

    def _is_leaving(self, revision: str) -> bool:
        """Whether the fleet of this revision gets no new requests and so no new workers."""
        fleet = self._core.fleets.find(revision)
        return fleet is None or not self._core.rollouts.traffic.gets_new(fleet)

    def _flip(self) -> None:
        if worker := self._any_attached():
            role = PREFILL if worker.role == DECODE else DECODE
            if self._core.flip_error(worker, role) is None:
                self._post(ev.FlipRequested(worker.id, role))

    def _drain(self) -> None:
        worker = self._any_attached()
        if worker is None:
            return
        is_last = worker.fleet.workers.serving(worker.role) in ([], [worker])
        if not self._faults and (
            (is_last and not self._launched) or self._is_leaving(worker.fleet.name)
        ):
            return
        timeout_s = self._rng.choice([0.2, 5.0, 60.0]) if self._faults else 300.0
        self._post(ev.DrainRequested(worker.id, timeout_s, "test"))
        if not self._launched:
            self._begin_later(5.0, f"{worker.id}x", worker.role, worker.fleet.name)

    def _scale(self) -> None:
        pool = self._rng.choice(list(Pool))
        size = self._rng.randrange(0 if self._faults else 1, 4)
        if self._core.scaler.scale_error(pool, size) is None:
            self._post(ev.ScaleRequested(pool, size))

    def _autoscale(self) -> None:
        self._post(ev.AutoscaleRequested(self._rng.random() < 0.7))

    def _set_targets(self) -> None:
        targets = Targets(
            ttft_s=self._rng.choice([None, 0.1, 1.0]), itl_s=self._rng.choice([None, 0.02])
        )
        self._post(ev.TargetsRequested({"interactive": targets}))

    def _roll_out(self) -> None:
        rollouts, rng = self._core.rollouts, self._rng
        name = rng.choice([one for one in REVISIONS if one != rollouts.traffic.stable.name])
        revision, share = Revision(name), rng.choice([0.0, 0.3, 1.0])
        sizes = {pool: rng.choice([1, 2]) for pool in Pool if rng.random() < 0.5}
        if rollouts.start_error(revision, share, sizes) is not None:
            return
        self._post(ev.RolloutRequested(revision, share, sizes, self._faults and rng.random() < 0.3))
        if not self._launched:
            for role in (PREFILL, DECODE):
                self._begin_later(0.0, f"{name}-{role}-{rng.randrange(100)}", role, name)

    def _share(self) -> None:
        if self._core.rollouts.share_error(0.5) is None:
            self._post(ev.ShareRequested(self._rng.choice([0.0, 0.5, 1.0])))

    def _promote(self) -> None:
        if self._core.rollouts.promote_error() is None:
            drain_s = self._rng.choice([None, None, 1.0, 20.0]) if self._faults else None
            self._post(ev.PromotionRequested(drain_s))

    def _abort(self) -> None:
        if self._core.rollouts.abort_error() is None:
            drain_s = self._rng.choice([None, 1.0]) if self._faults else None
            self._post(ev.AbortRequested("test", drain_s))

    # ---- Workers.

    def _any_worker(self) -> RandomWorker | None:
        workers = self._cell.workers
        return self._rng.choice(workers) if workers else None

    def _begin_later(self, seconds: float, worker_id: str, role: int, revision: str) -> None:
        """Starts another worker after this many seconds, unless the cell has enough workers."""

        def begin() -> None:
            if len(self._cell.workers) < _MAX_WORKERS:
                self._cell.spawn(worker_id, role, revision)

        self._cell.after(seconds, begin)

    def _stop_worker(self) -> None:
        """SIGTERM: the worker drains by itself."""
        worker = self._any_worker()
        if worker is None or worker.state != SERVING:
            return
        alike = [
            one
            for one in self._cell.workers
            if (one.role, one.revision, one.state) == (worker.role, worker.revision, SERVING)
        ]
        if self._faults or (len(alike) > 1 and not self._is_leaving(worker.revision)):
            worker.drain(5.0)
            if not self._launched:
                name = worker.id if self._faults else f"{worker.id}n"
                self._begin_later(3.0, name, worker.role, worker.revision)

    def _kill(self) -> None:
        if worker := self._any_worker():
            self._cell.num_losses += 1
            self._cell.exit(worker, "was killed")
            if not worker.is_launched:
                role = worker.role if self._rng.random() < 0.7 else self._rng.choice([1, 2])
                self._begin_later(
                    self._rng.choice([0.05, 1.0, 8.0]),
                    worker.id,
                    role,
                    self._revision_like(worker),
                )

    def _freeze(self) -> None:
        """SIGSTOP a worker; SIGCONT follows after a pause."""
        if worker := self._any_worker():
            self._cell.num_losses += 1
            seconds = self._rng.choice([0.5, 1.5, 4.0, 12.0, 30.0])
            worker.frozen_until = max(worker.frozen_until, self._cell.now + seconds)
            self._cell.log("worker", worker.key, "is stopped for", seconds)

    def _wedge(self) -> None:
        """Stops a worker's engine; the process continues to send heartbeats."""
        if worker := self._any_worker():
            self._cell.num_losses += 1
            seconds = self._rng.choice([1.0, 10.0, 30.0, 90.0])
            worker.wedged_until = max(worker.wedged_until, self._cell.now + seconds)
            self._cell.log("worker", worker.key, "makes no step for", seconds)

    def _stall(self) -> None:
        """SIGSTOP the coordinator; messages to it wait."""
        if self._rng.random() < 0.4:
            seconds = self._rng.choice([0.5, 2.0, 12.0])
            self._cell.coordinator.frozen_until = self._cell.now + seconds
            self._cell.log("the coordinator is stopped for", seconds)

    def _cut(self) -> None:
        if worker := self._any_worker():
            self._cell.network.cut(worker)

    def _replace(self) -> None:
        """Starts another process under the ID of a live worker."""
        worker = self._any_worker()
        if worker is not None and not worker.is_launched:
            self._cell.num_losses += 1
            self._cell.spawn(
                worker.id, self._rng.choice([PREFILL, DECODE]), self._revision_like(worker)
            )

    def _declare_lost(self) -> None:
        """Reports a live worker as lost, as the shell does when a worker reads too slowly."""
        worker = self._any_worker()
        if worker is not None and not self._launched:
            self._cell.num_losses += 1
            self._post(ev.WorkerLost(worker.id, "does not keep up", worker.key[1]))
            self._begin_later(1.0, worker.id, worker.role, worker.revision)

    def _revision_like(self, worker: RandomWorker) -> str:
        """Returns a revision, most often that of the worker."""
        return self._rng.choice([worker.revision, worker.revision, "1", "v2"])

    def _lose_coordinator(self) -> None:
        """Kills the coordinator in 70 % of the calls; before some of them it closes admission."""
        if self._rng.random() < 0.7:
            if self._rng.random() < 0.4:
                self._post(ev.AdmissionClosed(True))
            self._cell.lose_coordinator()
