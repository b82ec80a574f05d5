"""Tracks the worker processes that the core has started, from the start order to their end.

The module does no I/O and has no clock: it emits orders to start and end processes, and gets the
results as events.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.coordinator.scaling.autoscale.types import Phase, WorkerView
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.workers import WorkerRegistry
from baton.coordinator.telemetry.stats import CoreStats

# Wait after a failed start; it doubles with each further failure in a row, up to the longest.
_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
# Doublings that reach the longest wait. Without a limit, a float could not hold the wait after a
# thousand failures, which is less than a day.
_MAX_DOUBLINGS = 6
# A worker that dies within this many seconds after attaching counts as a failed start.
STABLE_S = 10.0


@dataclass(slots=True)
class _Launch:
    """A worker process, from the start order until its launcher reports that it is gone.

    Attributes:
        pool: Pool of the worker now.
        since: time of the start order.
        revision: Launch configuration of the process.
        first_pool: Pool that the process was started for. It decides the engine arguments and the
            number of GPUs, also after the worker has moved to the other pool.
        attached_at: time when the worker first attached; None: it has not attached yet.
        incarnation: incarnation that attached then; None: it has not attached yet. Another process
            with the worker's ID has another incarnation.
        ends: whether the process was told to end or its worker has left. The process holds its
            GPUs until the launcher reports that it is gone.
        waits: reason why the process cannot be started yet; empty if nothing prevents it.
    """

    worker_id: str
    pool: Pool
    since: float
    revision: Revision
    first_pool: Pool
    attached_at: float | None = None
    incarnation: int | None = None
    ends: bool = False
    waits: str = ""

    @property
    def starting(self) -> bool:
        """Whether the process should attach but has not attached yet."""
        return self.attached_at is None and not self.ends


@dataclass(slots=True)
class _Starts:
    """Failed starts in one pool of one fleet.

    Attributes:
        num_failed: number of failures in a row, without processes that waited to be started.
        problem: reason of the last failure.
        failed_at: time of the last failure.
        not_before: earliest time of the next attempt.
    """

    num_failed: int = 0
    problem: str = ""
    failed_at: float = 0.0
    not_before: float = 0.0


class Launches:
    """Owns the worker processes; a worker ID is never used twice.

    Args:
        workers: Attached workers.
        stats: Counters of cold starts and failed starts.
        emit: Callback for effects.
    """

    def __init__(
        self,
        workers: WorkerRegistry,
        stats: CoreStats,
        emit: Callable[[ev.Effect], None],
    ) -> None:
        self._workers, self._stats, self._emit = workers, stats, emit
        # IDs of this fleet's workers do not contain the fleet's name.
        self._first = workers.fleets.stable.name
        self._all: dict[str, _Launch] = {}
        # By pool and the fleet's name: a fleet may be forgotten and created again.
        self._num_starting: Counter[tuple[Pool, str]] = Counter()
        # Failed starts of one fleet do not delay the starts of another fleet.
        self._starts: defaultdict[tuple[Pool, str], _Starts] = defaultdict(_Starts)
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    # ---- Queries.

    @property
    def worker_ids(self) -> list[str]:
        """IDs of the processes that are not known to have ended."""
        return list(self._all)

    def has(self, worker_id: str) -> bool:
        """Whether a process was started here and is not known to have ended."""
        return worker_id in self._all

    def started_as(self, worker_id: str) -> tuple[Revision, Pool] | None:
        """Returns the revision and the pool that a process was started for.

        None: it was not started here.
        """
        launch = self._all.get(worker_id)
        return (launch.revision, launch.first_pool) if launch is not None else None

    def revisions(self) -> Iterator[tuple[Revision, Pool]]:
        """As `started_as`, of all processes that are not known to be gone."""
        for one in self._all.values():
            yield one.revision, one.first_pool

    def num_starting(self, pool: Pool, fleet: Fleet | None = None) -> int:
        """Returns how many processes start and have not attached; default: stable fleet."""
        return self._num_starting[self._key(pool, fleet)]

    def starting(self, fleet: Fleet) -> list[tuple[str, Pool]]:
        """Returns id and pool of the processes that start for a fleet and have not attached."""
        return [(launch.worker_id, launch.pool) for launch in self._starting(fleet)]

    def is_starting(self, worker_id: str) -> bool:
        """Whether a process was started here and has neither attached nor been told to end."""
        launch = self._all.get(worker_id)
        return launch is not None and launch.starting

    def is_ending(self, key: WorkerKey) -> bool:
        """Whether the process of this worker was started here and was told to end."""
        worker_id, incarnation = key
        launch = self._all.get(worker_id)
        return launch is not None and launch.ends and launch.incarnation == incarnation

    def is_other_process(self, key: WorkerKey) -> bool:
        """Whether a process was started here under this worker's ID, but not for this worker."""
        worker_id, incarnation = key
        launch = self._all.get(worker_id)
        return launch is not None and launch.incarnation != incarnation

    def views(self) -> Iterator[WorkerView]:
        """Processes that are not attached as workers but count: they start or still hold GPUs.

        Processes that start for a fleet other than the stable one are counted by the rollout.
        """
        stable = self._workers.fleets.stable.name
        for launch in self._all.values():
            if launch.starting and launch.revision.name != stable:
                continue
            if launch.starting:
                yield WorkerView(launch.worker_id, launch.pool, Phase.STARTING, launch.since)
            elif launch.ends and self._workers.by_id(launch.worker_id) is None:
                yield WorkerView(launch.worker_id, launch.pool, Phase.DRAINING, launch.since)

    def problem(self, pool: Pool, fleet: Fleet | None = None) -> str:
        """Why the last start in this pool failed; empty if there was no recent failure."""
        starts = self._starts.get(self._key(pool, fleet))
        return starts.problem if starts is not None else ""

    def waiting(self, pool: Pool, fleet: Fleet | None = None) -> str:
        """Which workers of this pool cannot be started yet, and why; empty if no worker waits."""
        key = self._key(pool, fleet)
        waiting = [
            launch
            for launch in self._all.values()
            if (launch.pool, launch.revision.name) == key and launch.starting and launch.waits
        ]
        if not waiting:
            return ""
        first, others = waiting[0], len(waiting) - 1
        told = f"worker {first.worker_id} {first.waits}"
        return f"{told}; {others} more wait" if others else told

    def not_before(self, pool: Pool) -> float:
        """Earliest time, by the core's clock, of the stable fleet's next process start."""
        return self._starts[self._key(pool)].not_before

    # ---- Orders from the scaler and from rollouts.

    def start(self, pool: Pool, number: int, now: float, fleet: Fleet | None = None) -> None:
        """Starts processes, but none before `not_before`, and one at a time after a failed start.

        The end of a process that waited to be started does not delay or limit other starts.

        Args:
            pool: pool of the new workers.
            number: number of processes; 0 or less starts none.
            now: time by the core's clock.
            fleet: fleet of the new workers; None: the stable fleet.
        """
        fleet = fleet or self._workers.fleets.stable
        starts = self._starts[pool, fleet.name]
        if now < starts.not_before:
            return
        if starts.num_failed:
            number = min(number, 1 - self.num_starting(pool, fleet))
        prefix = pool.value if fleet.name == self._first else f"{pool.value}-{fleet.name}"
        for _ in range(number):
            worker_id = next(
                name
                for name in (f"{prefix}-{count}" for count in self._numbers[prefix])
                if self._workers.by_id(name) is None
            )
            self._all[worker_id] = _Launch(worker_id, pool, now, fleet.revision, pool)
            self._num_starting[pool, fleet.name] += 1
            self._emit(ev.StartWorker(worker_id, pool, fleet.revision))

    def give_up_stuck(self, fleet: Fleet, timeout_s: float, now: float) -> None:
        """Ends processes of a fleet that take longer than `timeout_s` to start, as failures."""
        for launch in self._starting(fleet):
            if now - launch.since > timeout_s:
                self._end(launch)
                waits = f": {launch.waits}" if launch.waits else ""
                self._lost(launch, f"did not come up within {timeout_s:g} s{waits}", now)

    def give_up_all(self, fleet: Fleet) -> None:
        """Ends processes of a fleet that have not attached yet."""
        for launch in self._starting(fleet):
            self._end(launch)

    def give_up(self, worker_id: str) -> None:
        """Ends a process that has not attached yet; ignores other processes."""
        launch = self._all.get(worker_id)
        if launch is not None and launch.starting:
            self._end(launch)

    # ---- Events.

    def attached(self, key: WorkerKey, now: float) -> None:
        """Records the first attach of a worker that has served no other coordinator."""
        worker_id, incarnation = key
        launch = self._all.get(worker_id)
        if launch is not None and launch.attached_at is None:
            self._num_starting[launch.pool, launch.revision.name] -= launch.starting
            launch.attached_at, launch.incarnation = now, incarnation
            self._stats.cold_started(now - launch.since)

    def waits(self, worker_id: str, reason: str) -> None:
        """Records why a process cannot be started yet; an empty reason ends the wait."""
        if (launch := self._all.get(worker_id)) is not None:
            launch.waits = reason

    def moved(self, worker_id: str, pool: Pool) -> None:
        """Records that a worker has moved to this pool."""
        launch = self._all.get(worker_id)
        # While the process still starts, the event is about another worker of the same ID; see
        # `left`.
        if launch is not None and not launch.starting:
            launch.pool = pool

    def left(self, worker_id: str, reason: str, now: float, *, wanted: bool) -> bool:
        """Ends the process of a worker that has left the cluster.

        Returns:
            Whether the worker was started here and left without being told to.
        """
        launch = self._all.get(worker_id)
        # While the process still starts, the worker that left was started by an earlier coordinator
        # and has the same ID.
        if launch is None or launch.ends or launch.starting:
            return False
        self._end(launch)
        if not wanted:
            self._lost(launch, reason, now)
        return not wanted

    def exited(self, event: ev.WorkerExited, now: float) -> bool:
        """Records that a process has ended or could not be started.

        A process that was told to end is forgotten only when its launcher reports that it is gone,
        because its child processes may live longer and hold its GPUs.

        Returns:
            Whether the process was started here and ended without being told to.
        """
        launch = self._all.get(event.worker_id)
        if launch is None:
            return False
        if launch.ends:
            if event.gone:
                del self._all[launch.worker_id]
            return False
        # The launcher must also end child processes, which hold the GPUs until then.
        self._end(launch)
        loading = event.loading_failure if launch.attached_at is None else ""
        self._lost(launch, loading or event.reason, now)
        return True

    def settle(self, pool: Pool, now: float, fleet: Fleet | None = None) -> None:
        """Forgets failed starts once a later worker has served for a while or none was started."""
        key = self._key(pool, fleet)
        starts = self._starts[key]
        if not starts.problem:
            return
        later = [
            launch
            for launch in self._all.values()
            if (launch.pool, launch.revision.name) == key
            and launch.since >= starts.failed_at
            and not launch.ends
        ]
        stable = any(
            launch.attached_at is not None and now - launch.attached_at >= STABLE_S
            for launch in later
        )
        settled_at = max(starts.not_before, starts.failed_at) + _LONGEST_BACKOFF_S
        unwanted = not later and now >= settled_at
        if stable or unwanted:
            del self._starts[key]

    def forget(self, fleet: Fleet) -> None:
        """Forgets the failed starts of a fleet that takes part in no rollout any more."""
        for pool in Pool:
            self._starts.pop((pool, fleet.name), None)

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts of starting processes are wrong."""
        starting = (launch for launch in self._all.values() if launch.starting)
        assert +self._num_starting == Counter(
            (launch.pool, launch.revision.name) for launch in starting
        )

    # ---- Private methods

    def _key(self, pool: Pool, fleet: Fleet | None = None) -> tuple[Pool, str]:
        return pool, (fleet or self._workers.fleets.stable).name

    def _starting(self, fleet: Fleet) -> list[_Launch]:
        name = fleet.name
        return [
            launch
            for launch in self._all.values()
            if launch.starting and launch.revision.name == name
        ]

    def _end(self, launch: _Launch) -> None:
        self._num_starting[launch.pool, launch.revision.name] -= launch.starting
        launch.ends = True
        self._emit(ev.EndWorker(launch.worker_id))

    def _lost(self, launch: _Launch, reason: str, now: float) -> None:
        if launch.attached_at is not None and now - launch.attached_at >= STABLE_S:
            return
        starts = self._starts[launch.pool, launch.revision.name]
        starts.failed_at, starts.problem = now, f"worker {launch.worker_id} {reason}"
        self._stats.num_failed_starts += 1
        if launch.waits:
            # The process has never run, so there is no sign that the next one would fail. Fewer
            # starts at a time would only request fewer nodes.
            return
        starts.num_failed += 1
        num_doublings = min(starts.num_failed - 1, _MAX_DOUBLINGS)
        wait_s = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2**num_doublings)
        starts.not_before = now + wait_s
