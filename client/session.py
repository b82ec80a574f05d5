"""One `Inference.Session` stream, which multiplexes any number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import errors
from baton.client.client_request import ClientRequest
from baton.client.retry_policy import MAX_UNACCEPTED
from baton.runtime.errors import RemoteError
from baton.runtime.network.rpc import MAX_MESSAGE_BYTES
from baton.v1 import inference_pb2, inference_pb2_grpc

# Size limit of the fields around a request in its message.
_ENVELOPE_BYTES = 64
# Limits of a batch of queued messages; a longer submission is sent by itself.
_MAX_BATCH, _MAX_BATCH_BYTES = 64, 2**20
# gRPC's message if the stream ended during a write; it hides the error that ended the stream.
_ENDED_DURING_WRITE = "Internal error from Core"
_HEALTH_TIMEOUT_S = 2.0
# Errors of a stream that every new stream would get too, unless the error says when to retry.
_REFUSALS = {
    code_pb2.UNAUTHENTICATED,
    code_pb2.PERMISSION_DENIED,
    code_pb2.RESOURCE_EXHAUSTED,
    code_pb2.UNIMPLEMENTED,
}


def check_size(request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidArgumentError if a request exceeds gRPC's message size limit.

    Sending it would end the stream for all requests of the session.
    """
    num_bytes = request.ByteSize() + _ENVELOPE_BYTES
    if num_bytes > MAX_MESSAGE_BYTES:
        raise errors.invalid(
            "request", f"{num_bytes} bytes", f"must be at most {MAX_MESSAGE_BYTES} bytes"
        )


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """How a session ended.

    Attributes:
        error: Error with which the stream ended.
        served: The coordinator sent at least one message.
        refused: A coordinator refused the stream, or a proxy did not reach the coordinator: no
            submitted request was accepted.
    """

    error: RemoteError
    served: bool
    refused: bool

    @property
    def permanent(self) -> bool:
        """Whether another attempt would fail in the same way."""
        return self.error.code in _REFUSALS and self.error.retry_after_s is None


class Session:
    """A stream that is opened once and ends once; holds the requests that are submitted on it.

    The session manager owns the session and takes back the requests that have not ended.

    The send queue holds at most one submission or cancel per request. At most MAX_UNACCEPTED
    resumed requests are sent before the coordinator accepts them.

    Args:
        channel: Channel of this session only.
        address: Address of the coordinator, for error messages.
        on_open: Called once when the connection is open.
        on_refused: Called with a request that may be submitted again (it is lost, may retry, or
            the coordinator is restarting) and the error of the refusal.

    Attributes:
        address: Address of the coordinator.
        draining: The coordinator has said that it is restarting: it accepts no new requests.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        *,
        on_open: Callable[[Session], None],
        on_refused: Callable[[ClientRequest, RemoteError], None],
    ) -> None:
        self.address = address
        self._channel = channel
        self._on_open, self._on_refused = on_open, on_refused
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self._call: grpc.aio.StreamStreamCall[
            inference_pb2.SessionRequest, inference_pb2.SessionEvents
        ] = stub.Session()
        self._requests: dict[int, ClientRequest] = {}
        self._last_number = 0
        # By stream number: submissions to send, streams to cancel, resumed requests that wait for
        # one of MAX_UNACCEPTED slots, and resumed requests that were sent and not answered.
        self._submits: dict[int, inference_pb2.Submit] = {}
        self._cancels: dict[int, None] = {}
        self._held_resumes: dict[int, None] = {}
        self._unaccepted: set[int] = set()
        self._to_send = asyncio.Event()
        self._closed = False
        self._served = False
        self.draining = False

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, so that no request can be submitted."""
        return self._closed

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def submit(self, request: ClientRequest) -> None:
        """Queues a request for submission."""
        number = self._next_number()
        request.on_submitted(self.address, partial(self._cancel, number))
        self._requests[number] = request
        if request.is_lost:
            self._held_resumes[number] = None
            self._send_held_resumes()
        else:
            self._send(number, request.message())

    def release(self) -> list[ClientRequest]:
        """Returns the requests that have not ended and forgets them."""
        left, self._requests = list(self._requests.values()), {}
        return left

    async def run(self) -> SessionEnd:
        """Serves until the stream ends; its tasks have ended when this returns."""
        writer = asyncio.create_task(self._write(), name="baton session writer")
        try:
            reached = await self._connected()
            if reached:
                self._on_open(self)
            end = await self._read(reached)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # gRPC swallows a cancellation that coincides with a failure to connect.
                raise asyncio.CancelledError
            return end
        finally:
            self._closed = True
            self._call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _connected(self) -> bool:
        """Waits for the connection; returns whether it is open.

        The call's own wait_for_connection returns before the connection is open. If a connection
        opens and closes between two reads of the channel's state, the channel is idle in both. Only
        the end of the call then shows that there was a connection.
        """
        ended = asyncio.Event()
        self._call.add_done_callback(lambda _: ended.set())
        call_end = asyncio.create_task(ended.wait())
        try:
            while (state := self._channel.get_state()) is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or ended.is_set():
                    return False
                change = asyncio.ensure_future(self._channel.wait_for_state_change(state))
                try:
                    await asyncio.wait((change, call_end), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
            return True
        finally:
            call_end.cancel()

    async def _read(self, reached: bool) -> SessionEnd:
        """Dispatches events until the stream ends; returns how it ended."""
        try:
            while isinstance(batch := await self._call.read(), inference_pb2.SessionEvents):
                self._served = True
                self._receive(batch)
        except grpc.RpcError as error:
            cause = await self._cause(error)
            refused = cause.code in _REFUSALS or errors.is_from_proxy(cause)
            if refused or not reached:
                return SessionEnd(cause, self._served, refused)
            return self._lost(error.details() or str(cause))
        return self._lost("ended by the coordinator")  # grpc.aio.EOF

    async def _cause(self, error: grpc.RpcError) -> RemoteError:
        """Returns the error that ended the stream.

        gRPC hides the error if the stream ended during a write. If nothing was received before, a
        health check call gets the same error from the server.
        """
        if error.details() == _ENDED_DURING_WRITE and not self._served:
            stub = health_pb2_grpc.HealthStub(self._channel)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
            except grpc.RpcError as hidden:
                error = hidden
        return errors.from_rpc_error(error, self.address)

    def _receive(self, batch: inference_pb2.SessionEvents) -> None:
        """Passes the events of a message to their requests, then all of them to the readers."""
        requests, unaccepted = self._requests, self._unaccepted
        received = list[ClientRequest]()
        for event in batch.events:
            number = event.stream
            request = requests.get(number)
            if request is None:
                continue  # The request was cancelled here while the event was in flight.
            received.append(request)
            # Nearly all events are deltas with tokens. Looking for tokens is cheaper than asking
            # for the event's kind, and copying them to a list is cheaper than iterating over them.
            delta = event.delta
            token_ids = delta.token_ids[:]
            if token_ids and number not in unaccepted:
                request.on_delta(delta, token_ids)
            else:
                self._dispatch(request, event)
        for request in received:
            request.buffer.deliver()

    def _dispatch(self, request: ClientRequest, event: inference_pb2.SessionEvent) -> None:
        number = event.stream
        resumes = number in self._unaccepted
        if resumes:
            self._answered(number)
        if event.HasField("failed"):
            error = errors.from_message(event.failed)
            self.draining |= errors.is_restarting(error)
            again = resumes and request.is_lost
            if again or request.may_retry or errors.is_restarting(error):
                del self._requests[number]
                self._on_refused(request, error)
                return
        request.on_event(event)
        if request.ended:
            self._requests.pop(number, None)

    def _lost(self, why: str) -> SessionEnd:
        message = f"the session with the coordinator at {self.address} is lost: {why}"
        return SessionEnd(errors.make(code_pb2.UNAVAILABLE, message), self._served, refused=False)

    def _next_number(self) -> int:
        number = self._last_number
        while True:
            number = number % 0xFFFF_FFFF + 1
            if number not in self._requests:
                self._last_number = number
                return number

    def _send(self, number: int, request: inference_pb2.GenerateRequest) -> None:
        self._submits[number] = inference_pb2.Submit(stream=number, request=request)
        self._to_send.set()

    def _send_held_resumes(self) -> None:
        """Sends resumed requests while fewer than MAX_UNACCEPTED are unanswered."""
        while self._held_resumes and len(self._unaccepted) < MAX_UNACCEPTED:
            number = next(iter(self._held_resumes))
            del self._held_resumes[number]
            request = self._requests[number]
            message = request.message()
            try:
                check_size(message)
            except RemoteError as error:
                del self._requests[number]
                self._on_refused(request, error)
                continue
            self._unaccepted.add(number)
            self._send(number, message)

    def _answered(self, number: int) -> None:
        self._unaccepted.discard(number)
        self._send_held_resumes()

    def _cancel(self, number: int, request: ClientRequest) -> None:
        if self._submits.pop(number, None) is not None or number in self._held_resumes:
            # The request was never sent.
            self._held_resumes.pop(number, None)
            request.finish_cancelled()
        else:
            self._cancels[number] = None
            self._to_send.set()
        if request.ended:
            self._requests.pop(number, None)
            self._answered(number)

    async def _write(self) -> None:
        """Sends queued messages; those that queue up during a write are sent as one batch."""
        try:
            while True:
                while self._submits or self._cancels:
                    found = self._next_messages()
                    one = len(found) == 1
                    await self._call.write(
                        found[0] if one else inference_pb2.SessionRequest(batch=found)
                    )
                self._to_send.clear()
                await self._to_send.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The stream ended; `_read` gets the error and handles it.
            return

    def _next_messages(self) -> list[inference_pb2.SessionRequest]:
        """Takes the next batch from the queue, cancels first: they free capacity.

        A request in the queue of submissions has no entry in the queue of cancels.
        """
        found, num_bytes = list[inference_pb2.SessionRequest](), 0
        while self._cancels and len(found) < _MAX_BATCH:
            number = next(iter(self._cancels))
            del self._cancels[number]
            cancel = inference_pb2.Cancel(stream=number)
            found.append(inference_pb2.SessionRequest(cancel=cancel))
        while self._submits and len(found) < _MAX_BATCH:
            number = next(iter(self._submits))
            num_bytes += self._submits[number].ByteSize()
            if found and num_bytes > _MAX_BATCH_BYTES:
                break
            found.append(inference_pb2.SessionRequest(submit=self._submits.pop(number)))
        return found
