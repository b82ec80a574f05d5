"""One placer per fleet, so that a request never gets workers of two fleets.

A placer knows only its own fleet's workers. It looks up cached prefixes, a session's last worker,
the least loaded worker and the other end of a handoff.
"""

from __future__ import annotations

from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.kv_speeds import KvSpeed
from baton.coordinator.routing.loads.latency import LatencyRegistry
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.output_lengths import OutputLengths
from baton.coordinator.routing.placement import Placer
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import RequestKey, SessionKey, WorkerKey
from baton.coordinator.state.scaling_config import in_seconds
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.coordinator.telemetry.recent_values import RecentValues
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2

# Number of recent prompts, the same as of recent outputs.
_WINDOW = 512


class Placers:
    """Owns one placer per fleet, from its first use until the core forgets the fleet.

    Attributes:
        crowded: decode workers that got interactive work since the last check for crowding.
        outputs: lengths of recent outputs, of all fleets.
        prompt_times: seconds that recent interactive prompts take to compute, of all fleets; empty
            in a cell that is not elastic.
        step_targets: targets of the workers' steps; in elastic cells, requests are placed by them.
    """

    def __init__(
        self,
        config: CoreConfig,
        workers: WorkerRegistry,
        latency: LatencyRegistry,
        clock: CoreClock,
    ) -> None:
        self._config, self._workers, self._latency = config, workers, latency
        self._clock = clock
        self.outputs = OutputLengths()
        self.prompt_times = RecentValues[float](_WINDOW)
        itl_s = in_seconds(config.targets.interactive).itl_s
        self.step_targets = StepTargets.of(config.steps, itl_s)
        self.crowded: dict[WorkerKey, None] = {}
        self._placers: dict[Fleet, Placer] = {}

    def __len__(self) -> int:
        return len(self._placers)

    def tidy(self) -> None:
        """Removes some blocks of workers that have left; the core calls it with each event."""
        for placer in self._placers.values():
            placer.view.tidy()

    @property
    def longest_gap_s(self) -> float | None:
        """Longest gap that the workers keep; None: no ITL target, or vLLM's scheduler."""
        # vLLM's own scheduler does not bound single gaps.
        is_kept = self._config.steps.scheduler == "baton" and self.step_targets.itl_s is not None
        return self.step_targets.longest_gap_s if is_kept else None

    def set_step_targets(self, targets: StepTargets) -> None:
        """Changes the step targets of the placers; the caller tells the workers."""
        self.step_targets = targets
        for placer in self._placers.values():
            placer.set_step_targets(targets)

    def single_step_s(self) -> float | None:
        """Time of the fastest worker's decode step with one stream; None without workers."""
        loads = [entry for worker in self._workers if (entry := self.load(worker)) is not None]
        return min((one.traits.latency.decode_step_s(1, 0) for one in loads), default=None)

    def of(self, fleet: Fleet) -> Placer:
        """Returns the placer of a fleet; creates it if it does not exist."""
        placer = self._placers.get(fleet)
        if placer is None:
            placer = self._placers[fleet] = Placer(
                self._config,
                self._clock,
                fleet.workers,
                self._latency,
                self.outputs,
                self.crowded,
                self.prompt_times,
                self.step_targets,
            )
        return placer

    def forget(self, fleet: Fleet) -> None:
        """Removes the placer of a fleet that has neither workers nor requests."""
        self._placers.pop(fleet, None)

    def check_integrity(self) -> None:
        """Raises AssertionError if a placer is inconsistent or knows a worker of another fleet."""
        assert self._placers.keys() <= set(self._workers.fleets)
        for fleet, placer in self._placers.items():
            placer.check_integrity()
            assert placer.view.loads.step_targets in (None, self.step_targets)
            for worker in self._workers:
                assert worker.fleet is fleet or placer.view.loads.get(worker.key) is None

    # ---- Members.

    def attach(self, worker: Worker) -> None:
        self._workers.changed(worker)
        self.of(worker.fleet).attach(worker)

    def refresh(self, worker: Worker) -> None:
        self._workers.changed(worker)
        self.of(worker.fleet).refresh(worker)

    def detach(self, worker: Worker) -> None:
        self.of(worker.fleet).detach(worker)

    def load(self, worker: Worker) -> WorkerLoad | None:
        return self._view(worker).loads.get(worker.key)

    def report_kv(self, worker: Worker, kv_tokens_used: int) -> None:
        self._view(worker).report_kv(worker.key, kv_tokens_used)

    def report_tier_loads(self, worker: Worker, load: cluster_pb2.LoadReport) -> None:
        self._view(worker).report_tier_loads(worker.key, load.host_loads, load.disk_loads)

    def kv_speeds(self) -> list[KvSpeed]:
        """Returns the measured speeds at which the workers of all fleets get KV blocks."""
        placers = tuple(self._placers.values())
        return [speed for placer in placers for speed in placer.view.kv_speeds()]

    def apply_cache(self, worker: Worker, changes: cluster_pb2.CacheEvents) -> None:
        self._view(worker).apply_cache(worker.key, changes)

    def forget_session(self, session: SessionKey) -> None:
        """Forgets which workers a session had."""
        for placer in self._placers.values():
            placer.view.forget_session(session)

    # ---- Requests from before a restart that workers still decode and no client has resumed yet.

    def hold(self, key: RequestKey, worker: Worker, num_tokens: int) -> None:
        """Reserves this many KV tokens on a worker until `release_held`."""
        self._view(worker).hold(key, worker.key, num_tokens)

    def grow_held(self, key: RequestKey, fleet: Fleet, worker: WorkerKey, num_tokens: int) -> None:
        """Raises a reservation made with `hold` to this many tokens."""
        view = self.of(fleet).view
        if view.outgrows(key, worker, num_tokens):
            view.grow(key, worker, num_tokens)

    def release_held(self, key: RequestKey, fleet: Fleet, worker: WorkerKey) -> None:
        """Frees a reservation made with `hold`; idempotent."""
        self.of(fleet).view.release(key, None, worker)

    # ---- Private methods

    def _view(self, worker: Worker) -> FleetView:
        return self.of(worker.fleet).view
