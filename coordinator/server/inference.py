"""The Inference service: single calls and multiplexed sessions over one shell."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import grpc

from baton.coordinator.server.intake import Intake, has_images
from baton.coordinator.server.message_limits import decoder
from baton.coordinator.server.session_events import generate_events
from baton.coordinator.server.shell import ClientSession, Shell
from baton.coordinator.server.stall import StallGuard, slow_reader
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import StreamKey
from baton.runtime.config import CoordinatorConfig
from baton.runtime.errors import (
    BatonError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unauthenticated,
    abort,
)
from baton.runtime.security.access import ANYONE, Caller
from baton.runtime.security.guard import authorization
from baton.runtime.security.unchecked_calls import CURRENT, evicted_error
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

# Seconds within which a session must be charged to a tenant: it must send a request with a valid
# credential whose tenant has a free call slot.
_CHARGE_TIMEOUT_S = 10.0
# Limit of messages in a client's batch, and number of messages handled before the event loop runs
# other tasks.
_MAX_BATCH, _MAX_AT_ONCE = 64, 16

# The write type is bytes, because messages are written encoded.
_GenerateContext: TypeAlias = "grpc.aio.ServicerContext[inference_pb2.GenerateRequest, bytes]"
_SessionContext: TypeAlias = "grpc.aio.ServicerContext[inference_pb2.SessionRequest, bytes]"


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The Inference service, which clients call."""

    def __init__(self, shell: Shell, intake: Intake, config: CoordinatorConfig) -> None:
        self._shell, self._intake, self._config = shell, intake, config

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: object
    ) -> common_pb2.ModelDescription:
        return self._intake.model()

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: _GenerateContext
    ) -> None:
        arrived_at = self._shell.now()
        session = self._shell.open_session()
        guard = _guard(self._shell, session, context)
        try:
            deadline_s = context.time_remaining()
            credential, peer = authorization(context), context.peer()
            caller = self._intake.caller(request, credential, peer, arrived_at)
            _charge(self._intake, session, 0, caller, request, arrived_at)
            submission = await self._intake.submission(
                request, StreamKey(session.number, 0), arrived_at, deadline_s, caller
            )
            session.live.add(0)
            self._shell.post(ev.Submitted(submission))
            await _write_one(session, guard)
        except BatonError as error:
            await abort(context, error)
        finally:
            guard.close()
            self._shell.close_session(session)
            session.release()

    async def Session(  # type: ignore[override]
        self, request_iterator: object, context: _SessionContext
    ) -> None:
        del request_iterator  # Reading through the context leaves writing to another task.
        call = _SessionCall(self._shell, self._intake, self._config, context)
        try:
            await call.run()
        except BatonError as error:
            await abort(context, error)
        finally:
            call.close()


def add_to_server(service: InferenceService, server: grpc.aio.Server) -> None:
    """Registers the service like the generated code, but with encoders of its own.

    Events are written encoded, and unknown fields of requests are dropped.
    """
    handlers: dict[str, Any] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.Generate, decoder(inference_pb2.GenerateRequest)
        ),
        "Session": grpc.stream_stream_rpc_method_handler(
            service.Session, decoder(inference_pb2.SessionRequest)
        ),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            service.GetModel,
            inference_pb2.GetModelRequest.FromString,
            common_pb2.ModelDescription.SerializeToString,
        ),
    }
    name = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
    server.add_registered_method_handlers(name, handlers)


def _guard(shell: Shell, session: ClientSession, context: Any) -> StallGuard:
    """Creates the guard of a session's writes."""

    def slow(began_at: float, ended_at: float) -> None:
        # The times are by the loop's clock; only their difference is valid by the core's clock.
        now = shell.now()
        shell.wrote_slowly(session, now - (ended_at - began_at), now)

    return StallGuard(context, lambda: shell.close_session(session), on_slow=slow)


def _charge(
    intake: Intake,
    session: ClientSession,
    stream: int,
    caller: Caller,
    request: inference_pb2.GenerateRequest,
    now: float,
) -> None:
    """Charges the request, its images and its call to the caller's tenant.

    Raises:
        ResourceExhausted: The tenant has too many requests or calls, or the images do not fit.
    """
    if caller.grants is not None:
        # A gateway's call serves many tenants; only the tenant over its limit is refused.
        session.holders.enter(
            stream,
            caller.grants.tenant,
            lambda: intake.acquire_call_slot(caller, session.number, request, now),
        )
    if (release_slot := intake.acquire_slot(caller, request, now)) is not None:
        session.on_stream_end(stream, release_slot)
    if (release_images := intake.hold_images(request, now)) is not None:
        session.on_stream_end(stream, release_images)


async def _write_one(session: ClientSession, guard: StallGuard) -> None:
    """Writes the events of the session's only stream, up to the stream's last event."""
    while True:
        taken = await session.outbox.take()
        if session.slow:
            raise slow_reader()
        for event, is_last in generate_events(taken):
            await guard.write(event)
            if is_last:
                return
        if session.end_error is not None and session.outbox.empty:
            raise session.end_error


class _SessionCall:
    """One Session stream: submissions in, batches of events out."""

    def __init__(
        self, shell: Shell, intake: Intake, config: CoordinatorConfig, context: _SessionContext
    ) -> None:
        self._shell, self._intake, self._context = shell, intake, context
        self._max_requests = config.max_requests_per_session
        self._session = session = shell.open_session()
        self._guard = _guard(shell, session, context)
        self._unchecked = CURRENT.get()
        self._submitting: dict[int, asyncio.Task[None]] = {}
        # Why the session ends: it was not charged to any tenant in time. None: it may go on.
        self._not_charged: BatonError | None = None
        self._last_refusal: BatonError = Unauthenticated(
            f"no valid credential within {_CHARGE_TIMEOUT_S:g} s"
        )

    async def run(self) -> None:
        """Runs until the client has ended its stream and received all events.

        Raises:
            BatonError: An error that ends the whole session.
        """
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self._session.outbox.wake())
        timer = None
        if not self._may_stay_open:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(_CHARGE_TIMEOUT_S, self._end_if_not_charged, reader)
            if self._unchecked is not None:
                self._unchecked.on_evict = lambda: self._evict(reader)
                if self._unchecked.evicted:
                    self._evict(reader)
        try:
            await self._write(reader)
        finally:
            if timer is not None:
                timer.cancel()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    @property
    def _may_stay_open(self) -> bool:
        """Whether the call is charged to a tenant, or the coordinator requires no credentials."""
        return bool(self._session.holders) or not self._intake.needs_credentials

    def _end_if_not_charged(self, reader: asyncio.Task[None]) -> None:
        """Ends a session without a valid credential, or with a tenant that has too many calls."""
        if not self._may_stay_open and not reader.done():
            self._not_charged = self._last_refusal
            reader.cancel()

    def _evict(self, reader: asyncio.Task[None]) -> None:
        """Ends a session that is not charged to a tenant, because newer calls take its place."""
        self._last_refusal = evicted_error()
        self._end_if_not_charged(reader)

    def close(self) -> None:
        """Cancels everything that has not ended.

        It does not wait, because gRPC may cancel the call again during a wait.
        """
        for task in self._submitting.values():
            task.cancel()
        self._guard.close()
        self._shell.close_session(self._session)
        self._session.release()

    async def _read(self) -> None:
        while isinstance(message := await self._context.read(), inference_pb2.SessionRequest):
            if len(message.batch) > _MAX_BATCH:
                size = f"{len(message.batch)} messages"
                raise InvalidArgument("batch", size, f"at most {_MAX_BATCH}")
            for number, one in enumerate(message.batch or (message,), start=1):
                self._take(one)
                if number % _MAX_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _take(self, message: inference_pb2.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(message.submit)
        elif kind == "cancel":
            self._cancel(message.cancel.stream)
        else:
            raise InvalidArgument("message", None, "must be submit or cancel")

    def _submit(self, submit: inference_pb2.Submit) -> None:
        session, stream = self._session, submit.stream
        if session.end_error is not None:
            raise session.end_error
        if session.outbox.overfull or not self._shell.is_open(session):
            # Without this limit a client that reads nothing could fill the outbox with refusals.
            raise slow_reader()
        if stream in session.live:
            raise InvalidArgument(
                "submit.stream", stream, "must differ from those of requests that have not ended"
            )
        if len(session.live) >= self._max_requests:
            error = ResourceExhausted(
                f"{len(session.live)} requests run in this session; at most {self._max_requests}",
                reason="SESSION_FULL",
                retry_after_s=1.0,
            )
            session.end(stream, error)
            return
        session.live.add(stream)
        to, arrived_at, request = (
            StreamKey(session.number, stream),
            self._shell.now(),
            submit.request,
        )
        try:
            caller = self._caller(stream, request, arrived_at)
            submission = self._intake.submission_at_once(request, to, arrived_at, caller)
        except Exception as error:
            self._refuse(stream, error)
            return
        if submission is not None:
            self._shell.post(ev.Submitted(submission))
        else:
            submitting = self._submit_later(to, request, arrived_at, caller)
            self._submitting[stream] = asyncio.create_task(submitting)

    def _caller(
        self, stream: int, request: inference_pb2.GenerateRequest, arrived_at: float
    ) -> Caller:
        """Identifies the caller and charges the request to it. Raises BatonError."""
        caller = ANYONE
        if self._intake.needs_credentials:
            context = self._context
            credential, peer = authorization(context), context.peer()
            caller = self._intake.caller(request, credential, peer, arrived_at)
        elif not has_images(request):
            return caller
        try:
            _charge(self._intake, self._session, stream, caller, request, arrived_at)
        except ResourceExhausted as error:
            self._last_refusal = error
            raise
        if self._unchecked is not None:
            self._unchecked.leave()
        return caller

    async def _submit_later(
        self,
        to: StreamKey,
        request: inference_pb2.GenerateRequest,
        arrived_at: float,
        caller: Caller,
    ) -> None:
        """Tokenizes one request off the event loop and submits it to the core."""
        submission = None
        try:
            try:
                submission = await self._intake.submission(request, to, arrived_at, caller=caller)
            except Exception as error:
                self._refuse(to.stream, error)
            # A session that was closed meanwhile would never cancel this request.
            if submission is not None and self._shell.is_open(self._session):
                self._shell.post(ev.Submitted(submission))
        finally:
            self._submitting.pop(to.stream, None)

    def _refuse(self, stream: int, error: Exception) -> None:
        """Fails one request; other requests of the session continue."""
        if not isinstance(error, BatonError):
            error = Internal(f"the request could not be prepared: {error!r}")
        self._session.end(stream, error)

    def _cancel(self, stream: int) -> None:
        task = self._submitting.pop(stream, None)
        if task is None:
            self._shell.post(ev.StreamCancelled(StreamKey(self._session.number, stream)))
        elif task.cancel():
            task.add_done_callback(lambda done: self._cancelled(stream, done))

    def _cancelled(self, stream: int, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            finished = inference_pb2.Finished(reason=common_pb2.FINISH_REASON_CANCELLED)
            self._session.end(stream, finished)

    async def _write(self, reader: asyncio.Task[None]) -> None:
        """Writes events until the client has ended and received all; raises reader errors."""
        session = self._session
        while True:
            taken = await session.outbox.take()
            if session.slow:
                raise slow_reader()
            if taken:
                await self._guard.write(taken)
            if session.end_error is not None and session.outbox.empty:
                raise session.end_error
            if reader.done():
                if self._not_charged is not None:
                    raise self._not_charged
                reader.result()
                if not session.live and session.outbox.empty:
                    return
