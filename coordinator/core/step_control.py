"""Owns the targets of the workers' steps, and tells them to the placers and to the workers."""

from __future__ import annotations

from baton.coordinator.core.gap_choice import LEAST_OUTPUTS, GapChoice, Workload
from baton.coordinator.core.parts import Parts
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.runtime.steps.step_budget import StepTargets
from baton.runtime.steps.step_messages import to_message
from baton.v1 import common_pb2

# Time between two updates of the choice, in seconds. A change of workers updates it at once.
_UPDATE_INTERVAL_S = 1.0


class StepControl:
    """Changes the step targets of placers and workers, always together.

    A worker that attaches gets `Placers.step_targets` in its Welcome.
    """

    def __init__(self, parts: Parts) -> None:
        self._clock = parts.clock
        self._config, self._targets, self._effects = parts.config, parts.targets, parts.effects
        self._workers, self._placers = parts.workers, parts.placers
        self._gaps = GapChoice() if _may_choose(parts.config) else None
        self._next_update_at, self._num_workers = 0.0, 0

    @property
    def gap_reason(self) -> str:
        """Explains to people how the longest gap was chosen."""
        if self._config.steps.longest_gap_ms is not None:
            return "set as steps.longest_gap_ms"
        if self._gaps is None:
            return "long gaps are for elastic cells with steps.scheduler baton"
        return self._gaps.reason

    def targets_changed(self) -> None:
        """Follows a change of the latency targets."""
        self._apply()

    def after_event(self) -> None:
        """Chooses the longest gap again, if the operator leaves it to the coordinator."""
        if self._gaps is None:
            return
        now = self._clock.now
        if now < self._next_update_at and len(self._workers) == self._num_workers:
            return
        self._next_update_at, self._num_workers = now + _UPDATE_INTERVAL_S, len(self._workers)
        self._gaps.update(self._num_workers, self._workload(), now)
        self._apply()

    @property
    def _itl_s(self) -> float | None:
        return self._targets.of_lane(common_pb2.LANE_INTERACTIVE).itl_s

    def _workload(self) -> Workload | None:
        placers, times, itl_s = self._placers, self._placers.prompt_times, self._itl_s
        output_tokens = placers.outputs.recent_mean(common_pb2.LANE_INTERACTIVE, LEAST_OUTPUTS)
        step_s = placers.single_step_s()
        if step_s is None or itl_s is None or not times.total:
            return None
        return Workload(output_tokens, times.size_biased_mean / itl_s, step_s / itl_s)

    def _apply(self) -> None:
        is_long = self._gaps is not None and self._gaps.is_long
        targets = StepTargets.of(self._config.steps, self._itl_s, long_gaps=is_long)
        if targets == self._placers.step_targets:
            return
        self._placers.set_step_targets(targets)
        for worker in self._workers:
            self._effects.add(ev.SendCommand(worker.key, to_message(targets)))


def _may_choose(config: CoreConfig) -> bool:
    """Whether the coordinator chooses the longest gap."""
    steps = config.steps
    return config.elastic and steps.scheduler == "baton" and steps.longest_gap_ms is None
