"""The transfer service: a process of its own beside one worker's engine.

    python -m baton.kvtransfer.service CONFIG

CONFIG is JSON: {"socket_path": "/run/baton/kv.sock", "kv_transfer": {...}}.

The service owns one shared-memory segment with two arenas: send [0, send_bytes) and receive
[send_bytes, send_bytes + receive_bytes). The engine's processes copy into and out of the segment;
this process moves the bytes between workers. It prints one line of JSON when it serves, the only
line on its standard output. It ends when the worker's main process disconnects, when its parent
ends, or on SIGTERM, and then removes socket and segment. It ends itself, with exit code 1, when
reads that do not end hold too much of its staging.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Literal, TextIO

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from pydantic import Field, ValidationError

from baton.kvtransfer import local_wire
from baton.kvtransfer.addresses import advertised, bind
from baton.kvtransfer.arena import Arena, Segment
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.grpc_methods import SERVICE
from baton.kvtransfer.service import local_server
from baton.kvtransfer.service.grpc_stream import GrpcStreamDialer, HandoffServicer
from baton.kvtransfer.service.local_server import LocalConnection
from baton.kvtransfer.service.receive_state import ReceiverLimits
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.service.send_state import SenderLimits
from baton.kvtransfer.service.sender import Sender
from baton.kvtransfer.service.shell import TransferShell
from baton.kvtransfer.transports import registry
from baton.kvtransfer.transports.negotiation import Negotiator
from baton.kvtransfer.transports.transport import ServiceContext
from baton.runtime.config_error import ConfigError
from baton.runtime.kv.kv_transfer_config import KvTransferConfig
from baton.runtime.network import rpc
from baton.runtime.process import affinity, lifecycle, logs, output_streams, quick_exit
from baton.runtime.section import Section
from baton.runtime.security.access import Access
from baton.runtime.security.dial import within_cluster
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig

# Time that a commit's reply and a first frame may take beyond the receiver's idle timeout.
SENDER_GRACE_S = 5.0
# Longest wait for transports that load a library; one that takes longer cannot be used until then.
START_TIMEOUT_S = 60.0


class ServiceArguments(Section):
    """The JSON argument with which the process is started."""

    socket_path: str
    parent_pid: int = Field(
        default_factory=os.getppid, description="The service ends when this process ends."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    kv_transfer: KvTransferConfig = Field(default_factory=KvTransferConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)


def limits(config: KvTransferConfig) -> tuple[SenderLimits, ReceiverLimits]:
    """Returns the limits of both state machines from the configuration."""
    sending = SenderLimits(
        max_wait_s=config.open_timeout_s, idle_timeout_s=config.idle_timeout_s + SENDER_GRACE_S
    )
    receiving = ReceiverLimits(
        max_wait_s=config.open_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        commit_ttl_s=config.commit_ttl_s,
        claim_timeout_s=config.claim_timeout_s,
        retry_timeout_s=config.open_timeout_s,
    )
    return sending, receiving


def _run_on(cpus: list[int]) -> None:
    """Binds this process and the threads that it starts later to these cores; empty: any."""
    if not cpus:
        return
    try:
        affinity.pin_to(cpus)
    except OSError as error:
        raise ConfigError(
            f"kv_transfer.cpus: is {cpus}; this process may use {sorted(os.sched_getaffinity(0))}: "
            f"{error}"
        ) from None


def _own_stdout() -> TextIO:
    """Returns this process's standard output; everything else that is printed goes to stderr.

    UCX prints its warnings to file descriptor 1, and NCCL its log. The parent takes the first line
    there for this service's, and reads no further ones: a full pipe would stop the printing thread.
    """
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


async def serve(arguments: ServiceArguments, stdout: TextIO) -> int:
    """Runs the service until it is told to end; returns the process's exit code.

    Args:
        arguments: The JSON argument.
        stdout: Where the service prints its line; closed then.

    Raises:
        ConfigError, TransferError: The service cannot start, or cannot go on.
    """
    stop = lifecycle.stop_requested()
    # A terminal's signals reach every process of its group. The service ignores them and ends with
    # its worker, which may still drain.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    config, security = arguments.kv_transfer, arguments.security
    _run_on(config.cpus)
    refusals = Refusals()
    access = Access.for_workers(security, refusals)
    protection = rpc.Protection.of(security, access, "kv_transfer.listen")
    # Other workers use the same TLS settings as this one.
    dial = within_cluster(security, with_tls=security.serves_tls)
    server = rpc.server(max_message_bytes=rpc.MAX_FRAME_BYTES, protection=protection)
    dialer = GrpcStreamDialer(config.grpc_connections, dial)
    address = advertised(bind(server, config, protection), config.advertise_host)
    listener = local_wire.bind(arguments.socket_path)
    segment: Segment | None = None
    try:
        segment = Segment.create(config.send_bytes + config.receive_bytes)
        segment.prefault()
        sending, receiving = limits(config)
        within_host = security.serves_tls and not security.allow_plain_links
        context = ServiceContext(segment.name, segment.memory, config, dial, within_host)
        transports = registry.make(config.transports, context)
        negotiator = Negotiator(transports)
        sender = Sender(Arena(0, config.send_bytes), segment.memory, sending, negotiator)
        receiver = Receiver(
            Arena(config.send_bytes, config.receive_bytes),
            segment.memory,
            receiving,
            negotiator.choose,
        )
        shell = TransferShell(sender, receiver, negotiator, dialer, stop)
        shell.use_refusals(lambda: {reason: n for (_, reason), n in refusals.totals().items()})
        shell.describe_as(address, segment.name, config.send_bytes, config.receive_bytes)
        HandoffServicer(shell).add_to(server)
        for transport in transports:
            transport.serve(server, shell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await negotiator.started()
        health = rpc.add_health_and_reflection(server, [SERVICE])
        with _watched_parent(stop, arguments.parent_pid):
            await _run(shell, server, health, listener, stop, arguments.socket_path, stdout)
        if shell.problem:
            raise TransferError(shell.problem)
    finally:
        listener.close()
        local_server.remove(arguments.socket_path)
        if segment is not None:
            segment.close()
    return 0


async def _run(
    shell: TransferShell,
    server: grpc.aio.Server,
    health: HealthServicer,
    listener: socket.socket,
    stop: asyncio.Event,
    socket_path: str,
    stdout: TextIO,
) -> None:
    loop = asyncio.get_running_loop()
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    serving = health_pb2.HealthCheckResponse.SERVING
    await health.set(SERVICE, not_serving)
    await server.start()
    local = await loop.create_unix_server(
        lambda: LocalConnection(shell.handle_request, shell.connection_lost), sock=listener
    )
    with stdout:
        print(json.dumps({"socket_path": socket_path, **shell.ready_fields()}), file=stdout)
    configured = loop.create_task(shell.configured.wait())
    stopping = loop.create_task(stop.wait())
    await asyncio.wait([configured, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        await health.set(SERVICE, serving)
        await health.set("", serving)
        await stopping
    # Shutdown: 1. take nothing new, 2. end our streams, 3. end the streams of others.
    configured.cancel()
    local.close()
    shell.close_connections()
    await health.enter_graceful_shutdown()
    await shell.close_streams()
    await server.stop(0)
    await asyncio.wait([configured])


@contextlib.contextmanager
def _watched_parent(stop: asyncio.Event, parent: int) -> Iterator[None]:
    """Stops the service when its parent ends, even if a process still holds the parent's socket.

    The parent may have been killed before this process started, so os.getppid() is not enough.
    """
    loop = asyncio.get_running_loop()
    try:
        watch = os.pidfd_open(parent)
    except ProcessLookupError:
        stop.set()
        yield
        return
    except OSError:
        # Without pidfd support only the main process's connection tells that it has ended.
        yield
        return
    try:
        if os.getppid() != parent:
            stop.set()
        loop.add_reader(watch, stop.set)
        yield
        loop.remove_reader(watch)
    finally:
        os.close(watch)


def main() -> int:
    """Runs the service as this process; returns the exit code."""
    quick_exit.skip_final_gc()
    try:
        if len(sys.argv) != 2:
            raise ConfigError("takes one argument: a JSON object with socket_path and kv_transfer")
        arguments = ServiceArguments.model_validate_json(sys.argv[1])
        logs.setup(arguments.log_level, "kv-transfer")
        return lifecycle.run(serve(arguments, _own_stdout()))
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg'].lower()}" for each in error.errors()
        ]
        message = "; ".join(problems)
    except (ConfigError, TransferError) as error:
        message = str(error)
    output_streams.stderr.write(f"kv-transfer: {message}\n")
    # A transport whose reads do not end has asked for exit code 0; the latest call counts.
    quick_exit.skip_cleanup(1)
    return 1
