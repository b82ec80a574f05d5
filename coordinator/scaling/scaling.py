"""The sizes that the pools are to have: by the autoscaler, by hand, and what was decided and why.

Part of the core: no I/O, no clock. What is to happen to attached workers (drains, flips) it hands
to the core; processes it starts and gives up by itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.coordinator.core import events as ev
from baton.coordinator.core.request import RequestKey, WorkerKey
from baton.coordinator.core.timers import Timers
from baton.coordinator.core.workers import Worker, WorkerRegistry
from baton.coordinator.rollouts.revision import Revision
from baton.coordinator.routing.load_index import POOL_OF, Pool
from baton.coordinator.scaling.autoscale.numbers import numbers
from baton.coordinator.scaling.autoscale.observer import Observer
from baton.coordinator.scaling.autoscale.policy import Autoscaler, Policy
from baton.coordinator.scaling.autoscale.settings import ScalingSettings
from baton.coordinator.scaling.autoscale.sizing import POOLS
from baton.coordinator.scaling.autoscale.types import (
    Drain,
    Flip,
    Observation,
    Phase,
    PoolDecision,
    Targets,
    Want,
)
from baton.coordinator.scaling.launches import Launches
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime.errors import BatonError, FailedPrecondition

SCALING: WorkerKey = ("", 1)
"""The timer of the next decision; no worker has this key."""

# Between two decisions, where something that happened asks for one.
_SOONEST_S = 0.2
# Of a pool.
_MAX_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Remembered:
    """A decision on a pool, and the same one again and again until `at`, with the last numbers."""

    since: float
    at: float
    decision: PoolDecision
    numbers: Mapping[str, float]


class Scaler:
    """Owns the sizes of the pools.

    A size that was set by hand holds: the pool is kept at it, whatever its load, until autoscaling
    is switched on (again). With autoscaling off every pool has such a size.

    Args:
        settings: to begin with; `policy` has its own limits and targets.
        emit: takes effects.
        policy: what decides; the autoscaler unless told.
        stable: the revision that workers are started as.

    Attributes:
        launches: the processes that were started.
        active: whether there is anything that starts workers; until then nothing is decided.
        autoscale: whether pools size themselves.
        decisions: by pool, oldest first.
    """

    def __init__(
        self,
        settings: ScalingSettings,
        workers: WorkerRegistry,
        observer: Observer,
        stats: CoreStats,
        timers: Timers[RequestKey | WorkerKey],
        emit: Callable[[ev.Effect], None],
        policy: Policy | None = None,
        stable: Revision | None = None,
    ) -> None:
        self._workers, self._observer, self._stats = workers, observer, stats
        self._timers, self._emit = timers, emit
        self._policy = policy or Autoscaler(settings.config)
        # Without the sizes that are held.
        self._config = self._policy.config
        self.launches = Launches(workers, stats, emit, stable or Revision())
        self.active, self.autoscale = False, settings.autoscale
        self.decisions: dict[Pool, deque[Remembered]] = {
            pool: deque(maxlen=_MAX_REMEMBERED) for pool in POOLS
        }
        self._by_hand: dict[Pool, int] = {}
        # When each was set.
        self._by_hand_at: dict[Pool, float] = {}
        # That workers of a rollout, or of revisions that leave, have.
        self._reserved_gpus = 0
        # Of workers started here: what pools keep without autoscaling; with it, as decided last.
        self._sizes = dict.fromkeys(POOLS, 0)
        self._seen: Observation | None = None
        self._decided_at = self._due = float("-inf")
        self._asleep = False

    # ---- What others may ask.

    @property
    def num_timers(self) -> int:
        return int(self.active)

    @property
    def targets(self) -> Mapping[str, Targets]:
        """By lane."""
        return dict(self._config.targets)

    def limits(self, pool: Pool) -> tuple[int, int]:
        """The least and the most workers that a pool may have."""
        limits = self._config.limits(pool)
        return limits.floor, limits.ceiling

    def by_hand(self, pool: Pool) -> int | None:
        """The size that an operator has set and autoscaling does not touch; None: there is none."""
        return self._by_hand.get(pool)

    def desired(self, pool: Pool) -> int:
        """How many workers the pool is to have; 0 where nothing starts any."""
        held = self._held(pool)
        if not self.active or held is not None:
            return held or 0
        past = self.decisions[pool]
        return past[-1].decision.target if past else self._sizes[pool]

    def wakes(self, pool: Pool) -> bool:
        """Whether a request that finds the pool empty makes it start a worker."""
        limits = self._config.limits(pool)
        return (
            self.active
            and self._held(pool) is None
            # Of a pool that is never to be empty it tells that something is wrong.
            and limits.floor == 0
            and limits.ceiling > 0
            and not self.launches.problem(pool)
        )

    @property
    def start_timeout_s(self) -> float:
        return self._config.start_timeout_s

    @property
    def cold_start_s(self) -> float:
        return self._config.cold_start_s

    @property
    def max_gpus(self) -> int | None:
        """Of all workers together; None: no limit."""
        return self._config.max_gpus

    def gpus(self, sizes: Mapping[Pool, int], revision: Revision | None = None) -> int:
        """What so many workers have; of the stable revision unless told."""
        revision = revision or self.launches.stable
        return sum(
            revision.num_gpus(self._config.limits(pool).gpus) * number
            for pool, number in sizes.items()
        )

    def gpus_of(self, workers: Iterable[Worker]) -> int:
        """What these have, of whatever revision they are."""
        return sum(
            self._gpus_of(one.id, POOL_OF[one.role]) for one in workers if one.role in POOL_OF
        )

    def error(self) -> BatonError | None:
        """Why pools have no sizes here; None when they have."""
        if self.active:
            return None
        return FailedPrecondition(
            "this coordinator starts no workers, so its pools are as large as the workers that "
            "attach: start them with `baton worker --role ROLE --coordinator HOST:PORT`, end them "
            "with `baton drain WORKER`, or run `baton up`, which starts its own"
        )

    def scale_error(self, pool: Pool, num_workers: int) -> BatonError | None:
        """Why a pool cannot be set to this size; None when it can."""
        floor, ceiling = self.limits(pool)
        if (refused := self.error()) is not None:
            return refused
        if floor <= num_workers <= ceiling:
            return None
        return FailedPrecondition(
            f"workers is {num_workers}; scaling.{pool.value} allows {floor} to {ceiling} "
            "(min_workers, max_workers)"
        )

    def flip_error(self, worker_id: str, pool: Pool, into: Pool) -> BatonError | None:
        """Why a worker of `pool` cannot go `into` the other, as far as their limits go."""
        if not self.active:
            return None
        floor, ceiling = self.limits(pool)[0], self.limits(into)[1]
        if self._counts(worker_id, pool) and self.desired(pool) - 1 < floor:
            return FailedPrecondition(f"{pool.value} would have less than its {floor} workers")
        if self._counts(worker_id, into) and self.desired(into) + 1 > ceiling:
            return FailedPrecondition(f"{into.value} would have more than its {ceiling} workers")
        return None

    # ---- What happens.

    def begin(self, sizes: Mapping[Pool, int], now: float) -> None:
        """Workers can be started: those that the pools begin with are."""
        self.active = True
        self._sizes.update(sizes)
        self._hold()
        present = Counter(view.pool for view in self._observe(now).workers)
        for pool in POOLS:
            self.launches.start(pool, sizes[pool] - present[pool], now)
        self._set_timer(now)

    def stop(self) -> None:
        """Nothing is decided any more."""
        self.active = False
        self._timers.cancel(SCALING)

    def scale(self, pool: Pool, num_workers: int, now: float) -> None:
        """A size by hand."""
        self._by_hand[pool], self._by_hand_at[pool] = num_workers, now
        self._hold()
        self.soon(now)

    def set_autoscale(self, enabled: bool, now: float) -> None:
        """Switched on, it takes over from sizes by hand; off, the pools stay as they are to be."""
        self.autoscale = enabled
        if enabled:
            self._by_hand.clear()
        self._hold()
        self.soon(now)

    def set_targets(self, targets: Mapping[str, Targets], now: float) -> None:
        changed = {**self.targets, **targets}
        self._config = replace(self._config, targets=tuple(changed.items()))
        self._hold()
        self.soon(now)

    def flipped(self, worker_id: str, pool: Pool, into: Pool) -> None:
        """An operator moves a worker: sizes that are held, and count it, move with it."""
        self._move_sizes(worker_id, pool, into, float("inf"))

    def not_flipped(self, worker_id: str, pool: Pool, into: Pool, since: float) -> None:
        """It stays after all: sizes move back, but for those that were set by hand since."""
        self._move_sizes(worker_id, into, pool, since)

    def reserve(self, num_gpus: int) -> None:
        """So many are other revisions', and not the pools' to grow into."""
        if num_gpus != self._reserved_gpus:
            self._reserved_gpus = num_gpus
            self._hold()

    def promoted(self, revision: Revision, now: float) -> None:
        """The pools are of this revision from now on, and of the sizes that they were to have."""
        self.launches.stable = revision
        # Its workers may have other numbers of GPUs.
        self._hold()
        self.soon(now)

    def left(self, worker_id: str, reason: str, now: float, *, wanted: bool) -> None:
        """A worker is out of the cluster; another follows if it was not to leave."""
        if self.launches.left(worker_id, reason, now, wanted=wanted):
            self.soon(now)

    def exited(self, event: ev.WorkerExited, now: float) -> None:
        """A process has ended; another follows if it was not to."""
        if self.launches.exited(event, now):
            self.soon(now)

    def waits(self, event: ev.WorkerWaits, now: float) -> None:
        """A process cannot be started yet, or no longer waits; told with the next decision."""
        self.launches.waits(event.worker_id, event.reason)
        self.soon(now)

    def arrived(self, now: float) -> None:
        """A request has come."""
        if self._asleep:
            self.soon(now)

    def soon(self, now: float) -> None:
        """Decides as soon as may be."""
        if self.active:
            self._set_timer(min(self._due, max(now, self._decided_at + _SOONEST_S)))

    # ---- Decisions.

    def decide(self, now: float) -> list[Drain | Flip]:
        """Decides, now, and sets the timer of the next decision.

        Returns:
            What is to happen to attached workers.
        """
        span_s, self._decided_at = now - self._decided_at, now
        self._set_timer(now + self._policy.interval_s)
        observation = self._observe(now)
        decision = self._policy.decide(observation, now)
        found: list[Drain | Flip] = []
        views = {view.worker_id: view for view in observation.workers}
        present = Counter(
            view.pool for view in observation.workers if view.phase is not Phase.DRAINING
        )
        for action in decision.actions:
            if isinstance(action, Want):
                self._start(action.pool, action.num_workers - present[action.pool], now)
                continue
            view = views.get(action.worker_id)
            if view is None:
                continue
            present[view.pool] -= 1
            if isinstance(action, Flip):
                present[action.to] += 1
                self._stats.scaled(action.to.value, "flip")
            if self.launches.is_starting(action.worker_id):
                self.launches.give_up(action.worker_id)
            else:
                found.append(action)
        decision = replace(
            decision,
            prefill=self._explained(decision.prefill, now),
            decode=self._explained(decision.decode, now),
        )
        guests = Counter(
            view.pool
            for view in observation.workers
            if view.stays and view.phase is not Phase.DRAINING
        )
        for one in (decision.prefill, decision.decode):
            found_numbers = numbers(observation, self._seen, span_s, one.pool, self._config)
            self._remember(one, found_numbers, now)
            if self.autoscale:
                self._sizes[one.pool] = max(0, one.target - guests[one.pool])
        self._seen = observation
        self._asleep = any(one.target == 0 for one in (decision.prefill, decision.decode))
        self._emit(ev.Decided(decision))
        return found

    # ---- Inside.

    def _held(self, pool: Pool) -> int | None:
        """The size that the load does not change; None: it does."""
        size = self._by_hand.get(pool)
        return size if size is not None or self.autoscale else self._sizes[pool]

    def _hold(self) -> None:
        """Tells the policy of sizes that are held: they are limits that leave no choice."""
        limits = {}
        for pool in POOLS:
            held, one = self._held(pool), self._config.limits(pool)
            one = replace(one, gpus=self.launches.stable.num_gpus(one.gpus))
            limits[pool] = one if held is None else replace(one, floor=held, ceiling=held)
        self._policy.config = replace(
            self._config,
            prefill=limits[Pool.PREFILL],
            decode=limits[Pool.DECODE],
            max_gpus=None
            if self._config.max_gpus is None
            else max(0, self._config.max_gpus - self._reserved_gpus),
            flip=self._config.flip and self.autoscale,
        )

    def _move_sizes(self, worker_id: str, pool: Pool, into: Pool, until: float) -> None:
        """One less and one more; those that were set by hand before `until`."""
        for one, change in ((pool, -1), (into, 1)):
            if one in self._by_hand and self._by_hand_at[one] < until:
                self._by_hand[one] = max(0, self._by_hand[one] + change)
            if self._is_ours(worker_id):
                self._sizes[one] = max(0, self._sizes[one] + change)
        self._hold()

    def _set_timer(self, at: float) -> None:
        self._due = at
        self._timers.set(SCALING, at)

    def _observe(self, now: float) -> Observation:
        """Workers that were started elsewhere count where the load or an operator sizes a pool.

        They are nobody's to drain; a pool that keeps its configured size has them beside it.
        """
        observation = self._observer.observe(self._policy.config, now, self.launches.views())
        found = tuple(
            replace(
                view,
                stays=not self._is_ours(view.worker_id),
                gpus=self._gpus_of(view.worker_id, view.pool),
            )
            for view in observation.workers
            if self._counts(view.worker_id, view.pool)
        )
        return replace(observation, workers=found)

    def _gpus_of(self, worker_id: str, pool: Pool) -> int:
        """By what it was started as; of one that was started elsewhere by what it says."""
        configured, revision = self._config.limits(pool).gpus, self.launches.revision_of(worker_id)
        if revision is not None:
            return revision.num_gpus(configured)
        worker = self._workers.by_id(worker_id)
        return (worker.hello.fingerprint.tp_size if worker is not None else 0) or configured

    def _is_ours(self, worker_id: str) -> bool:
        return self.launches.has(worker_id)

    def _counts(self, worker_id: str, pool: Pool) -> bool:
        """Whether a worker in this pool is one of those that its size is about."""
        return self._is_ours(worker_id) or self.autoscale or pool in self._by_hand

    def _start(self, pool: Pool, number: int, now: float) -> None:
        """Starts workers; after starts that failed, when it is time to."""
        if number <= 0:
            return
        self.launches.start(pool, number, now)
        if now < (again_at := self.launches.not_before(pool)):
            self._set_timer(min(self._due, again_at))

    def _explained(self, decision: PoolDecision, now: float) -> PoolDecision:
        """With what this pool is held at, and what keeps its workers from starting."""
        pool, reason, held = decision.pool, decision.reason, self._held(decision.pool)
        if held is not None and pool in self._by_hand and self.autoscale:
            reason = f"held at {held}, set by hand, until `baton autoscale on`; {reason}"
        elif held is not None:
            reason = f"autoscaling is off: {held} wanted; {reason}"
        self.launches.settle(pool, now)
        if problem := self.launches.problem(pool):
            wait_s = max(0.0, self.launches.not_before(pool) - now)
            reason += f"; {problem}"
            if decision.target > decision.current and wait_s:
                reason += f"; tried again in {wait_s:.0f} s"
            elif self.launches.num_starting(pool):
                reason += "; tried again"
        if waiting := self.launches.waiting(pool):
            reason += f"; {waiting}"
        return replace(decision, reason=reason)

    def _remember(self, decision: PoolDecision, found: Mapping[str, float], now: float) -> None:
        past = self.decisions[decision.pool]
        if decision.target != decision.current:
            direction = "up" if decision.target > decision.current else "down"
            self._stats.scaled(decision.pool.value, direction)
        same = past and (
            (past[-1].decision.current, past[-1].decision.needed, past[-1].decision.target)
            == (decision.current, decision.needed, decision.target)
        )
        since = past.pop().since if same else now
        past.append(Remembered(since, now, decision, found))
