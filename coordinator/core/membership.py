"""The cluster's members: workers that come, fall silent, stand still, flip, drain and leave."""

from __future__ import annotations

from collections.abc import Callable

from baton.coordinator.core.adoption import Adoption
from baton.coordinator.core.failure_detector import FailureDetector
from baton.coordinator.core.flips import Flips
from baton.coordinator.core.losses import Losses
from baton.coordinator.core.request_lifecycle import RequestLifecycle
from baton.coordinator.routing.latency import LatencyRegistry
from baton.coordinator.routing.placers import Placers
from baton.coordinator.scaling.drains import Drains
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import POOL_OF, ROLE_OF
from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.scaling_decision import Drain
from baton.coordinator.state.timers import Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

# A worker that is stuck for so many times the limit is fenced, so that another can take its place.
_STUCK_FOR_GOOD = 3
# And it is taken to be stuck no sooner than after so many of its longest steps.
_STUCK_STEPS = 4


class Membership:
    """Owns the workers from attaching to leaving: their states, and the timer of their silence.

    Args:
        config: limits and times.
        lifecycle: the requests.
        workers: attached ones.
        placers: choose workers for requests.
        latency: what steps cost.
        adoption: what workers go on with from before a restart.
        scaler: the sizes of the pools.
        timers: the core's; each worker has one.
        emit: takes effects.
    """

    def __init__(
        self,
        config: CoreConfig,
        lifecycle: RequestLifecycle,
        workers: WorkerRegistry,
        placers: Placers,
        latency: LatencyRegistry,
        adoption: Adoption,
        scaler: Scaler,
        timers: Timers,
        emit: Callable[[ev.Effect], None],
    ) -> None:
        self._config, self._lifecycle, self._workers, self._placers = (
            config,
            lifecycle,
            workers,
            placers,
        )
        self._latency, self._adoption, self._scaler = latency, adoption, scaler
        self._timers, self._emit = timers, emit
        self._losses = Losses(lifecycle, workers, placers, latency, adoption, scaler, timers, emit)
        self._drains = Drains(workers, placers, emit)
        self._flips = Flips(lifecycle, workers, placers, scaler, config.scaling.drain_s, emit)
        self._detector = FailureDetector(config)

    def flip_error(
        self, worker: Worker, role: common_pb2.Role.ValueType
    ) -> errors.BatonError | None:
        """Why an operator cannot have a worker change to this role now; None when they can."""
        if worker.role == role:
            return None
        limits = self._scaler.flip_error(worker.id, POOL_OF[worker.role], POOL_OF[role])
        return self._flips.error(worker, role) or limits

    def advance(self) -> None:
        """Lets draining workers leave, and flipping ones change roles, once they are idle."""
        if self._drains:
            self._drains.release()
        if self._flips:
            self._flips.advance()

    def attached(self, event: ev.WorkerAttached, now: float) -> Worker | None:
        """Takes in a worker; returns it, or None when it was refused."""
        hello = event.hello
        key = (hello.worker_id, hello.incarnation)
        refusal = self._workers.refusal(hello)
        if refusal is not None:
            self._emit(ev.RefuseWorker(key, refusal))
            return None
        worker = self._workers.by_id(hello.worker_id)
        was_in = (worker.role, worker.fleet) if worker is not None else None
        if worker is not None and worker.key != key:
            replaced = f"was replaced by incarnation {hello.incarnation:016x}"
            # One that was to leave has done so.
            blame = worker.state != cluster_pb2.WORKER_STATE_DRAINING
            self._losses.lose(worker, replaced, now, blame=blame, ended=False)
            worker = None
        if worker is None:
            fleet = self._workers.fleet_of(hello)
            worker = Worker(hello, fleet, hello.role, hello.state, attached_at=now, heard_at=now)
            self._detector.expect(worker)
            self._workers.add(worker)
            if not hello.generation:
                # It has served no coordinator before.
                self._lifecycle.stats.came_up(worker, now)
            if not event.returns:
                self._scaler.launches.attached(worker.id, now)
        else:
            # Nothing leads out of draining; the worker may not have heard of it yet.
            drains = worker.state == cluster_pb2.WORKER_STATE_DRAINING
            worker.state = worker.state if drains else hello.state
            worker.hello, worker.role = hello, hello.role
        if hello.state == cluster_pb2.WORKER_STATE_DRAINING:
            self._drains.said(worker)
        worker.connected, worker.heard_at, worker.progressed_at = True, now, now
        worker.unresponsive, worker.stuck = "", False
        self._flips.heard(worker)
        self._watch(worker, now)
        self._placers.attach(worker)
        if was_in is not None:
            self._losses.left_pool(*was_in, now)
        adopted = self._adoption.attached(worker, hello.running, now, returns=event.returns)
        self._emit(ev.WelcomeWorker(worker.key, worker.role, tuple(adopted)))
        if self._scaler.launches.is_ending(worker.id):
            # It was given up while it started, and came up before it was ended.
            self.drain(worker, self._config.scaling.drain_s, "it was to end before", now)
        self._lifecycle.room_freed()
        return worker

    def hear(self, key: WorkerKey, now: float) -> Worker | None:
        """Notes a sign of life; returns the worker, or None when it is not attached."""
        worker = self._workers.get(key)
        if worker is not None:
            self._detector.heard(worker, now)
            if worker.unresponsive and now - worker.progressed_at < self._may_stand_s(worker):
                self._losses.responds(worker)
        return worker

    def heard(self, event: ev.WorkerHeard, now: float) -> None:
        """A worker gave a sign of life."""
        self.hear(event.worker, now)

    def load(self, event: ev.WorkerLoad, now: float) -> None:
        """A worker reports its load: learns what steps cost, and whether its engine is stuck."""
        worker = self.hear(event.worker, now)
        if worker is None:
            return
        load, worker.load = event.load, event.load
        self._detector.reported(worker)
        if worker.flip is not None:
            self._flips.look(worker, now)
        self._latency.observe(worker, load.steps)
        if worker.role == common_pb2.ROLE_DECODE and load.steps:
            self._lifecycle.stats.recent.at(now).decode_steps(load.steps)
        self._placers.report_kv(worker, load.kv_tokens_used)
        if len(self._lifecycle.lanes):
            self._lifecycle.room_freed()
        is_idle = not (load.num_running or worker.stuck or self._awaits_step(worker))
        if load.num_steps != worker.num_steps or is_idle:
            worker.num_steps, worker.progressed_at, worker.stuck = load.num_steps, now, False
            if worker.unresponsive:
                self._losses.responds(worker)
            return
        stuck_s, limit_s = now - worker.progressed_at, self._may_stand_s(worker)
        if stuck_s >= _STUCK_FOR_GOOD * limit_s:
            self._losses.lose(worker, f"has made no step for {stuck_s:.1f} s", now)
        elif stuck_s >= limit_s:
            # Once its requests are elsewhere only a step shows that its engine goes on.
            worker.stuck = True
            self._losses.suspect(worker, f"has made no step for {stuck_s:.1f} s", now)

    def changed(self, event: ev.WorkerChanged, now: float) -> None:
        """A worker says that its state or role has changed."""
        worker = self.hear(event.worker, now)
        if worker is None:
            return
        change = event.change
        if change.state == cluster_pb2.WORKER_STATE_STOPPED:
            reason = f"stopped: {change.reason}" if change.reason else "stopped"
            self._losses.lose(worker, reason, now, fenced=False, blame=change.failed)
            return
        if change.state == cluster_pb2.WORKER_STATE_DRAINING:
            self._flips.stop(worker)
            self._drains.said(worker)
            if worker.state != cluster_pb2.WORKER_STATE_DRAINING:
                # By itself: another may have to take its place.
                self._scaler.soon(now)
        # Nothing leads out of draining; the worker may not have heard of it yet.
        if change.state and worker.state != cluster_pb2.WORKER_STATE_DRAINING:
            worker.state = change.state
        was_in = worker.role, worker.fleet
        if change.role:
            worker.role = change.role
            self._flips.heard(worker)
        self._placers.refresh(worker)
        self._losses.left_pool(*was_in, now)
        self._lifecycle.room_freed()

    def detached(self, event: ev.WorkerDetached, now: float) -> None:
        """A worker's stream has ended; the worker may be back."""
        worker = self._workers.get(event.worker)
        if worker is not None:
            worker.connected = False
            # Its time to come back begins now. The end of a silent one's stream is no sign of life.
            if not worker.unresponsive:
                worker.heard_at = now
            self._placers.refresh(worker)
            self._watch(worker, now)

    def lost(self, event: ev.WorkerLost, now: float) -> None:
        """A worker is known to be gone."""
        worker = self._workers.by_id(event.worker_id)
        if worker is not None and event.incarnation in (None, worker.hello.incarnation):
            self._losses.lose(worker, event.reason, now)

    def drain_asked(self, event: ev.DrainRequested, now: float) -> None:
        """A worker is to leave; one that has not attached yet is given up."""
        worker = self._workers.by_id(event.worker_id)
        if worker is None:
            self._scaler.launches.give_up(event.worker_id)
        else:
            self.drain(worker, event.timeout_s, event.reason, now)
        # Another may have to take its place.
        self._scaler.soon(now)

    def flip(self, worker: Worker, role: common_pb2.Role.ValueType, now: float) -> None:
        """Changes a worker's role by an operator's wish; `flip_error` must have been None."""
        self._flips.begin(worker, role, now, by_hand=True)

    def drain(self, worker: Worker, timeout_s: float, reason: str, now: float) -> None:
        """Tells a worker to leave; its requests may take `timeout_s` to end."""
        self._flips.stop(worker)
        self._drains.begin(worker, timeout_s, reason, now)
        self._watch(worker, now)

    def exited(self, event: ev.WorkerExited, now: float) -> None:
        """A process that was started here has ended."""
        worker = self._workers.by_id(event.worker_id)
        if self._scaler.launches.is_starting(event.worker_id):
            # Who is attached under its id is another.
            worker = None
        leaves = worker is not None and worker.state == cluster_pb2.WORKER_STATE_DRAINING
        if worker is not None and not leaves:
            self._scaler.exited(event, now)
            self._losses.lose(worker, event.reason, now)
            return
        if worker is not None:
            self._losses.lose(worker, event.reason, now, fenced=False, blame=False)
        self._scaler.exited(event, now)

    def scale(self, now: float) -> None:
        """Lets the scaler decide the pools' sizes, and carries out its drains and flips."""
        for action in self._scaler.decide(now):
            worker = self._workers.by_id(action.worker_id)
            if worker is None:
                continue
            if isinstance(action, Drain):
                self.drain(worker, self._config.scaling.drain_s, action.reason, now)
            else:
                role = ROLE_OF[action.to]
                if self._flips.error(worker, role) is None:
                    self._flips.begin(worker, role, now, by_hand=False)

    # ---- Time

    def excuse(self, now: float) -> None:
        """Forgives the workers a silence that was the coordinator's own.

        A process that stood still (stopped, starved, a paused machine) finds timers long overdue
        and what the workers said meanwhile unread.
        """
        due = self._timers.next()
        if due is None or now - due < self._detector.least_silent_s / 2:
            return
        for worker in self._workers:
            worker.heard_at = now
            worker.progressed_at = min(now, worker.progressed_at + now - due)
            self._watch(worker, now)

    def look_at(self, key: WorkerKey, now: float) -> None:
        """A worker's timer went off: it is lost, or its requests go elsewhere, if it was silent."""
        worker = self._workers.get(key)
        assert worker is not None
        if worker.leaves_by <= now:
            self._losses.lose(worker, "did not leave in time", now)
            return
        silent = "was silent" if worker.connected else "was gone"
        if worker.heard_at + self._config.worker_timeout_s <= now:
            self._losses.lose(worker, f"{silent} for {self._config.worker_timeout_s:g} s", now)
            return
        if worker.heard_at + self._detector.may_be_silent_s(worker) <= now:
            if worker.connected and self._detector.is_deaf(now):
                lost_at = worker.heard_at + self._config.worker_timeout_s
                caught_up_at = now + self._detector.catch_up_s
                self._timers.set(key, min(caught_up_at, lost_at, worker.leaves_by))
                return
            self._losses.suspect(worker, f"{silent} for {now - worker.heard_at:.1f} s", now)
        self._watch(worker, now)

    # ---- Inside

    def _may_stand_s(self, worker: Worker) -> float:
        """How long its engine may make no step: several of the longest that are predicted."""
        entry = self._placers.load(worker)
        step_s = entry.step_s if entry is not None else 0.0
        return max(self._config.worker_stuck_s, _STUCK_STEPS * step_s)

    def _awaits_step(self, worker: Worker) -> bool:
        """Whether it was sent something that makes an engine step, and has not answered.

        An engine that has stopped since its last step says what ran then: nothing, perhaps. What
        waits for its KV cache to come makes no step.
        """
        for key in worker.ledger.unanswered:
            request = self._lifecycle.requests.get(key)
            sender = self._workers.get(request.prefill) if request is not None else None
            if sender is None or sender is worker or key not in sender.ledger.handoffs:
                return True
        return False

    def _watch(self, worker: Worker, now: float) -> None:
        """Sets the timer by which a worker's silence is looked at."""
        self._timers.set(worker.key, self._detector.next_look(worker, now))
