"""The worker's side of `Cluster.Attach`: one stream at a time to the coordinator.

cluster.proto defines the rules: numbered messages, cumulative acknowledgements, replay on a new
stream to the same coordinator, adoption by a new coordinator, and fencing, which ends the worker at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from baton.runtime.durations import to_seconds
from baton.runtime.errors import connection_failure
from baton.runtime.network import rpc
from baton.runtime.security.dial import PLAIN, Dial
from baton.v1 import cluster_pb2, cluster_pb2_grpc
from baton.worker.host import WorkerHost
from baton.worker.load_reports import LoadReports
from baton.worker.outbox import Outbox

if TYPE_CHECKING:
    _Call: TypeAlias = grpc.aio.StreamStreamCall[
        cluster_pb2.WorkerMessage, cluster_pb2.CoordinatorMessage
    ]

_log = logging.getLogger(__name__)

# First and longest delay between attempts, and growth factor. The delay stays short, because a
# restarted coordinator holds back resumed requests until its workers have attached.
_BACKOFF_S, _BACKOFF_GROWTH = (0.05, 0.3), 1.5
# A connection that is accepted but stays silent for this long counts as failed.
_WELCOME_TIMEOUT_S = 10.0
# A coordinator that sends neither messages nor heartbeats for this long counts as gone, even if the
# connection answers pings: a proxy may answer them, or a coordinator with a blocked event loop. A
# coordinator with long heartbeat intervals may be silent for as many intervals.
_SILENT_S = rpc.PING_INTERVAL_S + rpc.PING_TIMEOUT_S
_SILENT_HEARTBEATS = 3
# The silence is measured in so many steps.
_SILENCE_STEPS = 10
_LEAVE_TIMEOUT_S = 5.0
# Number of received commands after which an acknowledgement is sent; each heartbeat sends one too.
_ACK_EVERY = 64

_STREAM_ERRORS = (grpc.RpcError, asyncio.InvalidStateError, TimeoutError, EOFError)
# Status codes of errors that every further attempt would get too.
_FINAL = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
# Status codes that are final for a worker that was never attached. A worker that was attached tries
# again after them. UNAUTHENTICATED and PERMISSION_DENIED mean a wrong credential: an operator who
# replaces tokens or certificates may have done so on the coordinator's host only. UNIMPLEMENTED
# comes from a server without this service, for example a proxy while the coordinator restarts.
_FINAL_AT_START = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class AttachError(Exception):
    """The worker cannot continue with this coordinator; the message says why."""


class Fenced(AttachError):
    """The coordinator declared this incarnation dead: stop at once and send nothing more."""


class Refused(AttachError):
    """The coordinator does not accept this worker."""


class CoordinatorGone(AttachError):
    """No coordinator answered for too long."""


class _StreamLost(Exception):
    """The stream has ended; a new stream may follow."""


class Attachment:
    """Keeps a worker attached to its coordinator.

    Args:
        address: host:port of the coordinator.
        host: The worker that the attachment represents.
        outbox: Messages to send, beside load reports.
        load_reports: Makes the report that each heartbeat sends.
        attach_timeout_s: Longest time without a coordinator before `run` fails.
        dial: TLS files and credential; each stream reads the files again.

    Attributes:
        detached: Event that is set while no stream is up.
    """

    def __init__(
        self,
        address: str,
        host: WorkerHost,
        outbox: Outbox,
        load_reports: LoadReports,
        *,
        attach_timeout_s: float,
        dial: Dial = PLAIN,
    ) -> None:
        self._address, self._host, self._outbox, self._dial = address, host, outbox, dial
        self._load_reports, self._attach_timeout_s = load_reports, attach_timeout_s
        self._generation = 0
        self._received = self._acknowledged = 0
        self._heartbeat_s, self._grace_s = 1.0, 0.0
        # Whether the present stream had a message since the silence was last looked at.
        self._heard = False
        self._load: cluster_pb2.LoadReport | None = None
        self._leaving = False
        self.detached = asyncio.Event()
        self.detached.set()

    def leave(self) -> None:
        """Sends the remaining messages, then ends the stream, so that `run` returns."""
        self._leaving = True
        self._outbox.posted.set()

    async def run(self) -> None:
        """Attaches, and attaches again whenever the stream ends, until `leave`.

        Raises:
            Fenced: The coordinator declared this incarnation dead.
            Refused: The coordinator does not accept this worker.
            CoordinatorGone: No coordinator answered for too long.
        """
        lost_at, abandoned, backoff_s = monotonic(), False, _BACKOFF_S[0]
        warned = False
        while True:
            attached = asyncio.Event()
            try:
                # A new channel per attempt, because a failed channel applies its own backoff. The
                # coordinator bounds its commands by its own configuration, which may differ.
                async with rpc.channel(
                    self._address, max_received_bytes=-1, dial=self._dial
                ) as channel:
                    await self._stream(cluster_pb2_grpc.ClusterStub(channel), attached)
                return
            except _StreamLost as lost:
                reason = str(lost)
            if attached.is_set():
                lost_at, abandoned, backoff_s = monotonic(), False, _BACKOFF_S[0]
                warned = True
                _log.warning("the stream to the coordinator ended: %s", reason)
            if self._leaving:
                return
            if not warned:
                warned = True
                _log.warning(
                    "no coordinator at %s: %s; retrying for up to %g s",
                    *(self._address, reason, self._attach_timeout_s),
                )
            gone_s = monotonic() - lost_at
            if self._generation and not abandoned and gone_s >= self._grace_s:
                abandoned = True
                self._host.abandon(f"no coordinator for {gone_s:.1f} s")
            limit_s = max(self._attach_timeout_s, self._grace_s)
            if gone_s >= limit_s:
                # The message names the limit instead of the measured time, which varies with load.
                raise CoordinatorGone(
                    f"no coordinator at {self._address} within {limit_s:g} s: {reason}"
                )
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(_BACKOFF_GROWTH * backoff_s, _BACKOFF_S[1])

    async def _stream(
        self, stub: cluster_pb2_grpc.ClusterAsyncStub, attached: asyncio.Event
    ) -> None:
        """Runs one stream from Hello to its end; returns if `leave` ended it."""
        call: _Call = stub.Attach(metadata=self._dial.metadata())
        try:
            await self._exchange_hello(call)
            attached.set()
            self.detached.clear()
            await _first_of(
                self._read(call), self._write(call), self._send_heartbeats(), self._await_silence()
            )
        except _STREAM_ERRORS as error:
            await self._raise_for_end(call, error)
        finally:
            self.detached.set()
            self._host.on_detached()
            call.cancel()

    async def _exchange_hello(self, call: _Call) -> None:
        hello = self._host.hello()
        hello.generation, hello.ack = self._generation, self._received
        self._outbox.mark_hello()
        async with asyncio.timeout(_WELCOME_TIMEOUT_S):
            await call.write(cluster_pb2.WorkerMessage(hello=hello))
            first: object = await call.read()
        if not isinstance(first, cluster_pb2.CoordinatorMessage):
            raise EOFError("the stream ended before the welcome")
        if not first.HasField("welcome"):
            raise EOFError("the coordinator's first message is not a welcome")
        welcome = first.welcome
        self._heartbeat_s = to_seconds(welcome.heartbeat_interval) or 1.0
        self._grace_s = to_seconds(welcome.adoption_grace)
        if welcome.generation == self._generation:
            self._outbox.resume(welcome.ack)
        else:
            adopted = frozenset((one.request_id, one.attempt) for one in welcome.adopted)
            has_dropped = self._outbox.restart(adopted)
            # Before its first coordinator, a worker may have reported blocks on disk.
            if self._generation or has_dropped:
                self._host.keep_only(adopted)
            self._generation, self._received = welcome.generation, 0
        self._acknowledged = self._received
        if welcome.HasField("step_targets"):
            self._host.on_step_targets(welcome.step_targets)
        self._host.on_welcome(welcome.role)

    async def _read(self, call: _Call) -> None:
        while isinstance(message := await call.read(), cluster_pb2.CoordinatorMessage):
            self._heard = True
            self._outbox.acknowledge(message.ack)
            if not message.batch:
                self._take(message)
            for one in message.batch:
                # Copied, because a part keeps the whole batch in memory for the life of a request.
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
            raise EOFError(f"message {message.seq} follows message {self._received}")
        self._host.on_command(message)
        self._received = message.seq

    async def _write(self, call: _Call) -> None:
        posted = self._outbox.posted
        while True:
            posted.clear()
            while (message := self._outbox.next_batch()) is not None:
                await self._send(call, message)
            if self._load is not None:
                load, self._load = self._load, None
                await self._send(call, cluster_pb2.WorkerMessage(load=load))
            if self._received - self._acknowledged >= _ACK_EVERY:
                await self._send(call, cluster_pb2.WorkerMessage())
            if self._leaving and not self._outbox.has_unsent:
                await call.done_writing()
                # The coordinator reads all messages, then ends the stream.
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

    async def _send_heartbeats(self) -> None:
        while True:
            self._load = await self._load_reports.make()
            self._outbox.posted.set()
            await asyncio.sleep(self._heartbeat_s)

    async def _await_silence(self) -> None:
        """Raises _StreamLost when the coordinator has been silent for too long."""
        limit_s = max(_SILENT_S, _SILENT_HEARTBEATS * self._heartbeat_s)
        step_s = limit_s / _SILENCE_STEPS
        num_silent = 0
        # Steps are counted, not time: after a pause of this process (SIGSTOP), the messages that
        # came meanwhile must be read first.
        while num_silent < _SILENCE_STEPS:
            self._heard = False
            await asyncio.sleep(step_s)
            num_silent = 0 if self._heard else num_silent + 1
        raise _StreamLost(f"no message and no heartbeat for {limit_s:g} s")

    async def _raise_for_end(
        self,
        call: _Call,
        error: BaseException,
    ) -> None:
        """Raises the error that the end of a stream means; returns if the end was requested."""
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
        if code in _FINAL or (code in _FINAL_AT_START and not self._generation):
            raise Refused(f"coordinator at {self._address} refuses this worker: {details}")
        raise _StreamLost(connection_failure(details) or f"{code.name}: {details}")


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all coroutines until one ends, then cancels the others; raises the first one's error."""
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
