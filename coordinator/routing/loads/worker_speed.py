"""Compares the speed of a worker with that of other workers of its kind."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.latency_fit import StepTerms, log_error

# Number of latest steps that are compared, and of those of one kind of work that are enough.
_NUM_STEPS, _FEWEST = 48, 12
# A worker counts as slower or faster than its kind from the first factor on, until it is below the
# second one. Workers with other mixes of steps differ by less, because no fit is perfect.
_DIFFERS, _IS_ALIKE = math.log(1.3), math.log(1.15)

# Whether a step computes prompts, and whether it decodes.
_Work: TypeAlias = tuple[bool, bool]


class _Error(NamedTuple):
    """Median of log(measured / predicted by the kind's model) of a worker's steps."""

    num_steps: int
    median: float


class WorkerSpeed:
    """The speed of one worker.

    A GPU that is throttled, or a core that other processes use, makes all steps of one worker
    longer. The fit of the kind is made of steps without this factor: otherwise it would explain the
    difference by other properties of the steps, such as the KV tokens that pile up there.

    Attributes:
        slowdown: How many times as long as its kind's the worker's steps take; 1 unless they differ
            clearly.
    """

    def __init__(self) -> None:
        self.slowdown = 1.0
        self._latest = deque[StepTerms](maxlen=_NUM_STEPS)
        self._errors = dict[_Work, _Error]()
        self._model_of_kind: LatencyModel | None = None
        self._own_model: LatencyModel | None = None

    def add(self, step: StepTerms) -> None:
        """Records a measured step."""
        self._latest.append(step)

    def measure(self, model: LatencyModel) -> None:
        """Computes the errors of the kind's model for the latest steps."""
        by_work = dict[_Work, list[float]]()
        for step in self._latest:
            work = step.num_prefill_tokens > 0, step.num_decodes > 0
            by_work.setdefault(work, []).append(log_error(model, step))
        self._errors = {
            work: _Error(len(errors), statistics.median(errors))
            for work, errors in by_work.items()
            if len(errors) >= _FEWEST
        }

    def applied(self, model: LatencyModel) -> LatencyModel:
        """Returns the worker's model, from its kind's."""
        if self.slowdown == 1.0:
            return model
        if self._model_of_kind is not model or self._own_model is None:
            self._model_of_kind, self._own_model = model, model.scaled(self.slowdown)
        return self._own_model

    def _compare(self, typical: dict[_Work, float]) -> None:
        shared = [
            (one.num_steps, one.median - typical[work])
            for work, one in self._errors.items()
            if work in typical
        ]
        num_steps = sum(count for count, _ in shared)
        differs_by = sum(count * error for count, error in shared) / max(1, num_steps)
        limit = _DIFFERS if self.slowdown == 1.0 else _IS_ALIKE
        slowdown = math.exp(differs_by) if abs(differs_by) > limit else 1.0
        if slowdown != self.slowdown:
            self.slowdown, self._own_model = slowdown, None


def compare(workers: Iterable[WorkerSpeed]) -> None:
    """Compares the workers of one kind by the errors that each has measured.

    A kind of work that only one worker does says nothing: its time may be that of the kind, or of
    this worker alone. Of two workers, the faster one is the typical one.
    """
    compared: Sequence[WorkerSpeed] = tuple(workers)
    by_work = dict[_Work, list[float]]()
    for worker in compared:
        for work, error in worker._errors.items():
            by_work.setdefault(work, []).append(error.median)
    typical = {
        work: statistics.median_low(medians)
        for work, medians in by_work.items()
        if len(medians) > 1
    }
    for worker in compared:
        worker._compare(typical)
