"""Another revision on a share of the traffic, until it is promoted or given up.

Part of the core: no I/O, no clock. Only one rollout runs at a time. A request whose output has
begun ends on the revision that began it, or fails: weights that differ would go on with an answer
that is nobody's, and say that all is well. One of which nothing has been sent goes to the stable
revision when its own has no workers.

Attached workers keep a record of it, and a coordinator that follows this one takes it from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.coordinator import events as ev
from baton.coordinator.book import RequestBook
from baton.coordinator.comparison import Side
from baton.coordinator.load_index import POOL_OF, ROLE_OF, Pool
from baton.coordinator.placers import Placers
from baton.coordinator.request import WorkerKey
from baton.coordinator.revision import Revision, Traffic
from baton.coordinator.scaling import Scaler
from baton.coordinator.timers import Timers
from baton.coordinator.workers import Worker, WorkerRegistry
from baton.runtime import errors
from baton.runtime.names import REVISION_NAMES, is_revision
from baton.v1 import cluster_pb2, common_pb2

ROLLOUT: WorkerKey = ("", 2)
"""The timer at which a rollout is looked at; no worker has this key."""

_INTERVAL_S = 1.0
_DRAINING = cluster_pb2.WORKER_STATE_DRAINING
_WHY_NOT_MIXED = "another revision does not go on with an output that has begun"


@dataclass(slots=True)
class Rollout:
    """One that runs, or the last one.

    Attributes:
        sizes: workers to start, by pool; nothing where nothing starts workers.
        sides: of stable and canary, once the canary has served; they are compared since `since`.
        drains_s: None: it is not being promoted; else how long the old revision's requests may
            take then.
    """

    revision: Revision
    stable: str
    sizes: dict[Pool, int]
    sides: dict[str, Side] = field(default_factory=dict)
    since: float = 0.0
    drains_s: float | None = None


@dataclass(slots=True)
class _Retiring:
    """Attributes: until: what has not ended then fails."""

    until: float
    why: str


class Rollouts:
    """Owns the rollout that runs, and the revisions that leave.

    Args:
        traffic: says which revision a request gets; changed only here.
        drain: tells a worker to leave: itself, how long it may take in seconds, why, and the time.
        emit: takes effects.
        max_request_s: longest life of a request.

    Attributes:
        rollout: the one that runs; None: none does.
        last: the one before, or None.
        outcome: how that ended, in words.
    """

    def __init__(
        self,
        traffic: Traffic,
        book: RequestBook,
        workers: WorkerRegistry,
        placers: Placers,
        scaler: Scaler,
        timers: Timers[str | WorkerKey],
        drain: Callable[[Worker, float, str, float], None],
        emit: Callable[[ev.Effect], None],
        max_request_s: float,
    ) -> None:
        self.traffic, self._book, self._workers, self._placers = traffic, book, workers, placers
        self._scaler, self._timers, self._drain, self._emit = scaler, timers, drain, emit
        self._configured, self._version = traffic.stable, 0
        # Whether an operator has said something here: what workers remember is older.
        self._was_told = False
        self._max_request_s = max_request_s
        self.rollout: Rollout | None = None
        self.last: Rollout | None = None
        self.outcome = ""
        self._retiring: dict[str, _Retiring] = {}
        self._set_current()

    # ---- What others may ask.

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return self.rollout is not None or bool(self._retiring)

    @property
    def num_timers(self) -> int:
        return int(bool(self))

    @property
    def retiring(self) -> list[str]:
        """Revisions that finish what they have."""
        return list(self._retiring)

    def is_gone(self, revision: str) -> bool:
        """Whether no worker will go on with what this revision began."""
        traffic = self.traffic
        return (
            revision not in (traffic.stable, traffic.canary)
            and len(self._workers) > 0
            and not any(
                one.role == common_pb2.ROLE_DECODE and one.state != _DRAINING
                for one in self._workers.of(revision)
            )
        )

    def gone_error(self, revision: str) -> errors.Unavailable:
        return errors.Unavailable(
            f"revision {revision!r} began this output and has no workers any more; "
            f"{_WHY_NOT_MIXED}: submit the request anew",
            reason="REVISION_GONE",
        )

    def flip_error(self, worker: Worker) -> errors.BatonError | None:
        """Why a worker may not change its role; None when rollouts have nothing against it."""
        if worker.revision == self.traffic.stable:
            return None
        return errors.FailedPrecondition(
            f"worker {worker.id} is of revision {worker.revision!r}; only workers of the stable "
            f"one, {self.traffic.stable!r}, change their role"
        )

    def counts(self, revision: str) -> Counter[Pool]:
        """Workers that serve."""
        members = self._workers.of(revision)
        return Counter({pool: len(members.serving(role)) for pool, role in ROLE_OF.items()})

    def start_error(
        self, revision: Revision, share: float, sizes: Mapping[Pool, int]
    ) -> errors.BatonError | None:
        """Why this rollout cannot be started; None when it can.

        Args:
            revision: what its workers are to run.
            share: of new sessions.
            sizes: workers to start; a pool that is left out has those that are attached, or one.
        """
        name, traffic = revision.name, self.traffic
        if not is_revision(name):
            return errors.InvalidArgument("revision", name, REVISION_NAMES)
        if name == traffic.stable:
            allowed = "must differ from the stable revision's name: workers are told apart by it"
            return errors.InvalidArgument("revision", name, allowed)
        if self.rollout is not None:
            running = self.rollout.revision.name
            return errors.FailedPrecondition(
                f"revision is {name!r}; a rollout of {running!r} runs: promote or abort it first"
            )
        if name in self._retiring:
            return errors.FailedPrecondition(
                f"revision is {name!r}, whose workers are still finishing what they have: wait "
                "until they have left, or take another name"
            )
        return (
            _share_error(share) or self._workers_error(revision, sizes) or self._gpus_error(sizes)
        )

    def share_error(self, share: float) -> errors.BatonError | None:
        return self._none_runs() or _share_error(share)

    def promote_error(self) -> errors.BatonError | None:
        """Why the canary cannot be promoted; None when it can."""
        rollout = self.rollout
        if rollout is None:
            return self._none_runs()
        name, counts = rollout.revision.name, self.counts(rollout.revision.name)
        for pool in Pool:
            if not counts[pool]:
                problem = self._scaler.launches.problem(pool, name)
                return errors.FailedPrecondition(
                    f"revision {name!r} has no {pool.value} worker that serves"
                    + (f": {problem}" if problem else "")
                )
            wanted = self._promoted_size(pool)
            if not self._scaler.active and counts[pool] < wanted:
                return errors.FailedPrecondition(
                    f"revision {name!r} has {counts[pool]} {pool.value} workers that serve, "
                    f"revision {rollout.stable!r} {wanted}, and this coordinator starts none: "
                    f"start {wanted - counts[pool]} more with --revision {name}, or drain some of "
                    f"revision {rollout.stable!r}"
                )
        return self._gpus_error({pool: self._promoted_size(pool) for pool in Pool})

    def abort_error(self) -> errors.BatonError | None:
        return self._none_runs()

    # ---- What happens.

    def start(self, event: ev.RolloutAsked, now: float) -> None:
        """There is no `start_error`."""
        name, self._was_told = event.revision.name, True
        sizes = dict.fromkeys(Pool, 0)
        if self._scaler.active:
            sizes = {pool: self._to_start(pool, name, event.sizes) for pool in Pool}
        self.rollout = Rollout(event.revision, self.traffic.stable, sizes)
        self.traffic.canary, self.traffic.share = name, event.share
        self._set_current()
        self._changed()
        self.advance(now)

    def set_share(self, share: float) -> None:
        if self.rollout is not None:
            self.traffic.share, self._was_told = share, True
            self._changed()

    def promote(self, drain_s: float | None, now: float) -> None:
        """There is no `promote_error`."""
        if self.rollout is not None:
            self._was_told = True
            self.rollout.drains_s = drain_s or self._max_request_s
            self.advance(now)

    def abort(self, drain_s: float | None, why: str, now: float) -> None:
        """There is no `abort_error`."""
        rollout = self.rollout
        if rollout is not None:
            self._was_told = True
            self._end(rollout, f"revision {rollout.revision.name!r} was aborted: {why}")
            self._retire(rollout.revision.name, "its rollout was aborted", drain_s, now)
            self._changed()
            self.advance(now)

    def attached(self, worker: Worker, now: float, *, returns: bool) -> None:
        """A worker is there: it may know of a rollout that another coordinator was told of."""
        record = worker.hello.rollout
        if (
            returns
            and record.version > self._version
            and record.configured == self._configured
            # What it started itself ended with it.
            and not self._scaler.active
            and not self._was_told
        ):
            self._restore(record, now)
        elif self._version:
            self._emit(ev.SendCommand(worker.key, self._record()))

    def advance(self, now: float) -> None:
        """Looks at who serves, and does what follows. To be called when that has changed."""
        self._placers.changed = False
        rollout = self.rollout
        if rollout is not None:
            self._size(rollout, now)
            self._open(rollout, now)
            if rollout.drains_s is not None and self._has_sizes(rollout):
                self._switch(rollout, rollout.drains_s, now)
        for revision, retiring in tuple(self._retiring.items()):
            self._let_go(revision, retiring, now)
        self._move_waiting()
        # What waits for workers that are gone is to hear it.
        self._book.room_made = True
        if self:
            self._timers.set(ROLLOUT, now + _INTERVAL_S)
        else:
            self._timers.cancel(ROLLOUT)
            self._placers.keep_only(frozenset({self.traffic.stable}))

    # ---- Inside.

    def _record(self) -> cluster_pb2.RolloutRecord:
        traffic = self.traffic
        return cluster_pb2.RolloutRecord(
            version=self._version,
            configured=self._configured,
            stable=traffic.stable,
            canary=traffic.canary,
            share=traffic.share,
            retiring=self._retiring,
        )

    def _changed(self) -> None:
        """Workers are to remember what is so now."""
        self._version += 1
        record = self._record()
        for worker in self._workers:
            self._emit(ev.SendCommand(worker.key, record))

    def _restore(self, record: cluster_pb2.RolloutRecord, now: float) -> None:
        """Goes on where the coordinator before was."""
        self._version, self.rollout = record.version, None
        self._retiring.clear()
        self._book.stats.sides = {}
        self.traffic.stable = self._workers.stable = record.stable
        self.traffic.canary, self.traffic.open = "", False
        if record.canary:
            canary = Revision(record.canary)
            self.rollout = Rollout(canary, record.stable, dict.fromkeys(Pool, 0))
            self.traffic.canary, self.traffic.share = record.canary, record.share
        for revision in record.retiring:
            self._retire(revision, "another has taken its place", None, now)
        self._set_current()
        self._placers.changed = True
        if not self:
            self._timers.cancel(ROLLOUT)

    def _none_runs(self) -> errors.BatonError | None:
        return errors.FailedPrecondition("no rollout runs") if self.rollout is None else None

    def _to_start(self, pool: Pool, name: str, sizes: Mapping[Pool, int]) -> int:
        attached = any(POOL_OF.get(one.role) is pool for one in self._workers.of(name))
        return sizes.get(pool, 0 if attached else 1)

    def _workers_error(
        self, revision: Revision, sizes: Mapping[Pool, int]
    ) -> errors.BatonError | None:
        name = revision.name
        attached = {POOL_OF.get(one.role) for one in self._workers.of(name)}
        if not self._scaler.active:
            lacking = [pool.value for pool in Pool if pool not in attached]
            if revision.model or revision.engine_args or any(sizes.values()):
                return errors.FailedPrecondition(
                    "this coordinator starts no workers, so model, engine_args, prefill and decode "
                    f"must be left out: start them with `baton worker --revision {name}`"
                )
            if lacking:
                return errors.FailedPrecondition(
                    f"no {' and no '.join(lacking)} worker of revision {name!r} is attached, and "
                    "this coordinator starts none: start them with "
                    f"`baton worker --revision {name}`"
                )
            return None
        for pool in Pool:
            if pool not in attached and not self._to_start(pool, name, sizes):
                allowed = f"at least 1: no {pool.value} worker of revision {name!r} is attached"
                return errors.InvalidArgument(pool.value, 0, allowed)
        return None

    def _gpus_error(self, sizes: Mapping[Pool, int]) -> errors.BatonError | None:
        """Why there is no room for so many of a canary beside the others."""
        if not self._scaler.active:
            return None
        wanted = {pool: sizes.get(pool, 1) for pool in Pool}
        most, needed = self._scaler.max_gpus, self._scaler.gpus(wanted)
        used = self._scaler.gpus({pool: self._scaler.desired(pool) for pool in Pool})
        if most is None or needed + used <= most:
            return None
        return errors.FailedPrecondition(
            f"scaling.max_gpus is {most}; {used} are the stable revision's, and the canary would "
            f"need {needed}: both run side by side for a while"
        )

    def _set_current(self) -> None:
        current = frozenset(filter(None, (self.traffic.stable, self.traffic.canary)))
        self._book.lanes.set_current(current)

    def _size(self, rollout: Rollout, now: float) -> None:
        """Starts what the canary lacks; what of it does not come up is given up."""
        if not self._scaler.active:
            return
        name, launches = rollout.revision.name, self._scaler.launches
        launches.give_up_stuck(name, now - self._scaler.start_timeout_s)
        for pool, role in ROLE_OF.items():
            if rollout.drains_s is not None:
                rollout.sizes[pool] = max(rollout.sizes[pool], self._promoted_size(pool))
            there = sum(
                one.role == role and one.state != _DRAINING for one in self._workers.of(name)
            )
            lacking = rollout.sizes[pool] - there - launches.num_starting(pool, name)
            launches.start(pool, lacking, now, rollout.revision)
            launches.settle(pool, now, name)
        self._scaler.reserve(self._scaler.gpus(rollout.sizes))

    def _open(self, rollout: Rollout, now: float) -> None:
        """New requests go to the canary while it serves in both pools."""
        traffic, name = self.traffic, rollout.revision.name
        counts, model = self.counts(name), self._workers.of(name).model
        traffic.open = all(counts[pool] for pool in Pool)
        traffic.max_model_len = model.max_model_len if model is not None else 0
        if traffic.open and not rollout.sides:
            rollout.sides, rollout.since = {rollout.stable: Side(), name: Side()}, now
            self._book.stats.sides = rollout.sides

    def _promoted_size(self, pool: Pool) -> int:
        """How many workers a pool is to have."""
        if self._scaler.active:
            return max(1, self._scaler.desired(pool))
        return self.counts(self.traffic.stable)[pool]

    def _has_sizes(self, rollout: Rollout) -> bool:
        counts = self.counts(rollout.revision.name)
        return all(counts[pool] >= max(1, self._promoted_size(pool)) for pool in Pool)

    def _switch(self, rollout: Rollout, drain_s: float, now: float) -> None:
        """The canary is the stable revision from now on."""
        new, old = rollout.revision, self.traffic.stable
        self._end(rollout, f"revision {new.name!r} was promoted, after {old!r}")
        self.traffic.stable = self._workers.stable = new.name
        self._scaler.promoted(new, now)
        self._set_current()
        self._retire(old, f"revision {new.name} has taken its place", drain_s, now)
        self._changed()

    def _end(self, rollout: Rollout, outcome: str) -> None:
        self.rollout, self.last, self.outcome = None, rollout, outcome
        self.traffic.canary, self.traffic.open, self.traffic.share = "", False, 0.0
        self._book.stats.sides = {}
        self._scaler.reserve(0)
        self._set_current()

    def _retire(self, revision: str, why: str, drain_s: float | None, now: float) -> None:
        self._retiring[revision] = _Retiring(now + (drain_s or self._max_request_s), why)

    def _let_go(self, revision: str, retiring: _Retiring, now: float) -> None:
        """Those leave that are not needed, the last one of each pool when nothing is left to do.

        What waits for another attempt there (a worker died, batch made room) still has somewhere
        to go.
        """
        left = [one for one in self._book.all() if one.revision == revision]
        stays = [one for one in left if len(one.token_ids) or not one.waits]
        if stays and now >= retiring.until:
            for request in stays:
                self._book.fail(request, self.gone_error(revision), now)
            stays = []
        self._scaler.launches.give_up_stuck(revision, now)
        members = self._workers.of(revision)
        for role in ROLE_OF.values():
            there = [one for one in members if one.role == role and one.state != _DRAINING]
            there.sort(key=lambda one: (one.serving, len(one.assigned), one.id))
            if stays and there:
                there.pop()
            for worker in there:
                self._drain(worker, max(1.0, retiring.until - now), retiring.why, now)
        if not stays and not len(members):
            del self._retiring[revision]
            self._changed()

    def _move_waiting(self) -> None:
        """What waits on a revision that gets nothing new goes to the stable one."""
        for request in self._book.all():
            if (
                request.waits
                and not len(request.token_ids)
                and not self.traffic.gets_new(request.revision)
            ):
                self._book.change_revision(request, self.traffic.stable)


def _share_error(share: float) -> errors.BatonError | None:
    if 0 <= share <= 1:
        return None
    return errors.InvalidArgument("share", share, "0 to 1")
