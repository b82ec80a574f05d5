"""Profiles of a worker: recorded, sent in chunks, and cleaned up however they end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest
from google.rpc import code_pb2

from baton.engine.base import EngineDead, NoProfiler, Trace
from baton.runtime.profiling import CHUNK_BYTES, WINDOW_BYTES
from baton.v1 import cluster_pb2
from baton.worker.outbox import Outbox
from baton.worker.profiles import Profiles
from tests.worker.scripted_coordinator import WAIT_S, spec


def record(profile_id: int, seconds: float = 0.05) -> cluster_pb2.ProfileCommand:
    command = cluster_pb2.ProfileCommand(profile_id=profile_id)
    command.record.FromMicroseconds(round(seconds * 1e6))
    return command


def allow(profile_id: int, num_bytes: int) -> cluster_pb2.ProfileCommand:
    return cluster_pb2.ProfileCommand(profile_id=profile_id, allowed_bytes=num_bytes)


class FakeEngine:
    """An engine with two ranks that writes given traces and raises given errors."""

    def __init__(self, directory: Path, content: bytes = b"{}") -> None:
        self._directory, self._content = directory, content
        self.recording, self.started = False, asyncio.Event()
        self.may_start, self.may_stop = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_stop.set()
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None

    async def start_profile(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        # The engine starts to record even if its caller no longer waits.
        self.recording = True
        self.started.set()
        await self.may_start.wait()

    async def stop_profile(self) -> list[Trace]:
        await self.may_stop.wait()
        if self.stop_error is not None:
            raise self.stop_error
        self.recording = False
        paths = [self._directory / f"rank{rank}.json" for rank in (0, 1)]
        for path in paths:
            path.write_bytes(self._content)
        return [Trace(rank, path) for rank, path in enumerate(paths)]


class Reports:
    """Reports of a worker, as its coordinator receives them."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def next(self) -> cluster_pb2.ProfileReport:
        async with asyncio.timeout(WAIT_S):
            while (message := self._outbox.next_unsent()) is None:
                self._outbox.posted.clear()
                await self._outbox.posted.wait()
        return message.profile

    async def kind(self, kind: str) -> cluster_pb2.ProfileReport:
        report = await self.next()
        assert report.WhichOneof("report") == kind, report
        return report


@pytest.fixture
async def engine(tmp_path):
    return FakeEngine(tmp_path)


@pytest.fixture
async def start(engine):
    made = []

    def start(**options) -> tuple[Profiles, Reports]:
        outbox = Outbox()
        made.append(Profiles(engine, outbox, **options))
        return made[-1], Reports(outbox)

    yield start
    for one in made:
        await one.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def until_ended(profiles: Profiles, directory: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while profiles._task is not None:
            await asyncio.sleep(0.001)
    assert names(directory) == []
    assert not profiles.recording


async def test_every_rank_sends_a_file_and_no_file_stays_on_disk(engine, start, tmp_path):
    profiles, reports = start()
    profiles.on_command(record(7))
    await reports.kind("started")
    assert profiles.recording
    profiles.on_command(allow(7, WINDOW_BYTES))
    for rank in (0, 1):
        file = (await reports.kind("file")).file
        data = (await reports.kind("data")).data
        assert (file.rank, file.num_files, file.num_bytes) == (rank, 2, len(data))
        assert gzip.decompress(data) == b"{}"
    assert (await reports.kind("done")).profile_id == 7
    await until_ended(profiles, tmp_path)
    assert not engine.recording


async def test_no_more_is_sent_than_is_allowed(engine, start, tmp_path):
    noise = bytes(index * index % 251 for index in range(7 * CHUNK_BYTES))
    engine._content = noise * 3
    profiles, reports = start()
    profiles.on_command(record(1))
    await reports.kind("started")
    size, num_bytes, allowed = (await reports.kind("file")).file.num_bytes, 0, 0
    first = bytearray()
    while num_bytes < size:
        allowed = num_bytes + CHUNK_BYTES
        profiles.on_command(allow(1, allowed))
        data = (await reports.kind("data")).data
        num_bytes += len(data)
        first += data
        assert num_bytes <= allowed
        # The worker sends nothing more without permission.
        await asyncio.sleep(0)
        assert reports._outbox.next_unsent() is None or num_bytes == size
    assert gzip.decompress(bytes(first)) == engine._content
    profiles.cancel()
    await until_ended(profiles, tmp_path)


async def test_only_one_profile_runs_at_a_time(engine, start, tmp_path):
    profiles, reports = start()
    profiles.on_command(record(1, 60))
    await reports.kind("started")
    profiles.on_command(record(2))
    refused = await reports.kind("failed")
    assert (refused.profile_id, refused.failed.code) == (2, code_pb2.FAILED_PRECONDITION)
    # A command of another profile has no effect.
    profiles.on_command(cluster_pb2.ProfileCommand(profile_id=2, cancel=True))
    assert engine.recording
    engine.may_stop.clear()
    profiles.on_command(cluster_pb2.ProfileCommand(profile_id=1, cancel=True))
    await asyncio.sleep(0)
    profiles.on_command(record(3))
    assert (await reports.kind("failed")).profile_id == 3
    engine.may_stop.set()
    await until_ended(profiles, tmp_path)
    assert not engine.recording
    profiles.on_command(record(4))
    assert (await reports.kind("started")).profile_id == 4


@pytest.mark.parametrize("when", ["starting", "recording", "stopping"])
async def test_a_profile_can_be_cancelled_in_every_phase(engine, start, tmp_path, when):
    profiles, reports = start()
    if when == "starting":
        engine.may_start.clear()
    profiles.on_command(record(1, 0 if when == "stopping" else 60))
    if when == "stopping":
        engine.may_stop.clear()
    async with asyncio.timeout(WAIT_S):
        await engine.started.wait()
    if when != "starting":
        await reports.kind("started")
        await asyncio.sleep(0.01)
    profiles.cancel()
    await asyncio.sleep(0.01)
    engine.may_stop.set()
    await until_ended(profiles, tmp_path)
    assert not engine.recording
    assert reports._outbox.next_unsent() is None


def open_files() -> list[str]:
    """Open files of this process, including deleted ones."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        # The directory's own descriptor is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return found


async def test_a_profile_can_be_cancelled_while_it_compresses(engine, start, tmp_path):
    # Compressing this takes a few seconds.
    engine._content = os.urandom(48 * 2**20)
    profiles, reports = start()
    profiles.on_command(record(1, 0))
    await reports.kind("started")
    async with asyncio.timeout(WAIT_S):
        while not any(name.endswith(".gz") for name in names(tmp_path)):
            await asyncio.sleep(0.001)
    for _ in range(3):
        profiles.cancel()
        await asyncio.sleep(0)
    await until_ended(profiles, tmp_path)
    assert not [path for path in open_files() if path.startswith(str(tmp_path))]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoProfiler("there is none"), code_pb2.FAILED_PRECONDITION),
        (EngineDead("it is gone"), code_pb2.UNAVAILABLE),
        (RuntimeError("odd"), code_pb2.INTERNAL),
    ],
)
@pytest.mark.parametrize("at", ["start_error", "stop_error"])
async def test_failures_are_reported(engine, start, tmp_path, error, code, at):
    profiles, reports = start()
    setattr(engine, at, error)
    profiles.on_command(record(1, 0))
    if at == "stop_error":
        await reports.kind("started")
    failed = (await reports.kind("failed")).failed
    assert failed.code == code
    assert str(error) in failed.message
    await until_ended(profiles, tmp_path)


async def test_traces_that_are_too_large_are_refused(start, tmp_path):
    profiles, reports = start(max_bytes=40)
    profiles.on_command(record(1, 0))
    await reports.kind("started")
    failed = (await reports.kind("failed")).failed
    assert failed.code == code_pb2.RESOURCE_EXHAUSTED
    assert "at most 40: record for less time" in failed.message
    await until_ended(profiles, tmp_path)


async def test_a_profile_ends_when_its_traces_are_not_requested(start, tmp_path):
    profiles, reports = start(take_timeout_s=0.01)
    profiles.on_command(record(1, 0))
    await reports.kind("started")
    await reports.kind("file")
    assert "no more of the traces was requested" in (await reports.kind("failed")).failed.message
    await until_ended(profiles, tmp_path)


async def test_a_live_worker_serves_on_and_the_trace_has_its_steps(
    coordinator, start_worker, vocabulary, monkeypatch, short_path
):
    # The worker makes its directory here, so that the test can look into it.
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    recorded = asyncio.Event()

    async def until_recorded(_: float) -> None:
        await recorded.wait()

    made = functools.partial(Profiles, sleep=until_recorded)
    monkeypatch.setattr("baton.worker.worker.Profiles", made)
    start_worker()
    stream = await coordinator.stream()
    await coordinator.command(stream, profile=record(9))
    assert (await stream.next_of("profile")).profile.HasField("started")
    decode = cluster_pb2.DecodeCommand(spec=spec("r", list(range(5, 25)), max_tokens=5))
    await coordinator.command(stream, decode=decode)
    assert (await stream.outputs("r"))[-1].HasField("finished")
    recorded.set()
    file = (await stream.next_of("profile")).profile.file
    assert (file.rank, file.num_files) == (0, 1)
    await coordinator.command(stream, profile=allow(9, WINDOW_BYTES))
    trace = json.loads(gzip.decompress((await stream.next_of("profile")).profile.data))
    assert (await stream.next_of("profile")).profile.HasField("done")
    steps = [event["args"] for event in trace["traceEvents"]]
    assert sum(step["prefill tokens"] for step in steps) == 20
    assert sum(step["decodes"] for step in steps) == 4
    assert {event["ph"] for event in trace["traceEvents"]} == {"X"}
    (directory,) = (one for one in short_path.iterdir() if one.is_dir())
    assert not [one for one in directory.iterdir() if "trace" in one.name]


async def test_a_new_coordinator_ends_the_profile(coordinator, start_worker):
    start_worker()
    stream = await coordinator.stream()
    await coordinator.command(stream, profile=record(9, 60))
    assert (await stream.next_of("profile")).profile.HasField("started")
    coordinator.generation, coordinator.received, coordinator.sent = 2, 0, 0
    stream.end()
    stream = await coordinator.stream()
    for _ in range(100):
        await coordinator.command(stream, profile=record(10, 0))
        report = (await stream.next_of("profile")).profile
        if report.HasField("started"):
            break
    assert report.profile_id == 10
