"""What steps cost on each kind of worker, as far as workers have reported it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.workers import Worker
from baton.runtime.latency import LatencyModel
from baton.runtime.latency_fit import FitQuality, LatencyFit, shape_class
from baton.v1 import cluster_pb2

# Kinds that are remembered; workers are upgraded a few times in a coordinator's life.
_MAX_KINDS = 64
# Steps that a kind's workers may contribute per round of reports: some 15 microseconds each. One
# worker's are enough to follow it within seconds, and a thousand workers say no more than that.
_STEPS_PER_ROUND = 64
# Of each shape class, on each worker. The first step of a size compiles kernels, captures graphs,
# grows pools and touches memory; a second and third may still tune. What comes later is steady. It
# counts steps, not seconds, since an idle worker does not become warm.
_COLD_STEPS = 3


class WorkerKind(NamedTuple):
    """Workers that cost the same; whichever role they have."""

    engine: str
    engine_version: str
    device: str
    model: str
    revision: str
    tp_size: int
    # Other engine arguments may cost other times.
    rollout: str

    @classmethod
    def of(cls, hello: cluster_pb2.Hello) -> WorkerKind:
        return cls(
            hello.engine,
            hello.engine_version,
            hello.device,
            hello.model.name,
            hello.model.revision,
            hello.fingerprint.tp_size,
            hello.revision,
        )


@dataclass(frozen=True, slots=True)
class KindLatency:
    """One kind's model and how good it is.

    Attributes:
        num_cold: samples left out because their worker was new to steps of that size.
    """

    model: LatencyModel
    quality: FitQuality
    num_cold: int


@dataclass(slots=True)
class _Measured:
    fit: LatencyFit
    workers: set[WorkerKey] = field(default_factory=set)
    num_cold: int = 0


@dataclass(slots=True)
class _Reporter:
    """A worker that has reported: its steps by shape class, up to _COLD_STEPS."""

    kind: WorkerKind
    num_steps: dict[int, int] = field(default_factory=dict)
    num_reports: int = 0


class LatencyRegistry:
    """One fit per kind; the kinds heard of last are kept.

    Args:
        seed: the model of a kind that nobody has measured.
    """

    def __init__(self, seed: LatencyModel, max_kinds: int = _MAX_KINDS) -> None:
        self._seed, self._max_kinds = seed, max_kinds
        self._kinds: OrderedDict[WorkerKind, _Measured] = OrderedDict()
        self._reporters: dict[WorkerKey, _Reporter] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def model(self, kind: WorkerKind) -> LatencyModel:
        """As of the latest reports; the seed of a kind that nobody has measured."""
        measured = self._kinds.get(kind)
        return measured.fit.model if measured is not None else self._seed

    def describe(self, kind: WorkerKind) -> KindLatency:
        """The model with its quality, for operators."""
        measured = self._kinds.get(kind)
        if measured is None:
            return KindLatency(self._seed, FitQuality(0, 0, None, None), 0)
        return KindLatency(measured.fit.model, measured.fit.quality, measured.num_cold)

    def observe(self, worker: Worker, steps: Sequence[cluster_pb2.StepSample]) -> None:
        """Takes the steps of one load report; of many, evenly spaced ones."""
        if not steps:
            return
        reporter = self._reporters.get(worker.key)
        if reporter is None:
            reporter = self._reporters[worker.key] = _Reporter(WorkerKind.of(worker.hello))
        measured = self._of(reporter.kind)
        measured.workers.add(worker.key)
        share = max(1, _STEPS_PER_ROUND // len(measured.workers))
        stride = -(-len(steps) // share)
        # From another one each time, in case the steps alternate.
        first = reporter.num_reports % stride
        reporter.num_reports += 1
        for step in steps[first::stride]:
            name = shape_class(step)
            num_steps = reporter.num_steps.get(name, 0)
            if num_steps < _COLD_STEPS:
                reporter.num_steps[name] = num_steps + 1
                measured.num_cold += 1
            else:
                measured.fit.observe(step)

    def forget(self, key: WorkerKey) -> None:
        """A worker has left; what was learned from it stays."""
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
