"""The coordinator's synchronous core: it takes events and returns effects.

It does no I/O, awaits nothing and reads no real clock: each event comes with its time, which the
parts of the core read from one CoreClock. The core tells its shell when it must be called next.
`coordinator/server/shell.py` runs the core on asyncio; `simulator/` runs it under a virtual clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from baton.coordinator.core.adoption import Adoption
from baton.coordinator.core.assignments import Assignments
from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.dispatch import Dispatcher
from baton.coordinator.core.fetches import Fetches
from baton.coordinator.core.handoff_reports import HandoffReports
from baton.coordinator.core.membership import Membership
from baton.coordinator.core.outputs import Outputs
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.recovery_timeout import RecoveryTimeout
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.core.request_fleets import RequestFleets
from baton.coordinator.core.request_states import RequestStates
from baton.coordinator.core.rollout_control import RolloutControl
from baton.coordinator.core.step_control import StepControl
from baton.coordinator.core.submissions import Submissions
from baton.coordinator.core.token_charges import TokenCharges
from baton.coordinator.core.token_gaps import TokenGaps
from baton.coordinator.rollouts.retiring import gone_error
from baton.coordinator.rollouts.rollout import Rollouts
from baton.coordinator.scaling.autoscale.observer import Observer
from baton.coordinator.scaling.autoscale.policy import Policy
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.requests import EndedRequest, Request, RequestKey
from baton.coordinator.state.session_blocks import TakenSession
from baton.coordinator.state.slow_steps import Stall
from baton.coordinator.state.timers import CoreTimer
from baton.coordinator.state.workers import Worker
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime import errors
from baton.runtime.steps.step_messages import to_message
from baton.v1 import cluster_pb2, common_pb2


class Core:
    """Hands each event to the part that owns it, and returns the effects of all parts.

    The shell reads the attributes. It changes the core's state only through `handle`.

    Args:
        config: Limits and times.
        random_bytes: See Parts.random_bytes.
        policy: Sizes the pools; None: the autoscaler.

    Attributes:
        targets: Latency targets of the lanes.
        fleets: The fleets of workers.
        workers: All attached workers.
        placers: Choose workers for requests and count the load on them.
        latency: Fitted costs of engine steps.
        scaler: Sizes of the pools.
        rollouts: The rollout that runs, and the fleets that leave.
    """

    def __init__(
        self,
        config: CoreConfig,
        random_bytes: Callable[[int], bytes] = os.urandom,
        policy: Policy | None = None,
    ) -> None:
        self._config = config
        # Whether a waiting request may find a worker, so that a round of dispatching is due.
        self._may_dispatch = False
        self._parts = parts = Parts.of(config, random_bytes, self._room_freed)
        self.targets, self.fleets, self.workers = parts.targets, parts.fleets, parts.workers
        self.latency, self.placers = parts.latency, parts.placers
        self._clock = parts.clock
        self._timers, self._effects, self._requests = parts.timers, parts.effects, parts.requests
        self._steps = StepControl(parts)
        states, charges = RequestStates(parts), TokenCharges(parts)
        self._request_fleets, self._gaps = RequestFleets(parts), TokenGaps(parts)
        self._fetches = Fetches(parts)
        self._assignments = Assignments(parts, self._fetches)
        self._ends = RequestEnds(parts, states, self._assignments, charges, self._gaps)
        self._submissions = Submissions(parts, states, self._ends)
        self._attempts = attempts = Attempts(
            parts, states, self._request_fleets, self._fetches, self._assignments, self._ends
        )
        self._outputs = Outputs(parts, attempts, self._assignments, self._ends, charges, self._gaps)
        self._adoption = Adoption(parts, attempts, self._outputs)
        self._handoffs = HandoffReports(parts, attempts, self._assignments, self._fetches)
        self.scaler = Scaler(
            config.scaling,
            self.targets,
            self.workers,
            self.observer(),
            self.stats,
            self._clock,
            self._timers,
            self._effects.add,
            policy,
        )
        self._recovery_timeout = RecoveryTimeout(parts, self.scaler)
        self._members = members = Membership(
            parts,
            attempts,
            self._ends,
            self._request_fleets,
            self._fetches,
            self._adoption,
            self.scaler,
        )
        self.rollouts = Rollouts(
            parts.traffic,
            self._requests,
            self.workers,
            self.scaler,
            self.stats,
            self._clock,
            self._timers,
            members.drain,
            self._effects.add,
            config.max_request_s,
        )
        self._rollout_control = control = RolloutControl(
            parts, self.rollouts, attempts, self._ends, self._request_fleets
        )
        self._dispatcher = Dispatcher(parts, attempts, self._ends, self._adoption, self.rollouts)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Submitted: self._submitted,
            ev.StreamCancelled: self._stream_cancelled,
            ev.RequestCancelled: self._request_cancelled,
            ev.RequestFailed: self._request_failed,
            ev.StreamFailed: self._stream_failed,
            ev.SessionLost: self._session_lost,
            ev.WorkerAttached: self._worker_attached,
            ev.WorkerHeard: members.heard,
            ev.LoadReported: members.load_reported,
            ev.WorkerStep: self._worker_step,
            ev.WorkerHandoff: self._worker_handoff,
            ev.WorkerCache: self._worker_cache,
            ev.WorkerChanged: members.changed,
            ev.WorkerDetached: members.detached,
            ev.WorkerLost: members.lost,
            ev.DrainRequested: members.drain_asked,
            ev.FlipRequested: self._flip_requested,
            ev.LauncherReady: self._launcher_ready,
            ev.WorkerExited: members.exited,
            ev.WorkerWaits: self.scaler.waits,
            ev.ScaleRequested: lambda event: self.scaler.scale(event.pool, event.num_workers),
            ev.AutoscaleRequested: lambda event: self.scaler.set_autoscale(event.enabled),
            ev.TargetsRequested: self._targets_requested,
            ev.RolloutRequested: control.start,
            ev.ShareRequested: control.set_share,
            ev.PromotionRequested: control.promote,
            ev.AbortRequested: control.abort,
            ev.AdmissionClosed: self._admission_closed,
            ev.ShutdownNow: self._shut_down_now,
            ev.Tick: self._tick,
        }
        # Handlers of the core's own timers. Each request and each worker has a timer besides.
        self._timed: dict[CoreTimer, Callable[[], None]] = {
            CoreTimer.ADOPTION: self._adoption.advance,
            CoreTimer.SCALING: members.scale,
            CoreTimer.ROLLOUT: control.advance,
            CoreTimer.ROOM: self._room_is_due,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Applies one event.

        Args:
            event: The event.
            now: Time of the event, in seconds of a clock that never goes back.

        Returns:
            The effects that the shell must carry out, in order.
        """
        self._clock.now = now
        self.placers.tidy()
        self._members.after_pause()
        self._handlers[type(event)](event)
        self._rollout_control.after_event()
        self._steps.after_event()
        if self._may_dispatch:
            self._may_dispatch = self._dispatcher.dispatch()
        self._members.advance()
        if len(self.fleets) > 1:
            self._forget_unused_fleets()
        return self._effects.take()

    def next_deadline(self) -> float | None:
        """Returns when the next Tick is due, by `now`'s clock; None: no timer is set."""
        return self._timers.next()

    def _forget_unused_fleets(self) -> None:
        """Forgets fleets that have no worker and no request and take no part in a rollout."""
        for fleet in self.fleets.unused():
            if not self.rollouts.involves(fleet):
                self.fleets.forget(fleet)
                self.placers.forget(fleet)
                self._request_fleets.forget(fleet)
                self.scaler.launches.forget(fleet)

    # ---- State that the shell may read

    @property
    def model_name(self) -> str:
        return self._config.model_name

    @property
    def stats(self) -> CoreStats:
        """The counters."""
        return self._parts.stats

    def take_session(self, session_id: str, tenant: str) -> TakenSession:
        """Forgets the workers and the KV blocks of a session; see SessionBlocks.take."""
        taken = self._parts.session_blocks.take(session_id, tenant)
        self.placers.forget_session(taken.key)
        return taken

    def put_session_back(self, taken: TakenSession) -> None:
        """Remembers KV blocks of a session that may not all be deleted."""
        self._parts.session_blocks.put_back(taken)

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def serves(self, session: int) -> bool:
        """Whether a session has a request that has not ended."""
        return bool(self._requests.of_session(session, 1))

    @property
    def can_serve(self) -> bool:
        """Whether requests are admitted, and a worker serves or will start for each role's work."""
        stable = self.fleets.stable.workers
        return self._parts.admission.closing is None and all(
            stable.able(role).num_serving
            or any(self.scaler.starts_on_request(POOL_OF[one]) for one in stable.roles_doing(role))
            for role in POOL_OF
        )

    def flip_error(
        self, worker: Worker, role: common_pb2.Role.ValueType
    ) -> errors.BatonError | None:
        """Returns why an operator may not change a worker to this role now, or None."""
        return self._members.flip_error(worker, role) or self.rollouts.flip_error(worker)

    def admission_error(
        self, lane: common_pb2.Lane.ValueType, tenant: str
    ) -> errors.BatonError | None:
        """Returns why no request of this tenant would be admitted to this lane now, or None."""
        return self._parts.admission.error(lane, tenant)

    def wait_correction(self, lane: common_pb2.Lane.ValueType) -> float:
        """Returns the factor for predicted waits of a lane for the stable fleet, 1 to 4."""
        return self._parts.admission.wait_correction(lane, self.fleets.stable)

    def request(self, request_id: str, tenant: str = "") -> Request | EndedRequest | None:
        """Returns a running or recently ended request, or None.

        Args:
            request_id: The client's id of the request.
            tenant: Tenant of the request; empty: any tenant.

        Raises:
            InvalidArgument: `tenant` is empty and several tenants have a request of this id.
        """
        return self._requests.find(request_id, tenant)

    def running_request(self, request_id: str, tenant: str = "") -> Request | None:
        """Like `request`, among requests that have not ended."""
        return self._requests.find_running(request_id, tenant)

    def stalls(self, request: Request) -> tuple[Stall, ...]:
        """Returns the longest gaps over its target of a running request, up to now."""
        return self._gaps.stalls(request)

    def running(self) -> list[Request]:
        """Returns the requests that have not ended."""
        return self._requests.all()

    def recently_ended(self) -> list[EndedRequest]:
        """Returns the requests that ended last, newest first."""
        return self._requests.recently_ended()

    def num_queued(self, lane: common_pb2.Lane.ValueType) -> int:
        """Returns the number of requests that wait in a lane."""
        return self._parts.lanes.num_queued(lane)

    def num_running(self, lane: common_pb2.Lane.ValueType) -> int:
        """Returns the number of requests of a lane that workers have."""
        lanes = self._parts.lanes
        return lanes.num_open(lane) - lanes.num_queued(lane)

    def oldest_queued(self, lane: common_pb2.Lane.ValueType) -> Request | None:
        """Returns the request that has waited longest in a lane since it ran last, or None."""
        return self._parts.lanes.oldest(lane)

    def queued_without_token(self, lane: common_pb2.Lane.ValueType) -> list[Request]:
        """Returns the requests of a lane that wait and have no token yet."""
        return self._parts.lanes.without_token(lane)

    def step_targets(self) -> cluster_pb2.StepTargets:
        """Returns the targets of the workers' steps."""
        return to_message(self.placers.step_targets)

    @property
    def longest_gap_s(self) -> float | None:
        """Longest gap that the workers keep; None: no ITL target, or vLLM's scheduler."""
        return self.placers.longest_gap_s

    def gap_target_s(self, lane: common_pb2.Lane.ValueType) -> float | None:
        """Target of a single gap between a lane's tokens; None: the lane has no ITL target."""
        return self._gaps.target_s(lane)

    @property
    def gap_reason(self) -> str:
        """Explains to people how the longest gap of the step targets was chosen."""
        return self._steps.gap_reason

    def observer(self) -> Observer:
        """Returns a new observer of the load that the pools are sized by."""
        return Observer(
            self.workers,
            self.placers,
            self._parts.lanes,
            self.stats,
            self.latency,
            self._config.latency,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when a resource has no owner or two owners."""
        requests = {request.key: request for request in self._requests.all()}
        self._attempts.check_integrity()
        self._parts.lanes.check_integrity()
        self._parts.session_blocks.check_integrity()
        self._assignments.check_integrity(requests)
        self._fetches.check_integrity(iter(requests.values()))
        self.workers.check_integrity()
        self.fleets.check_integrity(self.workers, self.running())
        assert all(self.rollouts.involves(fleet) for fleet in self.fleets.unused())
        self.placers.check_integrity()
        self.scaler.launches.check_integrity()
        num_timers = len(self._requests) + len(self.workers) + self._adoption.num_timers
        num_timers += self.scaler.num_timers + self.rollouts.num_timers
        num_timers += self._dispatcher.num_timers
        assert len(self._timers) == num_timers

    # ---- Clients

    def _submitted(self, event: ev.Submitted) -> None:
        submission = event.submission
        resumes = len(submission.known_token_ids) > 0
        may_still_run = resumes and self._adoption.may_find(submission.key)
        if resumes and submission.revision and not may_still_run:
            fleet = self.fleets.named(submission.revision)
            if self.rollouts.is_gone(fleet):
                self._effects.failed(submission, gone_error(fleet))
                return
        request = self._submissions.admit(submission, may_still_run=may_still_run)
        if request is not None:
            self._adoption.admitted(request)
            self.scaler.arrived()

    def _stream_cancelled(self, event: ev.StreamCancelled) -> None:
        request = self._requests.by_stream(event.to)
        if request is not None:
            self._ends.cancel(request)

    def _request_cancelled(self, event: ev.RequestCancelled) -> None:
        request = self._requests.get(event.key)
        if request is not None:
            self._ends.cancel(request)

    def _request_failed(self, event: ev.RequestFailed) -> None:
        request = self._requests.get(event.key)
        if request is not None:
            self._ends.fail(request, event.error)

    def _stream_failed(self, event: ev.StreamFailed) -> None:
        request = self._requests.by_stream(event.to)
        if request is not None:
            self._ends.fail(request, event.error)

    def _session_lost(self, event: ev.SessionLost) -> None:
        for request in self._requests.of_session(event.session, event.most):
            self._ends.session_lost(request)

    def _admission_closed(self, event: ev.AdmissionClosed) -> None:
        self.scaler.stop()
        self._parts.admission.closing = errors.Unavailable("the coordinator is stopping")
        if event.restarts:
            what = "the coordinator is restarting: submit again"
            self._parts.admission.closing = errors.Unavailable(what, reason=errors.RESTARTING)

    def _shut_down_now(self, event: ev.ShutdownNow) -> None:
        self.scaler.stop()
        self._parts.admission.closing = errors.Unavailable(event.reason)
        for request in self._requests.all():
            self._ends.fail(request, errors.Unavailable(event.reason))

    # ---- Workers

    def _worker_attached(self, event: ev.WorkerAttached) -> None:
        worker = self._members.attached(event)
        if worker is not None:
            self._rollout_control.attached(worker, returns=event.returns)

    def _flip_requested(self, event: ev.FlipRequested) -> None:
        worker = self.workers.by_id(event.worker_id)
        if worker is not None and self.flip_error(worker, event.role) is None:
            self._members.flip(worker, event.role)

    def _worker_step(self, event: ev.WorkerStep) -> None:
        worker = self._members.hear(event.worker)
        if worker is not None:
            # Passed on with the registry's own key object, which Outputs compares by identity.
            self._outputs.apply_step(worker.key, event.step)
            self._adoption.apply_step(worker.key, event.step)

    def _worker_handoff(self, event: ev.WorkerHandoff) -> None:
        if self._members.hear(event.worker) is not None:
            self._handoffs.take(event.worker, event.report)

    def _worker_cache(self, event: ev.WorkerCache) -> None:
        worker = self._members.hear(event.worker)
        if worker is not None:
            self.placers.apply_cache(worker, event.changes)

    # ---- Time and sizes

    def _launcher_ready(self, event: ev.LauncherReady) -> None:
        self._rollout_control.launcher_ready()
        self.scaler.begin(event.sizes)

    def _targets_requested(self, event: ev.TargetsRequested) -> None:
        self.targets.change(event.targets)
        self.scaler.targets_changed()
        self._steps.targets_changed()
        self._room_freed()

    def _tick(self, event: ev.Tick) -> None:
        while (key := self._timers.pop_due(self._clock.now)) is not None:
            if isinstance(key, str):
                self._request_is_due(key)
            elif isinstance(key, CoreTimer):
                self._timed[key]()
            else:
                self._members.check_silence(key)

    def _request_is_due(self, key: RequestKey) -> None:
        request = self._requests.get(key)
        if request is None:
            self._adoption.expire(key)
            return
        request.waits_until = self._recovery_timeout.waits_until(request)
        if self._ends.expire(request) and not self._rollout_control.leaves_canary(request):
            self._ends.fail(request, self._dispatcher.queue_error(request))

    def _room_is_due(self) -> None:
        self._room_freed()

    def _room_freed(self) -> None:
        self._may_dispatch = True
