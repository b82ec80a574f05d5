"""The coordinator's synchronous core: events in, effects out.

It does no I/O, awaits nothing and holds no clock: time is a parameter, timers are data. The asyncio
server is one shell around it; a simulator can be another.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

from baton.coordinator import events as ev
from baton.coordinator.adoption import SETTLED, Adoption
from baton.coordinator.autoscale.observer import Observer
from baton.coordinator.autoscale.policy import Policy
from baton.coordinator.autoscale.settings import in_config
from baton.coordinator.autoscale.types import Drain
from baton.coordinator.book import RequestBook
from baton.coordinator.core_config import CoreConfig
from baton.coordinator.drains import Drains
from baton.coordinator.flips import Flips
from baton.coordinator.lanes import lane_config
from baton.coordinator.latency import LatencyRegistry
from baton.coordinator.load_index import POOL_OF, ROLE_OF
from baton.coordinator.outputs import apply_step
from baton.coordinator.placement import Placement
from baton.coordinator.placers import Placers
from baton.coordinator.request import EndedRequest, Request, RequestState, WorkerKey
from baton.coordinator.retiring import gone_error
from baton.coordinator.revision import Revision, Traffic
from baton.coordinator.rollout import ROLLOUT, Rollouts
from baton.coordinator.scaling import SCALING, Scaler
from baton.coordinator.stalls import Stall
from baton.coordinator.stats import CoreStats
from baton.coordinator.timers import Timers
from baton.coordinator.workers import Worker, WorkerRegistry
from baton.runtime import errors
from baton.runtime.sampling import needs_exact_state
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

_MAX_REMEMBERED_HANDOFFS = 4096
# A worker that is stuck for so many times the limit is fenced, so that another can take its place.
_STUCK_FOR_GOOD = 3
# A worker whose stream has broken is back within a tenth of this, or it is dead.
_GONE_S = 0.5
# A batch request that made room so often is let go on: its cache may not keep what was computed.
_MAX_PARKED = 8


class Core:
    """Request states, deadlines, dispatch, and the cluster's members.

    Args:
        config: limits and times.
        random_bytes: of handoff ids; injected so that a simulation repeats.
        policy: what sizes the pools; the autoscaler unless told.

    Attributes:
        workers: attached ones; read only outside the core.
        stats: counters; read only outside the core.
        latency: what steps cost on the workers; read only outside the core.
        scaler: how large the pools are to be; read only outside the core.
        rollouts: which revisions there are, and what each gets; read only outside the core.
    """

    def __init__(
        self,
        config: CoreConfig,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        policy: Policy | None = None,
    ) -> None:
        self._config = config
        self._timers: Timers[str | WorkerKey] = Timers()
        self.workers = WorkerRegistry(config.model_name, config.revision)
        self.latency = LatencyRegistry(config.latency)
        self.placer = Placers(config, self.workers, self.latency)
        traffic = Traffic(config.revision)
        self._book = RequestBook(
            config, self.workers, self.placer, traffic, self._timers, random_bytes
        )
        self._adoption = Adoption(self._book, self.workers, self._timers)
        # Both ends report a handoff; each counts once.
        self._ended_handoffs: OrderedDict[bytes, None] = OrderedDict()
        self._drains = Drains(self.workers, self.placer, self._emit)
        self.scaler = Scaler(
            config.scaling,
            self.workers,
            self.observer(),
            self.stats,
            self._timers,
            self._emit,
            policy,
            Revision(config.revision),
        )
        self.rollouts = Rollouts(
            traffic,
            self._book,
            self.workers,
            self.placer,
            self.scaler,
            self._timers,
            self._drain,
            self._emit,
            config.max_request_s,
        )
        self._flips = Flips(
            self._book, self.workers, self.placer, self.scaler, config.scaling.drain_s, self._emit
        )
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Submitted: self._submitted,
            ev.StreamCancelled: self._stream_cancelled,
            ev.RequestCancelled: self._request_cancelled,
            ev.StreamFailed: self._stream_failed,
            ev.SessionLost: self._session_lost,
            ev.WorkerAttached: self._worker_attached,
            ev.WorkerHeard: self._worker_heard,
            ev.WorkerLoad: self._worker_load,
            ev.WorkerStep: self._worker_step,
            ev.WorkerHandoff: self._worker_handoff,
            ev.WorkerCache: self._worker_cache,
            ev.WorkerChanged: self._worker_changed,
            ev.WorkerDetached: self._worker_detached,
            ev.WorkerLost: self._worker_lost,
            ev.DrainAsked: self._drain_asked,
            ev.FlipAsked: self._flip_asked,
            ev.LauncherReady: lambda event, now: self.scaler.begin(event.sizes, now),
            ev.WorkerExited: self._worker_exited,
            ev.ScaleAsked: lambda event, now: self.scaler.scale(event.pool, event.num_workers, now),
            ev.AutoscaleAsked: lambda event, now: self.scaler.set_autoscale(event.enabled, now),
            ev.TargetsAsked: self._targets_asked,
            ev.RolloutAsked: self.rollouts.start,
            ev.ShareAsked: lambda event, now: self.rollouts.set_share(event.share),
            ev.PromotionAsked: lambda event, now: self.rollouts.promote(event.drain_s, now),
            ev.AbortAsked: lambda event, now: self.rollouts.abort(event.drain_s, event.why, now),
            ev.AdmissionClosed: self._admission_closed,
            ev.EverythingEnds: self._everything_ends,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Applies one event.

        Args:
            event: what happened.
            now: seconds by any clock that never goes back.

        Returns:
            What the shell must do, in order.
        """
        self.placer.at(now)
        self._excuse(now)
        self._handlers[type(event)](event, now)
        if self.placer.changed:
            self.placer.changed = False
            if self.rollouts:
                self.rollouts.advance(now)
        if self._book.room_made:
            self._dispatch(now)
        if self._drains:
            self._drains.release()
        if self._flips:
            self._flips.advance()
        return self._book.take_effects()

    def next_deadline(self) -> float | None:
        """When the next Tick is due; None while nothing is timed."""
        return self._timers.next()

    def _emit(self, effect: ev.Effect) -> None:
        self._book.out.append(effect)

    # ---- What the shell may look at

    @property
    def model_name(self) -> str:
        return self._config.model_name

    @property
    def stats(self) -> CoreStats:
        return self._book.stats

    @property
    def num_requests(self) -> int:
        """Admitted and not ended."""
        return len(self._book)

    @property
    def can_serve(self) -> bool:
        """Whether requests are admitted, and both pools have a serving worker, or will get one."""
        stable = self.workers.of(self.workers.stable)
        return self._book.closing is None and all(
            stable.serving(role) or self.scaler.wakes(POOL_OF[role]) for role in POOL_OF
        )

    def flip_error(
        self, worker: Worker, role: common_pb2.Role.ValueType
    ) -> errors.BatonError | None:
        """Why an operator cannot have a worker change to this role now; None when they can."""
        if worker.role == role:
            return None
        limits = self.scaler.flip_error(POOL_OF[worker.role], POOL_OF[role])
        return self._flips.error(worker, role) or self.rollouts.flip_error(worker) or limits

    def admission_error(self, lane: common_pb2.Lane.ValueType) -> errors.BatonError | None:
        """Why no request of this lane would be admitted now; None when one would."""
        return self._book.admission_error(lane)

    def request(self, request_id: str) -> Request | EndedRequest | None:
        """One request: running, or recently ended."""
        return self._book.get(request_id) or self._book.ended.get(request_id)

    def stalls(self, request: Request) -> tuple[Stall, ...]:
        """A running request's longest gaps over its target, up to now."""
        return self._book.stalls(request)

    def running(self) -> list[Request]:
        return self._book.all()

    def recently_ended(self) -> list[EndedRequest]:
        """Newest first."""
        return list(reversed(self._book.ended.values()))

    def num_queued(self, lane: common_pb2.Lane.ValueType) -> int:
        return self._book.lanes.num_queued(lane)

    def oldest_queued(self, lane: common_pb2.Lane.ValueType) -> Request | None:
        return self._book.lanes.oldest(lane)

    def observer(self) -> Observer:
        """Looks at what the pools are sized by."""
        return Observer(
            self.workers,
            self.placer,
            self._book.lanes,
            self.stats,
            self.latency,
            self._config.latency,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when a resource has no owner, or two."""
        requests = {request.id: request for request in self._book.all()}
        for worker in self.workers:
            assert worker.assigned_tokens == sum(worker.assigned.values())
            for request_id in worker.assigned:
                request = requests[request_id]
                assert worker.key in (request.prefill, request.decode)
            assert worker.unanswered.keys() <= worker.assigned.keys()
            assert not worker.alone or worker.alone in worker.unanswered
            assert all(requests[request_id].prefill == worker.key for request_id in worker.sending)
        attempts = [request for request in requests.values() if not request.waits]
        assert self._book.by_handle == {request.handle: request for request in attempts}
        queued = sum(request.waits for request in requests.values())
        assert queued == len(self._book.lanes)
        self._book.lanes.check_integrity()
        num_timers = len(requests) + len(self.workers) + self._adoption.num_timers
        num_timers += self.scaler.num_timers + self.rollouts.num_timers
        assert len(self._timers) == num_timers
        assert not any(request.ended for request in requests.values())
        self.placer.check_integrity()
        for request in attempts:
            found = map(self.workers.get, (request.prefill, request.decode))
            assert all(one is None or one.revision == request.revision for one in found)

    # ---- Clients

    def _submitted(self, event: ev.Submitted, now: float) -> None:
        submission = event.submission
        revision = submission.revision if len(submission.known_token_ids) else ""
        if revision and self.rollouts.is_gone(revision) and not self._adoption.settling:
            self._emit(ev.SendFailed(submission.to, gone_error(revision)))
            return
        is_taken = self._adoption.is_anothers(submission)
        request = self._book.admit(submission, now, is_taken=is_taken)
        if request is not None:
            self._adoption.admitted(request, now)
            self.scaler.arrived(now)

    def _stream_cancelled(self, event: ev.StreamCancelled, now: float) -> None:
        request = self._book.by_stream(event.to)
        if request is not None:
            self._book.cancel(request, now)

    def _request_cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        request = self._book.get(event.request_id)
        if request is not None:
            self._book.cancel(request, now)

    def _stream_failed(self, event: ev.StreamFailed, now: float) -> None:
        request = self._book.by_stream(event.to)
        if request is not None:
            self._book.fail(request, event.error, now)

    def _session_lost(self, event: ev.SessionLost, now: float) -> None:
        for request in self._book.of_session(event.session):
            self._book.cancel(request, now, tell=False)

    def _admission_closed(self, event: ev.AdmissionClosed, now: float) -> None:
        self.scaler.stop()
        self._book.closing = errors.Unavailable("the coordinator is stopping")
        if event.restarts:
            what = "the coordinator is restarting: submit again"
            self._book.closing = errors.Unavailable(what, reason=errors.RESTARTING)

    def _everything_ends(self, event: ev.EverythingEnds, now: float) -> None:
        self.scaler.stop()
        self._book.closing = errors.Unavailable(event.reason)
        for request in self._book.all():
            self._book.fail(request, errors.Unavailable(event.reason), now)

    # ---- Dispatch

    def _dispatch(self, now: float) -> None:
        self._book.room_made = False
        for request in self._book.lanes.candidates():
            if self._settled(request, now) or self._adoption.may_return(request):
                continue
            if self.rollouts.is_gone(request.revision):
                self._book.fail(request, gone_error(request.revision), now)
                continue
            placement = self.placer.place(request)
            if self._made_room(request, placement, now):
                placement = self.placer.place(request)
            if placement is None:
                continue  # The lanes pass its own over.
            problem = self._resume_error(request, placement)
            if problem is not None:
                self._book.fail(request, problem, now)
            else:
                self._book.dispatch(request, placement, now)
        # What ended on the way made no room on a worker.
        self._book.room_made = False
        self._park(now)

    def _made_room(self, request: Request, placement: Placement | None, now: float) -> bool:
        """Whether a batch prompt that was being computed has made room."""
        found = self.placer.prompt_that_yields(request, placement)
        batch = self._book.get(found) if found is not None else None
        if batch is None or batch.num_parked >= _MAX_PARKED:
            return False
        self._book.park(batch, now)
        return True

    def _park(self, now: float) -> None:
        """Lets batch outputs make room where interactive ones have just been added."""
        while self.placer.crowded:
            key, _ = self.placer.crowded.popitem()
            worker = self.workers.get(key)
            while worker is not None and self.placer.must_yield(worker):
                batch = [
                    request
                    for request_id in worker.assigned
                    if (request := self._book.get(request_id)) is not None
                    and request.submission.lane == common_pb2.LANE_BATCH
                    and request.state is RequestState.DECODING
                ]
                if not batch:
                    break
                # The one that is computed again most cheaply.
                self._book.park(min(batch, key=lambda one: worker.assigned[one.id]), now)

    def _resume_error(self, request: Request, placement: Placement) -> errors.BatonError | None:
        """Why a request cannot go on after its known tokens; None when it can, or has none."""
        decoder = self.workers.get(placement.decode.worker) if placement.decode else None
        if (
            not len(request.token_ids)
            or decoder is None
            or decoder.hello.capacity.supports_forced_tokens
            or not needs_exact_state(request.submission.sampling)
        ):
            return None
        return errors.FailedPrecondition(
            "this request cannot be resumed: its seed, penalties, bad words or grammar "
            f"need forced tokens, which worker {decoder.id} does not support"
        )

    def _settled(self, request: Request, now: float) -> bool:
        """Ends a request that no worker need see, by the context length that workers have."""
        sampling, model = request.submission.sampling, self.workers.of(request.revision).model
        num_known = len(request.token_ids)
        max_len = model.max_model_len if model is not None else 0
        if max_len and request.num_prompt_tokens >= max_len:
            allowed = f"at most {max_len - 1} tokens, one less than the context"
            error = errors.InvalidArgument("prompt", f"{request.num_prompt_tokens} tokens", allowed)
            self._book.fail(request, error, now)
            return True
        # A caller resumes whose connection broke between the last token and Finished.
        if request.submission.known_stop is not None and not request.attempt:
            stop = request.submission.known_stop
            self._book.finish(request, common_pb2.FINISH_REASON_STOP, stop, now)
            return True
        if num_known and (
            (sampling.HasField("max_tokens") and num_known >= sampling.max_tokens)
            or (max_len and request.num_prompt_tokens + num_known >= max_len)
        ):
            self._book.finish(request, common_pb2.FINISH_REASON_LENGTH, "", now)
            return True
        return False

    def _queue_error(self, request: Request) -> errors.BatonError:
        """Why a request waited for too long."""
        waited_s = lane_config(self._config.lanes, request.submission.lane).max_queue_s
        waited = f"waited {waited_s:g} s"
        if request.losses:
            waited = f"waited {self._config.max_recovery_s:g} s after {request.losses[-1]}"
        revision, members = request.revision, self.workers.of(request.revision)
        if revision != self.workers.stable:
            waited = f"revision {revision!r} began its output, and no other may go on: {waited}"
        elif others := [one for one in self.workers.revisions if one != revision]:
            waited = f"revision {revision!r} is the stable one, attached are {others}: {waited}"
        roles = {one.role for one in members}
        empty = [pool.value for pool, role in ROLE_OF.items() if role not in roles]
        if empty:
            return errors.Unavailable(f"no {' and no '.join(empty)} worker is attached: {waited}")
        idle = [pool.value for pool, role in ROLE_OF.items() if not members.serving(role)]
        if idle:
            return errors.Unavailable(f"no {' and no '.join(idle)} worker is serving: {waited}")
        return errors.ResourceExhausted(
            f"every worker is busy: {waited}", reason="QUEUE_TIMEOUT", retry_after_s=1.0
        )

    # ---- Workers

    def _worker_attached(self, event: ev.WorkerAttached, now: float) -> None:
        hello = event.hello
        key = (hello.worker_id, hello.incarnation)
        refusal = self.workers.refusal(hello)
        if refusal is not None:
            self._book.out.append(ev.RefuseWorker(key, refusal))
            return
        worker = self.workers.by_id(hello.worker_id)
        if worker is not None and worker.key != key:
            replaced = f"was replaced by incarnation {hello.incarnation:016x}"
            self._lose(worker, replaced, now, ended=False)
            worker = None
        if worker is None:
            worker = Worker(hello, hello.role, hello.state, attached_at=now, heard_at=now)
            self.workers.add(worker)
            if not hello.generation:
                # It has served no coordinator before.
                self.stats.came_up(worker, now)
            if not event.returns:
                self.scaler.launches.attached(worker.id, now)
        else:
            # Nothing leads out of draining; the worker may not have heard of it yet.
            drains = worker.state == cluster_pb2.WORKER_STATE_DRAINING
            worker.state = worker.state if drains else hello.state
            worker.hello, worker.role = hello, hello.role
        if hello.state == cluster_pb2.WORKER_STATE_DRAINING:
            self._drains.said(worker)
        worker.connected, worker.heard_at, worker.progressed_at = True, now, now
        worker.unresponsive = ""
        self._flips.heard(worker)
        self._watch(worker, now)
        self.placer.attach(worker)
        adopted = self._adoption.returned(worker, hello.running, now) if event.returns else ()
        self._book.out.append(ev.WelcomeWorker(worker.key, worker.role, tuple(adopted)))
        self.rollouts.attached(worker, now, returns=event.returns)
        self._book.room_made = True

    def _heard(self, key: WorkerKey, now: float) -> Worker | None:
        worker = self.workers.get(key)
        if worker is not None:
            worker.heard_at = now
            if worker.unresponsive and now - worker.progressed_at < self._config.worker_stuck_s:
                self._responds(worker)
        return worker

    def _worker_heard(self, event: ev.WorkerHeard, now: float) -> None:
        self._heard(event.worker, now)

    def _worker_load(self, event: ev.WorkerLoad, now: float) -> None:
        worker = self._heard(event.worker, now)
        if worker is None:
            return
        load, worker.load = event.load, event.load
        if worker.flip is not None:
            self._flips.look(worker, now)
        self.latency.observe(worker, load.steps)
        if worker.role == common_pb2.ROLE_DECODE and load.steps:
            self.stats.recent.at(now).decode_steps(load.steps)
        self.placer.report_kv(worker, load.kv_tokens_used)
        self._book.room_made |= len(self._book.lanes) > 0
        if load.num_steps != worker.num_steps or not load.num_running:
            worker.num_steps, worker.progressed_at = load.num_steps, now
            if worker.unresponsive:
                self._responds(worker)
            return
        stuck_s, limit_s = now - worker.progressed_at, self._config.worker_stuck_s
        if stuck_s >= _STUCK_FOR_GOOD * limit_s:
            self._lose(worker, f"has made no step for {stuck_s:.1f} s", now)
        elif stuck_s >= limit_s:
            self._suspect(worker, f"has made no step for {stuck_s:.1f} s", now)

    def _worker_step(self, event: ev.WorkerStep, now: float) -> None:
        if self._heard(event.worker, now) is None:
            return
        apply_step(self._book, event.worker, event.step, now)
        self._adoption.apply_step(event.worker, event.step)

    def _worker_handoff(self, event: ev.WorkerHandoff, now: float) -> None:
        report = event.report
        committed = report.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        failed = report.state == kv_transfer_pb2.HANDOFF_STATE_FAILED
        if self._heard(event.worker, now) is None or not (committed or failed):
            return
        request = self._book.get(report.request_id)
        if request is not None and request.handoff_id == report.handoff_id:
            request.exposed_us = report.exposed_us or request.exposed_us
            if committed:
                self._book.handed_over(request)
            else:
                self._book.baton_lost(request, event.worker)
        # Only the sending end knows of them, and it need not be the first to report.
        if report.num_fallbacks:
            self.stats.handoff_fell_back(report.num_fallbacks, now)
        if report.handoff_id in self._ended_handoffs:
            return
        self._ended_handoffs[report.handoff_id] = None
        if len(self._ended_handoffs) > _MAX_REMEMBERED_HANDOFFS:
            self._ended_handoffs.popitem(last=False)
        if committed:
            self.stats.handoff_committed(report, now)
        elif report.reason != kv_transfer_pb2.REFUSAL_REASON_CANCELLED:
            self.stats.handoff_failed(report.reason, now)

    def _worker_cache(self, event: ev.WorkerCache, now: float) -> None:
        worker = self._heard(event.worker, now)
        if worker is not None:
            self.placer.apply_cache(worker, event.changes)

    def _worker_changed(self, event: ev.WorkerChanged, now: float) -> None:
        worker = self._heard(event.worker, now)
        if worker is None:
            return
        change = event.change
        if change.state == cluster_pb2.WORKER_STATE_STOPPED:
            reason = f"stopped: {change.reason}" if change.reason else "stopped"
            self._lose(worker, reason, now, fenced=False, blame=change.failed)
            return
        if change.state == cluster_pb2.WORKER_STATE_DRAINING:
            self._flips.stop(worker)
            self._drains.said(worker)
            if worker.state != cluster_pb2.WORKER_STATE_DRAINING:
                # By itself: another may have to take its place.
                self.scaler.soon(now)
        if change.state:
            worker.state = change.state
        if change.role:
            worker.role = change.role
            self._flips.heard(worker)
        self.placer.refresh(worker)
        self._book.room_made = True

    def _worker_detached(self, event: ev.WorkerDetached, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.connected = False
            # Its time to come back begins now. The end of a silent one's stream is no sign of life.
            if not worker.unresponsive:
                worker.heard_at = now
            self.placer.refresh(worker)
            self._watch(worker, now)

    def _worker_lost(self, event: ev.WorkerLost, now: float) -> None:
        worker = self.workers.by_id(event.worker_id)
        if worker is not None and event.incarnation in (None, worker.hello.incarnation):
            self._lose(worker, event.reason, now)

    def _targets_asked(self, event: ev.TargetsAsked, now: float) -> None:
        self.scaler.set_targets(event.targets, now)
        self.stats.recent.targets = in_config(self.scaler.targets)

    def _drain_asked(self, event: ev.DrainAsked, now: float) -> None:
        worker = self.workers.by_id(event.worker_id)
        if worker is None:
            self.scaler.launches.give_up(event.worker_id)
        else:
            self._drain(worker, event.timeout_s, event.reason, now)
        # Another may have to take its place.
        self.scaler.soon(now)

    def _drain(self, worker: Worker, timeout_s: float, reason: str, now: float) -> None:
        self._flips.stop(worker)
        self._drains.begin(worker, timeout_s, reason, now)
        self._watch(worker, now)

    def _flip_asked(self, event: ev.FlipAsked, now: float) -> None:
        worker = self.workers.by_id(event.worker_id)
        if worker is not None and self.flip_error(worker, event.role) is None:
            self._flips.begin(worker, event.role, now, by_hand=True)

    def _worker_exited(self, event: ev.WorkerExited, now: float) -> None:
        worker = self.workers.by_id(event.worker_id)
        if self.scaler.launches.is_starting(event.worker_id):
            # Who is attached under its id is another.
            worker = None
        leaves = worker is not None and worker.state == cluster_pb2.WORKER_STATE_DRAINING
        if worker is not None and not leaves:
            self.scaler.exited(event, now)
            self._lose(worker, event.reason, now)
            return
        if worker is not None:
            self._lose(worker, event.reason, now, fenced=False, blame=False)
        self.scaler.exited(event, now)

    def _scale(self, now: float) -> None:
        """Sizes the pools; those that the scaler starts by itself are in its effects."""
        for action in self.scaler.decide(now):
            worker = self.workers.by_id(action.worker_id)
            if worker is None:
                continue
            if isinstance(action, Drain):
                self._drain(worker, self._config.scaling.drain_s, action.reason, now)
            else:
                role = ROLE_OF[action.to]
                if self._flips.error(worker, role) is None:
                    self._flips.begin(worker, role, now, by_hand=False)

    def _lose(
        self,
        worker: Worker,
        reason: str,
        now: float,
        *,
        fenced: bool = True,
        blame: bool = True,
        ended: bool = True,
    ) -> None:
        """Takes a worker out; its requests go on elsewhere, and their other workers are told.

        Args:
            worker: attached.
            reason: in words, continuing "worker w1 ...".
            now: by the core's clock.
            fenced: False when it leaves by itself.
            blame: whether what it computed may be what ended it.
            ended: False when another process goes on under its id.
        """
        self.workers.remove(worker, reason)
        self._adoption.lost(worker.key)
        self.placer.detach(worker)
        self.latency.forget(worker.key)
        self._timers.cancel(worker.key)
        if fenced or blame:
            self.stats.worker_lost(now)
        leaves = worker.state == cluster_pb2.WORKER_STATE_DRAINING
        if ended:
            self.scaler.left(worker.id, reason, now, wanted=leaves)
        suspects = worker.computing() if blame and not worker.unresponsive else []
        self._recover_all(worker, reason, suspects, now)
        fence = errors.Aborted(f"worker {worker.id} is fenced: it {reason}") if fenced else None
        self._book.out.append(ev.FenceWorker(worker.key, fence))

    def _recover_all(
        self,
        worker: Worker,
        reason: str,
        suspects: list[str],
        now: float,
        *,
        with_begun: bool = True,
    ) -> None:
        lost = f"worker {worker.id} {reason}"
        for request_id in [*worker.assigned, *worker.sending]:
            request = self._book.get(request_id)
            if request is None or worker.key not in (request.prefill, request.decode):
                continue
            if len(request.token_ids) and not with_begun:
                continue
            if request.suspect and suspects == [request_id]:
                error = errors.Internal(
                    f"request {request_id} was what two workers computed when they died; the last, "
                    f"worker {worker.id}, {reason}"
                )
                self._book.fail(request, error, now)
                continue
            request.suspect |= request_id in suspects
            self._book.recover(request, worker.key, errors.Unavailable(lost), now)

    def _suspect(self, worker: Worker, reason: str, now: float) -> None:
        """A worker does not respond: others take its requests, where there are others.

        It is not out: when it responds again it is given new work. What it then still says of the
        requests that went elsewhere is of an older attempt. Where only the stable revision could
        take its requests, those stay that have begun.
        """
        has_peers = any(other is not worker for other in self.workers.peers(worker))
        if not worker.unresponsive and (has_peers or worker.revision != self.workers.stable):
            worker.unresponsive = reason
            self.placer.refresh(worker)
            self.stats.worker_unresponsive(now)
            self._recover_all(worker, reason, [], now, with_begun=has_peers)

    def _responds(self, worker: Worker) -> None:
        worker.unresponsive = ""
        self.placer.refresh(worker)
        self._book.room_made = True

    # ---- Time

    def _excuse(self, now: float) -> None:
        """Forgives the workers a silence that was the coordinator's own.

        A process that stood still (stopped, starved, a paused machine) finds timers long overdue
        and what the workers said meanwhile unread.
        """
        due = self._timers.next()
        if due is None or now - due < self._config.worker_silent_s / 2:
            return
        for worker in self.workers:
            worker.heard_at = now
            worker.progressed_at = min(now, worker.progressed_at + now - due)
            self._watch(worker, now)

    def _silent_s(self, worker: Worker) -> float:
        """How long its requests wait for a worker that says nothing."""
        silent_s = self._config.worker_silent_s
        return silent_s if worker.connected else min(silent_s, _GONE_S)

    def _watch(self, worker: Worker, now: float) -> None:
        """Sets the timer of a worker's silence."""
        silent_s = self._silent_s(worker)
        due = worker.heard_at + silent_s
        if due <= now:
            # Looked at again, since others may come that could take its requests.
            due = now + silent_s
        due = min(due, worker.heard_at + self._config.worker_timeout_s, worker.leaves_by)
        self._timers.set(worker.key, due)

    def _tick(self, event: ev.Tick, now: float) -> None:
        while (key := self._timers.pop_due(now)) is not None:
            if isinstance(key, str):
                request = self._book.get(key)
                if request is not None:
                    self._book.expire(request, self._queue_error, now)
                else:
                    self._adoption.expire(key)
                continue
            if key == SETTLED:
                self._adoption.settled()
                continue
            if key == SCALING:
                self._scale(now)
                continue
            if key == ROLLOUT:
                self.rollouts.advance(now)
                continue
            worker = self.workers.get(key)
            assert worker is not None
            if worker.leaves_by <= now:
                self._lose(worker, "did not leave in time", now)
                continue
            silent = "was silent" if worker.connected else "was gone"
            if worker.heard_at + self._config.worker_timeout_s <= now:
                self._lose(worker, f"{silent} for {self._config.worker_timeout_s:g} s", now)
                continue
            if worker.heard_at + self._silent_s(worker) <= now:
                self._suspect(worker, f"{silent} for {now - worker.heard_at:.1f} s", now)
            self._watch(worker, now)
