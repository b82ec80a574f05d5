"""The Cluster service: attach streams of workers, as specified in cluster.proto."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeAlias

import grpc

from baton.coordinator.server.link import WorkerLink
from baton.coordinator.server.shell import Shell
from baton.coordinator.state import events as ev
from baton.runtime.config import CoordinatorConfig
from baton.runtime.errors import BatonError, Internal, InvalidArgument, abort
from baton.runtime.names import WORKER_NAMES, is_worker
from baton.v1 import cluster_pb2, cluster_pb2_grpc, common_pb2

_log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_ROLES = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)

# The write type is bytes, because messages are written encoded.
_Context: TypeAlias = "grpc.aio.ServicerContext[cluster_pb2.WorkerMessage, bytes]"


def add_to_server(service: ClusterService, server: grpc.aio.Server) -> None:
    """Registers the service like the generated code, but without a serializer for commands."""
    handlers: dict[str, Any] = {
        "Attach": grpc.stream_stream_rpc_method_handler(
            service.Attach, cluster_pb2.WorkerMessage.FromString
        ),
    }
    name = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
    server.add_registered_method_handlers(name, handlers)


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """One call of Attach per worker stream."""

    def __init__(self, shell: Shell, config: CoordinatorConfig) -> None:
        self._shell, self._config = shell, config

    async def Attach(  # type: ignore[override]
        self, request_iterator: object, context: _Context
    ) -> None:
        del request_iterator  # Reading through the context leaves writing to another task.
        stream = object()
        try:
            # The Hello is not kept: its running requests may be megabytes.
            link = self._shell.attach(await self._hello(context), stream)
        except BatonError as error:
            await abort(context, error)
            return
        try:
            welcome = cluster_pb2.CoordinatorMessage(welcome=self._welcome(link))
            await context.write(welcome.SerializeToString())
            reader = asyncio.create_task(self._read(link, stream, context))
            reader.add_done_callback(lambda _: link.wake.set())
            try:
                await self._write(link, stream, context, reader)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            if link.error is not None:
                await abort(context, link.error)
        except BatonError as error:
            worker_id, incarnation = link.key
            self._shell.post(ev.WorkerLost(worker_id, f"broke the protocol: {error}", incarnation))
            await abort(context, error)
        finally:
            self._shell.detach(link, stream)

    async def _hello(self, context: _Context) -> cluster_pb2.Hello:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            first = None
        if not isinstance(first, cluster_pb2.WorkerMessage) or not first.HasField("hello"):
            kind = first.WhichOneof("message") if first else None
            raise InvalidArgument("message", kind, "the first message must be a Hello")
        hello = first.hello
        if not is_worker(hello.worker_id):
            raise InvalidArgument("hello.worker_id", hello.worker_id, WORKER_NAMES)
        if hello.incarnation == 0:
            raise InvalidArgument("hello.incarnation", 0, "must be random and not 0")
        _check_role("hello.role", hello.role)
        if not hello.kv_address:
            raise InvalidArgument("hello.kv_address", "", "must be host:port")
        return hello

    def _welcome(self, link: WorkerLink) -> cluster_pb2.Welcome:
        welcome = cluster_pb2.Welcome(
            generation=self._shell.generation,
            ack=link.received,
            role=link.role,
            adopted=link.adopted,
            step_targets=self._shell.core.step_targets(),
        )
        welcome.heartbeat_interval.FromMicroseconds(round(self._config.heartbeat_s * 1e6))
        welcome.adoption_grace.FromMicroseconds(round(self._config.adoption_grace_s * 1e6))
        return welcome

    async def _read(self, link: WorkerLink, stream: object, context: _Context) -> None:
        while isinstance(message := await context.read(), cluster_pb2.WorkerMessage):
            for one in message.batch or (message,):
                if link.stream is not stream or link.ended:
                    return
                link.acknowledge(max(message.ack, one.ack))
                self._take(link, one)

    def _take(self, link: WorkerLink, message: cluster_pb2.WorkerMessage) -> None:
        if message.seq:
            if message.seq <= link.received:
                return
            if message.seq != link.received + 1:
                raise InvalidArgument("seq", message.seq, f"must be {link.received + 1}")
        try:
            self._apply(link, message)
        except BatonError:
            raise
        except Exception as error:
            # The error removes the worker, which would send the message again on every stream.
            _log.exception(
                "a message of the worker could not be handled", extra={"worker": link.key[0]}
            )
            raise Internal(f"the message could not be handled: {error!r}") from error
        if message.seq:
            link.processed(message.seq)

    def _apply(self, link: WorkerLink, message: cluster_pb2.WorkerMessage) -> None:
        kind, post, worker = message.WhichOneof("message"), self._shell.post, link.key
        if kind == "step":
            step = message.step
            if step.HasField("tokens"):
                _check_columns(step.tokens)
            post(ev.WorkerStep(worker, step))
        elif kind == "load":
            post(ev.LoadReported(worker, message.load))
        elif kind == "handoff":
            post(ev.WorkerHandoff(worker, message.handoff))
        elif kind == "cache":
            post(ev.WorkerCache(worker, message.cache))
        elif kind == "state_changed":
            if role := message.state_changed.role:
                _check_role("state_changed.role", role)
            post(ev.WorkerChanged(worker, message.state_changed))
        elif kind == "profile":
            post(ev.WorkerHeard(worker))
            self._shell.profiles.on_report(worker, message.profile)
        elif kind == "cache_dropped":
            post(ev.WorkerHeard(worker))
            self._shell.cache_drops.on_report(worker, message.cache_dropped)
        elif kind == "rendered":
            post(ev.WorkerHeard(worker))
            self._shell.renders.on_report(worker, message.rendered)
        elif kind is None:
            post(ev.WorkerHeard(worker))
        else:
            raise InvalidArgument("message", kind, "only the first message may be a Hello")

    async def _write(
        self, link: WorkerLink, stream: object, context: _Context, reader: asyncio.Task[None]
    ) -> None:
        """Sends the link's messages until the stream is over, and at least one per heartbeat.

        Raises the reader's exception. A write is never cancelled, because gRPC could not send the
        final status after it. Therefore a worker that does not read learns only later that it is
        fenced.
        """
        heartbeat = _Heartbeat(self._config.heartbeat_s, link.wake)
        try:
            while link.stream is stream and not link.ended:
                if reader.done():
                    reader.result()
                    return
                link.wake.clear()
                # A newer stream may have replaced this one during the previous write.
                while link.stream is stream and (message := link.next_to_send()) is not None:
                    heartbeat.sent()
                    await context.write(message)
                if link.owes_acknowledgement or heartbeat.is_due:
                    heartbeat.sent()
                    await context.write(link.bare_acknowledgement())
                await link.wake.wait()
        finally:
            heartbeat.close()


class _Heartbeat:
    """Wakes a stream's writer when the stream has sent nothing for `interval_s`.

    One repeating timer serves all waits: a timeout for every wait would cost as much as a message.
    """

    def __init__(self, interval_s: float, wake: asyncio.Event) -> None:
        self._interval_s, self._wake = interval_s, wake
        self._loop = asyncio.get_running_loop()
        self.sent()
        self._timer = self._loop.call_later(interval_s, self._on_timer)

    @property
    def is_due(self) -> bool:
        return self._left_s <= 0

    def sent(self) -> None:
        self._sent_at = self._loop.time()

    def close(self) -> None:
        self._timer.cancel()

    @property
    def _left_s(self) -> float:
        return self._sent_at + self._interval_s - self._loop.time()

    def _on_timer(self) -> None:
        left_s = self._left_s
        if left_s <= 0:
            self._wake.set()
            left_s = self._interval_s
        self._timer = self._loop.call_later(left_s, self._on_timer)


def _check_role(field: str, role: common_pb2.Role.ValueType) -> None:
    if role not in _ROLES:
        raise InvalidArgument(field, int(role), "must be ROLE_PREFILL or ROLE_DECODE")


def _check_columns(tokens: cluster_pb2.StepTokens) -> None:
    """Raises InvalidArgument if the columns of a step's tokens differ in length."""
    num_tokens = len(tokens.handles)
    for name in ("offsets", "token_ids", "num_text_chars", "deltas"):
        num_entries = len(getattr(tokens, name))
        if num_entries != num_tokens:
            raise InvalidArgument(
                f"len(step.tokens.{name})",
                num_entries,
                f"must be as many as step.tokens.handles: {num_tokens}",
            )
