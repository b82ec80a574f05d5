"""Cluster membership: workers attach, become silent or stuck, flip, drain and leave."""

from __future__ import annotations

from baton.coordinator.core.adoption import Adoption
from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.failure_detector import FailureDetector
from baton.coordinator.core.fetches import Fetches
from baton.coordinator.core.flips import Flips
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.core.request_fleets import RequestFleets
from baton.coordinator.core.worker_removal import Departure, Succession, WorkerRemoval
from baton.coordinator.scaling.drains import Drains
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import POOL_OF, ROLE_OF
from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.scaling_decision import Drain
from baton.coordinator.state.workers import Worker, without_running
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

# A worker that is stuck for this many times the limit is fenced, so that it can be replaced.
_STUCK_FOR_GOOD = 3
# A worker counts as stuck after this many of its longest predicted steps at the earliest.
_STUCK_STEPS = 4


class Membership:
    """Owns the workers from attaching to leaving: their states and their timers.

    Args:
        parts: The shared parts of the core.
        attempts: Moves and recovers requests.
        ends: Fails requests.
        request_fleets: Limits requests to the context of their fleet.
        fetches: Prefixes that workers send.
        adoption: Attempts that workers run for an earlier coordinator.
        scaler: Sizes of the pools.
    """

    def __init__(
        self,
        parts: Parts,
        attempts: Attempts,
        ends: RequestEnds,
        request_fleets: RequestFleets,
        fetches: Fetches,
        adoption: Adoption,
        scaler: Scaler,
    ) -> None:
        self._clock = parts.clock
        self._config, self._workers, self._placers = parts.config, parts.workers, parts.placers
        self._requests, self._lanes, self._stats = parts.requests, parts.lanes, parts.stats
        self._latency, self._timers, self._effects = parts.latency, parts.timers, parts.effects
        self._room_freed, self._request_fleets = parts.room_freed, request_fleets
        self._adoption, self._scaler = adoption, scaler
        self._removal = WorkerRemoval(parts, attempts, ends, fetches, adoption, scaler)
        self._drains = Drains(parts.workers, parts.placers, parts.effects.add)
        self._flips = Flips(parts, attempts, scaler)
        self._detector = FailureDetector(parts.config)

    def flip_error(
        self, worker: Worker, role: common_pb2.Role.ValueType
    ) -> errors.BatonError | None:
        """Returns why an operator may not change a worker to this role now, or None."""
        if worker.next_role == role:
            return None
        limits = self._scaler.flip_error(worker.id, POOL_OF[worker.role], POOL_OF[role])
        return self._flips.error(worker, role) or limits

    def advance(self) -> None:
        """Lets idle draining workers leave, and idle flipping workers change their role."""
        if self._drains:
            self._drains.release()
        if self._flips:
            self._flips.advance()

    def attached(self, event: ev.WorkerAttached) -> Worker | None:
        """Adds a worker, or updates one that attaches again; returns it, or None if it was refused.

        A worker stays the same while its process and its requests stay the same. Otherwise the
        earlier worker of the ID is removed first.
        """
        hello = event.hello
        refusal = self._workers.refusal(hello)
        if refusal is not None:
            self._effects.add(ev.RefuseWorker((hello.worker_id, hello.incarnation), refusal))
            return None
        before = self._workers.by_id(hello.worker_id)
        was_in = (before.role, before.fleet) if before is not None else None
        if before is None or self._made_way(before, event):
            worker = self._added(event)
        else:
            worker = before
            _update(worker, hello)
        if hello.state == cluster_pb2.WORKER_STATE_DRAINING:
            self._drains.confirmed(worker)
        worker.connected, worker.unresponsive, worker.stuck = True, "", False
        worker.heard_at = worker.progressed_at = self._clock.now
        self._flips.heard(worker)
        self._watch(worker)
        self._placers.attach(worker)
        if was_in is not None:
            self._removal.left_pool(*was_in)
        adopted = self._adoption.attached(worker, hello.running, returns=event.returns)
        self._effects.add(ev.WelcomeWorker(worker.key, worker.role, tuple(adopted)))
        if self._scaler.launches.is_ending(worker.key):
            # Its start was cancelled, but it attached before it was ended.
            self.drain(worker, self._config.scaling.drain_s, "it was to end before")
        elif before is not None and before is not worker and before.key == worker.key:
            self._order_again(before, worker)
        self._room_freed()
        return worker

    def _made_way(self, before: Worker, event: ev.WorkerAttached) -> bool:
        """Removes the earlier worker of an ID, unless it is the worker that attaches.

        Args:
            before: The attached worker of this ID.
            event: The worker that attaches.

        Returns:
            Whether the earlier worker was removed.
        """
        hello = event.hello
        if before.key != (hello.worker_id, hello.incarnation):
            # A draining worker has ended as it was asked to.
            drains = before.state == cluster_pb2.WORKER_STATE_DRAINING
            how = Succession.RESTARTED if drains else Succession.REPLACED
            replaced = f"was replaced by incarnation {hello.incarnation:016x}"
            self._removal.make_way(before, replaced, how)
            return True
        if event.forgets:
            elsewhere = "has served another coordinator since"
            self._removal.make_way(before, elsewhere, Succession.ELSEWHERE)
            return True
        return False

    def _added(self, event: ev.WorkerAttached) -> Worker:
        """Adds and returns a worker of an ID that is not attached."""
        hello, now = event.hello, self._clock.now
        fleet = self._workers.fleet_of(hello)
        worker = Worker(
            without_running(hello), fleet, hello.role, hello.state, attached_at=now, heard_at=now
        )
        self._detector.expect(worker)
        self._workers.add(worker)
        if len(fleet.workers) == 1:
            self._request_fleets.limit_outputs(fleet)
        if not hello.generation:
            # The worker has served no coordinator before.
            self._stats.attached_first(worker, now)
        if not event.returns:
            self._scaler.launches.attached(worker.key, now)
        return worker

    def _order_again(self, before: Worker, worker: Worker) -> None:
        """Repeats a drain or a flip that a worker has forgotten, or has not read.

        Args:
            before: The worker as it was attached before.
            worker: The same worker now.
        """
        if before.state == cluster_pb2.WORKER_STATE_DRAINING:
            if worker.state == cluster_pb2.WORKER_STATE_DRAINING:
                worker.leaves_by = before.leaves_by
                return
            left_s = before.leaves_by - self._clock.now
            timeout_s = max(0.0, min(left_s, self._config.scaling.drain_s))
            self.drain(worker, timeout_s, "it was to leave before")
        elif before.flip is not None and self._flips.error(worker, before.flip.into) is None:
            # The scaler has counted a flip by hand when it began.
            self._flips.begin(worker, before.flip.into, by_hand=False)
            if worker.flip is not None:
                worker.flip.by_hand = before.flip.by_hand

    def hear(self, key: WorkerKey) -> Worker | None:
        """Records a message of a worker; returns the worker, or None if it is not attached."""
        worker, now = self._workers.get(key), self._clock.now
        if worker is not None:
            self._detector.heard(worker, now)
            if worker.unresponsive and now - worker.progressed_at < self._max_step_s(worker):
                self._removal.responds(worker)
        return worker

    def heard(self, event: ev.WorkerHeard) -> None:
        """Handles a heartbeat."""
        self.hear(event.worker)

    def load_reported(self, event: ev.LoadReported) -> None:
        """Handles a load report: updates the latency model and detects a stuck engine."""
        now = self._clock.now
        worker = self.hear(event.worker)
        if worker is None:
            return
        load, worker.load = event.load, event.load
        self._detector.reported(worker)
        if worker.flip is not None:
            self._flips.move_outputs(worker)
        self._latency.observe(worker, load.steps)
        # vLLM's one-token prompt chunks look like decodes, so steps of other workers are left out.
        if load.steps and worker.role in worker.fleet.workers.roles_doing(common_pb2.ROLE_DECODE):
            self._stats.recent.at(now).decode_steps(load.steps)
        self._placers.report_kv(worker, load.kv_tokens_used)
        self._placers.report_tier_loads(worker, load)
        if len(self._lanes):
            self._room_freed()
        is_idle = not (load.num_running or worker.stuck or self._awaits_step(worker))
        if load.num_steps != worker.num_steps or is_idle:
            worker.num_steps, worker.progressed_at, worker.stuck = load.num_steps, now, False
            if worker.unresponsive:
                self._removal.responds(worker)
            return
        stuck_s, limit_s = now - worker.progressed_at, self._max_step_s(worker)
        if stuck_s >= _STUCK_FOR_GOOD * limit_s:
            self._removal.lose(worker, f"has made no step for {stuck_s:.1f} s")
        elif stuck_s >= limit_s:
            # After its requests have left, only a step shows that the engine works again.
            worker.stuck = True
            self._removal.suspect(worker, f"has made no step for {stuck_s:.1f} s")

    def changed(self, event: ev.WorkerChanged) -> None:
        """Handles a worker's report of a new state or role."""
        worker = self.hear(event.worker)
        if worker is None:
            return
        change = event.change
        if change.state == cluster_pb2.WORKER_STATE_STOPPED:
            reason = f"stopped: {change.reason}" if change.reason else "stopped"
            how = Departure.FAILED if change.failed else Departure.STOPPED
            self._removal.lose(worker, reason, how)
            return
        if change.state == cluster_pb2.WORKER_STATE_DRAINING:
            self._flips.stop(worker)
            self._drains.confirmed(worker)
            if worker.state != cluster_pb2.WORKER_STATE_DRAINING:
                # The worker drains by itself; the scaler may have to replace it.
                self._scaler.soon()
        # A draining worker never serves again; it may not have read the drain command yet.
        if change.state and worker.state != cluster_pb2.WORKER_STATE_DRAINING:
            worker.state = change.state
        was_in = worker.role, worker.fleet
        if change.role:
            worker.role = change.role
            self._flips.heard(worker)
        self._placers.refresh(worker)
        self._removal.left_pool(*was_in)
        self._room_freed()

    def detached(self, event: ev.WorkerDetached) -> None:
        """Handles the end of a worker's stream; the worker may come back."""
        worker = self._workers.get(event.worker)
        if worker is not None:
            worker.connected = False
            # The time in which it must come back begins now; for a silent worker, it began before.
            if not worker.unresponsive:
                worker.heard_at = self._clock.now
            self._placers.refresh(worker)
            self._watch(worker)

    def lost(self, event: ev.WorkerLost) -> None:
        """Removes a worker that the shell knows to be lost."""
        worker = self._workers.by_id(event.worker_id)
        if worker is not None and event.incarnation in (None, worker.hello.incarnation):
            self._removal.lose(worker, event.reason)

    def drain_asked(self, event: ev.DrainRequested) -> None:
        """Drains a worker; cancels the start of a worker that has not attached yet."""
        worker = self._workers.by_id(event.worker_id)
        if worker is None:
            self._scaler.launches.give_up(event.worker_id)
        else:
            self.drain(worker, event.timeout_s, event.reason)
        # The scaler may have to replace the worker.
        self._scaler.soon()

    def flip(self, worker: Worker, role: common_pb2.Role.ValueType) -> None:
        """Changes a worker's role for an operator; `flip_error` must have returned None."""
        self._flips.begin(worker, role, by_hand=True)

    def drain(self, worker: Worker, timeout_s: float, reason: str) -> None:
        """Tells a worker to drain; its requests may take `timeout_s` seconds to end."""
        self._flips.stop(worker)
        self._drains.begin(worker, timeout_s, reason, self._clock.now)
        self._watch(worker)

    def exited(self, event: ev.WorkerExited) -> None:
        """Handles the end of a launched process."""
        worker = self._workers.by_id(event.worker_id)
        if worker is not None and self._scaler.launches.is_other_process(worker.key):
            # Another process is attached under its ID, and stays.
            worker = None
        leaves = worker is not None and worker.state == cluster_pb2.WORKER_STATE_DRAINING
        if worker is not None and not leaves:
            self._scaler.exited(event)
            self._removal.lose(worker, event.reason)
            return
        if worker is not None:
            self._removal.lose(worker, event.reason, Departure.EXITED)
        self._scaler.exited(event)

    def scale(self) -> None:
        """Lets the scaler decide on the pools' sizes, and carries out its drains and flips."""
        for action in self._scaler.decide():
            worker = self._workers.by_id(action.worker_id)
            if worker is None:
                continue
            if isinstance(action, Drain):
                self.drain(worker, self._config.scaling.drain_s, action.reason)
            else:
                role = ROLE_OF[action.to]
                if self._flips.error(worker, role) is None:
                    self._flips.begin(worker, role, by_hand=False)

    # ---- Time

    def after_pause(self) -> None:
        """Restarts the workers' silence timers if this process was paused before this event.

        After a pause (a stopped process, a starved CPU, a suspended machine) timers are long
        overdue, and messages of the workers are unread.
        """
        now = self._clock.now
        due = self._timers.next()
        if due is None or now - due < self._detector.least_silent_s / 2:
            return
        for worker in self._workers:
            worker.heard_at = now
            worker.progressed_at = min(now, worker.progressed_at + now - due)
            self._watch(worker)

    def check_silence(self, key: WorkerKey) -> None:
        """Handles a worker's timer: removes or suspects a worker that was silent for too long."""
        now = self._clock.now
        worker = self._workers.get(key)
        assert worker is not None
        if worker.leaves_by <= now:
            self._removal.lose(worker, "did not leave in time")
            return
        silent = "was silent" if worker.connected else "was gone"
        if worker.heard_at + self._config.worker_timeout_s <= now:
            self._removal.lose(worker, f"{silent} for {self._config.worker_timeout_s:g} s")
            return
        if worker.heard_at + self._detector.may_be_silent_s(worker) <= now:
            if worker.connected and self._detector.was_paused(now):
                lost_at = worker.heard_at + self._config.worker_timeout_s
                caught_up_at = now + self._detector.catch_up_s
                self._timers.set(key, min(caught_up_at, lost_at, worker.leaves_by))
                return
            self._removal.suspect(worker, f"{silent} for {now - worker.heard_at:.1f} s")
        self._watch(worker)

    # ---- Private methods

    def _max_step_s(self, worker: Worker) -> float:
        """Returns after how many seconds without a step a worker's engine counts as stuck."""
        entry = self._placers.load(worker)
        step_s = entry.chunk_step_s if entry is not None else 0.0
        return max(self._config.worker_stuck_s, _STUCK_STEPS * step_s)

    def _awaits_step(self, worker: Worker) -> bool:
        """Returns whether the worker was sent a request that needs a step, and has not answered.

        A load report of an engine that stopped while idle does not show that it is stuck, so the
        ledger decides. A request that waits for its handoff needs no step.
        """
        for key in worker.ledger.unanswered:
            request = self._requests.get(key)
            sender = self._workers.get(request.prefill) if request is not None else None
            if sender is None or sender is worker or key not in sender.ledger.handoffs:
                return True
        return False

    def _watch(self, worker: Worker) -> None:
        """Sets the timer that checks for a worker's silence."""
        self._timers.set(worker.key, self._detector.next_check(worker, self._clock.now))


def _update(worker: Worker, hello: cluster_pb2.Hello) -> None:
    """Updates a worker that attaches again with the same process and the same requests."""
    # A draining worker never serves again; it may not have read the drain command yet.
    if worker.state != cluster_pb2.WORKER_STATE_DRAINING:
        worker.state = hello.state
    worker.hello, worker.role = without_running(hello), hello.role
