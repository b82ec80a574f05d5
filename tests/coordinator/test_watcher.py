"""The watcher with real coordinators, some of which may be unreachable."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from baton.client import AdminClient
from baton.client.errors import NotFoundError, UnavailableError
from baton.client.watcher import Watcher
from baton.coordinator.server.admin import AdminService
from baton.coordinator.server.server import Coordinator
from baton.runtime.network import rpc
from baton.v1 import admin_pb2, admin_pb2_grpc, common_pb2

WAIT_S = 120.0
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


@pytest.fixture
def unused_address():
    """An address on which no server listens during the test."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


async def test_the_watcher_uses_the_coordinator_that_answers(coordinator, unused_address):
    async with Watcher([unused_address, coordinator.address]) as watcher:
        view = await watcher.look(include_history=True)
        assert view.address == coordinator.address
        assert [pool.num_serving for pool in view.status.pools] == [0, 0]
        assert view.status.model.name == "demo"
        assert view.status.history
        assert {one.kind for one in view.findings} == {"no_workers"}
        assert not view.decisions
        assert await watcher.requests(5) == []
        with pytest.raises(NotFoundError):
            await watcher.request("r")


async def test_the_watcher_moves_to_another_coordinator(coordinator, coordinator_config):
    async with Coordinator(coordinator_config()) as first:
        watcher = Watcher([first.address, coordinator.address])
        assert (await watcher.look()).address == first.address
    views = await asyncio.gather(*(watcher.look() for _ in range(5)))
    assert {view.address for view in views} == {coordinator.address}
    await watcher.aclose()
    assert (await watcher.look()).address == coordinator.address
    await watcher.aclose()


async def test_the_watcher_moves_on_from_a_coordinator_that_hangs(coordinator):
    class Hangs(admin_pb2_grpc.AdminServicer):
        async def GetStatus(self, request, context):
            await asyncio.Event().wait()

    server = rpc.server()
    admin_pb2_grpc.add_AdminServicer_to_server(Hangs(), server)
    address = rpc.bind(server, "127.0.0.1:0", "listen")
    await server.start()
    try:
        # On a busy machine a call may end before there is a connection, so each is repeated.
        async with asyncio.timeout(WAIT_S), Watcher([address]) as watcher:
            failure = ""
            while f"{address} has not answered" not in failure:
                with pytest.raises(UnavailableError) as failed:
                    await watcher.look()
                failure = str(failed.value)
        async with asyncio.timeout(WAIT_S), Watcher([address, coordinator.address]) as watcher:
            found = None
            while found is None:
                with contextlib.suppress(UnavailableError):
                    found = await watcher.look()
            assert found.address == coordinator.address
    finally:
        await server.stop(0)


async def test_only_decisions_that_change_a_size_are_shown(coordinator, monkeypatch):
    sizes = [(PREFILL, 9, (2, 2)), (PREFILL, 3, (1, 2)), (DECODE, 8, (1, 1)), (DECODE, 5, (2, 1))]

    async def decisions(admin, limit=0):
        made = []
        for role, seconds, (before, after) in sizes:
            one = admin_pb2.ScalingDecision(role=role, from_workers=before, to_workers=after)
            one.at.FromSeconds(seconds)
            made.append(one)
        return made[: limit or None]

    monkeypatch.setattr(AdminClient, "list_decisions", decisions)
    async with Watcher([coordinator.address]) as watcher:
        found = (await watcher.look()).decisions
    assert [(one.role, one.at.seconds) for one in found] == [(DECODE, 5), (PREFILL, 3)]


async def test_an_error_names_the_addresses_without_an_answer(unused_address):
    async with Watcher([unused_address]) as watcher:
        with pytest.raises(UnavailableError, match=unused_address):
            await watcher.look()


async def test_a_slow_answer_delays_no_other_call(coordinator_config, monkeypatch):
    asked, released = asyncio.Event(), asyncio.Event()
    found = AdminService.GetRequest

    async def slowly(self, request, context):
        asked.set()
        await released.wait()
        return await found(self, request, context)

    monkeypatch.setattr(AdminService, "GetRequest", slowly)
    async with (
        asyncio.timeout(WAIT_S),
        Coordinator(coordinator_config()) as coordinator,
        Watcher([coordinator.address]) as watcher,
    ):
        slow = asyncio.create_task(watcher.request("unknown"))
        await asked.wait()
        assert (await watcher.look()).address == coordinator.address
        assert not slow.done()
        released.set()
        with pytest.raises(NotFoundError):
            await slow
