"""Profiles of this worker's engine, recorded on an operator's command and sent in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from baton.engine.base import Engine, EngineDead, NoProfiler, Trace
from baton.runtime.durations import to_seconds
from baton.runtime.errors import FailedPrecondition, Internal, ResourceExhausted, to_message
from baton.runtime.profiling import CHUNK_BYTES, MAX_TRACE_BYTES, TAKE_TIMEOUT_S
from baton.v1 import cluster_pb2
from baton.worker.command_tasks import CLOSE_S, error_message
from baton.worker.outbox import Outbox

# Traces are text. A higher level makes them hardly smaller, and takes CPU time from the engine.
_GZIP_LEVEL = 4
# Bytes compressed at once; takes a few milliseconds.
_PIECE_BYTES = 2**20


class Profiles:
    """Runs one profile at a time. All methods are called from one event loop.

    Args:
        engine: Started engine.
        outbox: Queue for the reports.
        max_bytes: Limit of the compressed traces of one profile.
        take_timeout_s: Longest wait for the permission to send more of a trace.
        sleep: Waits for the recording time, in seconds.

    Attributes:
        recording: Whether a profile is recorded, which makes the engine's steps slower.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        *,
        max_bytes: int = MAX_TRACE_BYTES,
        take_timeout_s: float = TAKE_TIMEOUT_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine, self._outbox = engine, outbox
        self._max_bytes, self._take_timeout_s = max_bytes, take_timeout_s
        self._sleep = sleep
        self.recording = False
        self._profile_id = 0
        self._task: asyncio.Task[None] | None = None
        self._num_sent_bytes = self._num_allowed_bytes = 0
        self._allowed = asyncio.Event()

    def on_command(self, command: cluster_pb2.ProfileCommand) -> None:
        """Executes a command; ignores commands of a profile other than the running one."""
        kind = command.WhichOneof("command")
        if kind == "record":
            self._begin(command.profile_id, to_seconds(command.record))
        elif command.profile_id != self._profile_id:
            return
        elif kind == "allowed_bytes":
            self._num_allowed_bytes = command.allowed_bytes
            self._allowed.set()
        elif kind == "cancel":
            self.cancel()

    def cancel(self) -> None:
        """Ends the running profile without a report."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Ends the running profile before the engine is stopped; the engine may be dead already."""
        for _ in range(2):
            if (task := self._task) is not None:
                task.cancel()
                await asyncio.wait([task], timeout=CLOSE_S)

    def _begin(self, profile_id: int, duration_s: float) -> None:
        if self._task is not None:
            busy = FailedPrecondition("the worker is still busy with another profile")
            self._report(profile_id, failed=to_message(busy))
            return
        self._profile_id = profile_id
        self._num_sent_bytes = self._num_allowed_bytes = 0
        self._task = asyncio.create_task(self._run(profile_id, duration_s), name="profile")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task, self._profile_id = None, 0

    async def _run(self, profile_id: int, duration_s: float) -> None:
        files: list[Path] = []
        try:
            traces = await self._record(profile_id, duration_s, files)
            await self._send(profile_id, traces)
            self._report(profile_id, done=cluster_pb2.ProfileDone())
        except NoProfiler as error:
            self._report(profile_id, failed=to_message(FailedPrecondition(str(error))))
        except Exception as error:
            self._report(profile_id, failed=error_message(error, "the profile"))
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    async def _record(
        self, profile_id: int, duration_s: float, files: list[Path]
    ) -> list[tuple[int, Path]]:
        """Records and compresses; returns (rank, file). `files` collects the files to remove."""
        self.recording = True
        try:
            try:
                await self._engine.start_profile()
            except asyncio.CancelledError:
                # The engine may start to record in spite of the cancellation.
                await self._stopped(files)
                raise
            self._report(profile_id, started=cluster_pb2.ProfileStarted())
            try:
                await self._sleep(duration_s)
            finally:
                # Always stop, because a forgotten recording would fill the memory.
                traces = await self._stopped(files)
        finally:
            self.recording = False
        if not traces:
            raise Internal("the engine has written no trace; see its log")
        packed = []
        for trace in traces:
            into = trace.path.with_name(f"{trace.path.name}.gz")
            files.append(into)
            await _compressed(trace.path, into)
            packed.append((trace.rank, into))
        return packed

    async def _stopped(self, files: list[Path]) -> Sequence[Trace]:
        """Stops the recording, even if this coroutine is cancelled once."""
        stopping = asyncio.ensure_future(self._engine.stop_profile())
        try:
            traces = await asyncio.shield(stopping)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDead):
                files += [trace.path for trace in await stopping]
            raise
        files += [trace.path for trace in traces]
        return traces

    async def _send(self, profile_id: int, traces: Sequence[tuple[int, Path]]) -> None:
        sizes = [path.stat().st_size for _, path in traces]
        if sum(sizes) > self._max_bytes:
            raise ResourceExhausted(
                f"the traces have {sum(sizes)} bytes, compressed; at most {self._max_bytes}: "
                "record for less time",
                reason="TRACE_TOO_LARGE",
                retry_after_s=None,
            )
        for (rank, path), num_bytes in zip(traces, sizes, strict=True):
            file = cluster_pb2.TraceFile(rank=rank, num_bytes=num_bytes, num_files=len(traces))
            self._report(profile_id, file=file)
            with path.open("rb") as content:
                while data := content.read(CHUNK_BYTES):
                    await self._until_allowed(len(data))
                    self._report(profile_id, data=data)

    async def _until_allowed(self, num_bytes: int) -> None:
        self._num_sent_bytes += num_bytes
        try:
            while self._num_sent_bytes > self._num_allowed_bytes:
                self._allowed.clear()
                async with asyncio.timeout(self._take_timeout_s):
                    await self._allowed.wait()
        except TimeoutError:
            raise Internal(
                f"no more of the traces was requested for {self._take_timeout_s:g} s"
            ) from None

    def _report(self, profile_id: int, **report: object) -> None:
        message = cluster_pb2.ProfileReport(profile_id=profile_id, **report)  # type: ignore[arg-type]
        self._outbox.post(cluster_pb2.WorkerMessage(profile=message))


async def _compressed(path: Path, into: Path) -> None:
    """Compresses a trace in a thread; a cancellation stops the thread after its current piece."""
    stop = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(_compress, path, into, stop))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        # Waits until the current piece is done, however often this is cancelled.
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise


def _compress(path: Path, into: Path, stop: threading.Event) -> None:
    with path.open("rb") as raw, gzip.open(into, "wb", compresslevel=_GZIP_LEVEL) as packed:
        while not stop.is_set() and (piece := raw.read(_PIECE_BYTES)):
            packed.write(piece)
    path.unlink()
