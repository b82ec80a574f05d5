"""The links of one transfer service by one backend: how they are made, found and ended.

A link is joined over a stream of its own, which the sender dials (`link_method`), and lives as long
as that stream. The first handoff that could use a link starts to make it in the background.
Handoffs use another transport until the link is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.kvtransfer.errors import TransferError, shortened
from baton.kvtransfer.grpc_methods import SERVICE, link_method
from baton.kvtransfer.transports.collective import ReceivingLink, SendingLink
from baton.kvtransfer.transports.process_group import Backend, LinkOptions
from baton.kvtransfer.transports.transport import TransportHandler
from baton.runtime.kv import kv_fingerprint
from baton.runtime.network import rpc
from baton.runtime.network.addresses import local_address, split_address
from baton.runtime.security.dial import PLAIN, Dial
from baton.v1 import kv_transfer_pb2 as pb

# Most links from this service, and most to it; further pairs use another transport.
MAX_LINKS = 64
# Most links of one host that have ended and whose threads go on. A single thread that hangs, or is
# only slow to end, does not keep the services of its host from making links.
_MAX_STUCK_PER_HOST = 4
# Longest ID of a link.
MAX_ID_CHARS = 64
# Longest time to join a link's group, in seconds. A group has its own timeouts, but NCCL waits for
# its peer without one.
JOIN_TIMEOUT_S = 60.0
# Seconds after a failed attempt to make a link before the next attempt.
RETRY_S = 30.0

_NOT_ENCRYPTED = (
    "it has no TLS and would leave the host; security.allow_plain_links: true allows it"
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outgoing:
    """A link to a target, or the attempt to make one.

    Attributes:
        decided: Set once the link is joined or has failed.
        problem: Why the link cannot be used now.
        last: The link of this attempt. While the thread of a link that was given up goes on, no
            further link is tried: each would leave another thread.
    """

    link_id: str
    task: asyncio.Task[None] | None = None
    link: SendingLink | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = "is being joined"
    retry_at: float = float("inf")
    last: SendingLink | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the link was given up and its thread goes on."""
        return self.task is None and self.last is not None and not self.last.thread_ended


class Links:
    """The links of one service by one backend. One event loop uses them.

    Args:
        backend: Backend of the links' groups; this process can use it.
        handler: Is told which reads have ended, and gives the KV cache's fingerprint.
        memory: This service's segment.
        open_timeout_s: Longest time to join a link.
        frame_timeout_s: Longest time for one operation of a group.
        dial: How other services are dialled.
        within_host: Whether links to other hosts are refused, because links are not encrypted.
    """

    def __init__(
        self,
        backend: Backend,
        handler: TransportHandler,
        memory: memoryview,
        *,
        open_timeout_s: float,
        frame_timeout_s: float,
        dial: Dial = PLAIN,
        within_host: bool = False,
    ) -> None:
        self._dial, self._within_host = dial, within_host
        self._backend, self._handler, self._memory = backend, handler, memory
        self._open_timeout_s, self._frame_timeout_s = open_timeout_s, frame_timeout_s
        # Links to other services by target, and links from other services by ID.
        self._to: dict[str, _Outgoing] = {}
        self._incoming: dict[str, ReceivingLink] = {}
        # Links that have ended and whose threads go on, with their senders' hosts: a library may
        # never return to them.
        self._stuck: list[tuple[str, ReceivingLink]] = []

    # ---- Sending.

    def link_id(self, target: str) -> str:
        """Returns the ID of the link to a target; the first call starts to join the link.

        Raises:
            TransferError: The link is not joined (yet); the message says why.
        """
        outgoing = self._to.get(target)
        if outgoing is None or (
            outgoing.link is None
            and time.monotonic() >= outgoing.retry_at
            and not outgoing.is_stuck
        ):
            outgoing = self._begin(target)
        if outgoing.link is None:
            raise TransferError(outgoing.problem)
        return outgoing.link_id

    async def wait_decided(self, target: str) -> None:
        """Waits until the link to a target is joined or has failed."""
        with contextlib.suppress(TransferError):
            self.link_id(target)
        await self._to[target].decided.wait()

    # ---- Receiving.

    def incoming(self, link_id: str) -> ReceivingLink | None:
        """Returns an incoming link that is joined or being joined; None when it has ended."""
        link = self._incoming.get(link_id)
        return link if link is not None and link.lost is None else None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the method to a server that has not started yet."""
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=pb.LinkMessage.FromString,
            response_serializer=pb.LinkMessage.SerializeToString,
        )
        method = link_method(self._backend).rpartition("/")[2]
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {method: handler}),)
        )

    async def close(self) -> None:
        """Ends every link and waits until their threads have ended. Idempotent."""
        tasks = [each.task for each in self._to.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in list(self._incoming.values())))

    # ---- One outgoing link.

    def _begin(self, target: str) -> _Outgoing:
        outgoing = _Outgoing(secrets.token_hex(16))
        self._to.pop(target, None)
        if len(self._to) >= MAX_LINKS:
            outgoing.problem = f"{MAX_LINKS} links are in use"
            outgoing.retry_at = time.monotonic() + RETRY_S
            outgoing.decided.set()
            unused = [
                other for other, each in self._to.items() if each.task is None and not each.is_stuck
            ]
            for other in unused:
                del self._to[other]
        else:
            outgoing.task = asyncio.create_task(self._run_link(target, outgoing))
        self._to[target] = outgoing
        return outgoing

    async def _run_link(self, target: str, outgoing: _Outgoing) -> None:
        """Joins a link and waits until it has ended."""
        try:
            await self._join(target, outgoing)
        except grpc.aio.AioRpcError as error:
            outgoing.problem = error.details() or error.code().name
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                outgoing.problem = "not in use at the receiver"
        except (TransferError, OSError, TimeoutError) as error:
            outgoing.problem = str(error) or f"not joined within {self._open_timeout_s:g} s"
        except Exception:
            logger.exception("link failed")
            outgoing.problem = "internal error"
        finally:
            # The next handoff after RETRY_S tries again.
            outgoing.link, outgoing.task = None, None
            outgoing.retry_at = time.monotonic() + RETRY_S
            outgoing.decided.set()
        logger.info("link to %s is over: %s", target, outgoing.problem)

    async def _join(self, target: str, outgoing: _Outgoing) -> None:
        fingerprint = self._handler.fingerprint()
        if fingerprint is None:
            raise TransferError("the engine is not ready yet")
        host, port = split_address(target, "target")
        local = await asyncio.to_thread(local_address, host.strip("[]"), port)
        if self._within_host and not await asyncio.to_thread(
            _is_this_host, host.strip("[]"), local
        ):
            raise TransferError(_NOT_ENCRYPTED)
        channel = rpc.channel(target, dial=self._dial)
        try:
            call: Any = channel.stream_stream(
                link_method(self._backend),
                request_serializer=pb.LinkMessage.SerializeToString,
                response_deserializer=pb.LinkMessage.FromString,
            )(metadata=self._dial.metadata())
            hello = pb.LinkHello(
                link_id=outgoing.link_id,
                fingerprint=fingerprint,
                segment_bytes=len(self._memory),
            )
            async with asyncio.timeout(self._open_timeout_s):
                answer = await _exchange_hello(call, hello)
            if answer is grpc.aio.EOF or not answer.HasField("hello"):
                raise TransferError("the receiver has not said hello")
            if answer.hello.refusal:
                raise TransferError(shortened(answer.hello.refusal))
            await self._join_group(local, call, outgoing)
        finally:
            await channel.close()

    async def _join_group(self, local: str, call: Any, outgoing: _Outgoing) -> None:
        mailbox = _Mailbox()

        def lost(detail: str) -> None:
            outgoing.link, outgoing.problem = None, detail
            mailbox.close()
            # A receiver that hangs never ends the stream itself.
            call.cancel()

        link = outgoing.last = SendingLink(self._options(local), mailbox.put, lost, self._memory)
        reader = asyncio.create_task(_read_call(call, link))
        writer = asyncio.create_task(_write(mailbox, call.write))
        opening = asyncio.create_task(self._opened(link, outgoing))
        try:
            await asyncio.wait([reader])
        finally:
            link.fail("the link was closed")
            opening.cancel()
            await asyncio.wait([reader, writer, opening])
            await link.close()

    async def _opened(self, link: SendingLink, outgoing: _Outgoing) -> None:
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await link.opened()
        except TransferError:
            # The link has ended, and has told why.
            return
        except TimeoutError:
            link.fail(f"the group was not joined within {JOIN_TIMEOUT_S:g} s")
            return
        outgoing.link, outgoing.problem = link, ""
        outgoing.decided.set()

    def _options(self, host: str) -> LinkOptions:
        return LinkOptions(self._backend, host, self._open_timeout_s, self._frame_timeout_s)

    # ---- One incoming link.

    async def _serve(
        self,
        messages: AsyncIterator[pb.LinkMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        hello = await self._hello(messages)
        peer = _peer(context.peer())
        local = await asyncio.to_thread(local_address, *peer)
        refusal = self._refusal(hello, peer[0])
        if not refusal and self._within_host and local != peer[0]:
            refusal = _NOT_ENCRYPTED
        if refusal:
            await context.write(pb.LinkMessage(hello=pb.LinkHello(refusal=refusal)))
            return
        link_id, mailbox = hello.link_id, _Mailbox()
        link = ReceivingLink(
            self._options(local),
            mailbox.put,
            lambda detail: mailbox.close(),
            self._memory,
            hello.segment_bytes,
            self._handler.pulls_ended,
        )
        # Set before anything is awaited, so no other stream can take its ID or the last place.
        self._incoming[link_id] = link
        reader = asyncio.create_task(_read(messages, link))
        try:
            await context.write(pb.LinkMessage(hello=pb.LinkHello()))
            await _write(mailbox, context.write)
        finally:
            reader.cancel()
            link.fail("the stream of the link has ended")
            try:
                await link.close()
            finally:
                # Runs also when gRPC cancels this task a second time.
                del self._incoming[link_id]
                if not link.thread_ended:
                    self._stuck.append((peer[0], link))

    async def _hello(self, messages: AsyncIterator[pb.LinkMessage]) -> pb.LinkHello:
        """Returns the hello of a stream; on a timeout an empty one, which is then refused."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._open_timeout_s):
                async for message in messages:
                    return message.hello
        return pb.LinkHello()

    def _refusal(self, hello: pb.LinkHello, host: str) -> str:
        """Returns why a link from a host is refused; empty when it is not."""
        ours = self._handler.fingerprint()
        if ours is None:
            return "the engine is not ready yet"
        if differing := kv_fingerprint.differences(ours, hello.fingerprint):
            return f"KV caches differ: {'; '.join(differing)}"
        if not 0 < len(hello.link_id) <= MAX_ID_CHARS:
            return f"link_id has {len(hello.link_id)} characters; must have 1 to {MAX_ID_CHARS}"
        if hello.link_id in self._incoming:
            return f"link_id is {hello.link_id!r}; must be new"
        self._stuck = [each for each in self._stuck if not each[1].thread_ended]
        num_stuck = sum(host == each for each, _ in self._stuck)
        if num_stuck >= _MAX_STUCK_PER_HOST:
            return f"{num_stuck} earlier links from {host} have ended, and their threads hang"
        if len(self._incoming) + len(self._stuck) >= MAX_LINKS:
            return f"{MAX_LINKS} links are in use at the receiver"
        return ""


class _Mailbox:
    """Messages that one task writes to a stream.

    A link has only a few reads and the keys of its group in flight, so the queue stays small.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[pb.LinkMessage | None] = asyncio.Queue()

    def put(self, message: pb.LinkMessage) -> None:
        self._queue.put_nowait(message)

    def close(self) -> None:
        """Ends the mailbox after the messages in it."""
        self._queue.put_nowait(None)

    async def next(self) -> pb.LinkMessage | None:
        """Waits for the next message; None at the end."""
        return await self._queue.get()


async def _write(mailbox: _Mailbox, write: Callable[[pb.LinkMessage], Any]) -> None:
    """Writes messages until the mailbox or the stream ends; the stream's reader reports errors."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        while (message := await mailbox.next()) is not None:
            await write(message)


async def _read_call(call: Any, link: SendingLink) -> None:
    """Passes the receiver's messages to the link until the stream ends."""
    detail = "the receiver has ended the link"
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            link.received(message)
    except grpc.aio.AioRpcError as error:
        detail = f"the receiver has ended: {error.details()}"
    except asyncio.CancelledError:
        # gRPC raises this for a cancelled call too.
        detail = "the link was closed"
    link.fail(detail)


async def _read(messages: AsyncIterator[pb.LinkMessage], link: ReceivingLink) -> None:
    async for message in messages:
        link.received(message)
    link.fail("the sender has ended the link")


async def _exchange_hello(call: Any, hello: pb.LinkHello) -> Any:
    """Sends the hello and returns the receiver's answer.

    The receiver may refuse and end the call during the write. gRPC then fails the write and every
    read that begins later, so the read begins before the write.
    """
    answer = asyncio.create_task(call.read())
    try:
        with contextlib.suppress(grpc.RpcError):
            await call.write(pb.LinkMessage(hello=hello))
        return await answer
    finally:
        answer.cancel()


def _is_this_host(host: str, local: str) -> bool:
    """Returns whether a host is this one: it reaches itself from the address that it dials."""
    return local in {str(found[4][0]) for found in socket.getaddrinfo(host, None)}


def _peer(peer: str) -> tuple[str, int]:
    """Splits gRPC's "ipv4:192.0.2.1:1234" and "ipv6:%5B2001:db8::1%5D:1234" into host and port."""
    _, _, address = peer.partition(":")
    host, port = split_address(address.replace("%5B", "").replace("%5D", ""), "peer")
    return host, port
