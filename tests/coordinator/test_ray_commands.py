"""Commands to the Ray driver, without Ray: long commands and commands that run concurrently."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.placement import Node
from baton.coordinator.launchers.worker_process import WorkerExit

pytest.importorskip("ray")
actors = pytest.importorskip("baton.coordinator.launchers.ray_launch.actor")
driver = pytest.importorskip("baton.coordinator.launchers.ray_launch.driver")
workers = pytest.importorskip("baton.coordinator.launchers.ray_launch.workers")

WAIT_S = 120.0
OPENING = wire.Open(
    address="127.0.0.1:9",
    namespace="",
    runtime_env={},
    directory="",
    coordinator="127.0.0.1:9",
    command=[],
    stop_timeout_s=1.0,
    connect_timeout_s=1.0,
    placement_timeout_s=1.0,
)


def start(config="model: demo"):
    return wire.Start("d1", "decode", 1.0, 0.0, 1, {}, {}, config)


async def test_a_worker_may_have_a_long_configuration(monkeypatch):
    """A configuration contains all tenants, so it may be large."""
    took = []

    class Workers:
        def __init__(self, opening, say):
            pass

        async def run(self, commands):
            while line := await commands.readline():
                took.append(wire.decode(line))

    monkeypatch.setattr(driver, "RayWorkers", Workers)
    monkeypatch.setattr(driver.ray, "shutdown", lambda **options: None)
    sent = start("tenants: {" + ", ".join(f"t{n}: {{weight: 2}}" for n in range(20_000)) + "}")
    reads, writes = os.pipe()

    def write():
        with os.fdopen(writes, "wb") as commands:
            commands.write(wire.encode(sent))

    writer = threading.Thread(target=write)
    writer.start()
    async with asyncio.timeout(WAIT_S):
        with os.fdopen(reads, "rb", 0) as commands:
            await driver._serve(OPENING, commands, lambda message: None, wire.Ready("", 1))
    writer.join()
    assert took == [sent]


async def test_a_second_signal_ends_the_drains(monkeypatch):
    """`baton up` sends it when its own second signal ends it at once."""
    draining, killed = asyncio.Event(), asyncio.Event()

    class Workers:
        def __init__(self, opening, say):
            pass

        async def run(self, commands):
            assert not await commands.readline()
            draining.set()
            await killed.wait()

        def kill(self):
            killed.set()

    monkeypatch.setattr(driver, "RayWorkers", Workers)
    monkeypatch.setattr(driver.ray, "shutdown", lambda **options: None)
    ready = asyncio.Event()
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb", 0) as commands, os.fdopen(writes, "wb"):
        async with asyncio.timeout(WAIT_S):
            serving = asyncio.create_task(
                driver._serve(OPENING, commands, lambda message: ready.set(), wire.Ready("", 1))
            )
            await ready.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await draining.wait()
            assert not killed.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await serving


async def test_a_worker_that_is_to_end_before_its_start_is_over_ends_all_the_same(monkeypatch):
    """The coordinator has forgotten the worker, so a process started later would never end."""
    said, alive, ray_answers = asyncio.Queue(), set(), asyncio.Event()

    async def in_thread(function, timeout_s=0.0):
        await ray_answers.wait()
        return function()

    class Workers(workers.RayWorkers):
        def _make_actor(self, start, gpus, node):
            alive.add(start.worker_id)
            return start.worker_id

        async def _watch(self, worker):
            await asyncio.Event().wait()

        async def _probe(self):
            await asyncio.Event().wait()

    monkeypatch.setattr(workers, "in_thread", in_thread)
    monkeypatch.setattr(workers, "live_nodes", list)
    monkeypatch.setattr(workers, "CALL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(workers.ray, "kill", lambda actor, no_restart: alive.discard(actor))
    commands = asyncio.StreamReader()
    running = asyncio.create_task(Workers(OPENING, said.put_nowait).run(commands))
    commands.feed_data(wire.encode(start()) + wire.encode(wire.End("d1")))
    # Both commands are running.
    for _ in range(10):
        await asyncio.sleep(0)
    ray_answers.set()
    async with asyncio.timeout(WAIT_S):
        assert {type(await said.get()) for _ in range(2)} == {wire.Started, wire.Ended}
        assert alive == set()
        commands.feed_eof()
        await running


@pytest.mark.parametrize(
    ("address", "on_nodes", "gpus", "asked", "waits"),
    [
        ("127.0.0.1:9", [], None, 2.0, "Ray has no nodes"),
        (
            "127.0.0.1:9",
            [{"CPU": 8.0}],
            None,
            2.0,
            "no node of Ray has GPU 2 (most: 0); if workers run vLLM's CPU build, "
            "set ray.decode.gpus to 0",
        ),
        ("127.0.0.1:9", [{"CPU": 8.0}], 2.0, 2.0, "no node of Ray has GPU 2 (most: 0)"),
        ("127.0.0.1:9", [{"CPU": 8.0, "GPU": 8.0}], None, 2.0, ""),
        ("127.0.0.1:9", [{"CPU": 8.0}], 0.0, 0.0, ""),
        ("", [{"CPU": 8.0}], None, 0.0, ""),
        ("", [{"CPU": 8.0, "GPU": 2.0}], None, 2.0, ""),
    ],
)
async def test_a_worker_reserves_gpus_though_no_node_has_some_yet(
    monkeypatch, address, on_nodes, gpus, asked, waits
):
    """Ray's autoscaler adds nodes with GPUs only for workers that ask for GPUs."""
    said, made = [], []

    class Workers(workers.RayWorkers):
        def _make_actor(self, start, gpus, node):
            made.append(gpus)

        async def _watch(self, worker):
            said.append(await self._why_not_placed(worker, 0.0))

        async def _probe(self):
            await asyncio.Event().wait()

    async def in_thread(function, timeout_s=0.0):
        return function()

    nodes = [Node(str(n), "10.0.0.1", resources) for n, resources in enumerate(on_nodes)]
    monkeypatch.setattr(workers, "in_thread", in_thread)
    monkeypatch.setattr(workers, "live_nodes", lambda: nodes)
    monkeypatch.setattr(workers.ray, "kill", lambda actor, no_restart: None)
    commands = asyncio.StreamReader()
    commands.feed_data(wire.encode(replace(start(), num_ranks=2, gpus=gpus)))
    commands.feed_eof()
    async with asyncio.timeout(WAIT_S):
        opening = replace(OPENING, address=address)
        await Workers(opening, lambda message: None).run(commands)
    assert made == [asked]
    assert said == [waits]


async def awaited(call):
    return await call


class LocalHandle:
    """Handle of a local actor: calls start in order and then run concurrently."""

    def __init__(self, actor, runs):
        self._actor, self.runs, self.calls = actor, runs, []

    def __getattr__(self, name):
        return LocalCalls(self, getattr(self._actor, name))


class LocalCalls:
    def __init__(self, handle, method):
        self._handle, self._method = handle, method

    def remote(self, *arguments):
        async def called():
            await self._handle.runs.wait()
            return await self._method(*arguments)

        call = asyncio.ensure_future(called())
        self._handle.calls.append(call)
        return call


def local_workers(monkeypatch, process, has_node, said, placement_timeout_s=2 * WAIT_S):
    """A driver's workers as local actors, which call `process` for WorkerProcess."""

    class Workers(workers.RayWorkers):
        def _make_actor(self, start, gpus, node):
            actor = actors.WorkerActor("d1", "decode", "127.0.0.1:9", "worker: {}", [], {})
            return LocalHandle(actor, has_node)

        async def _probe(self):
            await asyncio.Event().wait()

    async def in_thread(function, timeout_s=0.0):
        return function()

    def kill(handle, no_restart):
        for call in handle.calls:
            call.cancel()

    monkeypatch.setattr(actors, "WorkerProcess", process)
    monkeypatch.setattr(workers, "result", awaited)
    monkeypatch.setattr(workers, "in_thread", in_thread)
    context = SimpleNamespace(get_node_id=lambda: "n")
    monkeypatch.setattr(workers, "live_nodes", list)
    monkeypatch.setattr(workers.ray, "kill", kill)
    monkeypatch.setattr(workers.ray, "get_runtime_context", lambda: context)
    opening = replace(OPENING, placement_timeout_s=placement_timeout_s)
    return Workers(opening, said.put_nowait)


def run_locally(monkeypatch, process, has_node, commands, said, **options):
    """Runs `local_workers`."""
    found = local_workers(monkeypatch, process, has_node, said, **options)
    return asyncio.create_task(found.run(commands))


@pytest.mark.parametrize("when", ["before it has a node", "while it starts", "when it runs"])
async def test_a_worker_that_has_ended_is_gone(monkeypatch, when):
    """After the exit report, a worker with the same ID may be started at once."""
    said, alive = asyncio.Queue(), set()
    has_node, spawning, spawns = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Process:
        """A worker process that learns of its actor's death only later."""

        @classmethod
        async def start(cls, worker_id, *arguments, **options):
            alive.add(worker_id)
            spawning.set()
            await spawns.wait()
            return cls()

        async def stop(self, stop_timeout_s):
            await asyncio.sleep(0)
            alive.clear()

    commands = asyncio.StreamReader()
    running = run_locally(monkeypatch, Process, has_node, commands, said)
    # A worker that needs no resources, in a Ray without nodes.
    commands.feed_data(wire.encode(replace(start(), cpus=0.0)))
    async with asyncio.timeout(WAIT_S):
        assert await said.get() == wire.Started("d1", "")
        if when != "before it has a node":
            has_node.set()
            await spawning.wait()
        if when == "when it runs":
            spawns.set()
        commands.feed_data(wire.encode(wire.End("d1")))
        for _ in range(10):
            await asyncio.sleep(0)
        spawns.set()
        while not isinstance(await said.get(), wire.Ended):
            pass
        assert not alive
        has_node.set()
        commands.feed_eof()
        await running
    assert not alive


async def test_a_worker_is_said_to_wait_before_it_is_given_up(monkeypatch):
    """Otherwise the coordinator would count a failed start, and start fewer workers at a time."""
    said, commands = asyncio.Queue(), asyncio.StreamReader()
    running = run_locally(
        monkeypatch, None, asyncio.Event(), commands, said, placement_timeout_s=0.001
    )
    commands.feed_data(wire.encode(start()))
    async with asyncio.timeout(WAIT_S):
        assert await said.get() == wire.Started("d1", "")
        assert await said.get() == wire.Waits("d1", "Ray has no nodes")
        lost = "was not placed on a node within ray.placement_timeout_s (0.001 s): Ray has no nodes"
        assert await said.get() == wire.Exited("d1", None, lost=lost)
        commands.feed_eof()
        await running


async def test_a_worker_that_fails_after_it_has_waited_for_room_waits_no_more(monkeypatch):
    """A broken `runtime_env` is a failed start: the coordinator must start the next one later."""
    said, commands, fails = asyncio.Queue(), asyncio.StreamReader(), asyncio.Event()

    class NeverReady:
        """A node on which the actor's environment cannot be made."""

        async def wait(self):
            await fails.wait()
            raise RuntimeError("pip failed")

    monkeypatch.setattr(workers, "_PLACEMENT_CHECK_S", 0.001)
    running = run_locally(monkeypatch, None, NeverReady(), commands, said)
    commands.feed_data(wire.encode(start()))
    async with asyncio.timeout(WAIT_S):
        assert await said.get() == wire.Started("d1", "")
        assert await said.get() == wire.Waits("d1", "Ray has no nodes")
        fails.set()
        assert await said.get() == wire.Waits("d1", "")
        ended = await said.get()
        assert isinstance(ended, wire.Exited)
        assert "pip failed" in ended.lost
        commands.feed_eof()
        await running


async def test_a_killed_worker_is_gone_when_its_child_processes_are(monkeypatch):
    """They may hold GPUs for a while after its exit was reported."""
    said, alive = asyncio.Queue(), {"d1", "child of d1"}

    class Process:
        """A worker process that is killed; its actor ends the remaining processes."""

        @classmethod
        async def start(cls, worker_id, role, coordinator, config, on_exit, **options):
            alive.remove("d1")
            on_exit(WorkerExit("d1", -9))
            return cls()

        async def stop(self, stop_timeout_s):
            await asyncio.sleep(0)
            alive.clear()

    has_node, commands = asyncio.Event(), asyncio.StreamReader()
    has_node.set()
    running = run_locally(monkeypatch, Process, has_node, commands, said)
    commands.feed_data(wire.encode(replace(start(), cpus=0.0)))
    async with asyncio.timeout(WAIT_S):
        while not isinstance(await said.get(), wire.Exited):
            pass
        commands.feed_data(wire.encode(wire.End("d1")))
        assert await said.get() == wire.Ended("d1")
        assert not alive
        commands.feed_eof()
        await running


async def test_a_killed_worker_does_not_drain_to_its_end(monkeypatch):
    """Workers that are killed end at once, also those that end already."""
    said, alive, draining = asyncio.Queue(), set(), asyncio.Event()

    class Process:
        """A worker process with a request that does not end."""

        @classmethod
        async def start(cls, worker_id, *arguments, **options):
            alive.add(worker_id)
            return cls()

        def __init__(self):
            self._killed = asyncio.Event()

        async def stop(self, stop_timeout_s):
            if stop_timeout_s:
                draining.set()
                await self._killed.wait()
            alive.clear()
            self._killed.set()

    has_node, commands = asyncio.Event(), asyncio.StreamReader()
    has_node.set()
    found = local_workers(monkeypatch, Process, has_node, said)
    running = asyncio.create_task(found.run(commands))
    commands.feed_data(wire.encode(replace(start(), cpus=0.0)))
    async with asyncio.timeout(WAIT_S):
        while not alive:
            await asyncio.sleep(0)
        commands.feed_eof()
        await draining.wait()
        assert alive
        found.kill()
        await running
    assert not alive
