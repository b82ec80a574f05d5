"""Another revision on a share of the traffic, until it is promoted or given up.

Part of the core: no I/O, no clock. Only one rollout runs at a time. A request stays on the revision
that began its output (retiring.py says why); one of which nothing has been sent goes to the stable
revision when its own has no workers.

Attached workers keep a record of it, and a coordinator that follows this one takes it from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.coordinator.rollouts import rollout_errors as why
from baton.coordinator.rollouts.comparison import Verdict, judge
from baton.coordinator.rollouts.requests import RolloutRequests
from baton.coordinator.rollouts.retiring import Retiring
from baton.coordinator.rollouts.traffic import Traffic, fits
from baton.coordinator.routing.placers import Placers
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import ROLE_OF, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.timers import CoreTimer, Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.coordinator.telemetry.revision_stats import Side
from baton.runtime import errors
from baton.v1 import cluster_pb2

_INTERVAL_S = 1.0
_DRAINING = cluster_pb2.WORKER_STATE_DRAINING


@dataclass(slots=True)
class Rollout:
    """One that runs, or the last one.

    Attributes:
        sizes: workers to start, by pool; nothing where nothing starts workers.
        abort_if_worse: than the stable one, by the verdict on both.
        sides: of stable and canary, once the canary has served; they are compared since `since`.
        drains_s: None: it is not being promoted; else how long the old revision's requests may
            take then.
    """

    revision: Revision
    stable: str
    sizes: dict[Pool, int]
    abort_if_worse: bool = False
    sides: dict[str, Side] = field(default_factory=dict)
    since: float = 0.0
    drains_s: float | None = None


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
        retiring: revisions that finish what they have.
    """

    def __init__(
        self,
        traffic: Traffic,
        lifecycle: RolloutRequests,
        workers: WorkerRegistry,
        placers: Placers,
        scaler: Scaler,
        timers: Timers,
        drain: Callable[[Worker, float, str, float], None],
        emit: Callable[[ev.Effect], None],
        max_request_s: float,
    ) -> None:
        self.traffic, self._lifecycle, self._workers, self._placers = (
            traffic,
            lifecycle,
            workers,
            placers,
        )
        self._scaler, self._timers, self._emit = scaler, timers, emit
        self.retiring = Retiring(lifecycle, workers, scaler.launches, drain)
        self._configured, self._version = traffic.stable, 0
        # Whether an operator has said something here: what workers remember is older.
        self._was_told = False
        self._max_request_s = max_request_s
        self.rollout: Rollout | None = None
        self.last: Rollout | None = None
        self.outcome = ""
        self._set_current()

    # ---- What others may ask.

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return self.rollout is not None or len(self.retiring) > 0

    @property
    def num_timers(self) -> int:
        return int(bool(self))

    def is_gone(self, revision: str) -> bool:
        """Whether no worker will go on with what this revision began."""
        traffic = self.traffic
        return (
            revision not in (traffic.stable, traffic.canary)
            and len(self._workers) > 0
            and not self.retiring.decodes(revision)
            and not self.retiring.awaits_decode(revision)
        )

    def flip_error(self, worker: Worker) -> errors.BatonError | None:
        """Why a worker may not change its role; None when rollouts have nothing against it."""
        if worker.revision == self.traffic.stable:
            return None
        return errors.FailedPrecondition(
            f"worker {worker.id} is of revision {worker.revision!r}; only workers of the stable "
            f"one, {self.traffic.stable!r}, change their role"
        )

    def start_error(
        self, revision: Revision, share: float, sizes: Mapping[Pool, int]
    ) -> errors.BatonError | None:
        """Why this rollout cannot be started; None when it can.

        Args:
            revision: what its workers are to run.
            share: of new sessions.
            sizes: workers to start; a pool that is left out has those that are attached, or one.
        """
        running, leaving = self.traffic.canary, frozenset(self.retiring)
        return why.start_error(
            self._workers, self._scaler, running, leaving, revision, sizes
        ) or why.share_error(share)

    def share_error(self, share: float) -> errors.BatonError | None:
        return self.abort_error() or why.share_error(share)

    def promote_error(self) -> errors.BatonError | None:
        """Why the canary cannot be promoted; None when it can."""
        if self.rollout is None:
            return why.none_runs()
        return why.promote_error(self._workers, self._scaler, self.rollout.revision)

    def abort_error(self) -> errors.BatonError | None:
        return None if self.rollout is not None else why.none_runs()

    # ---- What happens.

    def start(self, event: ev.RolloutAsked, now: float) -> None:
        """There is no `start_error`."""
        name, self._was_told = event.revision.name, True
        sizes = dict.fromkeys(Pool, 0)
        if self._scaler.active:
            sizes = {pool: why.to_start(self._workers, pool, name, event.sizes) for pool in Pool}
        self.rollout = Rollout(event.revision, self.traffic.stable, sizes, event.abort_if_worse)
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

    def abort(self, drain_s: float | None, reason: str, now: float) -> None:
        """There is no `abort_error`."""
        rollout = self.rollout
        if rollout is not None:
            self._was_told = True
            self._give_up(rollout, reason, drain_s, now)
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
        if returns and worker.revision not in self.retiring and self._replaced(worker):
            self._retire(worker.revision, "another revision has taken its place", None, now)
            self._changed()

    def starts_workers(self, now: float) -> None:
        """Those are of the configured revision, whatever a worker has remembered before this."""
        if self._version and not self._was_told:
            record = cluster_pb2.RolloutRecord(version=self._version + 1, stable=self._configured)
            self._restore(record, now)

    def advance(self, now: float) -> None:
        """Looks at who serves, and does what follows. To be called when that has changed."""
        self._placers.changed = False
        rollout = self.rollout
        if rollout is not None:
            self._size(rollout, now)
            self._open(rollout, now)
            if (found := self._is_worse(rollout)) is not None:
                self._give_up(rollout, found, None, now)
            elif (
                rollout.drains_s is not None
                and self._has_sizes(rollout)
                and not self._needs_start(rollout.stable)
            ):
                self._switch(rollout, rollout.drains_s, now)
        for revision in self.retiring:
            self._scaler.launches.give_up_stuck(revision, self._scaler.start_timeout_s, now)
        if self.retiring.advance(now):
            self._changed()
        self._reserve()
        self._move_waiting()
        # What waits for workers that are gone is to hear it.
        self._lifecycle.room_freed()
        if self:
            self._timers.set(CoreTimer.ROLLOUT, now + _INTERVAL_S)
        else:
            self._timers.cancel(CoreTimer.ROLLOUT)
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
            retiring=self.retiring,
            abort_if_worse=self.rollout is not None and self.rollout.abort_if_worse,
        )

    def _changed(self) -> None:
        """Something is no more what workers remember."""
        self._version += 1
        self._tell()

    def _tell(self) -> None:
        """Workers are to remember what is so now."""
        record = self._record()
        for worker in self._workers:
            self._emit(ev.SendCommand(worker.key, record))

    def _restore(self, record: cluster_pb2.RolloutRecord, now: float) -> None:
        """Goes on where the coordinator before was."""
        self._version, self.rollout = record.version, None
        self.retiring.replace(record.retiring, self._max_request_s, now)
        self._lifecycle.stats.sides = {}
        self.traffic.stable = self._workers.stable = record.stable
        self.traffic.canary, self.traffic.open = "", False
        if record.canary:
            canary = Revision(record.canary)
            sizes = dict.fromkeys(Pool, 0)
            self.rollout = Rollout(canary, record.stable, sizes, record.abort_if_worse)
            self.traffic.canary, self.traffic.share = record.canary, record.share
        self._set_current()
        self._placers.changed = True
        if not self:
            self._timers.cancel(CoreTimer.ROLLOUT)
        # What came before the first worker did was taken for the configured revision's.
        self._move_waiting()
        self._tell()

    def _replaced(self, worker: Worker) -> bool:
        """Whether a worker's revision left, or was to, when it lost the coordinator before.

        One that no rollout was of waits for its own.
        """
        record, revision = worker.hello.rollout, worker.revision
        known = (record.stable, record.canary) if record.configured == self._configured else ()
        return revision not in (self.traffic.stable, self.traffic.canary) and (
            revision in known or revision in record.retiring
        )

    def _set_current(self) -> None:
        current = frozenset(filter(None, (self.traffic.stable, self.traffic.canary)))
        self._lifecycle.lanes.set_current(current)

    def _size(self, rollout: Rollout, now: float) -> None:
        """Starts what the canary lacks; what of it does not come up is given up."""
        if not self._scaler.active:
            return
        name, launches = rollout.revision.name, self._scaler.launches
        launches.give_up_stuck(name, self._scaler.start_timeout_s, now)
        for pool, role in ROLE_OF.items():
            if rollout.drains_s is not None:
                rollout.sizes[pool] = max(rollout.sizes[pool], self._promoted_size(pool))
            there = sum(
                one.role == role and one.state != _DRAINING for one in self._workers.of(name)
            )
            lacking = rollout.sizes[pool] - there - launches.num_starting(pool, name)
            launches.start(pool, lacking, now, rollout.revision)
            launches.settle(pool, now, name)

    def _reserve(self) -> None:
        """GPUs that the pools may not grow into.

        The canary's, and those of workers that stay, or still start, until what their revision has
        has ended: those that drain the pools count themselves.
        """
        scaler, rollout = self._scaler, self.rollout
        held = 0
        if rollout is not None:
            held = why.canary_gpus(self._workers, scaler, rollout.revision, rollout.sizes)
        stay = (
            one
            for revision in self.retiring
            for one in self._workers.of(revision)
            if one.state != _DRAINING
        )
        starting = sum(scaler.gpus_starting(revision) for revision in self.retiring)
        scaler.reserve(held + scaler.gpus_of(stay) + starting)

    def _open(self, rollout: Rollout, now: float) -> None:
        """New requests go to the canary while it serves in both pools."""
        traffic, name = self.traffic, rollout.revision.name
        counts = why.serving(self._workers, name)
        traffic.open = all(counts[pool] for pool in Pool)
        traffic.canary_model = self._workers.of(name).model
        if traffic.open and not rollout.sides:
            rollout.sides, rollout.since = {rollout.stable: Side(), name: Side()}, now
            self._lifecycle.stats.sides = rollout.sides

    def _promoted_size(self, pool: Pool) -> int:
        return why.promoted_size(self._workers, self._scaler, pool)

    def _has_sizes(self, rollout: Rollout) -> bool:
        counts = why.serving(self._workers, rollout.revision.name)
        return all(counts[pool] >= self._promoted_size(pool) for pool in Pool)

    def _needs_start(self, revision: str) -> bool:
        """Whether what it began may have to go on with a decode worker that only starts now.

        As a revision that leaves it would get no other one, should that fail to start.
        """
        return self.retiring.awaits_decode(revision) and any(
            one.stays_on(revision) for one in self._lifecycle.requests.all()
        )

    def _switch(self, rollout: Rollout, drain_s: float, now: float) -> None:
        """The canary is the stable revision from now on."""
        new, old = rollout.revision, self.traffic.stable
        self._end(rollout, f"revision {new.name!r} was promoted, after {old!r}")
        self.traffic.stable = self._workers.stable = new.name
        self._scaler.promoted(new, now)
        self._set_current()
        self._retire(old, f"revision {new.name} has taken its place", drain_s, now)
        self._changed()

    def _is_worse(self, rollout: Rollout) -> str | None:
        """What is worse about a canary that is to be aborted then; None: nothing is known of it."""
        if not rollout.abort_if_worse or not rollout.sides:
            return None
        found = judge(rollout.sides[rollout.stable], rollout.sides[rollout.revision.name])
        return found.reason if found.verdict is Verdict.WORSE else None

    def _give_up(self, rollout: Rollout, reason: str, drain_s: float | None, now: float) -> None:
        self._end(rollout, f"revision {rollout.revision.name!r} was aborted: {reason}")
        self._retire(rollout.revision.name, "its rollout was aborted", drain_s, now)
        self._changed()

    def _end(self, rollout: Rollout, outcome: str) -> None:
        self.rollout, self.last, self.outcome = None, rollout, outcome
        self.traffic.canary, self.traffic.open, self.traffic.share = "", False, 0.0
        self._lifecycle.stats.sides = {}
        self._set_current()

    def _retire(self, revision: str, reason: str, drain_s: float | None, now: float) -> None:
        self.retiring.begin(revision, reason, drain_s or self._max_request_s, now)

    def _move_waiting(self) -> None:
        """What waits on a revision that gets nothing new goes to the stable one.

        What the stable one cannot compute (it lacks an adapter, its context is shorter) stays as
        long as there are workers that can.
        """
        model = self._workers.of(self.traffic.stable).model
        for request in self._lifecycle.requests.all():
            if (
                request.waits
                and not len(request.token_ids)
                and not self.traffic.gets_new(request.revision)
                and (fits(request.submission, model) or self.is_gone(request.revision))
            ):
                self._lifecycle.change_revision(request, self.traffic.stable)
