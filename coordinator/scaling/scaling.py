"""Keeps the pools at their sizes, which the autoscaler decides or an operator sets.

The scaler is part of the core and has no I/O and no clock. It starts and ends worker processes
itself; it returns the drains and flips of attached workers to the core, which carries them out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from baton.coordinator.scaling.autoscale.autoscaler import Autoscaler
from baton.coordinator.scaling.autoscale.members import share_work
from baton.coordinator.scaling.autoscale.numbers import numbers
from baton.coordinator.scaling.autoscale.observer import Observer
from baton.coordinator.scaling.autoscale.policy import Policy
from baton.coordinator.scaling.autoscale.types import Observation, Phase
from baton.coordinator.scaling.decision_log import DecisionLog
from baton.coordinator.scaling.launches import Launches
from baton.coordinator.scaling.pool_sizes import PoolSizes
from baton.coordinator.state import events as ev
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.latency_targets import LatencyTargets
from baton.coordinator.state.pools import POOL_OF, POOLS, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.scaling_config import ScalingConfig, ScalingSettings
from baton.coordinator.state.scaling_decision import Action, Drain, Flip, PoolDecision, SetSize
from baton.coordinator.state.timers import CoreTimer, Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime.counted import counted
from baton.runtime.errors import BatonError, FailedPrecondition
from baton.runtime.kv import kv_fingerprint

# Minimum time between two decisions when an event requests a decision.
_SOONEST_S = 0.2


class Scaler:
    """Owns the sizes of the pools and the worker processes started for them.

    Args:
        settings: Initial settings; a `policy` brings its own initial limits.
        targets: Latency targets of the lanes.
        workers: Attached workers.
        observer: Source of the load that the policy decides by.
        stats: Counters of scaling decisions.
        clock: Time of the event that the core handles.
        timers: Timers of the core.
        emit: Callback for effects.
        policy: Scaling policy; None: the autoscaler. In simulations, a policy may have other
            targets than requests have, until `targets` change.

    Attributes:
        launches: processes that this coordinator has started.
        active: whether a launcher exists; without one the scaler decides nothing.
        has_stopped: whether it was active and decides nothing any more.
        decisions: log of the decisions on each pool.
    """

    def __init__(
        self,
        settings: ScalingSettings,
        targets: LatencyTargets,
        workers: WorkerRegistry,
        observer: Observer,
        stats: CoreStats,
        clock: CoreClock,
        timers: Timers,
        emit: Callable[[ev.Effect], None],
        policy: Policy | None = None,
    ) -> None:
        self._workers, self._observer, self._stats = workers, observer, stats
        self._clock, self._timers, self._emit = clock, timers, emit
        self._targets = targets
        self._policy = policy or Autoscaler(settings.config.with_targets(targets.by_lane))
        # Configured limits; `_policy_config` adds the fixed sizes.
        self._config = self._policy.config
        self.launches = Launches(workers, stats, emit)
        self.active = self.has_stopped = False
        self._sizes = PoolSizes(autoscale=settings.autoscale)
        self.decisions = DecisionLog()
        # GPUs used by workers of a rollout or of a retiring fleet.
        self._reserved_gpus = 0
        # Observation of the last decision.
        self._seen: Observation | None = None
        self._decided_at = self._due = float("-inf")
        # Whether the last decision left no worker for some work; the next request then requests a
        # decision.
        self._lacks_workers = False

    # ---- Queries.

    @property
    def num_timers(self) -> int:
        """Number of timers set: 1 while the scaler is active."""
        return int(self.active)

    @property
    def autoscale(self) -> bool:
        """Whether the load sizes the pools that have no size set by an operator."""
        return self._sizes.autoscale

    def limits(self, pool: Pool) -> tuple[int, int]:
        """Minimum and maximum number of workers in a pool."""
        limits = self._config.limits(pool)
        return limits.floor, limits.ceiling

    def by_hand(self, pool: Pool) -> int | None:
        """The size set by an operator, which autoscaling does not change; None: no size is set."""
        return self._sizes.by_hand(pool)

    def sizes_itself(self, pool: Pool) -> bool:
        """Whether the load sizes the pool."""
        return self.active and self._sizes.fixed(pool) is None

    def desired(self, pool: Pool) -> int:
        """Desired number of workers in the pool; 0 if the scaler is not active."""
        fixed = self._sizes.fixed(pool)
        if not self.active or fixed is not None:
            return fixed or 0
        past = self.decisions[pool]
        return past[-1].decision.target if past else self._sizes.started(pool)

    def lacking_gpus(self, pool: Pool) -> int:
        """Number of workers that the pool should get, but that max_gpus has no room for."""
        past = self.decisions[pool] if self.active else ()
        return past[-1].decision.lacking_gpus if past else 0

    def starts_on_request(self, pool: Pool) -> bool:
        """Whether a request that finds the pool empty makes it start a worker."""
        limits = self._config.limits(pool)
        return (
            self.active
            and self._sizes.fixed(pool) is None
            # A pool with a minimum size is empty only after it lost its workers to a failure.
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
        """Maximum number of GPUs of all workers together; None: no limit."""
        return self._config.max_gpus

    def gpus(self, sizes: Mapping[Pool, int], revision: Revision | None = None) -> int:
        """Number of GPUs that pools of these sizes use.

        Args:
            sizes: number of workers by pool.
            revision: launch configuration of the workers; None: that of the stable fleet.
        """
        revision = revision or self._workers.fleets.stable.revision
        return sum(self._num_gpus(revision, pool) * number for pool, number in sizes.items())

    def gpus_of(self, workers: Iterable[Worker]) -> int:
        """Number of GPUs that these workers of any fleet use."""
        return sum(
            self._gpus_of(one.id, POOL_OF[one.role]) for one in workers if one.role in POOL_OF
        )

    def num_startable(self, pool: Pool, revision: Revision) -> float:
        """Number of workers that the GPUs of max_gpus suffice for now; infinite without a limit.

        A process that was started here holds its GPUs until it is gone, also while it drains.
        """
        if self.max_gpus is None:
            return math.inf
        held = sum(self._num_gpus(*one) for one in self.launches.revisions())
        return max(0, self.max_gpus - held) // self._num_gpus(revision, pool)

    def gpus_starting(self, fleet: Fleet) -> int:
        """Number of GPUs that a fleet's starting processes will use."""
        return sum(self._gpus_of(*one) for one in self.launches.starting(fleet))

    def counts(self, worker_id: str, pool: Pool) -> bool:
        """Whether a worker counts towards the size of this pool."""
        by_hand = self._sizes.by_hand(pool) is not None
        return self.launches.has(worker_id) or self.autoscale or by_hand

    def error(self) -> BatonError | None:
        """Why this coordinator does not size the pools; None if it does."""
        if self.active:
            return None
        return FailedPrecondition(
            "this coordinator starts no workers, so its pools are as large as the workers that "
            "attach: start them with `baton worker --role ROLE --coordinator HOST:PORT`, end them "
            "with `baton drain WORKER`, or run `baton up`, which starts its own"
        )

    def scale_error(self, pool: Pool, num_workers: int) -> BatonError | None:
        """Why a pool cannot be set to this size; None if it can."""
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
        """Why the pools' limits prevent a flip from `pool` to `into`; None if they allow it."""
        if not self.active:
            return None
        floor, ceiling = self.limits(pool)[0], self.limits(into)[1]
        if self.counts(worker_id, pool) and self.desired(pool) - 1 < floor:
            return FailedPrecondition(
                f"{pool.value} would have less than its {counted(floor, 'worker')}"
            )
        if self.counts(worker_id, into) and self.desired(into) + 1 > ceiling:
            return FailedPrecondition(
                f"{into.value} would have more than its {counted(ceiling, 'worker')}"
            )
        return None

    # ---- Events.

    def begin(self, sizes: Mapping[Pool, int]) -> None:
        """Activates the scaler and starts the workers that the initial sizes require."""
        self.active = True
        self._sizes.begin(sizes)
        present = Counter(view.pool for view in self._observe(self._policy_config()).workers)
        for pool in POOLS:
            self.launches.start(pool, sizes[pool] - present[pool], self._clock.now)
        self._set_timer(self._clock.now)

    def stop(self) -> None:
        """Stops making decisions."""
        self.has_stopped = self.has_stopped or self.active
        self.active = False
        self._timers.cancel(CoreTimer.SCALING)

    def scale(self, pool: Pool, num_workers: int) -> None:
        """Sets the size of a pool on behalf of an operator."""
        self._sizes.set_by_hand(pool, num_workers, self._clock.now)
        self.soon()

    def set_autoscale(self, enabled: bool) -> None:
        """Switches autoscaling on or off for an operator; see PoolSizes.set_autoscale."""
        self._sizes.set_autoscale(enabled)
        self.soon()

    def targets_changed(self) -> None:
        """Follows a change of the latency targets."""
        self._config = self._config.with_targets(self._targets.by_lane)
        self.soon()

    def flipped(self, worker_id: str, pool: Pool, into: Pool) -> None:
        """Adjusts the fixed sizes for a worker that an operator moves to the other pool."""
        self._move_sizes(worker_id, pool, into, float("inf"))

    def not_flipped(self, worker_id: str, pool: Pool, into: Pool, since: float) -> None:
        """Reverts `flipped` for a worker that stays, except for sizes set after `since`."""
        self._move_sizes(worker_id, into, pool, since)

    def reserve(self, num_gpus: int) -> None:
        """Sets the number of GPUs that the pools must leave to workers of other fleets."""
        self._reserved_gpus = num_gpus

    def promoted(self) -> None:
        """Handles a change of the stable fleet; the pools keep their sizes."""
        self.soon()

    def left(self, worker_id: str, reason: str, *, wanted: bool) -> None:
        """Handles a worker that has left; it is replaced if it left without being told to."""
        if self.launches.left(worker_id, reason, self._clock.now, wanted=wanted):
            self.soon()

    def exited(self, event: ev.WorkerExited) -> None:
        """Handles the end of a process; it is replaced if it ended without being told to."""
        if self.launches.exited(event, self._clock.now):
            self.soon()

    def waits(self, event: ev.WorkerWaits) -> None:
        """Records that a process cannot be started yet or can be again; shown in decisions."""
        self.launches.waits(event.worker_id, event.reason)
        self.soon()

    def arrived(self) -> None:
        """Requests a decision for a new request if a pool is empty."""
        if self._lacks_workers:
            self.soon()

    def soon(self) -> None:
        """Requests a decision as soon as allowed (_SOONEST_S after the last decision)."""
        if self.active:
            self._set_timer(min(self._due, max(self._clock.now, self._decided_at + _SOONEST_S)))

    # ---- Decisions.

    def decide(self) -> list[Drain | Flip]:
        """Decides now, starts processes, and sets the timer of the next decision.

        Returns:
            Drains and flips of attached workers, which the caller must carry out.
        """
        now = self._clock.now
        span_s, self._decided_at = now - self._decided_at, now
        self._set_timer(now + self._policy.interval_s)
        # Before the decision, so that a stuck process no longer counts and gets replaced.
        self.launches.give_up_stuck(self._workers.fleets.stable, self.start_timeout_s, now)
        config = self._policy_config()
        observation = self._observe(config)
        decision = self._policy.decide(observation, config, now)
        of_attached = self._apply(decision.actions, observation)
        decision = replace(
            decision,
            prefill=self._explained(decision.prefill),
            decode=self._explained(decision.decode),
        )
        # Workers that were not started by this coordinator and that it does not drain.
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
        empty = [one.target == 0 for one in (decision.prefill, decision.decode)]
        # A worker of either pool serves requests where the pools share their work.
        self._lacks_workers = all(empty) if share_work(observation, config) else any(empty)
        self._emit(ev.Decided(decision))
        return of_attached

    # ---- Private methods

    def _apply(self, actions: Iterable[Action], observation: Observation) -> list[Drain | Flip]:
        """Starts and ends processes; returns the drains and flips of attached workers."""
        of_attached: list[Drain | Flip] = []
        views = {view.worker_id: view for view in observation.workers}
        present = Counter(
            view.pool for view in observation.workers if view.phase is not Phase.DRAINING
        )
        for action in actions:
            if isinstance(action, SetSize):
                self._start(action.pool, action.num_workers - present[action.pool])
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

    def _policy_config(self) -> ScalingConfig:
        """Returns the limits that the policy gets: fixed sizes are equal lower and upper limits."""
        config, limits = self._config, {}
        stable = self._workers.fleets.stable.revision
        for pool in POOLS:
            fixed, one = self._sizes.fixed(pool), config.limits(pool)
            one = replace(one, gpus=self._num_gpus(stable, pool))
            limits[pool] = one if fixed is None else replace(one, floor=fixed, ceiling=fixed)
        max_gpus = config.max_gpus
        if max_gpus is not None:
            max_gpus = max(0, max_gpus - self._reserved_gpus)
        return replace(
            config,
            prefill=limits[Pool.PREFILL],
            decode=limits[Pool.DECODE],
            max_gpus=max_gpus,
            flip=config.flip and self.autoscale,
        )

    def _move_sizes(self, worker_id: str, pool: Pool, into: Pool, before: float) -> None:
        self._sizes.move(pool, into, before, started_here=self.launches.has(worker_id))

    def _set_timer(self, at: float) -> None:
        self._due = at
        self._timers.set(CoreTimer.SCALING, at)

    def _observe(self, config: ScalingConfig) -> Observation:
        """Returns the observation that the policy decides by.

        Workers that another process started count if the load or an operator sizes their pool; the
        scaler never drains them. They do not count in a pool that keeps its configured size.
        """
        observation = self._observer.observe(config, self._clock.now, self.launches.views())
        found = tuple(
            replace(
                view,
                stays=not self.launches.has(view.worker_id),
                gpus=self._gpus_of(view.worker_id, view.pool),
            )
            for view in observation.workers
            if self.counts(view.worker_id, view.pool)
        )
        return replace(observation, workers=found)

    def _gpus_of(self, worker_id: str, pool: Pool) -> int:
        """Number of a worker's GPUs: as started by this coordinator, else as the worker reports."""
        if (started_as := self.launches.started_as(worker_id)) is not None:
            return self._num_gpus(*started_as)
        worker = self._workers.by_id(worker_id)
        reported = kv_fingerprint.num_ranks(worker.hello.fingerprint) if worker is not None else 0
        return reported or self._config.limits(pool).gpus

    def _num_gpus(self, revision: Revision, pool: Pool) -> int:
        """Number of GPUs of a worker of a revision."""
        limits = self._config.limits(pool)
        return revision.num_gpus(limits.gpus, limits.stages)

    def _start(self, pool: Pool, number: int) -> None:
        """Starts workers; after failed starts, sets the timer for the next attempt."""
        now = self._clock.now
        if number <= 0:
            return
        self.launches.start(pool, number, now)
        if now < (again_at := self.launches.not_before(pool)):
            self._set_timer(min(self._due, again_at))

    def _explained(self, decision: PoolDecision) -> PoolDecision:
        """Adds the fixed size and the problems of starting workers to a decision's reason."""
        now = self._clock.now
        pool, reason = decision.pool, decision.reason
        fixed = self._sizes.fixed(pool)
        if fixed is not None and self.autoscale:
            reason = f"held at {fixed}, set by hand, until `baton autoscale on`; {reason}"
        elif fixed is not None:
            reason = f"autoscaling is off: {fixed} wanted; {reason}"
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
