"""A placer for each revision, so that no request can be given workers of two.

A prefix, a session's last worker, the least loaded one and the other end of a handoff are all
looked up in one placer, which knows workers of its own revision only.
"""

from __future__ import annotations

from baton.coordinator.routing.latency import LatencyRegistry
from baton.coordinator.routing.output_lengths import OutputLengths
from baton.coordinator.routing.placement import Placer
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_load import WorkerLoad
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import RequestKey, WorkerKey
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.v1 import cluster_pb2


class Placers:
    """Owns one placer per revision that has workers.

    Attributes:
        crowded: decode workers that were given interactive work since they were last looked at.
        changed: whether workers have come, gone or changed what they take; whoever looks at them
            then sets it back.
    """

    def __init__(
        self, config: CoreConfig, workers: WorkerRegistry, latency: LatencyRegistry
    ) -> None:
        self._config, self._workers, self._latency = config, workers, latency
        self._outputs = OutputLengths()
        self._now = 0.0
        self.crowded: dict[WorkerKey, None] = {}
        self._placers: dict[str, Placer] = {}
        self.changed = False

    def __len__(self) -> int:
        return len(self._placers)

    def at(self, now: float) -> None:
        """Tells the time of the event that is handled next, by the core's clock."""
        self._now = now
        for placer in self._placers.values():
            placer.router.now = now

    def of(self, revision: str) -> Placer:
        """The placer of a revision, made where there is none."""
        placer = self._placers.get(revision)
        if placer is None:
            # Clients may name any revision: placers without workers are not kept.
            self.keep_only(frozenset({self._workers.stable}))
            placer = self._placers[revision] = Placer(
                self._config,
                self._workers.follow(revision),
                self._latency,
                self._outputs,
                self.crowded,
            )
            placer.router.now = self._now
        return placer

    def keep_only(self, revisions: frozenset[str]) -> None:
        """Forgets the placers of revisions without attached workers, but for these."""
        for revision in self._placers.keys() - revisions - set(self._workers.revisions):
            del self._placers[revision]
            self._workers.forget(revision)

    def check_integrity(self) -> None:
        """Raises AssertionError when sums, masks or owners differ from what they stand for."""
        for revision, placer in self._placers.items():
            placer.check_integrity()
            for worker in self._workers:
                assert worker.revision == revision or placer.router.load(worker.key) is None

    # ---- Members.

    def attach(self, worker: Worker) -> None:
        self.changed = True
        self._workers.changed(worker)
        self.keep_only(frozenset({self._workers.stable, worker.revision}))
        self.of(worker.revision).attach(worker)

    def refresh(self, worker: Worker) -> None:
        self.changed = True
        self._workers.changed(worker)
        self.of(worker.revision).refresh(worker)

    def detach(self, worker: Worker) -> None:
        self.changed = True
        self.of(worker.revision).detach(worker)

    def load(self, worker: Worker) -> WorkerLoad | None:
        return self._router(worker).load(worker.key)

    def report_kv(self, worker: Worker, kv_tokens_used: int) -> None:
        self._router(worker).report_kv(worker.key, kv_tokens_used)

    def apply_cache(self, worker: Worker, changes: cluster_pb2.CacheEvents) -> None:
        self._router(worker).apply_cache(worker.key, changes)

    # ---- Outputs that workers go on with from before a restart, and no client has come back for.

    def hold(self, key: RequestKey, worker: Worker, num_tokens: int) -> None:
        """Counts so many tokens of KV room on a worker, until `let_go`."""
        self._router(worker).hold(key, worker.key, num_tokens)

    def held_grows(
        self, key: RequestKey, revision: str, worker: WorkerKey, num_tokens: int
    ) -> None:
        """It takes this many tokens now."""
        router = self.of(revision).router
        if router.outgrows(key, worker, num_tokens):
            router.grow(key, worker, num_tokens)

    def let_go(self, key: RequestKey, revision: str, worker: WorkerKey) -> None:
        """Frees what was held; idempotent."""
        self.of(revision).router.release(key, None, worker)

    # ---- Inside.

    def _router(self, worker: Worker) -> Router:
        return self.of(worker.revision).router
