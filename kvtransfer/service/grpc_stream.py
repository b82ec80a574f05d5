"""The stream of a handoff by gRPC (HANDOFF_METHOD): raw frames up, HandoffReply down."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from baton.kvtransfer import frames
from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.grpc_methods import HANDOFF_METHOD, HANDOFF_NAME, SERVICE
from baton.kvtransfer.service.handoff_stream import StreamHandler, StreamLost
from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.runtime.network import rpc
from baton.runtime.security.dial import PLAIN, Dial
from baton.v1 import kv_transfer_pb2

logger = logging.getLogger(__name__)

# Number of channels kept to peers that receive no stream at the moment.
MAX_IDLE_CHANNELS = 64
# Most replies kept for a sender that does not read them; a correct sender gets a few.
MAX_UNREAD_REPLIES = 256
# Longest wait until gRPC takes a reply, which it does at once for a sender that reads.
WRITE_TIMEOUT_S = 30.0
# Time in which a client must read the last reply of a stream and end its side.
END_GRACE_S = 2.0
# Time in which the streams of a replaced connection must end.
RENEW_GRACE_S = 120.0


class GrpcOutgoingStream:
    """The sending end of a stream.

    It holds the call, because gRPC silently cancels a call that nothing refers to.
    """

    def __init__(self, call: Any, on_end: Callable[[], None]) -> None:
        self._call, self._cancelled = call, False
        call.add_done_callback(lambda _: on_end())

    async def send(self, batch: Sequence[OutgoingFrame]) -> None:
        parts = [part for frame in batch for part in (frame.header, frame.payload)]
        message = b"".join(parts)
        await self._during(self._call.write(message))

    async def receive(self) -> kv_transfer_pb2.HandoffReply | None:
        reply = await self._during(self._call.read())
        return reply if isinstance(reply, kv_transfer_pb2.HandoffReply) else None

    async def finish(self) -> None:
        await self._during(self._call.done_writing())

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    async def _during(self, operation: Awaitable[Any]) -> Any:
        """Maps each error by which gRPC reports an ended call to StreamLost."""
        try:
            return await operation
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details()
            raise StreamLost(f"{code}: {details}") from None
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            raise StreamLost("the call has ended") from None
        except asyncio.CancelledError:
            # gRPC raises this for a cancelled call too; only a cancelled task must re-raise it.
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
            raise StreamLost("the call was cancelled") from None


class GrpcStreamDialer:
    """Opens streams. Keeps the channels that streams use, and MAX_IDLE_CHANNELS beyond those.

    Args:
        num_connections: Most connections to one target; a stream takes the least used one.
        dial: Credentials; a stream that begins after their files changed uses a new connection.
    """

    def __init__(self, num_connections: int = 1, dial: Dial = PLAIN) -> None:
        self._num_connections, self._dial, self._version = num_connections, dial, dial.version
        self._channels: OrderedDict[tuple[str, int], grpc.aio.Channel] = OrderedDict()
        self._num_streams: Counter[tuple[str, int]] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def open_stream(self, target: str) -> GrpcOutgoingStream:
        self._renew()
        keys = [(target, number) for number in range(self._num_connections)]
        key = min(keys, key=self._num_streams.__getitem__)
        channel = self._channels.get(key)
        if channel is None:
            channel = rpc.channel(target, max_message_bytes=rpc.MAX_FRAME_BYTES, dial=self._dial)
            self._channels[key] = channel
        self._channels.move_to_end(key)
        self._num_streams[key] += 1
        call: Any = channel.stream_stream(
            HANDOFF_METHOD,
            request_serializer=None,
            response_deserializer=kv_transfer_pb2.HandoffReply.FromString,
        )(metadata=self._dial.metadata())
        return GrpcOutgoingStream(call, lambda: self._ended(key))

    async def close(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    def _renew(self) -> None:
        """Closes the connections made with older credential files.

        Their streams go on: closing a channel waits for its streams.
        """
        if self._version == (version := self._dial.version):
            return
        self._version = version
        for channel in self._channels.values():
            self._close(channel, grace_s=RENEW_GRACE_S)
        self._channels.clear()

    def _close(self, channel: grpc.aio.Channel, grace_s: float | None = None) -> None:
        task = asyncio.ensure_future(channel.close(grace_s))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _ended(self, key: tuple[str, int]) -> None:
        self._num_streams[key] -= 1
        if not self._num_streams[key]:
            del self._num_streams[key]
        idle = [each for each in self._channels if each not in self._num_streams]
        for each in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]:
            self._close(self._channels.pop(each))


class GrpcIncomingStream:
    """The receiving end of one stream; the stream's own task writes the replies.

    Attributes:
        sender: Address of the sender's connection, as gRPC names it.
        ending: Whether frames that still arrive are ignored.
    """

    def __init__(self, sender: str) -> None:
        self.sender = sender
        self._replies: deque[kv_transfer_pb2.HandoffReply] = deque()
        self._changed = asyncio.Event()
        self.ending = False

    @property
    def is_full(self) -> bool:
        """Whether so many replies wait that the sender must not cause another one."""
        return len(self._replies) >= MAX_UNREAD_REPLIES

    def reply(self, reply: kv_transfer_pb2.HandoffReply) -> None:
        self._replies.append(reply)
        self._changed.set()

    def end(self) -> None:
        self.ending = True
        self._changed.set()

    async def replies(self) -> AsyncIterator[kv_transfer_pb2.HandoffReply]:
        """Yields the replies in order until the stream ends."""
        while True:
            while self._replies:
                yield self._replies.popleft()
            if self.ending:
                return
            self._changed.clear()
            await self._changed.wait()


class HandoffServicer:
    """Serves the streams of incoming handoffs.

    Args:
        handler: The transfer service, which takes the frames.
    """

    def __init__(self, handler: StreamHandler) -> None:
        self._handler = handler

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the method to a server that has not started yet."""
        method: Any = grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=None,
            response_serializer=kv_transfer_pb2.HandoffReply.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {HANDOFF_NAME: method}),)
        )

    async def _serve(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        stream = GrpcIncomingStream(context.peer())
        number = self._handler.stream_started(stream)
        reader = asyncio.create_task(self._read(number, messages, stream))
        try:
            async for reply in stream.replies():
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(reply)
            # If the server ended the call while the client writes, the client would see an internal
            # error and lose the last reply. So the client reads the reply and ends its side first.
            await asyncio.wait([reader], timeout=END_GRACE_S)
        except TimeoutError:
            logger.info(
                "the stream of a handoff is ended: %s does not read its replies", stream.sender
            )
        finally:
            # Nothing here may wait: when a peer dies, gRPC ends the stream and cancels the call, so
            # it may cancel this task a second time.
            stream.end()
            reader.cancel()
            self._handler.stream_ended(number)

    async def _read(
        self, number: int, messages: AsyncIterator[bytes], stream: GrpcIncomingStream
    ) -> None:
        try:
            async for message in messages:
                if stream.ending:
                    continue
                try:
                    for frame in frames.decode(message):
                        self._handler.stream_frame(number, frame)
                        if stream.is_full:
                            stream.end()
                            break
                except MalformedFrame as error:
                    self._handler.stream_malformed(number, error)
        except Exception:
            logger.exception("the stream of a handoff failed")
        finally:
            stream.end()
