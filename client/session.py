"""One `Inference.Session` stream: any number of requests, multiplexed."""

from __future__ import annotations

import asyncio

import grpc
from google.rpc import code_pb2

from baton.client import errors
from baton.client.stream import RequestState
from baton.runtime.errors import RemoteError, ResourceExhausted
from baton.runtime.rpc import MAX_MESSAGE_BYTES
from baton.v1 import inference_pb2, inference_pb2_grpc

# Of the message around a request.
_ENVELOPE_BYTES = 64
# Ends of the whole stream that say more than "it is gone": every request fails with the same.
_TELLING_CODES = {
    code_pb2.UNAUTHENTICATED,
    code_pb2.PERMISSION_DENIED,
    code_pb2.RESOURCE_EXHAUSTED,
    code_pb2.UNIMPLEMENTED,
}


class Session:
    """A stream that is open until it ends once; its owner then opens another.

    It holds the requests that have not ended, and fails them when it goes. What waits to be sent is
    bounded by them: at most a submission or a cancel each.

    Args:
        address: for messages.
        max_requests: live at a time.
    """

    def __init__(
        self, stub: inference_pb2_grpc.InferenceAsyncStub, *, address: str, max_requests: int
    ) -> None:
        self._address = address
        self._max_requests = max_requests
        self._requests: dict[int, RequestState] = {}
        self._last_number = 0
        # Submissions not sent yet, by stream number, and streams to cancel.
        self._submits: dict[int, inference_pb2.Submit] = {}
        self._cancels: dict[int, None] = {}
        self._to_send = asyncio.Event()
        self._call: grpc.aio.StreamStreamCall[
            inference_pb2.SessionRequest, inference_pb2.SessionEvents
        ] = stub.Session()
        self._closed = False
        self._task = asyncio.create_task(self._run(), name=f"baton session {address}")

    @property
    def closed(self) -> bool:
        """Whether the stream has ended: nothing can be submitted any more."""
        return self._closed

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def submit(self, state: RequestState) -> None:
        """Queues a request for sending.

        Raises:
            ResourceExhaustedError: too many live requests on this client.
            InvalidArgumentError: larger than one message may be.
        """
        if len(self._requests) >= self._max_requests:
            message = f"this client has {self._max_requests} requests running, its limit"
            raise errors.from_baton(
                ResourceExhausted(message, reason="CLIENT_REQUESTS", retry_after_s=None)
            )
        num_bytes = state.request.ByteSize() + _ENVELOPE_BYTES
        if num_bytes > MAX_MESSAGE_BYTES:
            # Sent anyway it would end the stream, and with it everyone else's requests.
            raise errors.invalid(
                "request", f"{num_bytes} bytes", f"must be at most {MAX_MESSAGE_BYTES} bytes"
            )
        state.number = self._next_number()
        state.on_cancel = self._cancel
        self._requests[state.number] = state
        self._submits[state.number] = inference_pb2.Submit(
            stream=state.number, request=state.request
        )
        self._to_send.set()

    async def aclose(self) -> None:
        """Ends the stream, and with it its requests; returns when its tasks are gone."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _next_number(self) -> int:
        number = self._last_number
        while True:
            number = number % 0xFFFF_FFFF + 1
            if number not in self._requests:
                self._last_number = number
                return number

    def _cancel(self, state: RequestState) -> None:
        if state.ended:
            self._requests.pop(state.number, None)
            if self._submits.pop(state.number, None) is not None:
                return  # The coordinator never heard of it.
        self._cancels[state.number] = None
        self._to_send.set()

    async def _run(self) -> None:
        writer = asyncio.create_task(self._write(), name="baton session writer")
        error: RemoteError | None = None
        try:
            error = await self._read()
        except asyncio.CancelledError:
            error = errors.make(code_pb2.CANCELLED, "the client was closed")
            raise
        finally:
            self._closed = True
            self._call.cancel()
            writer.cancel()
            lost, self._requests = list(self._requests.values()), {}
            for state in lost:
                state.fail(error or errors.make(code_pb2.INTERNAL, "the session's reader failed"))
            self._submits.clear()
            self._cancels.clear()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self) -> RemoteError:
        """Hands out events until the stream ends; returns why it did."""
        reached = False
        try:
            await self._call.wait_for_connection()
            reached = True
            while True:
                batch = await self._call.read()
                if not isinstance(batch, inference_pb2.SessionEvents):  # grpc.aio.EOF
                    return self._lost("ended by the coordinator")
                for event in batch.events:
                    state = self._requests.get(event.stream)
                    if state is None:
                        continue  # Cancelled here while this was under way.
                    state.on_event(event)
                    if state.ended:
                        self._requests.pop(event.stream, None)
        except grpc.RpcError as error:
            cause = errors.from_rpc_error(error, self._address)
            telling = cause.code in _TELLING_CODES or not reached
            return cause if telling else self._lost(str(cause))

    def _lost(self, why: str) -> RemoteError:
        message = f"the session with the coordinator at {self._address} is lost: {why}"
        return errors.make(code_pb2.UNAVAILABLE, message)

    async def _write(self) -> None:
        try:
            while True:
                while self._submits:
                    number = next(iter(self._submits))
                    submit = self._submits.pop(number)
                    await self._call.write(inference_pb2.SessionRequest(submit=submit))
                while self._cancels:
                    number = next(iter(self._cancels))
                    del self._cancels[number]
                    cancel = inference_pb2.Cancel(stream=number)
                    await self._call.write(inference_pb2.SessionRequest(cancel=cancel))
                self._to_send.clear()
                await self._to_send.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The stream ended; the reader learns why and tells everyone.
            return
