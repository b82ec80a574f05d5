"""The worker's end of `Cluster.Attach`: one stream at a time to the coordinator, for life.

cluster.proto has the rules: numbered messages, cumulative acknowledgements, replay on a new stream
to the same coordinator, adoption by a new one, and a fence that ends the worker at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Collection, Coroutine
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc

from baton.runtime import rpc
from baton.runtime.dial import PLAIN, Dial
from baton.runtime.errors import why_not_connected
from baton.v1 import cluster_pb2, cluster_pb2_grpc, common_pb2

if TYPE_CHECKING:
    _Call: TypeAlias = grpc.aio.StreamStreamCall[
        cluster_pb2.WorkerMessage, cluster_pb2.CoordinatorMessage
    ]

_log = logging.getLogger(__name__)

# A coordinator that is back is found within half of the time that it was away, and soon after the
# first worker has found it: until then it waits with what clients come back for.
_BACKOFF_S, _BACKOFF_GROWTH = (0.05, 0.3), 1.5
# A connection that is accepted and then silent counts as none.
_WELCOME_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 5.0
# Commands without an answer are acknowledged at least this often, beside every heartbeat.
_ACK_EVERY = 64

_ENDS_A_STREAM = (grpc.RpcError, asyncio.InvalidStateError, TimeoutError, EOFError)
# Trying again would end the same way.
_FINAL = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


class AttachError(Exception):
    """The worker cannot go on with this coordinator; the message says why."""


class Fenced(AttachError):
    """The coordinator declared this incarnation lost: stop at once, say nothing more."""


class Refused(AttachError):
    """The coordinator does not take this worker."""


class CoordinatorGone(AttachError):
    """No coordinator answered for too long."""


class _StreamLost(Exception):
    """This stream is over; another may follow."""


class Host(Protocol):
    """What the stream speaks for."""

    def hello(self) -> cluster_pb2.Hello:
        """Who this worker is and what runs here; generation and ack are filled in."""
        ...

    async def load_report(self) -> cluster_pb2.LoadReport: ...

    def on_command(self, message: cluster_pb2.CoordinatorMessage) -> None:
        """Carries out a command, or begins to; never called twice for one."""
        ...

    def on_welcome(self, role: common_pb2.Role.ValueType) -> None:
        """Attached, in this role."""
        ...

    def on_detached(self) -> None:
        """The stream has ended; the next one may be another coordinator's."""
        ...

    def keep_only(self, adopted: frozenset[tuple[str, int]]) -> None:
        """Another coordinator than before: ends all but these (request id, attempt)."""
        ...

    def abandon(self, reason: str) -> None:
        """The coordinator was gone for longer than the grace: ends everything."""
        ...


class Outgoing(Protocol):
    """The kept messages; worker/outbox.py."""

    posted: asyncio.Event

    @property
    def has_unsent(self) -> bool: ...
    def next_unsent(self) -> cluster_pb2.WorkerMessage | None: ...
    def next_batch(self) -> cluster_pb2.WorkerMessage | None: ...
    def acknowledge(self, seq: int) -> None: ...
    def mark_hello(self) -> None: ...
    def resume(self, ack: int) -> None: ...
    def restart(self, adopted: Collection[tuple[str, int]]) -> None: ...


class Attachment:
    """Keeps a worker attached.

    Args:
        address: the coordinator's host:port.
        host: answers for the worker.
        outbox: what is sent, beside load reports.
        attach_timeout_s: a coordinator that does not answer for so long is given up.
        dial: how; each stream reads the files again.

    Attributes:
        detached: set while no stream is up.
    """

    def __init__(
        self,
        address: str,
        host: Host,
        outbox: Outgoing,
        *,
        attach_timeout_s: float,
        dial: Dial = PLAIN,
    ) -> None:
        self._address, self._host, self._outbox, self._dial = address, host, outbox, dial
        self._attach_timeout_s = attach_timeout_s
        self._generation = 0
        self._received = self._acknowledged = 0
        self._heartbeat_s, self._grace_s = 1.0, 0.0
        self._load: cluster_pb2.LoadReport | None = None
        self._leaving = self._sends_batches = False
        self.detached = asyncio.Event()
        self.detached.set()

    def leave(self) -> None:
        """Sends what is still to be said, then ends the stream; `run` returns."""
        self._leaving = True
        self._outbox.posted.set()

    async def run(self) -> None:
        """Attaches, again whenever the stream ends, until `leave`.

        Raises:
            Fenced, Refused, CoordinatorGone.
        """
        lost_at, abandoned, backoff_s = monotonic(), False, _BACKOFF_S[0]
        told = False
        while True:
            attached = asyncio.Event()
            try:
                # A channel of its own: one that has failed waits by itself before it tries again.
                async with rpc.channel(self._address, dial=self._dial) as channel:
                    await self._stream(cluster_pb2_grpc.ClusterStub(channel), attached)
                return
            except _StreamLost as lost:
                reason = str(lost)
            if attached.is_set():
                lost_at, abandoned, backoff_s = monotonic(), False, _BACKOFF_S[0]
                told = True
                _log.warning("coordinator lost: %s", reason)
            if self._leaving:
                return
            if not told:
                told = True
                _log.warning(
                    "no coordinator at %s: %s; tried again for up to %g s",
                    *(self._address, reason, self._attach_timeout_s),
                )
            gone_s = monotonic() - lost_at
            if self._generation and not abandoned and gone_s >= self._grace_s:
                abandoned = True
                self._host.abandon(f"no coordinator for {gone_s:.1f} s")
            if gone_s >= max(self._attach_timeout_s, self._grace_s):
                raise CoordinatorGone(
                    f"no coordinator at {self._address} for {gone_s:.0f} s: {reason}"
                )
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(_BACKOFF_GROWTH * backoff_s, _BACKOFF_S[1])

    async def _stream(
        self, stub: cluster_pb2_grpc.ClusterAsyncStub, attached: asyncio.Event
    ) -> None:
        """One stream, from Hello to its end; returns when it ended because of `leave`."""
        call: _Call = stub.Attach(metadata=self._dial.metadata())
        try:
            await self._introduce(call)
            attached.set()
            self.detached.clear()
            await _first_of(self._read(call), self._write(call), self._beat())
        except _ENDS_A_STREAM as error:
            await self._explain(call, error)
        finally:
            self.detached.set()
            self._host.on_detached()
            call.cancel()

    async def _introduce(self, call: _Call) -> None:
        hello = self._host.hello()
        hello.generation, hello.ack = self._generation, self._received
        hello.takes_batches = True
        self._outbox.mark_hello()
        async with asyncio.timeout(_WELCOME_TIMEOUT_S):
            await call.write(cluster_pb2.WorkerMessage(hello=hello))
            first: object = await call.read()
        if not isinstance(first, cluster_pb2.CoordinatorMessage):
            raise EOFError("the stream ended before the welcome")
        if not first.HasField("welcome"):
            raise EOFError("the coordinator's first message is no welcome")
        welcome = first.welcome
        self._sends_batches = welcome.takes_batches
        self._heartbeat_s = welcome.heartbeat_interval.ToNanoseconds() / 1e9 or 1.0
        self._grace_s = welcome.adoption_grace.ToNanoseconds() / 1e9
        if welcome.generation == self._generation:
            self._outbox.resume(welcome.ack)
        else:
            adopted = frozenset((one.request_id, one.attempt) for one in welcome.adopted)
            self._outbox.restart(adopted)
            if self._generation:
                self._host.keep_only(adopted)
            self._generation, self._received = welcome.generation, 0
        self._acknowledged = self._received
        self._host.on_welcome(welcome.role)

    async def _read(self, call: _Call) -> None:
        while isinstance(message := await call.read(), cluster_pb2.CoordinatorMessage):
            self._outbox.acknowledge(message.ack)
            if not message.batch:
                self._take(message)
            for one in message.batch:
                # A part of a message keeps all of it alive, and a request lives for long.
                own = cluster_pb2.CoordinatorMessage()
                own.CopyFrom(one)
                self._take(own)
            if self._received - self._acknowledged >= _ACK_EVERY:
                self._outbox.posted.set()
        if not self._leaving:
            raise EOFError("the coordinator ended the stream")

    def _take(self, message: cluster_pb2.CoordinatorMessage) -> None:
        if message.seq == 0 or message.seq <= self._received:
            return
        if message.seq != self._received + 1:
            raise EOFError(f"message {message.seq} came after {self._received}")
        self._host.on_command(message)
        self._received = message.seq

    async def _write(self, call: _Call) -> None:
        posted = self._outbox.posted
        following = self._outbox.next_batch if self._sends_batches else self._outbox.next_unsent
        while True:
            posted.clear()
            while (message := following()) is not None:
                await self._send(call, message)
            if self._load is not None:
                load, self._load = self._load, None
                await self._send(call, cluster_pb2.WorkerMessage(load=load))
            if self._received - self._acknowledged >= _ACK_EVERY:
                await self._send(call, cluster_pb2.WorkerMessage())
            if self._leaving and not self._outbox.has_unsent:
                await call.done_writing()
                # The coordinator reads all there is, then ends the stream.
                await asyncio.sleep(_LEAVE_TIMEOUT_S)
                call.cancel()
                return
            await posted.wait()

    async def _send(
        self,
        call: _Call,
        message: cluster_pb2.WorkerMessage,
    ) -> None:
        message.ack = self._acknowledged = self._received
        await call.write(message)

    async def _beat(self) -> None:
        while True:
            self._load = await self._host.load_report()
            self._outbox.posted.set()
            await asyncio.sleep(self._heartbeat_s)

    async def _explain(
        self,
        call: _Call,
        error: BaseException,
    ) -> None:
        """Raises what the end of a stream means; returns when it was wanted."""
        code, details = grpc.StatusCode.UNKNOWN, str(error)
        if isinstance(error, TimeoutError):
            details = f"no welcome for {_WELCOME_TIMEOUT_S:.0f} s"
        elif isinstance(error, EOFError) and not call.done():
            details = str(error)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    code, details = await call.code(), await call.details() or details
        if code is grpc.StatusCode.ABORTED:
            raise Fenced(f"fenced by the coordinator: {details}")
        if self._leaving:
            return
        if code in _FINAL:
            raise Refused(f"coordinator at {self._address} refuses this worker: {details}")
        raise _StreamLost(why_not_connected(details) or f"{code.name}: {details}")


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends, then ends the others; raises what that one raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()
