"""A rollout: a canary fleet gets a share of the traffic until it is promoted or aborted.

No I/O, no clock. One rollout runs at a time. A request stays in the fleet that began its output
(retiring.py says why); a request without output moves to the stable fleet if its own fleet has no
workers.

Every attached worker keeps a record of the rollout, from which a restarted coordinator restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.coordinator.rollouts import rollout_errors as why
from baton.coordinator.rollouts.canary_sizes import (
    canary_gpus,
    canary_sizes,
    has_promoted_sizes,
    num_lacking,
    promotion_sizes,
)
from baton.coordinator.rollouts.comparison import Verdict, judge
from baton.coordinator.rollouts.retiring import Retiring
from baton.coordinator.rollouts.traffic import Traffic
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.request_table import RequestTable
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.timers import CoreTimer, Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.coordinator.telemetry.fleet_stats import FleetStats
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime import errors
from baton.v1 import cluster_pb2

_INTERVAL_S = 1.0
_DRAINING = cluster_pb2.WORKER_STATE_DRAINING


@dataclass(slots=True)
class Rollout:
    """The rollout that runs, or the last one.

    Attributes:
        canary: The fleet that runs the new revision.
        stable: The stable fleet when the rollout began.
        sizes: Number of workers that the coordinator starts, by pool; 0 if it starts no workers.
        abort_if_worse: Whether the rollout is aborted when the comparison finds the canary worse.
        stats: Statistics of both fleets; empty until the canary has served.
        since: When `stats` began, by the core's clock.
        drain_s: Seconds that requests of the old fleet may take after the promotion; None: no
            promotion was requested.
    """

    canary: Fleet
    stable: Fleet
    sizes: dict[Pool, int]
    abort_if_worse: bool = False
    stats: dict[Fleet, FleetStats] = field(default_factory=dict)
    since: float = 0.0
    drain_s: float | None = None


class Rollouts:
    """Owns the rollout that runs, and the fleets that leave.

    `RolloutControl` in core/ calls `advance` after every change, and ends and moves requests.

    Args:
        traffic: Chooses the fleet of a request; changed only here.
        requests: Requests that have not ended.
        workers: All attached workers.
        scaler: Starts the canary's workers if it is active.
        stats: Counts by fleet while two fleets are compared.
        clock: Time of the event that the core handles.
        timers: The core's timers.
        drain: Tells a worker to leave: worker, time limit in seconds, reason.
        emit: Takes effects.
        max_request_s: Longest life of a request, in seconds.

    Attributes:
        rollout: The rollout that runs, if any.
        last: The rollout that ended last, if any.
        outcome: How `last` ended, in words.
        retiring: Fleets that finish their requests and leave.
    """

    def __init__(
        self,
        traffic: Traffic,
        requests: RequestTable,
        workers: WorkerRegistry,
        scaler: Scaler,
        stats: CoreStats,
        clock: CoreClock,
        timers: Timers,
        drain: Callable[[Worker, float, str], None],
        emit: Callable[[ev.Effect], None],
        max_request_s: float,
    ) -> None:
        self.traffic, self._requests, self._workers = traffic, requests, workers
        self._scaler, self._stats, self._clock = scaler, stats, clock
        self._timers, self._emit = timers, emit
        self._fleets, self._max_request_s = workers.fleets, max_request_s
        self.retiring = Retiring(scaler.launches, drain)
        self._configured, self._version = traffic.stable.name, 0
        # Highest version of the records of earlier coordinators that workers have returned with.
        self._newest_seen = 0
        # Whether an operator has changed a rollout at this coordinator. Records that workers keep
        # from an earlier coordinator are outdated then.
        self._was_changed = False
        self.rollout: Rollout | None = None
        self.last: Rollout | None = None
        self.outcome = ""

    # ---- Questions

    def __bool__(self) -> bool:
        """Whether a rollout runs or a fleet leaves."""
        return self.rollout is not None or len(self.retiring) > 0

    @property
    def num_timers(self) -> int:
        """Number of timers that are set."""
        return int(bool(self))

    def involves(self, fleet: Fleet) -> bool:
        """Whether the fleet is stable, a canary or leaving, so that it must be kept."""
        return self.traffic.is_current(fleet) or fleet in self.retiring

    def is_gone(self, fleet: Fleet) -> bool:
        """Whether no worker will continue the outputs that this fleet began."""
        return (
            fleet is not self._fleets.stable
            and fleet is not self.traffic.canary
            and len(self._workers) > 0
            and not self.retiring.decodes(fleet)
            and not self.retiring.awaits_decode(fleet)
        )

    def flip_error(self, worker: Worker) -> errors.BatonError | None:
        """Returns why rollouts forbid that a worker changes its role; None if they do not."""
        if worker.fleet is self.traffic.stable:
            return None
        return errors.FailedPrecondition(
            f"worker {worker.id} is of revision {worker.fleet.name!r}; only workers of the stable "
            f"revision {self.traffic.stable.name!r} can change their role"
        )

    def start_error(
        self, revision: Revision, share: float, sizes: Mapping[Pool, int]
    ) -> errors.BatonError | None:
        """Returns why this rollout cannot be started; None if it can.

        Args:
            revision: Launch configuration of the canary's workers.
            share: Share of new sessions for the canary.
            sizes: Number of workers by pool. For a pool that is left out, the attached workers that
                can do its work are used, or 1 worker is started.
        """
        return why.start_error(
            self._workers, self._scaler, self.traffic.canary, tuple(self.retiring), revision, sizes
        ) or why.share_error(share)

    def share_error(self, share: float) -> errors.BatonError | None:
        """Returns why the share cannot be changed to this value; None if it can."""
        return self.abort_error() or why.share_error(share)

    def promote_error(self) -> errors.BatonError | None:
        """Returns why the canary cannot be promoted; None if it can."""
        if self.rollout is None:
            return why.none_runs()
        rollout = self.rollout
        return why.promote_error(self._workers, self._scaler, rollout.canary, rollout.sizes)

    def abort_error(self) -> errors.BatonError | None:
        """Returns why no rollout can be aborted; None if one can."""
        return None if self.rollout is not None else why.none_runs()

    # ---- Events

    def start(self, event: ev.RolloutRequested) -> None:
        """Starts a rollout; `start_error` was None."""
        canary, self._was_changed = self._fleets.named(event.revision.name), True
        canary.revision = event.revision
        sizes = dict.fromkeys(Pool, 0)
        if self._scaler.active:
            sizes = canary_sizes(self._fleets, canary.workers, event.sizes)
        self.rollout = Rollout(canary, self.traffic.stable, sizes, event.abort_if_worse)
        self.traffic.canary, self.traffic.share = canary, event.share
        self._changed()

    def set_share(self, share: float) -> None:
        """Changes the canary's share; `share_error` was None."""
        if self.rollout is not None:
            self.traffic.share, self._was_changed = share, True
            self._changed()

    def promote(self, drain_s: float | None) -> None:
        """Promotes the canary as soon as it has enough workers; `promote_error` was None."""
        if self.rollout is not None:
            self._was_changed = True
            self.rollout.drain_s = drain_s or self._max_request_s
            if self._scaler.active:
                self.rollout.sizes = self._promotion_sizes(self.rollout)

    def abort(self, drain_s: float | None, reason: str) -> None:
        """Aborts the rollout; `abort_error` was None."""
        if self.rollout is not None:
            self._was_changed = True
            self._abort(self.rollout, reason, drain_s)

    def attached(self, worker: Worker, *, returns: bool) -> bool:
        """Handles an attached worker, which may have a record from an earlier coordinator.

        Args:
            worker: The worker.
            returns: Whether the worker served another coordinator before.

        Returns:
            Whether the stable fleet or the canary may have changed, so that waiting requests may
            have to move.
        """
        record, restores = worker.hello.rollout, False
        is_newer = returns and record.version > self._newest_seen
        if is_newer:
            self._newest_seen = record.version
        if is_newer and record.configured != self._configured:
            restores = self._supersede()
        # A coordinator with an active scaler starts its own workers, and the workers of the
        # recorded rollout ended with the earlier coordinator.
        elif is_newer and not self._scaler.active and not self._was_changed:
            self._restore(record)
            restores = True
        elif self._version:
            self._emit(ev.SendCommand(worker.key, self._record()))
        if returns and worker.fleet not in self.retiring and self._was_replaced(worker):
            self._retire(worker.fleet, "another revision has taken its place", None)
            self._changed()
        return restores

    def launcher_ready(self) -> None:
        """Makes the configured revision stable again: the launcher starts workers of this revision.

        A rollout that was restored from a record ends, unless an operator has changed it here.
        """
        if self._version and not self._was_changed:
            self._discard_restored()

    def advance(self) -> None:
        """Takes all steps of rollouts that are possible with the workers that serve now."""
        now = self._clock.now
        rollout = self.rollout
        if rollout is not None:
            self._start_workers(rollout)
            self._open(rollout)
            if (found := self._found_worse(rollout)) is not None:
                self._abort(rollout, found, None)
            elif (
                rollout.drain_s is not None
                and has_promoted_sizes(self._fleets, self._scaler, rollout.canary, rollout.sizes)
                and not self._needs_start(rollout.stable)
            ):
                self._switch(rollout, rollout.drain_s)
        for fleet in self.retiring:
            self._scaler.launches.give_up_stuck(fleet, self._scaler.start_timeout_s, now)
        if self.retiring.advance(now):
            self._changed()
        self._reserve()
        if self:
            self._timers.set(CoreTimer.ROLLOUT, now + _INTERVAL_S)
        else:
            self._timers.cancel(CoreTimer.ROLLOUT)

    # ---- The record that workers keep

    def _record(self) -> cluster_pb2.RolloutRecord:
        traffic = self.traffic
        return cluster_pb2.RolloutRecord(
            version=self._version,
            configured=self._configured,
            stable=traffic.stable.name,
            canary=traffic.canary.name if traffic.canary is not None else "",
            share=traffic.share,
            retiring=[fleet.name for fleet in self.retiring],
            abort_if_worse=self.rollout is not None and self.rollout.abort_if_worse,
        )

    def _changed(self) -> None:
        """Sends a new version of the record to all workers."""
        self._version = max(self._version, self._newest_seen) + 1
        self._send_record()

    def _send_record(self) -> None:
        record = self._record()
        for worker in self._workers:
            self._emit(ev.SendCommand(worker.key, record))

    def _restore(self, record: cluster_pb2.RolloutRecord) -> None:
        """Replaces the state by the one that an earlier coordinator has recorded."""
        named = self._fleets.named
        # This coordinator may have sent records of its own since an older one was restored.
        self._version, self.rollout = max(record.version, self._version + 1), None
        self.retiring.replace(map(named, record.retiring), self._max_request_s, self._clock.now)
        self._stats.compared = {}
        self._fleets.stable = stable = named(record.stable)
        self.traffic.canary, self.traffic.open, self.traffic.share = None, False, 0.0
        if record.canary:
            canary, sizes = named(record.canary), dict.fromkeys(Pool, 0)
            self.rollout = Rollout(canary, stable, sizes, record.abort_if_worse)
            self.traffic.canary, self.traffic.share = canary, record.share
        if not self:
            self._timers.cancel(CoreTimer.ROLLOUT)
        self._send_record()

    def _supersede(self) -> bool:
        """Replaces a record from before the configuration named another stable revision.

        All workers get this coordinator's record instead. If they kept the older one, a coordinator
        whose configuration names the former revision again would restore it.

        Returns:
            Whether a rollout was discarded that had been restored from a still older record.
        """
        is_configured = self.rollout is None and self._fleets.stable.name == self._configured
        if is_configured or self._was_changed:
            self._changed()
            return False
        self._discard_restored()
        return True

    def _discard_restored(self) -> None:
        """Makes the configured revision stable, with a record that is newer than all others."""
        version = max(self._version, self._newest_seen) + 1
        self._restore(cluster_pb2.RolloutRecord(version=version, stable=self._configured))

    def _was_replaced(self, worker: Worker) -> bool:
        """Whether, according to the worker's record, the worker's fleet has left or is leaving.

        False for a fleet that took part in no rollout: its workers are kept.
        """
        record, fleet = worker.hello.rollout, worker.fleet
        known = (record.stable, record.canary) if record.configured == self._configured else ()
        return not self.traffic.is_current(fleet) and (
            fleet.name in known or fleet.name in record.retiring
        )

    # ---- Steps of a rollout

    def _start_workers(self, rollout: Rollout) -> None:
        """Starts the workers that the canary lacks, and gives up starts that take too long.

        A worker that is draining or has ended is replaced once its GPUs are free.
        """
        now = self._clock.now
        if not self._scaler.active:
            return
        canary, launches = rollout.canary, self._scaler.launches
        launches.give_up_stuck(canary, self._scaler.start_timeout_s, now)
        if rollout.drain_s is not None:
            self._follow_pools(rollout)
        for pool, lacking in num_lacking(self._scaler, canary, rollout.sizes).items():
            number = min(lacking, self._scaler.num_startable(pool, canary.revision))
            launches.start(pool, int(number), now, canary)
            launches.settle(pool, now, canary)

    def _follow_pools(self, rollout: Rollout) -> None:
        """Raises a canary that is being promoted to the stable pools' sizes, while GPUs suffice.

        Without room for both, the pools have grown since the promotion was requested. The canary
        then keeps its sizes, and its pools grow after the promotion.
        """
        canary, sizes = rollout.canary, self._promotion_sizes(rollout)
        attached = list(canary.workers)
        if not why.gpus_error(self._workers, self._scaler, attached, canary.revision, sizes):
            rollout.sizes = sizes

    def _promotion_sizes(self, rollout: Rollout) -> dict[Pool, int]:
        return promotion_sizes(self._fleets, self._scaler, rollout.canary.workers, rollout.sizes)

    def _reserve(self) -> None:
        """Reserves the GPUs of the canary and of leaving fleets, so that no pool takes them.

        Draining workers are left out, because the pools already count their GPUs.
        """
        scaler, rollout, held = self._scaler, self.rollout, 0
        if rollout is not None:
            canary = rollout.canary
            held = canary_gpus(scaler, canary.workers, canary.revision, rollout.sizes)
        for fleet in self.retiring:
            held += scaler.gpus_of(one for one in fleet.workers if one.state != _DRAINING)
            held += scaler.gpus_starting(fleet)
        scaler.reserve(held)

    def _open(self, rollout: Rollout) -> None:
        """Opens the canary to new requests while it can compute prompts and decode outputs."""
        canary = rollout.canary
        self.traffic.open = all(canary.workers.able(role).num_serving for role in POOL_OF)
        if self.traffic.open and not rollout.stats:
            rollout.stats, rollout.since = (
                {rollout.stable: FleetStats(), canary: FleetStats()},
                self._clock.now,
            )
            self._stats.compared = rollout.stats

    def _needs_start(self, fleet: Fleet) -> bool:
        """Whether requests of the fleet need a worker that can decode and is still starting.

        The fleet must not leave before: if this start fails, a leaving fleet starts no other one.
        """
        return self.retiring.awaits_decode(fleet) and any(
            one.fleet is fleet and one.has_begun for one in self._requests.all()
        )

    def _switch(self, rollout: Rollout, drain_s: float) -> None:
        """Makes the canary the stable fleet."""
        new, old = rollout.canary, self.traffic.stable
        self._end(rollout, f"revision {new.name!r} was promoted, after {old.name!r}")
        self._fleets.stable = new
        self._scaler.promoted()
        self._retire(old, f"revision {new.name} has taken its place", drain_s)
        self._changed()

    def _found_worse(self, rollout: Rollout) -> str | None:
        """Returns why the rollout is aborted because the canary is worse; None if it is not."""
        if not rollout.abort_if_worse or not rollout.stats:
            return None
        found = judge(rollout.stats[rollout.stable], rollout.stats[rollout.canary])
        return found.reason if found.verdict is Verdict.WORSE else None

    def _abort(self, rollout: Rollout, reason: str, drain_s: float | None) -> None:
        self._end(rollout, f"revision {rollout.canary.name!r} was aborted: {reason}")
        self._retire(rollout.canary, "its rollout was aborted", drain_s)
        self._changed()

    def _end(self, rollout: Rollout, outcome: str) -> None:
        self.rollout, self.last, self.outcome = None, rollout, outcome
        self.traffic.canary, self.traffic.open, self.traffic.share = None, False, 0.0
        self._stats.compared = {}

    def _retire(self, fleet: Fleet, reason: str, drain_s: float | None) -> None:
        self.retiring.begin(fleet, reason, drain_s or self._max_request_s, self._clock.now)
