"""The worker's main process's end: starts the transfer service, talks to it, ends it."""

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
from baton.runtime.kv_transfer_config import KvTransferConfig
from baton.runtime.security_config import SecurityConfig
from baton.v1 import kv_transfer_pb2 as pb

HandoffEvent = pb.LocalHandoffState | pb.LocalSendState

CALL_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
# Handoffs whose latest state nobody has asked for; beyond it the oldest is forgotten.
MAX_UNREAD_EVENTS = 65_536
_READ_BYTES = 2**18
_MAX_LINE_BYTES = 2**16
# How glibc serves a process that moves megabytes at a time; others ignore it.
_GLIBC_TUNABLES = {
    # The memory of large messages is kept, not given back after each: to map and clear it again
    # costs as much as to move the bytes. What is kept is bounded by what is in flight.
    "glibc.malloc.mmap_threshold": 32 * 2**20,
    "glibc.malloc.trim_threshold": 256 * 2**20,
    # Large copies go past the caches: nobody reads the bytes again on this core.
    "glibc.cpu.x86_non_temporal_threshold": 2**17,
}


class TransferClient:
    """The transfer service of this worker, which lives as long as this object.

    Use from one event loop; `start` makes it, `close` (or leaving `async with`) ends it.

    Attributes:
        socket_path: of the control socket; engine processes get it for their EnginePort.
        address: host:port that other workers' services push to.
        send_bytes: size of the sender's staging: the largest handoff this worker can send.
        receive_bytes: the same of the receiver's.
        gone: set once the service has ended, whoever ended it; `gone_reason` says why.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        ready: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Takes over a running service; use `start`."""
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
        # The service's last words, for gone_reason.
        self._stderr: deque[str] = deque(maxlen=1)
        self._closing = False
        self._tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._forward_stderr()),
            asyncio.create_task(self._watch()),
        ]

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
            config: of the service.
            socket_path: where the service makes its control socket; a short path in a directory
                that only this user can enter.
            security: of the service's port and of what it dials; None: as by default.
            log_level: of the service; its log goes to this process's stderr.
            timeout_s: until it serves.

        Raises:
            ServiceGone: it did not start; the message is its one line of explanation.
        """
        arguments = {
            "socket_path": socket_path,
            "parent_pid": os.getpid(),
            "log_level": log_level,
            "kv_transfer": config.model_dump(mode="json"),
            "security": (security or SecurityConfig()).model_dump(mode="json"),
        }
        # In the worker's own process group, so that whoever kills that leaves nothing behind; it
        # ignores the SIGINT of a terminal. Never a session of its own: see the coordinator's
        # launchers/launcher.py.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton.kvtransfer.service.service",
            json.dumps(arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            env=_environment(),
        )
        try:
            async with asyncio.timeout(timeout_s):
                assert process.stdout is not None
                line = await process.stdout.readline()
                if not line:
                    raise ServiceGone(await _last_words(process))
                ready = json.loads(line)
                reader, writer = await asyncio.open_unix_connection(socket_path)
            client = cls(process, ready, reader, writer)
        except BaseException as error:
            # It may have a socket and shared memory already, which are its own to remove.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await _end(process)
            finally:
                # Of one that did not come to it.
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
        """Of the service's process."""
        return self._process.pid

    async def configure(self, fingerprint: pb.KvFingerprint) -> None:
        """Says what the engine's cache is like; before that the service takes no handoffs.

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
        *,
        epoch: int = 1,
    ) -> int:
        """Reserves the sender's staging and begins to open the handoff at the receiver.

        Cancelling the call aborts the send.

        Args:
            handoff_id: 16 random bytes.
            target: host:port of the receiving worker's transfer service.
            num_blocks: that hold the tokens.
            num_tokens: prompt tokens to hand over, from the first.
            wait_s: how long to wait for room, here and at the receiver together; at most the
                service's open_timeout_s.
            epoch: of the first frames.

        Returns:
            The offset of the handoff's bytes in the segment (see LocalSendOpened). How it goes on
            is told by `next_events`, always with one LocalSendState unless it is aborted here.

        Raises:
            TransferRefused: no room in time, too large, or the id is in use: prefill without
                handing over.
            ServiceGone: the same.
        """
        wanted = pb.LocalOpenSend(
            handoff_id=handoff_id,
            target=target,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            wait_ms=round(wait_s * 1000),
            epoch=epoch,
        )
        try:
            reply = await self._call(
                pb.LocalRequest(open_send=wanted), timeout_s=wait_s + CALL_TIMEOUT_S
            )
        except asyncio.CancelledError:
            self.abort_send(handoff_id)
            raise
        return reply.send_opened.offset

    def abort_send(self, handoff_id: bytes) -> None:
        """The send is over: cancelled, failed, or finished with its first token. Idempotent.

        Abort the request in the engine first. Its staging is free half a second later, since the
        engine may still be writing to it. A send that fails keeps its staging until this, or until
        every rank has said that it filled the last of it: the engine does not hear of the failure.
        """
        self._write(pb.LocalRequest(abort_send=pb.LocalAbortSend(handoff_id=handoff_id)))

    def drop(self, handoff_id: bytes) -> None:
        """A handoff to this worker is not wanted (any more), also before it was opened."""
        self._write(pb.LocalRequest(drop=pb.LocalDrop(handoff_id=handoff_id)))

    async def stats(self) -> pb.LocalStatistics:
        """Raises ServiceGone."""
        return (await self._call(pb.LocalRequest(stats=pb.LocalStats()))).statistics

    async def next_events(self) -> list[HandoffEvent]:
        """Waits for changes of handoffs' states; the latest of each since the last call.

        LocalHandoffState for handoffs to this worker, LocalSendState for those from it. One caller
        at a time.

        Raises:
            ServiceGone: the service has ended, and with it every handoff.
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
        """Ends the service and waits for its end; socket and segment are gone after. Idempotent."""
        self._closing = True
        self._writer.close()
        try:
            await _end(self._process)
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
            async with asyncio.timeout(timeout_s):
                reply: pb.LocalReply = await answer
        except TimeoutError:
            # It is stuck, and with it everything it holds.
            self._lost(f"transfer service: no answer within {timeout_s:g} s")
            raise ServiceGone(self.gone_reason) from None
        finally:
            self._calls.pop(request.call_id, None)
        if reply.error:
            raise TransferRefused(reply.error)
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
        # Its process is ending; `_watch` says how.

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

    async def _forward_stderr(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            while line := await self._process.stderr.readline():
                text = line.decode(errors="replace").rstrip("\n")
                self._stderr.append(text)
                print(text, file=sys.stderr, flush=True)

    async def _watch(self) -> None:
        code = await self._process.wait()
        said = f": {self._stderr[-1]}" if self._stderr and code > 0 else ""
        self._lost(
            "transfer service: closed"
            if self._closing
            else f"transfer service: ended with exit code {code}{said}"
        )
        # Of a service that was killed, nobody else removes what it owned.
        for left in (self.socket_path, f"{SEGMENT_DIRECTORY}/{self._shm_name}"):
            with contextlib.suppress(OSError):
                os.unlink(left)

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


def _environment() -> dict[str, str]:
    """This process's, with what suits the service unless somebody has said otherwise."""
    tunables = [f"{name}={value}" for name, value in _GLIBC_TUNABLES.items()]
    if said := os.environ.get("GLIBC_TUNABLES"):
        tunables.append(said)
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


async def _last_words(process: asyncio.subprocess.Process) -> str:
    """Why a service did not start: its last line, or how it ended."""
    assert process.stderr is not None
    lines = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
    code = await process.wait()
    return lines[-1] if lines else f"ended with exit code {code}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of one that was asked to end; SIGKILL when it does not, and at a cancel.

    What a killed one owned is removed by others.
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
