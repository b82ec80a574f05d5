"""The workers of the cluster, and what the coordinator has running on each."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.coordinator.state.requests import Request, RequestKey, WorkerKey
from baton.coordinator.state.slow_steps import MAX_SLOW_STEPS, SlowStep
from baton.coordinator.state.worker_ledger import WorkerLedger
from baton.runtime import kv_fingerprint
from baton.runtime.errors import (
    Aborted,
    AlreadyExists,
    BatonError,
    FailedPrecondition,
    InvalidArgument,
)
from baton.runtime.names import FIRST_REVISION, REVISION_NAMES, is_revision
from baton.runtime.sampling import needs_exact_state
from baton.v1 import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from baton.coordinator.state.fleets import Fleet, Fleets

# Incarnations that must never come back; far more than workers die in a coordinator's life.
_MAX_FENCED = 4096
# Of ModelDescription: what must be equal. The tokenizer's path may differ between hosts.
_MODEL_FIELDS = ("name", "revision", "max_model_len", "vocab_size")


@dataclass(slots=True)
class Flipping:
    """A worker that gives up its role for another.

    Attributes:
        into: its next role.
        since: when it was to change, by the core's clock.
        until: what it has not finished by then is done elsewhere.
        by_hand: whether an operator wants it.
        told: whether it was told to change, having nothing of its old role any more.
    """

    into: common_pb2.Role.ValueType
    since: float
    until: float
    by_hand: bool
    told: bool = False


@dataclass(slots=True)
class Worker:
    """One attached worker process.

    Attributes:
        hello: as it introduced itself last.
        fleet: The fleet that it belongs to, named by its revision.
        key: one object, which requests and the shell refer to.
        connected: whether its stream is up.
        heard_at: when it last gave a sign of life, by the core's clock.
        longest_silence_s: the longest time between two signs of life lately.
        load: its last report.
        ledger: the requests that the coordinator has sent there.
        unresponsive: why its requests went elsewhere and it gets no new ones for now, in words that
            continue "worker w1 ..."; empty when all is well.
        num_steps: steps of its engine, by its last report.
        progressed_at: when `num_steps` last changed, or it had nothing to do.
        stuck: whether its engine made no step for too long, and none since.
        slow_steps: the latest slow steps of its engine.
        released: whether it drains, and was told that nothing more will come.
        leaves_by: when it is out, whatever it still does; infinite unless it was told to drain.
        flip: its change to the other role, while that goes on.
    """

    hello: cluster_pb2.Hello
    fleet: Fleet
    role: common_pb2.Role.ValueType
    state: cluster_pb2.WorkerState.ValueType
    attached_at: float
    heard_at: float
    key: WorkerKey = field(init=False)
    connected: bool = True
    longest_silence_s: float = 0.0
    load: cluster_pb2.LoadReport | None = None
    ledger: WorkerLedger = field(default_factory=WorkerLedger)
    unresponsive: str = ""
    num_steps: int = 0
    progressed_at: float = 0.0
    stuck: bool = False
    released: bool = False
    slow_steps: deque[SlowStep] = field(default_factory=lambda: deque(maxlen=MAX_SLOW_STEPS))
    leaves_by: float = math.inf
    flip: Flipping | None = None

    def __post_init__(self) -> None:
        self.key = self.hello.worker_id, self.hello.incarnation

    @property
    def id(self) -> str:
        return self.key[0]

    @property
    def serving(self) -> bool:
        """Whether new work may be sent to it."""
        return (
            self.connected
            and self.state == cluster_pb2.WORKER_STATE_SERVING
            and not self.unresponsive
            and self.flip is None
        )

    def trouble(self, now: float, silent_s: float) -> str:
        """Why it does nothing for anybody now, for operators; in words as `unresponsive`.

        A silent worker without which its role would be empty is not called unresponsive: its
        requests could go nowhere else, and wait for it. It is described here all the same.

        Args:
            now: by the core's clock.
            silent_s: how long a worker may be silent.
        """
        if self.unresponsive or now - self.heard_at <= silent_s:
            return self.unresponsive
        return "is silent; its requests wait for it, since no other worker can have them"

    def computing(self) -> list[RequestKey]:
        """Unanswered requests that its engine may have been computing: as many as fit a step."""
        return self.ledger.computing(self.hello.capacity.max_num_batched_tokens)

    def can_resume(self, request: Request) -> bool:
        """Whether it could go on with what another worker has put out."""
        return not len(request.token_ids) or self.can_replay(request.submission.sampling)

    def can_replay(self, sampling: common_pb2.SamplingParams) -> bool:
        """Whether it could go on with outputs of others that are sampled so."""
        return self.hello.capacity.supports_forced_tokens or not needs_exact_state(sampling)


@dataclass(slots=True)
class Presence:
    """How many workers of one role there are, and in which condition.

    Attributes:
        num_attached: all of them, whatever they do.
        num_serving: those that new work may be sent to.
        num_staying: those that neither drain nor change their role.
        num_coming: workers of the other role, on their way into this one.
        since: when the first attached of those that do not drain; infinite without any.
    """

    num_attached: int = 0
    num_serving: int = 0
    num_staying: int = 0
    num_coming: int = 0
    since: float = math.inf


class AttachedWorkers:
    """The workers that are attached now: all of them, or those of one fleet.

    Args:
        workers: by key. The registry that owns them changes them, and calls `recount` then.

    Attributes:
        get: returns the worker of a key; None when this incarnation of it is not among them. It is
            the dictionary's own method, being called some twenty times per request.
    """

    get: Callable[[WorkerKey | None], Worker | None]

    def __init__(self, workers: Mapping[WorkerKey | None, Worker]) -> None:
        self._attached, self.get = workers, workers.get
        # By role; None: not counted since the last change.
        self._presences: Mapping[common_pb2.Role.ValueType, Presence] | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._attached.values()))

    def __len__(self) -> int:
        return len(self._attached)

    def serving(self, role: common_pb2.Role.ValueType) -> list[Worker]:
        """The workers of a role that new work may be sent to."""
        return [
            worker for worker in self._attached.values() if worker.role == role and worker.serving
        ]

    def presence(self, role: common_pb2.Role.ValueType) -> Presence:
        """How many workers of a role there are: counted once, and again after a change.

        For the core's thread alone: another might keep counts of what has changed meanwhile.
        """
        if self._presences is None:
            self._presences = _presences(self)
        return self._presences.get(role, _NO_PRESENCE)

    def recount(self) -> None:
        """Forgets the counts: workers have come or gone, or do something else."""
        self._presences = None

    def check_integrity(self) -> None:
        """Raises AssertionError when workers have changed without a `recount`."""
        assert self._presences is None or self._presences == _presences(self)

    @property
    def first(self) -> Worker | None:
        """Any worker; None when there is none."""
        for worker in self._attached.values():
            return worker
        return None

    @property
    def model(self) -> common_pb2.ModelDescription | None:
        """The model they serve; None when there is no worker."""
        for worker in self._attached.values():
            return worker.hello.model
        return None

    @property
    def max_model_len(self) -> int:
        """How many tokens prompt and output may have together; 0 when there is no worker."""
        model = self.model
        return model.max_model_len if model is not None else 0


_NO_PRESENCE = Presence()


def _presences(workers: Iterable[Worker]) -> Mapping[common_pb2.Role.ValueType, Presence]:
    found: defaultdict[common_pb2.Role.ValueType, Presence] = defaultdict(Presence)
    for worker in workers:
        there = found[worker.role]
        there.num_attached += 1
        there.num_serving += worker.serving
        if worker.state != cluster_pb2.WORKER_STATE_DRAINING:
            there.num_staying += worker.flip is None
            there.since = min(there.since, worker.attached_at)
        if worker.flip is not None:
            found[worker.flip.into].num_coming += 1
    return found


class WorkerRegistry(AttachedWorkers):
    """All attached workers, with at most one incarnation per worker id.

    Args:
        model_name: what this coordinator serves; other workers are refused.
        fleets: The fleets that workers are added to.

    Attributes:
        fleets: As above.
        num_changes: How often a worker came, left or changed the work that it takes.
    """

    def __init__(self, model_name: str, fleets: Fleets) -> None:
        self._model_name, self.fleets = model_name, fleets
        self.num_changes = 0
        self._workers: dict[str, Worker] = {}
        self._by_key: dict[WorkerKey | None, Worker] = {}
        super().__init__(self._by_key)
        # Insertion order is age; the value says what ended the incarnation.
        self._fenced: dict[WorkerKey, str] = {}

    def by_id(self, worker_id: str) -> Worker | None:
        """The attached worker of an id, whichever incarnation it is."""
        return self._workers.get(worker_id)

    def fleet_of(self, hello: cluster_pb2.Hello) -> Fleet:
        """Returns the fleet of a worker that says this hello; creates it if it does not exist."""
        return self.fleets.named(hello.revision or FIRST_REVISION)

    def changed(self, worker: Worker) -> None:
        """An attached worker's role, state or readiness has changed."""
        self.num_changes += 1
        self.recount()
        worker.fleet.workers.recount()

    @property
    def model(self) -> common_pb2.ModelDescription | None:
        """The model of the stable fleet, or of any worker if that fleet has none; else None."""
        return self.fleets.stable.workers.model or super().model

    def refusal(self, hello: cluster_pb2.Hello) -> BatonError | None:
        """Why a worker that says this hello may not attach; None when it may."""
        key = (hello.worker_id, hello.incarnation)
        current = self._workers.get(hello.worker_id)
        if key in self._fenced:
            reason = self._fenced[key]
            if current is not None:
                return AlreadyExists(
                    f"worker {hello.worker_id}: a newer incarnation "
                    f"{current.hello.incarnation:016x} is attached; this one {reason}"
                )
            return Aborted(f"worker {hello.worker_id} is fenced: this incarnation {reason}")
        if hello.model.name != self._model_name:
            return FailedPrecondition(
                f"worker {hello.worker_id}: model.name is {hello.model.name!r}, "
                f"here {self._model_name!r}"
            )
        revision = hello.revision or FIRST_REVISION
        if not is_revision(revision):
            return InvalidArgument("hello.revision", revision, REVISION_NAMES)
        if current is not None and current.key == key and current.fleet.name != revision:
            return InvalidArgument("hello.revision", revision, f"was {current.fleet.name!r} before")
        return self._misfit(hello, revision)

    def _misfit(self, hello: cluster_pb2.Hello, revision: str) -> BatonError | None:
        """Why a worker of this fleet cannot serve beside the attached ones; None when it can."""
        others = [one for one in self._workers.values() if one.id != hello.worker_id]
        if not others:
            return None
        # The attached workers of one fleet are alike.
        other = next((one for one in others if one.fleet.name == revision), None)
        if other is None:
            # Prompts are tokenized once, before their fleet is chosen.
            other = others[0]
            differing = _differences(other.hello.model, hello.model, ("vocab_size",))
        else:
            differing = _differences(other.hello.model, hello.model, _MODEL_FIELDS)
            theirs, ours = _adapters(hello.model), _adapters(other.hello.model)
            if theirs != ours:
                differing.append(f"model.adapters are {theirs}, here {ours}")
            differing += [
                f"fingerprint.{one}"
                for one in kv_fingerprint.differences(other.hello.fingerprint, hello.fingerprint)
            ]
        if not differing:
            return None
        return FailedPrecondition(
            f"worker {hello.worker_id} does not fit worker {other.id}: " + "; ".join(differing)
        )

    def add(self, worker: Worker) -> None:
        """Takes in a worker whose hello was not refused; none of its id is attached."""
        assert worker.id not in self._workers
        self._workers[worker.id] = self._by_key[worker.key] = worker
        worker.fleet.add(worker)
        self.changed(worker)

    def remove(self, worker: Worker, reason: str) -> None:
        """Takes out a worker that must not come back.

        Args:
            worker: attached.
            reason: in words, continuing "this incarnation ...".
        """
        del self._workers[worker.id], self._by_key[worker.key]
        worker.fleet.remove(worker)
        self.changed(worker)
        self._fenced[worker.key] = reason
        while len(self._fenced) > _MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]


def _adapters(model: common_pb2.ModelDescription) -> str:
    """Adapters with their revisions: other weights under the same name make another KV cache."""
    return ", ".join(f"{one.name} ({one.revision})" for one in model.adapters) or "none"


def _differences(
    ours: common_pb2.ModelDescription, theirs: common_pb2.ModelDescription, fields: Iterable[str]
) -> list[str]:
    return [
        f"model.{one} is {getattr(theirs, one)!r}, here {getattr(ours, one)!r}"
        for one in fields
        if getattr(ours, one) != getattr(theirs, one)
    ]
