"""Frames over gRPC: the stream `/baton.v1.KvTransfer/Push`, whose messages up are raw bytes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from baton.kvtransfer import frames
from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.sending import Outgoing
from baton.kvtransfer.transports.transport import PushHandler, PushLost
from baton.runtime import rpc
from baton.runtime.dial import PLAIN, Dial
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE = "baton.v1.KvTransfer"
PUSH_METHOD = f"/{SERVICE}/Push"
# To peers that nothing is pushed to at the moment.
MAX_IDLE_CHANNELS = 64
# For a client to read the last reply of a push and end its side.
END_GRACE_S = 2.0
# For the pushes of a connection that is replaced.
RENEW_GRACE_S = 120.0


class GrpcPush:
    """The sending end. It holds the call: gRPC cancels one that nobody refers to, silently."""

    def __init__(self, target: str, call: Any, on_end: Callable[[], None]) -> None:
        self._target, self._call = target, call
        self._cancelled = False
        call.add_done_callback(lambda _: on_end())

    async def send(self, batch: Sequence[Outgoing]) -> None:
        parts = [part for frame in batch for part in (frame.header, frame.payload)]
        message = b"".join(parts)
        await self._during(self._call.write(message))

    async def receive(self) -> kv_transfer_pb2.PushReply | None:
        reply = await self._during(self._call.read())
        return reply if isinstance(reply, kv_transfer_pb2.PushReply) else None

    async def finish(self) -> None:
        await self._during(self._call.done_writing())

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    async def _during(self, operation: Awaitable[Any]) -> Any:
        """Maps every way in which gRPC says that a call is over to PushLost."""
        try:
            return await operation
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details()
            raise PushLost(f"{self._target}: {code}: {details}") from None
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            raise PushLost(f"{self._target}: the call has ended") from None
        except asyncio.CancelledError:
            # gRPC raises it for a cancelled call too; a cancelled task is something else.
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
            raise PushLost(f"{self._target}: the call was cancelled") from None


class GrpcTransport:
    """Opens pushes; keeps a target's channels while they are used, and some beyond.

    Args:
        num_connections: to each target at most; a push takes the one with the fewest.
        dial: how; pushes that begin after its files have changed go over new connections.
    """

    def __init__(self, num_connections: int = 1, dial: Dial = PLAIN) -> None:
        self._num_connections, self._dial, self._version = num_connections, dial, dial.version
        self._channels: OrderedDict[tuple[str, int], grpc.aio.Channel] = OrderedDict()
        self._num_pushes: Counter[tuple[str, int]] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def open_push(self, target: str) -> GrpcPush:
        self._renew()
        keys = [(target, number) for number in range(self._num_connections)]
        key = min(keys, key=self._num_pushes.__getitem__)
        channel = self._channels.get(key)
        if channel is None:
            channel = rpc.channel(target, max_message_bytes=rpc.MAX_FRAME_BYTES, dial=self._dial)
            self._channels[key] = channel
        self._channels.move_to_end(key)
        self._num_pushes[key] += 1
        call: Any = channel.stream_stream(
            PUSH_METHOD,
            request_serializer=None,
            response_deserializer=kv_transfer_pb2.PushReply.FromString,
        )(metadata=self._dial.metadata())
        return GrpcPush(target, call, lambda: self._ended(key))

    async def close(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    def _renew(self) -> None:
        """Lets go of connections that were made with other files than those of now.

        Their pushes go on: closing waits for them.
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
        self._num_pushes[key] -= 1
        if not self._num_pushes[key]:
            del self._num_pushes[key]
        idle = [each for each in self._channels if each not in self._num_pushes]
        for each in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]:
            self._close(self._channels.pop(each))


class GrpcIncomingPush:
    """The receiving end of one stream: replies are written by the stream's own task.

    Attributes:
        ending: what still comes in is thrown away.
    """

    def __init__(self) -> None:
        self._replies: deque[kv_transfer_pb2.PushReply] = deque()
        self._changed = asyncio.Event()
        self.ending = False

    def reply(self, reply: kv_transfer_pb2.PushReply) -> None:
        self._replies.append(reply)
        self._changed.set()

    def end(self) -> None:
        self.ending = True
        self._changed.set()

    async def replies(self) -> AsyncIterator[kv_transfer_pb2.PushReply]:
        """Every reply in its order, until the end."""
        while True:
            while self._replies:
                yield self._replies.popleft()
            if self.ending:
                return
            self._changed.clear()
            await self._changed.wait()


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServicer):
    """Serves Describe and Push for a handler.

    Args:
        describe: None while the service is not configured.
    """

    def __init__(
        self,
        handler: PushHandler,
        describe: Callable[[], kv_transfer_pb2.DescribeResponse | None],
    ) -> None:
        self._handler, self._describe = handler, describe

    def add_to(self, server: grpc.aio.Server) -> None:
        """Before the server starts."""
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(self, server)
        push: Any = grpc.stream_stream_rpc_method_handler(
            self._push,
            request_deserializer=None,
            response_serializer=kv_transfer_pb2.PushReply.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Push": push}),)
        )

    async def Describe(
        self,
        request: kv_transfer_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> kv_transfer_pb2.DescribeResponse:
        response = self._describe()
        if response is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is not ready yet")
        return response

    async def _push(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        push = GrpcIncomingPush()
        stream = self._handler.push_started(push)
        reader = asyncio.create_task(self._read(stream, messages, push))
        try:
            async for reply in push.replies():
                await context.write(reply)
            # A call that ends while its client writes looks to that client like an internal error,
            # and the last reply is lost: let it read that, and say itself that it is done.
            await asyncio.wait([reader], timeout=END_GRACE_S)
        finally:
            # Without a wait: gRPC may cancel this task a second time while it waits here, when the
            # peer's death ends the stream and the call at once.
            push.end()
            reader.cancel()
            self._handler.push_ended(stream)

    async def _read(
        self, stream: int, messages: AsyncIterator[bytes], push: GrpcIncomingPush
    ) -> None:
        try:
            async for message in messages:
                if push.ending:
                    continue
                try:
                    for frame in frames.decode(message):
                        self._handler.push_frame(stream, frame)
                except MalformedFrame as error:
                    self._handler.push_malformed(stream, error)
        except Exception:
            logger.exception("push stream failed")
        finally:
            push.end()
