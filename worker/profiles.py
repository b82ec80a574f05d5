"""Profiles of this worker's engine: recorded when an operator asks, sent as they are taken."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from google.rpc import code_pb2

from baton.engine.base import Engine, EngineDead, NoProfiler, Trace
from baton.runtime.errors import (
    BatonError,
    FailedPrecondition,
    Internal,
    RemoteError,
    ResourceExhausted,
    to_message,
)
from baton.runtime.profiling import CHUNK_BYTES, MAX_TRACE_BYTES, TAKE_TIMEOUT_S
from baton.v1 import cluster_pb2
from baton.worker.outbox import Outbox

_log = logging.getLogger(__name__)

# Traces are text: more effort makes them hardly smaller, and takes the engine's cores.
_GZIP_LEVEL = 4
_CLOSE_S = 1.0
# Of a trace, compressed at one go: a few milliseconds.
_PIECE_BYTES = 2**20


class Profiles:
    """One profile at a time. All methods are called from one event loop.

    Args:
        engine: started.
        outbox: takes reports.
        max_bytes: of all traces of a profile, compressed; more are refused.
        take_timeout_s: how long nobody may want more of a trace.

    Attributes:
        recording: the engine's steps cost more than they would.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        *,
        max_bytes: int = MAX_TRACE_BYTES,
        take_timeout_s: float = TAKE_TIMEOUT_S,
    ) -> None:
        self._engine, self._outbox = engine, outbox
        self._max_bytes, self._take_timeout_s = max_bytes, take_timeout_s
        self.recording = False
        self._profile_id = 0
        self._task: asyncio.Task[None] | None = None
        self._num_sent_bytes = self._num_allowed_bytes = 0
        self._allowed = asyncio.Event()

    def on_command(self, command: cluster_pb2.ProfileCommand) -> None:
        """Carries out a command; what is not of the profile that runs is ignored."""
        kind = command.WhichOneof("command")
        if kind == "record":
            self._begin(command.profile_id, command.record.ToNanoseconds() / 1e9)
        elif command.profile_id != self._profile_id:
            return
        elif kind == "allowed_bytes":
            self._num_allowed_bytes = command.allowed_bytes
            self._allowed.set()
        elif kind == "cancel":
            self.cancel()

    def cancel(self) -> None:
        """Ends what runs, without a word: nobody wants it."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Ends what runs before the engine is stopped, which may be dead already."""
        for _ in range(2):
            if (task := self._task) is not None:
                task.cancel()
                await asyncio.wait([task], timeout=_CLOSE_S)

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
        except EngineDead as error:
            gone = RemoteError(code_pb2.UNAVAILABLE, str(error), [])
            self._report(profile_id, failed=to_message(gone))
        except BatonError as error:
            self._report(profile_id, failed=to_message(error))
        except Exception as error:
            _log.exception("profile")
            internal = Internal(f"the profile failed: {type(error).__name__}: {error}")
            self._report(profile_id, failed=to_message(internal))
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    async def _record(
        self, profile_id: int, duration_s: float, files: list[Path]
    ) -> list[tuple[int, Path]]:
        """Ranks and their compressed traces; `files` is what is there to be removed."""
        self.recording = True
        try:
            try:
                await self._engine.start_profile()
            except asyncio.CancelledError:
                # It may begin all the same.
                await self._stopped(files)
                raise
            self._report(profile_id, started=cluster_pb2.ProfileStarted())
            try:
                await asyncio.sleep(duration_s)
            finally:
                # However it ends: what goes on recording fills the memory.
                traces = await self._stopped(files)
        finally:
            self.recording = False
        if not traces:
            raise Internal("the engine has written no trace; its log may say why")
        packed = []
        for trace in traces:
            into = trace.path.with_name(f"{trace.path.name}.gz")
            files.append(into)
            await _compressed(trace.path, into)
            packed.append((trace.rank, into))
        return packed

    async def _stopped(self, files: list[Path]) -> Sequence[Trace]:
        """Ends the recording, also while this is cancelled once."""
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
                f"nobody has taken more of the traces for {self._take_timeout_s:g} s"
            ) from None

    def _report(self, profile_id: int, **report: object) -> None:
        message = cluster_pb2.ProfileReport(profile_id=profile_id, **report)  # type: ignore[arg-type]
        self._outbox.post(cluster_pb2.WorkerMessage(profile=message))


async def _compressed(path: Path, into: Path) -> None:
    """Compresses a trace off the event loop; when it is cancelled, nothing goes on with it."""
    stop = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(_compress, path, into, stop))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        # Until after one piece, however often this is cancelled.
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise


def _compress(path: Path, into: Path, stop: threading.Event) -> None:
    with path.open("rb") as raw, gzip.open(into, "wb", compresslevel=_GZIP_LEVEL) as packed:
        while not stop.is_set() and (piece := raw.read(_PIECE_BYTES)):
            packed.write(piece)
    path.unlink()
