"""Admin.Profile over a real server, with scripted workers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from baton.client import AdminClient, errors
from baton.coordinator.server.profiles import Profiles
from baton.coordinator.server.stall import StallGuard
from baton.runtime.errors import FailedPrecondition, Internal, from_rpc_error, to_message
from baton.runtime.network import rpc
from baton.runtime.profiling import CHUNK_BYTES, WINDOW_BYTES
from baton.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, common_pb2
from tests.coordinator.scripted_worker import WAIT_S, attached

DECODE = common_pb2.ROLE_DECODE


@pytest.fixture
async def worker(coordinator, say_hello):
    async with attached(coordinator.address, say_hello("d", DECODE)) as (worker,):
        yield worker


@pytest.fixture
async def admin(coordinator):
    async with AdminClient(coordinator.address) as admin:
        yield admin


async def report(worker, profile_id, **what):
    await worker.say(profile=cluster_pb2.ProfileReport(profile_id=profile_id, **what))


async def begun(worker, events):
    """Waits until the caller gets the started event; returns the profile's ID."""
    first = asyncio.ensure_future(anext(events))
    while not (command := await worker.command("profile")).HasField("record"):
        pass  # Commands of the previous profile.
    assert command.record.ToSeconds() == 5
    await report(worker, command.profile_id, started=cluster_pb2.ProfileStarted())
    assert (await asyncio.wait_for(first, WAIT_S)).HasField("started")
    allowed = await worker.command("profile")
    assert (allowed.profile_id, allowed.allowed_bytes) == (command.profile_id, WINDOW_BYTES)
    return command.profile_id


async def send(worker, profile_id, content):
    """Sends a file within the allowed bytes; returns how often the allowance was raised."""
    file = cluster_pb2.TraceFile(rank=0, num_bytes=len(content), num_files=1)
    await report(worker, profile_id, file=file)
    allowed, times = WINDOW_BYTES, 0
    for start in range(0, len(content), CHUNK_BYTES):
        data = content[start : start + CHUNK_BYTES]
        while start + len(data) > allowed:
            command = await worker.command("profile")
            assert command.allowed_bytes > allowed
            allowed, times = command.allowed_bytes, times + 1
        await report(worker, profile_id, data=data)
    await report(worker, profile_id, done=cluster_pb2.ProfileDone())
    return times


async def test_a_trace_comes_back_whole_however_large(admin, worker):
    content = bytes(range(256)) * (5 * WINDOW_BYTES // 256) + b"end"
    events = admin.profile("d")
    profile_id = await begun(worker, events)
    sending = asyncio.create_task(send(worker, profile_id, content))
    file, data = await anext(events), bytearray()
    async for event in events:
        data += event.data
    assert file.file.num_bytes == len(content)
    assert bytes(data) == content
    assert await sending >= 4
    # The next profile may begin.
    again = admin.profile("d")
    assert await begun(worker, again) != profile_id
    await again.aclose()


async def test_leaving_ends_the_recording(admin, worker):
    events = admin.profile("d")
    profile_id = await begun(worker, events)
    await events.aclose()
    command = await worker.command("profile")
    assert (command.profile_id, command.cancel) == (profile_id, True)
    # Late reports are ignored.
    await report(worker, profile_id, data=b"late")
    await begun(worker, admin.profile("d"))


async def test_a_worker_has_one_profile_at_a_time(admin, worker):
    events = admin.profile("d")
    profile_id = await begun(worker, events)
    with pytest.raises(errors.FailedPreconditionError, match="being profiled already"):
        await anext(admin.profile("d"))
    sent = asyncio.create_task(send(worker, profile_id, b"x"))
    assert [event.WhichOneof("event") async for event in events] == ["file", "data"]
    await sent


@pytest.mark.parametrize("seconds", [0.5, 61, -1])
async def test_durations_outside_the_limits_are_refused(admin, worker, seconds):
    with pytest.raises(errors.InvalidArgumentError, match="1 to 60 s") as caught:
        await anext(admin.profile("d", seconds))
    assert caught.value.field == "duration"


async def test_unknown_and_unsupported_workers_are_refused(admin, worker):
    with pytest.raises(errors.NotFoundError, match="no worker 'x'; attached: d"):
        await anext(admin.profile("x"))
    first = asyncio.ensure_future(anext(admin.profile("d")))
    command = await worker.command("profile")
    no = to_message(FailedPrecondition("this engine has no profiler"))
    await report(worker, command.profile_id, failed=no)
    with pytest.raises(errors.FailedPreconditionError, match="no profiler"):
        await asyncio.wait_for(first, WAIT_S)


async def test_a_worker_that_is_lost_says_so(admin, worker, coordinator, say_hello):
    events = admin.profile("d")
    await begun(worker, events)
    # A new incarnation replaces the worker; the recording is lost.
    async with attached(coordinator.address, say_hello("d", DECODE, 2)) as (other,):
        with pytest.raises(errors.UnavailableError, match="d was lost while it was profiled"):
            await asyncio.wait_for(anext(events), WAIT_S)
        await begun(other, admin.profile("d"))


async def test_a_worker_that_stops_says_so(admin, worker):
    events = admin.profile("d")
    await begun(worker, events)
    await worker.leave()
    with pytest.raises(errors.UnavailableError, match="it left"):
        await asyncio.wait_for(anext(events), WAIT_S)


async def test_a_connection_that_is_lost_for_a_moment_loses_nothing(admin, worker, coordinator):
    events = admin.profile("d")
    profile_id = await begun(worker, events)
    await worker.disconnect()
    async with asyncio.timeout(WAIT_S):
        while coordinator.shell.core.workers.by_id("d").connected:
            await asyncio.sleep(0.01)
    with pytest.raises(errors.UnavailableError, match="not connected"):
        await anext(admin.profile("d"))
    await worker.connect()
    sent = asyncio.create_task(send(worker, profile_id, b"trace"))
    assert b"".join([event.data async for event in events]) == b"trace"
    await sent


async def test_more_than_is_allowed_ends_it(admin, worker):
    events = admin.profile("d")
    profile_id = await begun(worker, events)
    await report(worker, profile_id, data=bytes(WINDOW_BYTES + 1))
    with pytest.raises(errors.InternalError, match="sends more trace bytes than it may"):
        await asyncio.wait_for(anext(events), WAIT_S)
    assert (await worker.command("profile")).cancel


async def test_a_reader_that_takes_nothing_is_given_up(admin, worker, coordinator, monkeypatch):
    defaults = StallGuard.__init__.__defaults__
    monkeypatch.setattr(StallGuard.__init__, "__defaults__", (0.2, *defaults[1:]))
    async with rpc.channel(coordinator.address) as channel, asyncio.timeout(4 * WAIT_S):
        stub = admin_pb2_grpc.AdminStub(channel)
        unread = aiter(stub.Profile(admin_pb2.ProfileRequest(worker_id="d")))
        profile_id = await begun(worker, unread)
        file = cluster_pb2.TraceFile(rank=0, num_bytes=WINDOW_BYTES, num_files=1)
        await report(worker, profile_id, file=file)
        # The connection itself buffers some data.
        num_sent, allowed = 0, WINDOW_BYTES
        while True:
            while num_sent + CHUNK_BYTES <= allowed:
                await report(worker, profile_id, data=bytes(CHUNK_BYTES))
                num_sent += CHUNK_BYTES
            command = await worker.command("profile")
            assert command.profile_id == profile_id
            if command.cancel:
                break
            allowed = command.allowed_bytes
        again = admin.profile("d")
        await begun(worker, again)
        # The slow caller gets the error when it reads; the other caller continues.
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in unread:
                pass
        error = from_rpc_error(caught.value)
        assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        with pytest.raises(errors.FailedPreconditionError, match="being profiled already"):
            await anext(admin.profile("d"))
        await again.aclose()


async def test_ending_a_finished_profile_drops_its_reports():
    told = []
    profiles = Profiles(lambda worker, command: told.append(command.WhichOneof("command")))
    profile = profiles.begin(("d", 1), 5.0)
    reports = [
        cluster_pb2.ProfileReport(profile_id=profile.id, started=cluster_pb2.ProfileStarted()),
        cluster_pb2.ProfileReport(profile_id=profile.id, done=cluster_pb2.ProfileDone()),
    ]
    for one in reports:
        profiles.on_report(("d", 1), one)
    other = profiles.begin(("d", 1), 5.0)
    profiles.end(profile)
    assert profile.reports.empty()
    # The first profile had ended, so the worker gets no cancel for it.
    assert told == ["record", "record"]
    profiles.end(other)
    profiles.end(other)
    assert told == ["record", "record", "cancel"]


async def test_waiting_reports_are_bounded():
    told = []
    profiles = Profiles(lambda worker, command: told.append(command))
    events = profiles.events(profiles.begin(("d", 1), 5.0))
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    file = cluster_pb2.ProfileReport(
        profile_id=told[0].profile_id, file=cluster_pb2.TraceFile(rank=0, num_files=1)
    )
    for _ in range(5000):
        profiles.on_report(("d", 1), file)
    assert [command.WhichOneof("command") for command in told] == ["record", "cancel"]
    assert (await first).HasField("file")
    with pytest.raises(Internal, match="sends more trace bytes than it may"):
        async for _ in events:
            pass
