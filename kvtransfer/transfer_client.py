"""The main process's client of the transfer service: starts, uses and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import OrderedDict, deque

from google.protobuf.message import DecodeError

from baton.kvtransfer import local_wire
from baton.kvtransfer.arena import SEGMENT_DIRECTORY, remove_leftovers
from baton.kvtransfer.errors import ServiceGone, TransferError, TransferRefused
from baton.runtime.kv.kv_transfer_config import KvTransferConfig
from baton.runtime.process import output_streams
from baton.runtime.process.long_tasks import log_failure
from baton.runtime.security.security_config import SecurityConfig
from baton.v1 import kv_transfer_pb2 as pb

HandoffEvent = pb.LocalHandoffState | pb.LocalSendState

CALL_TIMEOUT_S = 10.0
# The same for an erasure, which takes about a second for some gigabytes of staging.
_ERASE_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
# Most unread events, one for each handoff; when there are more, the oldest is dropped.
MAX_UNREAD_EVENTS = 65_536
# Longest wait for the end of a failed service's stderr, which other processes may still hold open.
_LAST_LINE_TIMEOUT_S = 1.0
_READ_BYTES = 2**18
_MAX_LINE_BYTES = 2**16
# Most lines of a service that has not started yet; when there are more, the oldest is dropped.
_MAX_HELD_LINES = 1000
# Settings for glibc's allocator and memcpy, for a process that moves megabytes at a time. Other C
# libraries ignore them.
_GLIBC_TUNABLES = {
    # glibc keeps the memory of large messages: mapping and clearing it again would cost as much as
    # moving the bytes. The kept memory is bounded by the messages in flight.
    "glibc.malloc.mmap_threshold": 32 * 2**20,
    "glibc.malloc.trim_threshold": 256 * 2**20,
    # Large copies bypass the caches: this core does not read the bytes again.
    "glibc.cpu.x86_non_temporal_threshold": 2**17,
}


class TransferClient:
    """The transfer service of this worker, which lives as long as this object.

    One event loop uses it. `start` creates it and `close` ends it.

    Attributes:
        socket_path: Path of the control socket, which engine processes pass to EnginePort.
        address: host:port at which other workers' services open handoffs.
        send_bytes: Size of the sending staging: the largest handoff that this worker can send.
        receive_bytes: Size of the receiving staging.
        gone: Set once the service has ended for any reason; `gone_reason` says why.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        ready: dict[str, str],
        stderr: _Stderr,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Takes over a running service. Callers use `start`."""
        self.socket_path = ready["socket_path"]
        self.address = ready["address"]
        self.send_bytes = int(ready["send_bytes"])
        self.receive_bytes = int(ready["receive_bytes"])
        self.gone = asyncio.Event()
        self.gone_reason = ""
        self._shm_name = ready["shm_name"]
        self._process, self._reader, self._writer = process, reader, writer
        self._call_id = 0
        self._calls: dict[int, asyncio.Future[pb.LocalReply]] = {}
        self._events: OrderedDict[tuple[str, bytes], HandoffEvent] = OrderedDict()
        self._has_events = asyncio.Event()
        self._stderr, self._closing = stderr, False
        stderr.forward()
        self._tasks = [
            asyncio.create_task(self._read(), name="transfer service"),
            stderr.task,
            asyncio.create_task(self._watch(), name="end of the transfer service"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @classmethod
    async def start(
        cls,
        config: KvTransferConfig,
        socket_path: str,
        *,
        security: SecurityConfig | None = None,
        log_level: str = "info",
        timeout_s: float = 120.0,
    ) -> TransferClient:
        """Starts the service's process and connects to it.

        Args:
            config: The `kv_transfer` section.
            socket_path: Path for the service's control socket: a short path in a directory that
                only this user can enter.
            security: TLS and credentials of the service's port and connections; None: the default.
            log_level: Log level of the service; its log goes to this process's stderr.
            timeout_s: Longest time until the service serves, in seconds.

        Raises:
            ServiceGone: The service did not start; the message says why.
        """
        arguments = {
            "socket_path": socket_path,
            "parent_pid": os.getpid(),
            "log_level": log_level,
            "kv_transfer": config.model_dump(mode="json"),
            "security": (security or SecurityConfig()).model_dump(mode="json"),
        }
        process = await _spawn(arguments)
        assert process.stderr is not None
        stderr = _Stderr(process.stderr)
        try:
            async with asyncio.timeout(timeout_s):
                assert process.stdout is not None
                line = await process.stdout.readline()
                if not line:
                    raise ServiceGone(await _failure_detail(process, stderr))
                ready = json.loads(line)
                reader, writer = await asyncio.open_unix_connection(socket_path)
            client = cls(process, ready, stderr, reader, writer)
        except BaseException as error:
            # The process may have a socket and shared memory already, which it removes itself.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await _wait_for_end(process)
            finally:
                stderr.task.cancel()
                # For a process that was killed before it could remove its segment.
                remove_leftovers()
            if isinstance(error, TimeoutError):
                detail = f"did not serve within {timeout_s:g} s"
                raise ServiceGone(detail) from None
            if isinstance(error, OSError | ValueError):
                raise ServiceGone(str(error)) from error
            raise
        try:
            subscribe = pb.LocalSubscribe(main=True)
            await client._call(pb.LocalRequest(subscribe=subscribe))
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        """Process ID of the service."""
        return self._process.pid

    async def configure(self, fingerprint: pb.KvFingerprint) -> None:
        """Gives the service the fingerprint of the engine's cache; it takes no handoffs before.

        Raises:
            ServiceGone, TransferRefused.
        """
        await self._call(pb.LocalRequest(configure=pb.LocalConfigure(fingerprint=fingerprint)))

    async def open_send(
        self,
        handoff_id: bytes,
        target: str,
        num_blocks: int,
        num_tokens: int,
        wait_s: float,
    ) -> int:
        """Reserves the sender's staging and begins to open the handoff at the receiver.

        Cancelling the call aborts the send.

        Args:
            handoff_id: 16 random bytes.
            target: host:port of the receiving worker's transfer service.
            num_blocks: Number of blocks that hold the tokens.
            num_tokens: Number of prompt tokens to hand over, from the first token.
            wait_s: Longest wait for staging, here and at the receiver together, in seconds; at
                most the service's open_timeout_s.

        Returns:
            The offset of the handoff's bytes in the segment (see LocalSendOpened). `next_events`
            later returns exactly one LocalSendState, unless this worker aborts the send.

        Raises:
            TransferRefused: No staging in time, too large, or the ID is in use. The prompt is then
                computed without a handoff.
            ServiceGone: The service has ended; the prompt is computed without a handoff.
        """
        wanted = pb.LocalOpenSend(
            handoff_id=handoff_id,
            target=target,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            wait_ms=round(wait_s * 1000),
        )
        try:
            reply = await self._call(
                pb.LocalRequest(open_send=wanted), timeout_s=wait_s + CALL_TIMEOUT_S
            )
        except asyncio.CancelledError:
            self.abort_send(handoff_id)
            raise
        return reply.send_opened.offset

    async def shrink_send(self, handoff_id: bytes, num_blocks: int, num_tokens: int) -> int:
        """Makes a send smaller, of which the engine has filled nothing, and opens it again.

        Args:
            handoff_id: ID of a send that `open_send` has opened.
            num_blocks: New number of blocks; at most as many as before.
            num_tokens: Number of tokens in the blocks.

        Returns:
            The offset of the handoff's bytes in the segment.

        Raises:
            TransferRefused: The send has ended, or blocks of it were filled.
            ServiceGone: The service has ended.
        """
        shrink = pb.LocalShrinkSend(
            handoff_id=handoff_id, num_blocks=num_blocks, num_tokens=num_tokens
        )
        reply = await self._call(pb.LocalRequest(shrink_send=shrink))
        return reply.send_opened.offset

    def abort_send(self, handoff_id: bytes) -> None:
        """Ends a send: cancelled, failed, or finished with its first token. Idempotent.

        Abort the request in the engine first. The staging is freed half a second later, because
        the engine may still be writing to it; with pipeline stages ten seconds later, or when all
        of them have told that they write no more. The engine is not told when a send fails, so a
        failed send keeps its staging until this call or until every rank has filled its part.
        """
        self._write(pb.LocalRequest(abort_send=pb.LocalAbortSend(handoff_id=handoff_id)))

    def drop(self, handoff_id: bytes) -> None:
        """Drops a handoff to this worker that is not needed (any more), also before its open."""
        self._write(pb.LocalRequest(drop=pb.LocalDrop(handoff_id=handoff_id)))

    async def erase_staging(self) -> None:
        """Overwrites the bytes of earlier handoffs in staging; returns when no free byte is left.

        The bytes of handoffs that are under way are overwritten when these end.

        Raises:
            ServiceGone: The service has ended, and its staging with it.
        """
        await self._call(pb.LocalRequest(erase=pb.LocalErase()), timeout_s=_ERASE_TIMEOUT_S)

    async def stats(self) -> pb.LocalStatistics:
        """Returns the service's statistics. Raises ServiceGone."""
        return (await self._call(pb.LocalRequest(stats=pb.LocalStats()))).statistics

    async def next_events(self) -> list[HandoffEvent]:
        """Waits for changes; returns the latest state of each handoff that changed.

        LocalHandoffState is for handoffs to this worker, LocalSendState for those from it. Only one
        task may call this at a time.

        Raises:
            ServiceGone: The service has ended, and all its handoffs are lost.
        """
        while not self._events:
            if self.gone.is_set():
                raise ServiceGone(self.gone_reason)
            self._has_events.clear()
            await self._has_events.wait()
        events = list(self._events.values())
        self._events.clear()
        return events

    async def close(self) -> None:
        """Ends the service, waits for its end, and removes its socket and segment. Idempotent."""
        self._closing = True
        self._writer.close()
        try:
            await _wait_for_end(self._process)
        finally:
            await asyncio.wait(self._tasks)
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _call(
        self, request: pb.LocalRequest, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> pb.LocalReply:
        if self.gone.is_set():
            raise ServiceGone(self.gone_reason)
        self._call_id += 1
        request.call_id = self._call_id
        answer = asyncio.get_running_loop().create_future()
        self._calls[request.call_id] = answer
        self._write(request)
        try:
            # The time is waited in two parts: when both processes were stopped, the first part is
            # over at once, and the service then has the second one to answer.
            for _ in range(2):
                await asyncio.wait([answer], timeout=timeout_s / 2)
            if not answer.done():
                # A service that does not answer is treated as ended.
                self._lost(f"transfer service: no answer within {timeout_s:g} s")
            reply: pb.LocalReply = answer.result()
        finally:
            self._calls.pop(request.call_id, None)
        if reply.error:
            raise TransferRefused(reply.error, reply.reason)
        return reply

    def _write(self, request: pb.LocalRequest) -> None:
        if not self.gone.is_set() and not self._writer.is_closing():
            self._writer.write(local_wire.encode(request))

    async def _read(self) -> None:
        unpacker = local_wire.Unpacker()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for message in unpacker.feed(data):
                    self._take(pb.LocalReply.FromString(message))
        except (OSError, TransferError, DecodeError) as error:
            self._lost(f"transfer service: {error}")
        # The process is ending; `_watch` records the reason.

    def _take(self, reply: pb.LocalReply) -> None:
        if reply.HasField("handoff"):
            self._keep(("receive", reply.handoff.handoff_id), reply.handoff)
        elif reply.HasField("send"):
            self._keep(("send", reply.send.handoff_id), reply.send)
        elif (answer := self._calls.get(reply.call_id)) is not None and not answer.done():
            answer.set_result(reply)

    def _keep(self, key: tuple[str, bytes], event: HandoffEvent) -> None:
        self._events.pop(key, None)
        self._events[key] = event
        if len(self._events) > MAX_UNREAD_EVENTS:
            self._events.popitem(last=False)
        self._has_events.set()

    async def _watch(self) -> None:
        code = await self._process.wait()
        if code > 0:
            # The service's last line says why, and may not have been read yet.
            await asyncio.wait([self._stderr.task], timeout=_LAST_LINE_TIMEOUT_S)
        said = f": {self._stderr.last_line}" if self._stderr.last_line and code > 0 else ""
        self._lost(
            "transfer service: closed"
            if self._closing
            else f"transfer service: ended with exit code {code}{said}"
        )
        # A killed service leaves these files behind.
        for left in (self.socket_path, f"{SEGMENT_DIRECTORY}/{self._shm_name}"):
            with contextlib.suppress(OSError):
                os.unlink(left)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Gives the service up if a task has failed: events would be missing without a notice."""
        log_failure(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lost(f"transfer service: {type(error).__name__}: {error}")

    def _lost(self, reason: str) -> None:
        if self.gone.is_set():
            return
        self.gone_reason = reason
        self.gone.set()
        self._has_events.set()
        self._writer.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ServiceGone(reason))


class _Stderr:
    """Reads a service's stderr until its end: a full pipe would stop the service.

    Args:
        stream: The service's stderr.

    Attributes:
        last_line: The last line that is not empty; "" before there is one.
        task: Ends with the stream.
    """

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream, self.last_line = stream, ""
        # The lines before `forward`; None after it.
        self._held: deque[str] | None = deque(maxlen=_MAX_HELD_LINES)
        self.task = asyncio.create_task(self._read(), name="output of the transfer service")

    def forward(self) -> None:
        """Prints the lines so far, and all further ones, to this process's stderr."""
        held, self._held = self._held, None
        for line in held or ():
            output_streams.stderr.write(f"{line}\n")

    async def _read(self) -> None:
        while True:
            try:
                line = await self._stream.readline()
            except ValueError:
                # The stream drops the beginning of a line of more than _MAX_LINE_BYTES.
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            self.last_line = text.strip() or self.last_line
            if self._held is None:
                output_streams.stderr.write(f"{text}\n")
            else:
                self._held.append(text)


async def _spawn(arguments: dict[str, object]) -> asyncio.subprocess.Process:
    """Starts the service's process with these arguments.

    The service stays in the worker's process group, so that killing the group leaves nothing
    behind. It ignores a terminal's SIGINT. It must not get its own session: see the coordinator's
    launchers/end_with_parent.py.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton.kvtransfer.service",
        json.dumps(arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    """Returns the service's environment: this one, with glibc settings the user may override."""
    tunables = [f"{name}={value}" for name, value in _GLIBC_TUNABLES.items()]
    if said := os.environ.get("GLIBC_TUNABLES"):
        tunables.append(said)
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


async def _failure_detail(process: asyncio.subprocess.Process, stderr: _Stderr) -> str:
    """Returns why a service did not start: the last line of its stderr, or its exit code."""
    await asyncio.wait([stderr.task])
    code = await process.wait()
    return stderr.last_line or f"ended with exit code {code}"


async def _wait_for_end(process: asyncio.subprocess.Process) -> None:
    """Waits for a process that was told to end; kills it after STOP_TIMEOUT_S or at a cancel.

    The caller removes the files of a killed process.
    """
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
