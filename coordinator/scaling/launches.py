"""The worker processes that the core has started: until they attach, while they serve, as they end.

No I/O, no clock: it says which are to start and to end, and is told what became of them.
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
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.workers import WorkerRegistry
from baton.coordinator.telemetry.stats import CoreStats

# How long a pool waits after a start that failed; twice as long after each further one in a row.
_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
# A worker that dies sooner after it attached has not started properly either.
_STABLE_S = 10.0


@dataclass(slots=True)
class _Launch:
    """A process from the order to start it until nothing of it is left.

    Attributes:
        revision: Launch configuration that it was started with.
        since: when it was ordered.
        attached_at: when its worker attached first; None: it has not yet.
        ends: it is to end, or its worker has left: it holds its GPUs until the launcher says that
            nothing is left of it.
        waits: why it cannot be started yet, in words; empty when nothing keeps it.
    """

    worker_id: str
    pool: Pool
    since: float
    revision: Revision
    attached_at: float | None = None
    ends: bool = False
    waits: str = ""

    @property
    def starting(self) -> bool:
        """Whether it is waited for."""
        return self.attached_at is None and not self.ends


@dataclass(slots=True)
class _Starts:
    """How starts go in one pool of one fleet.

    Attributes:
        num_failed: how many failed in a row.
        problem: why the last of them did, in words.
        failed_at: when it did.
        not_before: when the next may be tried.
    """

    num_failed: int = 0
    problem: str = ""
    failed_at: float = 0.0
    not_before: float = 0.0


class Launches:
    """Owns the worker processes, whose ids are never used twice.

    Args:
        workers: attached ones.
        stats: counts cold starts and starts that fail.
        emit: takes effects.
    """

    def __init__(
        self,
        workers: WorkerRegistry,
        stats: CoreStats,
        emit: Callable[[ev.Effect], None],
    ) -> None:
        self._workers, self._stats, self._emit = workers, stats, emit
        # Its workers' ids do not contain the fleet's name.
        self._first = workers.fleets.stable.name
        self._all: dict[str, _Launch] = {}
        # By pool and the fleet's name: a fleet may be forgotten and created again.
        self._num_starting: Counter[tuple[Pool, str]] = Counter()
        # Failed starts of one fleet do not delay the starts of another fleet.
        self._starts: defaultdict[tuple[Pool, str], _Starts] = defaultdict(_Starts)
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    # ---- What others may ask.

    @property
    def worker_ids(self) -> list[str]:
        """The ids of processes that are not known to have ended."""
        return list(self._all)

    def has(self, worker_id: str) -> bool:
        """Whether a process was started here and is not known to have ended."""
        return worker_id in self._all

    def revision_of(self, worker_id: str) -> Revision | None:
        """Returns the launch configuration of a process, or None if it was not started here."""
        one = self._all.get(worker_id)
        return one.revision if one is not None else None

    def num_starting(self, pool: Pool, fleet: Fleet | None = None) -> int:
        """Returns how many processes start and have not attached; default: stable fleet."""
        return self._num_starting[self._key(pool, fleet)]

    def starting(self, fleet: Fleet) -> list[tuple[str, Pool]]:
        """Returns id and pool of the processes that start for a fleet and have not attached."""
        return [(one.worker_id, one.pool) for one in self._starting(fleet)]

    def is_starting(self, worker_id: str) -> bool:
        """Whether a process that was started here is waited for."""
        one = self._all.get(worker_id)
        return one is not None and one.starting

    def is_ending(self, worker_id: str) -> bool:
        """Whether a process that was started here is to end, or its worker has left."""
        one = self._all.get(worker_id)
        return one is not None and one.ends

    def views(self) -> Iterator[WorkerView]:
        """The processes that are not among the attached workers: they start, or still hold GPUs.

        Processes that start for another fleet than the stable one are counted by the rollout.
        """
        stable = self._workers.fleets.stable.name
        for one in self._all.values():
            if one.starting and one.revision.name != stable:
                continue
            if one.starting:
                yield WorkerView(one.worker_id, one.pool, Phase.STARTING, one.since)
            elif one.ends and self._workers.by_id(one.worker_id) is None:
                yield WorkerView(one.worker_id, one.pool, Phase.DRAINING, one.since)

    def problem(self, pool: Pool, fleet: Fleet | None = None) -> str:
        """Why workers of this pool did not start lately; empty when all is well."""
        starts = self._starts.get(self._key(pool, fleet))
        return starts.problem if starts is not None else ""

    def waiting(self, pool: Pool, fleet: Fleet | None = None) -> str:
        """Which workers of this pool cannot be started yet, and why; empty when none waits."""
        key = self._key(pool, fleet)
        waiting = [
            one
            for one in self._all.values()
            if (one.pool, one.revision.name) == key and one.starting and one.waits
        ]
        if not waiting:
            return ""
        first, others = waiting[0], len(waiting) - 1
        told = f"worker {first.worker_id} {first.waits}"
        return f"{told}; {others} more wait" if others else told

    def not_before(self, pool: Pool) -> float:
        """When the next process of the stable fleet may be started, by the core's clock."""
        return self._starts[self._key(pool)].not_before

    # ---- What the scaler and a rollout want.

    def start(self, pool: Pool, number: int, now: float, fleet: Fleet | None = None) -> None:
        """Starts processes; after a start that failed one at a time, and not before `not_before`.

        Args:
            pool: the pool that they are for.
            number: how many; 0 or less starts none.
            now: by the core's clock.
            fleet: The fleet that they are for; None: the stable fleet.
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
            self._all[worker_id] = _Launch(worker_id, pool, now, fleet.revision)
            self._num_starting[pool, fleet.name] += 1
            self._emit(ev.StartWorker(worker_id, pool, fleet.revision))

    def give_up_stuck(self, fleet: Fleet, timeout_s: float, now: float) -> None:
        """Ends processes of a fleet that have been starting for longer: these starts failed."""
        for one in self._starting(fleet):
            if now - one.since > timeout_s:
                self._end(one)
                self._lost(one, f"did not come up within {timeout_s:g} s", now)

    def give_up_all(self, fleet: Fleet) -> None:
        """Ends processes of a fleet that have not attached yet."""
        for one in self._starting(fleet):
            self._end(one)

    def give_up(self, worker_id: str) -> None:
        """Ends a process that has not attached yet; does nothing to one that has."""
        one = self._all.get(worker_id)
        if one is not None and one.starting:
            self._end(one)

    # ---- What happens.

    def attached(self, worker_id: str, now: float) -> None:
        """A worker has attached for the first time, and has served no other coordinator."""
        one = self._all.get(worker_id)
        if one is not None and one.attached_at is None:
            self._num_starting[one.pool, one.revision.name] -= one.starting
            one.attached_at = now
            self._stats.cold_started(now - one.since)

    def waits(self, worker_id: str, reason: str) -> None:
        """A process cannot be started yet; with an empty reason nothing keeps it any more."""
        if (one := self._all.get(worker_id)) is not None:
            one.waits = reason

    def moved(self, worker_id: str, pool: Pool) -> None:
        """A worker serves in this pool from now on."""
        one = self._all.get(worker_id)
        # While the process still starts, the worker was a namesake, as in `left`.
        if one is not None and not one.starting:
            one.pool = pool

    def left(self, worker_id: str, reason: str, now: float, *, wanted: bool) -> bool:
        """A worker is out of the cluster: what is left of its process is ended.

        Returns:
            Whether it was started here and was not to leave.
        """
        one = self._all.get(worker_id)
        # While the process still starts, the worker was a namesake that an earlier coordinator had
        # started.
        if one is None or one.ends or one.starting:
            return False
        self._end(one)
        if not wanted:
            self._lost(one, reason, now)
        return not wanted

    def exited(self, event: ev.WorkerExited, now: float) -> bool:
        """A process has ended, or was never there.

        A process that was to end is forgotten once its launcher says that nothing is left of it:
        what it started may outlive it, and hold its GPUs.

        Returns:
            Whether it was started here and was not to end.
        """
        one = self._all.get(event.worker_id)
        if one is None:
            return False
        if one.ends:
            if event.gone:
                del self._all[one.worker_id]
            return False
        # What it may have left behind is to go, and holds its GPUs until then.
        self._end(one)
        loading = event.loading_failure if one.attached_at is None else ""
        self._lost(one, loading or event.reason, now)
        return True

    def settle(self, pool: Pool, now: float, fleet: Fleet | None = None) -> None:
        """Forgets failed starts once a later worker has served for a while, or none is wanted."""
        key = self._key(pool, fleet)
        starts = self._starts[key]
        if not starts.num_failed:
            return
        later = [
            one
            for one in self._all.values()
            if (one.pool, one.revision.name) == key
            and one.since >= starts.failed_at
            and not one.ends
        ]
        stable = any(
            one.attached_at is not None and now - one.attached_at >= _STABLE_S for one in later
        )
        unwanted = not later and now >= starts.not_before + _LONGEST_BACKOFF_S
        if stable or unwanted:
            del self._starts[key]

    def check_integrity(self) -> None:
        """Raises AssertionError when the processes that start are not those counted."""
        starting = (one for one in self._all.values() if one.starting)
        assert +self._num_starting == Counter((one.pool, one.revision.name) for one in starting)

    # ---- Inside.

    def _key(self, pool: Pool, fleet: Fleet | None = None) -> tuple[Pool, str]:
        return pool, (fleet or self._workers.fleets.stable).name

    def _starting(self, fleet: Fleet) -> list[_Launch]:
        name = fleet.name
        return [one for one in self._all.values() if one.starting and one.revision.name == name]

    def _end(self, one: _Launch) -> None:
        self._num_starting[one.pool, one.revision.name] -= one.starting
        one.ends = True
        self._emit(ev.EndWorker(one.worker_id))

    def _lost(self, one: _Launch, reason: str, now: float) -> None:
        if one.attached_at is not None and now - one.attached_at >= _STABLE_S:
            return
        starts = self._starts[one.pool, one.revision.name]
        starts.num_failed += 1
        wait_s = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2 ** (starts.num_failed - 1))
        starts.failed_at, starts.not_before = now, now + wait_s
        starts.problem = f"worker {one.worker_id} {reason}"
        self._stats.num_failed_starts += 1
