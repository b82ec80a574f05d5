"""Runs the core on asyncio: feeds it events with their time, and carries out its effects."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable

from baton.coordinator.core.core import Core
from baton.coordinator.launchers.launch_supervisor import LaunchSupervisor
from baton.coordinator.server.cache_drops import CacheDrops
from baton.coordinator.server.call_tenants import CallTenants
from baton.coordinator.server.link import ENVELOPE_BYTES, WorkerLink
from baton.coordinator.server.outbox import Outbox
from baton.coordinator.server.profiles import Profiles
from baton.coordinator.server.renders import Renders
from baton.coordinator.server.session_events import encoded_deltas
from baton.coordinator.server.stall import slow_reader
from baton.coordinator.server.traces import request_span
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestKey, StreamKey, WorkerKey
from baton.coordinator.state.slow_steps import Cause, Stall
from baton.coordinator.telemetry.stalls import MAX_STALLS
from baton.runtime.errors import BatonError, InvalidArgument
from baton.runtime.network.rpc import MAX_MESSAGE_BYTES
from baton.runtime.telemetry.tracing import Tracing
from baton.v1 import cluster_pb2, inference_pb2

_log = logging.getLogger(__name__)

# The event loop's timers may fire up to a millisecond before time.monotonic() reaches their time.
_TIMER_SLACK_S = 0.001
_MAX_SLOW_WRITES = 256
# Requests of a lost session that are cancelled without a pause.
_MAX_LOST_AT_ONCE = 128
# Why a worker is removed if too many of its commands wait for an acknowledgement; follows
# "worker w1 ...".
_NO_ACKNOWLEDGEMENT = "does not acknowledge commands"


class ClientSession:
    """One client call: its outbox, and its streams (requests) that have not ended.

    Attributes:
        live: numbers of the streams that have not ended.
        slow: whether the session was closed because its client reads too slowly.
        end_error: error that ends the call after the client has read all waiting events, while
            its requests continue; None: the call goes on.
        holders: tenants that the call is charged to.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.outbox = Outbox()
        self.live: set[int] = set()
        self.slow = False
        self.end_error: BatonError | None = None
        self.holders = CallTenants()
        # By stream number: functions that free the stream's request slot and its images' memory.
        self._releases: dict[int, list[Callable[[], None]]] = {}

    def on_stream_end(self, stream: int, release: Callable[[], None]) -> None:
        """Adds a function that is called once, when the stream ends or the session closes."""
        self._releases.setdefault(stream, []).append(release)

    def release_streams(self) -> None:
        """Frees the request slots and the images' memory of all streams; idempotent."""
        releases, self._releases = self._releases, {}
        for release in itertools.chain.from_iterable(releases.values()):
            release()

    def release(self) -> None:
        """Frees the resources of all streams, and the call slots, at the end of the call."""
        self.release_streams()
        self.holders.release()

    def end(self, stream: int, last: inference_pb2.Finished | BatonError) -> None:
        """Ends a stream with its last event."""
        self.live.discard(stream)
        for release in self._releases.pop(stream, ()):
            release()
        if self.holders:
            self.holders.leave(stream)
        self.outbox.push(stream, last)


class Shell:
    """Feeds events to the core and carries out its effects, all on one event loop.

    Attributes:
        tracing: exporter of request spans; None: spans are dropped.
        generation: random ID of this coordinator's run, never 0.
        started_at: start time, by the core's clock.
        launch_supervisor: starts and ends workers; None: this coordinator starts no workers.
        profiles: running profiles of workers.
        cache_drops: commands to delete KV blocks of workers.
        renders: commands to render chats with images.

    Args:
        core: the core.
        held_image_bytes: limit of the images that commands may carry at the same time.
        max_command_bytes: size limit of one command.
    """

    def __init__(
        self,
        core: Core,
        held_image_bytes: int = 0,
        max_command_bytes: int = MAX_MESSAGE_BYTES - ENVELOPE_BYTES,
    ) -> None:
        self.core = core
        self._held_image_bytes = held_image_bytes
        self._max_command_bytes = max_command_bytes
        self.tracing: Tracing | None = None
        # The latest slow writes: session number, start and end.
        self._slow_writes: deque[tuple[int, float, float]] = deque(maxlen=_MAX_SLOW_WRITES)
        self.generation = secrets.randbits(64) or 1
        self.started_at = self.now()
        self.launch_supervisor: LaunchSupervisor | None = None
        self._sessions: dict[int, ClientSession] = {}
        self._numbers = itertools.count(1)
        self._links: dict[WorkerKey, WorkerLink] = {}
        self.profiles = Profiles(self._command)
        self.cache_drops = CacheDrops(self._command)
        self.renders = Renders(self._command)
        self._leave_error: BatonError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._follow_ups: deque[ev.Event] = deque()
        self._closed = False
        self._idle = asyncio.Event()
        self._watchers: list[Callable[[], None]] = [self.renders.on_members_changed]
        self._appliers: dict[type, Callable[..., None]] = {
            ev.SendAccepted: self._send_accepted,
            ev.SendDeltas: self._send_deltas,
            ev.SendFinished: self._send_finished,
            ev.SendFailed: self._send_failed,
            ev.SendCommand: self._send_command,
            ev.WelcomeWorker: self._welcome_worker,
            ev.RefuseWorker: self._refuse_worker,
            ev.FenceWorker: self._fence_worker,
            ev.ExportTrace: self._export_trace,
            ev.StartWorker: self._start_worker,
            ev.EndWorker: self._end_worker,
            ev.Decided: self._decided,
        }

    @staticmethod
    def now() -> float:
        """The core's clock, in seconds."""
        return time.monotonic()

    def post(self, event: ev.Event) -> None:
        """Handles an event and all follow-up events synchronously."""
        self._follow_ups.append(event)
        if len(self._follow_ups) > 1:
            return
        members_changed = False
        try:
            while self._follow_ups:
                event = self._follow_ups[0]
                for effect in self.core.handle(event, self.now()):
                    self._appliers[type(effect)](effect)
                members_changed |= type(event) in _MEMBERSHIP
                self._follow_ups.popleft()
        finally:
            self._follow_ups.clear()
            self._set_timer()
        if not self.core.num_requests:
            self._idle.set()
        if members_changed:
            for watcher in self._watchers:
                watcher()

    def watch_members(self, watcher: Callable[[], None]) -> None:
        """Calls `watcher` after every event that may change which workers serve."""
        self._watchers.append(watcher)

    async def idle(self) -> None:
        """Waits until no request is left."""
        while self.core.num_requests:
            self._idle.clear()
            await self._idle.wait()

    def leave(self, why: BatonError) -> None:
        """Ends all streams, but not their requests, which the next coordinator takes over.

        Clients resume their requests at the next coordinator, and workers continue them until
        then. New workers are refused.
        """
        self._leave_error = why
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.end_error = why
            session.outbox.wake()
        for link in self._links.values():
            link.leave()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- Clients

    def open_session(self) -> ClientSession:
        session = ClientSession(next(self._numbers))
        self._sessions[session.number] = session
        return session

    def close_session(self, session: ClientSession) -> None:
        """Closes a session; cancels its running requests."""
        if self._drop_session(session):
            self._cancel_requests_of(session.number)

    def _cancel_requests_of(self, session: int) -> None:
        """Cancels the requests of a closed session in parts, between which the event loop runs.

        The session of a gateway that dies may have thousands of requests, and their cancellation
        must not delay other streams.
        """
        self.post(ev.SessionLost(session, _MAX_LOST_AT_ONCE))
        if self.core.serves(session):
            asyncio.get_running_loop().call_soon(self._cancel_requests_of, session)

    def is_open(self, session: ClientSession) -> bool:
        """Whether the session is open; a closed session must not get new requests."""
        return session.number in self._sessions

    def wrote_slowly(self, session: ClientSession, began_at: float, ended_at: float) -> None:
        """Records a write that was delayed by a slow client."""
        self._slow_writes.append((session.number, began_at, ended_at))

    def client_stalls(self, session: int, arrived_at: float, ended_at: float) -> list[Stall]:
        """Periods in which a slow client delayed the events of a request; only recent ones."""
        return [
            Stall(
                max(0, round((began - arrived_at) * 1e6)),
                round((ended - max(began, arrived_at)) * 1e6),
                Cause.CLIENT,
            )
            for number, began, ended in self._slow_writes
            if number == session and began <= ended_at and ended > arrived_at
        ][-MAX_STALLS:]

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    # ---- Workers

    def attach(self, hello: cluster_pb2.Hello, stream: object) -> WorkerLink:
        """Attaches a worker over a new stream.

        Raises:
            BatonError: The worker is refused (see cluster.proto), or this coordinator stops.
        """
        if self._leave_error is not None:
            raise self._leave_error
        link = self._links.get((hello.worker_id, hello.incarnation))
        # The acknowledgement is only valid if the worker knows this coordinator's generation.
        if link is not None and hello.generation == self.generation:
            # This frees room in the link, which may be at its limit, for the commands that follow.
            link.acknowledge(hello.ack)
        returns = hello.generation not in (0, self.generation)
        # A link that is not used may belong to this very return, if its welcome was lost.
        forgets = returns and link is not None and link.is_used
        if link is not None and forgets:
            # Messages of an older stream must not reach the new link's worker.
            link.leave()
        # The core refuses the worker for the same reason, with an effect that is only logged.
        refusal = self.core.workers.refusal(hello)
        self.post(ev.WorkerAttached(hello, returns, forgets))
        if refusal is not None:
            raise refusal
        link = self._links.get((hello.worker_id, hello.incarnation))
        if link is None:
            # The commands for the worker exceeded the limit of its link, which removed the worker.
            refusal = self.core.workers.refusal(hello)
            assert refusal is not None
            raise refusal
        link.open(stream)
        return link

    def detach(self, link: WorkerLink, stream: object) -> None:
        """Handles the end of a stream, unless a newer stream has replaced it."""
        if link.stream is stream:
            link.stream = None
            if self._links.get(link.key) is link:
                self.post(ev.WorkerDetached(link.key))

    def _command(self, worker: WorkerKey, command: ev.Command) -> None:
        """Sends a worker a command that does not come from the core.

        Raises:
            InvalidArgument: The command is too large.
        """
        link = self._links.get(worker)
        if link is not None and not link.send(command):
            worker_id, incarnation = worker
            self.post(ev.WorkerLost(worker_id, _NO_ACKNOWLEDGEMENT, incarnation))

    # ---- Effects

    def _send_accepted(self, effect: ev.SendAccepted) -> None:
        session = self._sessions.get(effect.to.session)
        if session is not None:
            accepted = inference_pb2.Accepted(
                request_id=effect.request_id,
                model=effect.adapter or self.core.model_name,
                prompt_tokens=effect.num_prompt_tokens,
            )
            session.outbox.push(effect.to.stream, accepted)
            self._check_limits(session)

    def _send_deltas(self, effect: ev.SendDeltas) -> None:
        for number, batch in encoded_deltas(effect.deltas).items():
            session = self._sessions.get(number)
            if session is not None and session.outbox.push_deltas(batch):
                self._check_limits(session)

    def _check_limits(self, session: ClientSession) -> None:
        """Fails streams, or closes the session, if too much waits for the client's reader."""
        for stream in session.outbox.take_slow_streams():
            slow = StreamKey(session.number, stream)
            self._follow_ups.append(ev.StreamFailed(slow, slow_reader()))
        if session.outbox.overfull and self._drop_session(session):
            session.slow = True
            self._follow_ups.append(ev.SessionLost(session.number))

    def _drop_session(self, session: ClientSession) -> bool:
        """Drops a session and its events; returns False if it was dropped before."""
        if self._sessions.pop(session.number, None) is None:
            return False
        session.outbox.clear()
        # The resources are freed now, because a client that does not read may keep its call open.
        session.release_streams()
        return True

    def _send_finished(self, effect: ev.SendFinished) -> None:
        session = self._sessions.get(effect.to.session)
        if session is not None:
            finished = inference_pb2.Finished(
                reason=effect.reason,
                stop=effect.stop,
                usage=effect.usage,
                budget=effect.budget,
                prompt_logprobs=effect.prompt_logprobs,
            )
            # Prompt logprobs are up to 4 MiB. They must not fill the session, because it would be
            # closed with all of its requests.
            if effect.prompt_logprobs and not session.outbox.has_room(finished.ByteSize()):
                session.end(effect.to.stream, slow_reader())
            else:
                session.end(effect.to.stream, finished)
            self._check_limits(session)

    def _send_failed(self, effect: ev.SendFailed) -> None:
        session = self._sessions.get(effect.to.session)
        if session is not None:
            session.end(effect.to.stream, effect.error)
            self._check_limits(session)

    def _send_command(self, effect: ev.SendCommand) -> None:
        link, command = self._links.get(effect.worker), effect.command
        if link is None:
            return
        try:
            is_kept = link.send(command)
        except InvalidArgument as error:
            # Only these commands have a part that a client chooses.
            if isinstance(command, cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand):
                key = RequestKey(command.spec.request_id)
                self._follow_ups.append(ev.RequestFailed(key, error))
            _log.warning("a command was not sent: %s", error, extra={"worker": effect.worker[0]})
            return
        if not is_kept:
            worker_id, incarnation = effect.worker
            self._follow_ups.append(ev.WorkerLost(worker_id, _NO_ACKNOWLEDGEMENT, incarnation))

    def _welcome_worker(self, effect: ev.WelcomeWorker) -> None:
        if effect.worker not in self._links:
            # An image goes to a worker to be rendered, and once more with its request.
            self._links[effect.worker] = WorkerLink(
                effect.worker, 2 * self._held_image_bytes, self._max_command_bytes
            )
            _log.info("worker attached", extra={"worker": effect.worker[0]})
            self._warn_of_revision(effect.worker)
        link = self._links[effect.worker]
        link.role, link.adopted = effect.role, effect.adopted

    def _warn_of_revision(self, key: WorkerKey) -> None:
        """Warns if the worker's fleet gets no new requests: its revision may be misspelled."""
        worker, traffic = self.core.workers.get(key), self.core.rollouts.traffic
        if worker is not None and not traffic.is_current(worker.fleet):
            _log.warning(
                "revision %r is neither stable (%r) nor a canary: its workers get no new requests",
                worker.fleet.name,
                traffic.stable.name,
                extra={"worker": worker.id},
            )

    def _refuse_worker(self, effect: ev.RefuseWorker) -> None:
        _log.warning("worker refused: %s", effect.error, extra={"worker": effect.worker[0]})

    def _fence_worker(self, effect: ev.FenceWorker) -> None:
        link = self._links.pop(effect.worker, None)
        if link is not None:
            link.end(effect.error)
        for waiting in (self.profiles, self.cache_drops, self.renders):
            waiting.lost(effect.worker, str(effect.error or "it left"))
        if effect.error is not None:
            _log.warning("%s", effect.error, extra={"worker": effect.worker[0]})

    def _export_trace(self, effect: ev.ExportTrace) -> None:
        if self.tracing is None:
            return
        wanted = self.tracing.is_sampled(effect.traceparent)
        if not wanted and not effect.kept:
            return
        age_s = self.now() - effect.record.arrived_at
        span = request_span(effect.record, round((time.time() - age_s) * 1e9), effect.kept)
        if wanted:
            self.tracing.record(effect.traceparent, span)
        else:
            self.tracing.record_tail_sample(effect.traceparent, span)

    def _start_worker(self, effect: ev.StartWorker) -> None:
        if self.launch_supervisor is not None:
            _log.info("starting a worker", extra={"worker": effect.worker_id})
            self.launch_supervisor.start(effect.worker_id, effect.pool, effect.revision)

    def _end_worker(self, effect: ev.EndWorker) -> None:
        if self.launch_supervisor is not None:
            self.launch_supervisor.end(effect.worker_id)

    def _decided(self, effect: ev.Decided) -> None:
        if effect.decision.actions:
            for one in (effect.decision.prefill, effect.decision.decode):
                _log.info("%s %d -> %d: %s", one.pool.value, one.current, one.target, one.reason)

    # ---- Time

    def _set_timer(self) -> None:
        """Sets the timer for the core's next deadline; an early Tick is harmless."""
        due = self.core.next_deadline()
        if self._closed or due is None or (self._timer is not None and self._timer_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, due - self.now()) + _TIMER_SLACK_S
        self._timer_at = due
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(ev.Tick())
        self._set_timer()


_MEMBERSHIP = {
    ev.WorkerAttached,
    ev.WorkerDetached,
    ev.WorkerChanged,
    ev.WorkerLost,
    ev.DrainRequested,
    ev.FlipRequested,
    ev.LauncherReady,
    ev.WorkerExited,
    ev.WorkerWaits,
    ev.ScaleRequested,
    ev.AutoscaleRequested,
    ev.RolloutRequested,
    ev.PromotionRequested,
    ev.AbortRequested,
    ev.Tick,
}
