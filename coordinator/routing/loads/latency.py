"""Fits the step latency of each kind of worker to the steps that workers report."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.coordinator.routing.loads.worker_speed import WorkerSpeed, compare
from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.workers import Worker
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.latency_fit import FitQuality, LatencyFit, StepTerms, shape_class
from baton.v1 import cluster_pb2

# Maximum number of worker kinds kept. An upgrade of the workers adds a kind, and a coordinator sees
# only a few upgrades.
_MAX_KINDS = 64
# Steps used per kind and round of load reports; fitting a step takes about 15 microseconds. This
# many steps let the fit follow a change within seconds, with one worker or with a thousand.
_STEPS_PER_ROUND = 64
# Number of steps ignored as warm-up, per worker and shape class. The first step of a size compiles
# kernels, captures graphs, grows memory pools and touches memory; the second and third may still
# tune. Later steps have a steady latency. The limit counts steps instead of seconds because an
# idle worker does not warm up.
_COLD_STEPS = 3
# The workers of a kind are compared once per this many of their load reports.
_REPORTS_PER_COMPARISON = 4


class WorkerKind(NamedTuple):
    """Properties that determine the step latency of a worker; the role is not among them.

    Attributes:
        device: type of the device, for example "cuda".
        device_name: model of the device, for example "NVIDIA H100 80GB HBM3".
        revision: revision of the model.
        rollout: revision of the worker, which may change engine arguments.
    """

    engine: str
    engine_version: str
    device: str
    device_name: str
    model: str
    revision: str
    tp_size: int
    pp_size: int
    rollout: str

    @classmethod
    def of(cls, hello: cluster_pb2.Hello) -> WorkerKind:
        return cls(
            hello.engine,
            hello.engine_version,
            hello.device,
            hello.device_name,
            hello.model.name,
            hello.model.revision,
            hello.fingerprint.tp_size,
            hello.fingerprint.pp_size or 1,
            hello.revision,
        )


@dataclass(frozen=True, slots=True)
class KindLatency:
    """Latency model of one worker kind, with the quality of the fit.

    Attributes:
        num_cold: samples ignored because the worker was still warming up for steps of that size.
    """

    model: LatencyModel
    quality: FitQuality
    num_cold: int


@dataclass(slots=True)
class _Measured:
    """Measurements of a kind.

    Attributes:
        num_since: Load reports since its workers were compared.
    """

    fit: LatencyFit
    workers: set[WorkerKey] = field(default_factory=set)
    num_cold: int = 0
    num_since: int = 0


@dataclass(slots=True)
class _Reporter:
    """A worker that has reported steps.

    Attributes:
        num_steps: Number of steps by shape class, counted up to _COLD_STEPS.
    """

    kind: WorkerKind
    num_steps: dict[int, int] = field(default_factory=dict)
    num_reports: int = 0
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)


class LatencyRegistry:
    """One latency fit per worker kind; keeps the `max_kinds` kinds that reported most recently.

    Args:
        seed: Model used for a kind without any measurement.
    """

    def __init__(self, seed: LatencyModel, max_kinds: int = _MAX_KINDS) -> None:
        self._seed, self._max_kinds = seed, max_kinds
        self._kinds: OrderedDict[WorkerKind, _Measured] = OrderedDict()
        self._reporters: dict[WorkerKey, _Reporter] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def model(self, kind: WorkerKind) -> LatencyModel:
        """The model fitted to the latest reports; the seed for a kind without measurements."""
        measured = self._kinds.get(kind)
        return measured.fit.model if measured is not None else self._seed

    def worker_model(self, key: WorkerKey, kind: WorkerKind) -> LatencyModel:
        """The model of one worker: its kind's, slower or faster if the worker clearly is."""
        model, reporter = self.model(kind), self._reporters.get(key)
        return model if reporter is None else reporter.speed.applied(model)

    def is_measured(self, kind: WorkerKind) -> bool:
        """Whether the costs of both prompts and decodes are measured."""
        measured = self._kinds.get(kind)
        return measured is not None and measured.fit.knows_both

    def describe(self, kind: WorkerKind) -> KindLatency:
        """The model with its fit quality, for operators."""
        measured = self._kinds.get(kind)
        if measured is None:
            return KindLatency(self._seed, FitQuality(), 0)
        return KindLatency(measured.fit.model, measured.fit.quality, measured.num_cold)

    def observe(self, worker: Worker, steps: Sequence[cluster_pb2.StepSample]) -> None:
        """Adds the steps of one load report to the fit; samples evenly if there are too many."""
        if not steps:
            return
        reporter = self._reporters.get(worker.key)
        if reporter is None:
            reporter = self._reporters[worker.key] = _Reporter(WorkerKind.of(worker.hello))
        measured = self._of(reporter.kind)
        measured.workers.add(worker.key)
        share = max(1, _STEPS_PER_ROUND // len(measured.workers))
        stride = -(-len(steps) // share)
        # The first index changes with each report, in case two kinds of steps alternate.
        first = reporter.num_reports % stride
        reporter.num_reports += 1
        for step in steps[first::stride]:
            shape = shape_class(step)
            num_steps = reporter.num_steps.get(shape, 0)
            if num_steps < _COLD_STEPS:
                reporter.num_steps[shape] = num_steps + 1
                measured.num_cold += 1
            else:
                measured.fit.observe(step, reporter.speed.slowdown)
                reporter.speed.add(StepTerms.of(step))
        if reporter.num_reports % _REPORTS_PER_COMPARISON == 0:
            reporter.speed.measure(measured.fit.model)
        measured.num_since += 1
        if measured.num_since >= _REPORTS_PER_COMPARISON * len(measured.workers):
            measured.num_since = 0
            compare(self._reporters[key].speed for key in measured.workers)

    def forget(self, key: WorkerKey) -> None:
        """Removes a worker that has left; its measurements remain in the fit."""
        reporter = self._reporters.pop(key, None)
        if reporter is not None and (measured := self._kinds.get(reporter.kind)) is not None:
            measured.workers.discard(key)

    def _of(self, kind: WorkerKind) -> _Measured:
        measured = self._kinds.get(kind)
        if measured is None:
            measured = self._kinds[kind] = _Measured(LatencyFit(self._seed))
            if len(self._kinds) > self._max_kinds:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        return measured
