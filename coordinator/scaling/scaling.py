"""Keeps the pools at their sizes: those that the autoscaler decides, and those set by hand.

Part of the core: no I/O, no clock. What is to happen to attached workers (drains, flips) it hands
to the core; processes it starts and gives up by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from baton.coordinator.scaling.autoscale.numbers import numbers
from baton.coordinator.scaling.autoscale.observer import Observer
from baton.coordinator.scaling.autoscale.policy import Autoscaler, Policy
from baton.coordinator.scaling.autoscale.sizing import POOLS
from baton.coordinator.scaling.autoscale.types import Observation, Phase
from baton.coordinator.scaling.decision_log import DecisionLog
from baton.coordinator.scaling.launches import Launches
from baton.coordinator.scaling.pool_sizes import PoolSizes
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.scaling_config import ScalingSettings, Targets
from baton.coordinator.state.scaling_decision import Action, Drain, Flip, PoolDecision, Want
from baton.coordinator.state.timers import CoreTimer, Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime.errors import BatonError, FailedPrecondition

# Between two decisions, where something that happened asks for one.
_SOONEST_S = 0.2


class Scaler:
    """Owns the sizes of the pools, and the processes that make them so.

    Args:
        settings: to begin with; `policy` has its own limits and targets.
        workers: attached ones.
        observer: tells the load that the policy decides by.
        stats: counts what was scaled.
        timers: the core's.
        emit: takes effects.
        policy: what decides; the autoscaler unless told.

    Attributes:
        launches: the processes that were started.
        active: whether there is anything that starts workers; until then nothing is decided.
        decisions: what was decided on each pool.
    """

    def __init__(
        self,
        settings: ScalingSettings,
        workers: WorkerRegistry,
        observer: Observer,
        stats: CoreStats,
        timers: Timers,
        emit: Callable[[ev.Effect], None],
        policy: Policy | None = None,
    ) -> None:
        self._workers, self._observer, self._stats = workers, observer, stats
        self._timers, self._emit = timers, emit
        self._policy = policy or Autoscaler(settings.config)
        # As configured, whatever sizes are held; the policy's own has those for limits.
        self._config = self._policy.config
        self.launches = Launches(workers, stats, emit)
        self.active = False
        self._sizes = PoolSizes(autoscale=settings.autoscale)
        self.decisions = DecisionLog()
        # GPUs that workers of a rollout or of a retiring fleet have.
        self._reserved_gpus = 0
        # What the last decision saw.
        self._seen: Observation | None = None
        self._decided_at = self._due = float("-inf")
        # Whether a pool was to be empty at the last decision: a request that comes wakes it.
        self._asleep = False

    # ---- What others may ask.

    @property
    def num_timers(self) -> int:
        """Timers set: one while anything is decided."""
        return int(self.active)

    @property
    def autoscale(self) -> bool:
        """Whether pools size themselves, but for those with a size by hand."""
        return self._sizes.autoscale

    @property
    def targets(self) -> Mapping[str, Targets]:
        """What pools are sized for, by lane."""
        return dict(self._config.targets)

    def limits(self, pool: Pool) -> tuple[int, int]:
        """The least and the most workers that a pool may have."""
        limits = self._config.limits(pool)
        return limits.floor, limits.ceiling

    def by_hand(self, pool: Pool) -> int | None:
        """The size that an operator has set and autoscaling does not touch; None: there is none."""
        return self._sizes.by_hand(pool)

    def desired(self, pool: Pool) -> int:
        """How many workers the pool is to have; 0 where nothing starts any."""
        held = self._sizes.held(pool)
        if not self.active or held is not None:
            return held or 0
        past = self.decisions[pool]
        return past[-1].decision.target if past else self._sizes.started(pool)

    def wakes(self, pool: Pool) -> bool:
        """Whether a request that finds the pool empty makes it start a worker."""
        limits = self._config.limits(pool)
        return (
            self.active
            and self._sizes.held(pool) is None
            # One that is never to be empty, and is, has lost its workers: something is wrong.
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
        """How many GPUs all workers together may have; None: no limit."""
        return self._config.max_gpus

    def gpus(self, sizes: Mapping[Pool, int], revision: Revision | None = None) -> int:
        """How many GPUs pools of these sizes have.

        Args:
            sizes: numbers of workers, by pool.
            revision: Launch configuration of the workers; None: that of the stable fleet.
        """
        revision = revision or self._workers.fleets.stable.revision
        return sum(
            revision.num_gpus(self._config.limits(pool).gpus) * number
            for pool, number in sizes.items()
        )

    def gpus_of(self, workers: Iterable[Worker]) -> int:
        """How many GPUs these workers of any fleet have."""
        return sum(
            self._gpus_of(one.id, POOL_OF[one.role]) for one in workers if one.role in POOL_OF
        )

    def gpus_starting(self, fleet: Fleet) -> int:
        """How many GPUs the processes will have that start for a fleet."""
        return sum(self._gpus_of(*one) for one in self.launches.starting(fleet))

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
        """Why the pools' limits keep a worker of `pool` out of `into`; None when they do not."""
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
        """Workers can be started from now on: starts those that the pools begin with."""
        self.active = True
        self._sizes.begin(sizes)
        self._limit_policy()
        present = Counter(view.pool for view in self._observe(now).workers)
        for pool in POOLS:
            self.launches.start(pool, sizes[pool] - present[pool], now)
        self._set_timer(now)

    def stop(self) -> None:
        """Decides nothing any more."""
        self.active = False
        self._timers.cancel(CoreTimer.SCALING)

    def scale(self, pool: Pool, num_workers: int, now: float) -> None:
        """An operator sets the size of a pool."""
        self._sizes.set_by_hand(pool, num_workers, now)
        self._limit_policy()
        self.soon(now)

    def set_autoscale(self, enabled: bool, now: float) -> None:
        """An operator switches autoscaling on or off; see PoolSizes.set_autoscale."""
        self._sizes.set_autoscale(enabled)
        self._limit_policy()
        self.soon(now)

    def set_targets(self, targets: Mapping[str, Targets], now: float) -> None:
        """An operator changes the targets of some lanes."""
        changed = {**self.targets, **targets}
        self._config = replace(self._config, targets=tuple(changed.items()))
        self._limit_policy()
        self.soon(now)

    def flipped(self, worker_id: str, pool: Pool, into: Pool) -> None:
        """An operator moves a worker: sizes that are held, and count it, follow."""
        self._move_sizes(worker_id, pool, into, float("inf"))

    def not_flipped(self, worker_id: str, pool: Pool, into: Pool, since: float) -> None:
        """The worker stays after all: sizes go back, but for those set by hand since then."""
        self._move_sizes(worker_id, into, pool, since)

    def reserve(self, num_gpus: int) -> None:
        """Keeps so many GPUs from the pools: workers of other fleets have them."""
        if num_gpus != self._reserved_gpus:
            self._reserved_gpus = num_gpus
            self._limit_policy()

    def promoted(self, now: float) -> None:
        """Another fleet has become the stable one: the pools keep their sizes."""
        # Its workers may have other numbers of GPUs.
        self._limit_policy()
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
        """A request has come: a pool that sleeps is to wake."""
        if self._asleep:
            self.soon(now)

    def soon(self, now: float) -> None:
        """Has the next decision made as soon as may be."""
        if self.active:
            self._set_timer(min(self._due, max(now, self._decided_at + _SOONEST_S)))

    # ---- Decisions.

    def decide(self, now: float) -> list[Drain | Flip]:
        """Decides now, starts processes, and sets the timer of the next decision.

        Returns:
            What is to happen to attached workers.
        """
        span_s, self._decided_at = now - self._decided_at, now
        self._set_timer(now + self._policy.interval_s)
        # Before it is decided: another is to follow, later where that has failed too.
        self.launches.give_up_stuck(self._workers.fleets.stable, self.start_timeout_s, now)
        observation = self._observe(now)
        decision = self._policy.decide(observation, now)
        of_attached = self._apply(decision.actions, observation, now)
        decision = replace(
            decision,
            prefill=self._explained(decision.prefill, now),
            decode=self._explained(decision.decode, now),
        )
        # Workers that were started elsewhere, and stay.
        num_guests = Counter(
            view.pool
            for view in observation.workers
            if view.stays and view.phase is not Phase.DRAINING
        )
        for one in (decision.prefill, decision.decode):
            if one.target != one.current:
                self._stats.scaled(one.pool.value, "up" if one.target > one.current else "down")
            seen = numbers(observation, self._seen, span_s, one.pool, self._config)
            self.decisions.add(one, seen, now)
            self._sizes.decided(one.pool, max(0, one.target - num_guests[one.pool]))
        self._seen = observation
        self._asleep = any(one.target == 0 for one in (decision.prefill, decision.decode))
        self._emit(ev.Decided(decision))
        return of_attached

    # ---- Inside.

    def _apply(
        self, actions: Iterable[Action], observation: Observation, now: float
    ) -> list[Drain | Flip]:
        """Starts and gives up processes; returns what is to happen to attached workers."""
        of_attached: list[Drain | Flip] = []
        views = {view.worker_id: view for view in observation.workers}
        present = Counter(
            view.pool for view in observation.workers if view.phase is not Phase.DRAINING
        )
        for action in actions:
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
                of_attached.append(action)
        return of_attached

    def _limit_policy(self) -> None:
        """Tells the policy of sizes that are held: they are limits that leave it no choice."""
        config, limits = self._config, {}
        stable = self._workers.fleets.stable.revision
        for pool in POOLS:
            held, one = self._sizes.held(pool), config.limits(pool)
            one = replace(one, gpus=stable.num_gpus(one.gpus))
            limits[pool] = one if held is None else replace(one, floor=held, ceiling=held)
        max_gpus = config.max_gpus
        if max_gpus is not None:
            max_gpus = max(0, max_gpus - self._reserved_gpus)
        self._policy.config = replace(
            config,
            prefill=limits[Pool.PREFILL],
            decode=limits[Pool.DECODE],
            max_gpus=max_gpus,
            flip=config.flip and self.autoscale,
        )

    def _move_sizes(self, worker_id: str, pool: Pool, into: Pool, before: float) -> None:
        self._sizes.move(pool, into, before, started_here=self.launches.has(worker_id))
        self._limit_policy()

    def _set_timer(self, at: float) -> None:
        self._due = at
        self._timers.set(CoreTimer.SCALING, at)

    def _observe(self, now: float) -> Observation:
        """What the policy is to decide by.

        Workers that were started elsewhere count where the load or an operator sizes a pool, and
        nobody drains them; a pool that keeps its configured size has them beside it.
        """
        observation = self._observer.observe(self._policy.config, now, self.launches.views())
        found = tuple(
            replace(
                view,
                stays=not self.launches.has(view.worker_id),
                gpus=self._gpus_of(view.worker_id, view.pool),
            )
            for view in observation.workers
            if self._counts(view.worker_id, view.pool)
        )
        return replace(observation, workers=found)

    def _gpus_of(self, worker_id: str, pool: Pool) -> int:
        """How many GPUs a worker has: what it was started with; else what it says itself."""
        configured, revision = self._config.limits(pool).gpus, self.launches.revision_of(worker_id)
        if revision is not None:
            return revision.num_gpus(configured)
        worker = self._workers.by_id(worker_id)
        return (worker.hello.fingerprint.tp_size if worker is not None else 0) or configured

    def _counts(self, worker_id: str, pool: Pool) -> bool:
        """Whether a worker in this pool is one of those that the pool's size counts."""
        by_hand = self._sizes.by_hand(pool) is not None
        return self.launches.has(worker_id) or self.autoscale or by_hand

    def _start(self, pool: Pool, number: int, now: float) -> None:
        """Starts workers; where starts have failed, sees to it that it tries again in time."""
        if number <= 0:
            return
        self.launches.start(pool, number, now)
        if now < (again_at := self.launches.not_before(pool)):
            self._set_timer(min(self._due, again_at))

    def _explained(self, decision: PoolDecision, now: float) -> PoolDecision:
        """Adds to a reason what the pool is held at, and what keeps its workers from starting."""
        pool, reason = decision.pool, decision.reason
        held = self._sizes.held(pool)
        if held is not None and self.autoscale:
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
