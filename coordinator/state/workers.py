"""The attached workers, and the registry that finds and fences them."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.requests import Request, RequestKey, WorkerKey
from baton.coordinator.state.slow_steps import MAX_SLOW_STEPS, SlowStep
from baton.coordinator.state.worker_ledger import WorkerLedger
from baton.runtime.errors import (
    Aborted,
    AlreadyExists,
    BatonError,
    FailedPrecondition,
    InvalidArgument,
)
from baton.runtime.kv import kv_fingerprint
from baton.runtime.names import FIRST_REVISION, REVISION_NAMES, is_revision
from baton.runtime.prompts.sampling import needs_exact_state
from baton.v1 import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from baton.coordinator.state.fleets import Fleet, Fleets

# Number of fenced incarnations that are remembered. A coordinator loses far fewer workers.
_MAX_FENCED = 4096
# Number of differing adapters that an error names.
_MAX_SHOWN_ADAPTERS = 3
# Fields of ModelDescription that must be equal in a fleet. The tokenizer's path may differ between
# hosts.
_MODEL_FIELDS = ("name", "revision", "max_model_len", "vocab_size")


def without_running(hello: cluster_pb2.Hello) -> cluster_pb2.Hello:
    """Returns a copy without the running requests, whose outputs are megabytes.

    A cleared field would keep its memory as long as the message.
    """
    fields = {one.name: value for one, value in hello.ListFields() if one.name != "running"}
    return cluster_pb2.Hello(**fields)


@dataclass(slots=True)
class Flipping:
    """A change of a worker's role that is under way.

    Attributes:
        into: The worker's next role.
        since: When the change was decided, by the core's clock.
        until: Other workers take over the requests that the worker has not finished by then.
        by_hand: Whether an operator asked for the change.
        told: Whether the worker was told to change; it has no requests of its old role then.
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
        hello: The worker's latest Hello, without its running requests.
        fleet: The fleet that it belongs to, named by its revision.
        key: Worker id and incarnation. Requests and the shell hold this very object.
        connected: Whether its stream is open.
        heard_at: When its last message came, by the core's clock.
        longest_silence_s: Longest recent time between two messages.
        load: Its latest load report.
        ledger: The requests that the coordinator has sent to the worker.
        unresponsive: Why other workers took over its requests and it gets no new ones, in words
            that continue "worker w1 ..."; empty: the worker responds.
        num_steps: Number of engine steps, by its latest report.
        progressed_at: When `num_steps` last changed, or the worker was last idle.
        stuck: Whether the engine has made no step for too long.
        slow_steps: The latest slow steps of its engine.
        released: Whether it drains and was told that no more requests will come.
        leaves_by: When a draining worker is removed at the latest; infinite if it does not drain.
        flip: The change of its role that is under way; None: no change.
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
        """Whether new requests may be sent to the worker."""
        return (
            self.connected
            and self.state == cluster_pb2.WORKER_STATE_SERVING
            and not self.unresponsive
            and self.flip is None
        )

    @property
    def next_role(self) -> common_pb2.Role.ValueType:
        """The role that it changes to, or else has."""
        return self.flip.into if self.flip is not None else self.role

    def trouble(self, now: float, silent_s: float) -> str:
        """Returns why the worker makes no progress now, for operators; empty if it does.

        A silent worker is not marked as unresponsive if no other worker can take its requests.
        This text describes it too.

        Args:
            now: Time by the core's clock.
            silent_s: How long a worker may be silent.
        """
        if self.unresponsive or now - self.heard_at <= silent_s:
            return self.unresponsive
        return "is silent; its requests wait for it, since no other worker can have them"

    def computing(self) -> list[RequestKey]:
        """Returns the unanswered requests that its engine may have been computing in one step."""
        return self.ledger.computing(self.hello.capacity.max_num_batched_tokens)

    def can_resume(self, request: Request) -> bool:
        """Returns whether the worker can continue an output that another worker began."""
        return not len(request.token_ids) or self.can_replay(request.submission.sampling)

    def can_replay(self, sampling: common_pb2.SamplingParams) -> bool:
        """Returns whether the worker can continue outputs with these sampling parameters."""
        return self.hello.capacity.supports_forced_tokens or not needs_exact_state(sampling)


@dataclass(slots=True)
class Presence:
    """Numbers of workers by condition: of one role, or of both.

    Attributes:
        num_attached: All attached workers.
        num_serving: Workers that new requests may be sent to.
        num_staying: Workers that neither drain nor change their role.
        num_coming: Workers that change to this role, or to either one.
        since: When the first worker attached that does not drain; infinite if there is none.
    """

    num_attached: int = 0
    num_serving: int = 0
    num_staying: int = 0
    num_coming: int = 0
    since: float = math.inf


class AttachedWorkers:
    """A view of the attached workers: all of them, or those of one fleet.

    A worker's role says in which pool it is counted. In an elastic cell, each worker can also do
    the work of the other role: `roles_doing` and `able` take this into account.

    Args:
        workers: Workers by key. Their owner changes the mapping and then calls `recount`.
        elastic: Whether any worker computes prompts and decodes.

    Attributes:
        get: Returns the worker of a key, or None if this incarnation is not attached. This is the
            mapping's own method, because it is called about 20 times per request.
    """

    get: Callable[[WorkerKey | None], Worker | None]

    def __init__(self, workers: Mapping[WorkerKey | None, Worker], *, elastic: bool) -> None:
        self._attached, self.get = workers, workers.get
        self._elastic = elastic
        # Counts by role, and under None of all workers. The whole is None if workers have changed
        # since they were counted.
        self._presences: Mapping[common_pb2.Role.ValueType | None, Presence] | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._attached.values()))

    def __len__(self) -> int:
        return len(self._attached)

    def serving(self, role: common_pb2.Role.ValueType) -> list[Worker]:
        """Returns the workers of a role that new requests may be sent to."""
        return [
            worker for worker in self._attached.values() if worker.role == role and worker.serving
        ]

    def presence(self, role: common_pb2.Role.ValueType) -> Presence:
        """Returns the numbers of workers of a role; they are counted again after each change.

        Only the core's thread may call this: another thread could cache outdated counts.
        """
        return self._counted(role)

    def able(self, role: common_pb2.Role.ValueType) -> Presence:
        """Returns the numbers of workers that can do the work of a role.

        These are all workers of an elastic cell, and else those of the role. Only the core's thread
        may call this, as for `presence`.
        """
        return self._counted(None if self._elastic else role)

    def roles_doing(self, role: common_pb2.Role.ValueType) -> tuple[common_pb2.Role.ValueType, ...]:
        """Returns the roles whose workers can do the work of a role."""
        return tuple(POOL_OF) if self._elastic else (role,)

    def recount(self) -> None:
        """Drops the cached counts after a change of the workers."""
        self._presences = None

    def check_integrity(self) -> None:
        """Raises AssertionError when workers have changed without a `recount`."""
        assert self._presences is None or self._presences == _presences(self)

    def _counted(self, role: common_pb2.Role.ValueType | None) -> Presence:
        """Returns the numbers of workers of a role; None: of all roles."""
        if self._presences is None:
            self._presences = _presences(self)
        return self._presences.get(role, _NO_PRESENCE)

    @property
    def first(self) -> Worker | None:
        """The worker that was added first; None without workers."""
        return next(iter(self._attached.values()), None)

    @property
    def model(self) -> common_pb2.ModelDescription | None:
        """The model that the workers serve; None without workers."""
        worker = self.first
        return worker.hello.model if worker is not None else None

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its output may have together; 0 without workers."""
        model = self.model
        return model.max_model_len if model is not None else 0


_NO_PRESENCE = Presence()


def _presences(workers: Iterable[Worker]) -> Mapping[common_pb2.Role.ValueType | None, Presence]:
    found: defaultdict[common_pb2.Role.ValueType | None, Presence] = defaultdict(Presence)
    for worker in workers:
        for there in (found[worker.role], found[None]):
            there.num_attached += 1
            there.num_serving += worker.serving
            if worker.state != cluster_pb2.WORKER_STATE_DRAINING:
                there.num_staying += worker.flip is None
                there.since = min(there.since, worker.attached_at)
        if worker.flip is not None:
            for there in (found[worker.flip.into], found[None]):
                there.num_coming += 1
    return found


class WorkerRegistry(AttachedWorkers):
    """All attached workers, with at most one incarnation per worker id.

    Args:
        model_name: Name of the model that this coordinator serves; workers with another model are
            refused.
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
        super().__init__(self._by_key, elastic=fleets.elastic)
        # Reason of the end by incarnation, oldest first.
        self._fenced: dict[WorkerKey, str] = {}

    def by_id(self, worker_id: str) -> Worker | None:
        """Returns the attached worker of an id, of any incarnation, or None."""
        return self._workers.get(worker_id)

    def fleet_of(self, hello: cluster_pb2.Hello) -> Fleet:
        """Returns the fleet of a worker that says this hello; creates it if it does not exist."""
        return self.fleets.named(hello.revision or FIRST_REVISION)

    def changed(self, worker: Worker) -> None:
        """Notes that an attached worker's role, state or readiness has changed."""
        self.num_changes += 1
        self.recount()
        worker.fleet.workers.recount()

    @property
    def model(self) -> common_pb2.ModelDescription | None:
        """The model of the stable fleet; None while that fleet has no worker.

        Another fleet's context length and adapters must not limit the stable fleet's requests.
        """
        return self.fleets.stable.workers.model

    def refusal(self, hello: cluster_pb2.Hello) -> BatonError | None:
        """Returns why a worker with this hello may not attach, or None if it may."""
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
        """Returns why a worker cannot serve beside the attached workers, or None if it can."""
        others = [one for one in self._workers.values() if one.id != hello.worker_id]
        if not others:
            return None
        # The attached workers of one fleet are alike, but some may have no speculative draft.
        fleet = [one for one in others if one.fleet.name == revision]
        drafting = [one for one in fleet if one.hello.fingerprint.draft_revision]
        other = next(iter(drafting or fleet), None)
        if other is None:
            # Prompts are tokenized once, before their fleet is chosen.
            other = others[0]
            differing = _differences(other.hello.model, hello.model, ("vocab_size",))
        else:
            differing = _differences(other.hello.model, hello.model, _MODEL_FIELDS)
            differing += _differing_adapters(other.hello.model, hello.model)
            differing += [
                f"fingerprint.{one}"
                for one in kv_fingerprint.differences(other.hello.fingerprint, hello.fingerprint)
            ]
        if not differing:
            return None
        why = f"worker {hello.worker_id} does not fit worker {other.id}: " + "; ".join(differing)
        if fleet:
            why += (
                f"; both have worker.revision {revision!r}: workers with another model or other "
                "engine_args need another one"
            )
        return FailedPrecondition(why)

    def add(self, worker: Worker) -> None:
        """Adds a worker whose hello was not refused; no worker of its id may be attached."""
        assert worker.id not in self._workers
        self._workers[worker.id] = self._by_key[worker.key] = worker
        worker.fleet.add(worker)
        self.changed(worker)

    def remove(self, worker: Worker, reason: str, *, may_return: bool = False) -> None:
        """Removes a worker.

        Args:
            worker: An attached worker.
            reason: Reason in words that continue "this incarnation ...".
            may_return: Whether its incarnation may attach again; otherwise it is fenced.
        """
        del self._workers[worker.id], self._by_key[worker.key]
        worker.fleet.remove(worker)
        self.changed(worker)
        if may_return:
            return
        self._fenced[worker.key] = reason
        while len(self._fenced) > _MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]


def _differing_adapters(
    ours: common_pb2.ModelDescription, theirs: common_pb2.ModelDescription
) -> list[str]:
    """Returns in words which adapters differ; other weights would give another KV cache."""
    here, there = ({one.name: one.revision for one in model.adapters} for model in (ours, theirs))
    names = [name for name in here | there if here.get(name) != there.get(name)]
    if not names:
        return []
    told = ", ".join(
        f"{name} ({there.get(name, 'missing')}, here {here.get(name, 'missing')})"
        for name in names[:_MAX_SHOWN_ADAPTERS]
    )
    if (num_more := len(names) - _MAX_SHOWN_ADAPTERS) > 0:
        told += f" and {num_more} more"
    return [f"model.adapters differ: {told}"]


def _differences(
    ours: common_pb2.ModelDescription, theirs: common_pb2.ModelDescription, fields: Iterable[str]
) -> list[str]:
    return [
        f"model.{one} is {getattr(theirs, one)!r}, here {getattr(ours, one)!r}"
        for one in fields
        if getattr(ours, one) != getattr(theirs, one)
    ]
