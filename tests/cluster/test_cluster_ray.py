"""Workers started through Ray: most tests share a one-node Ray cluster; one test starts its own."""

import asyncio
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from baton.client import AdminClient, BatonClient, errors
from baton.coordinator.launchers.launcher import LaunchError
from baton.coordinator.launchers.ray_launch.launcher import DIRECTORY, PREFIX, RayLauncher
from baton.coordinator.server.server import serve
from baton.runtime.closing import Closing
from baton.runtime.config import parse
from tests.cluster import load_steps
from tests.cluster.fork_server import fork_server
from tests.cluster.load_steps import DECODE, PREFILL, ids, until
from tests.cluster.processes import UpCluster

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(1200)

# Timeout of a wait in seconds; it only bounds a test that hangs. Ray alone may take minutes to
# start workers on a busy machine.
WAIT_S = 300.0
COMMAND = (sys.executable, "-m", "baton.cli.main")
# A worker that reads its configuration and waits for SIGTERM, or exits with an error.
SLEEPER = (
    sys.executable,
    "-c",
    "import os, signal, sys, yaml\n"
    "config = yaml.safe_load(sys.stdin)\n"
    "if config['engine_args'].get('die'): sys.exit(os.environ.get('WHY', 'no such weights'))\n"
    "signal.sigwait({signal.SIGTERM})\n",
)


class Ray:
    """The Ray cluster of ray_program.py, which ends when this process ends."""

    def __init__(self, directory: str) -> None:
        program = str(Path(__file__).with_name("ray_program.py"))
        self.process = subprocess.Popen(
            [sys.executable, program, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.address = self._read_answer()

    def _read_answer(self) -> str:
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "Ray does not answer"
        return self.process.stdout.readline().strip()

    def _send(self, command: str) -> list[str]:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self._read_answer())

    def actors(self) -> list[str]:
        return self._send("actors")

    def kill_actor(self, name: str) -> None:
        self._send(f"kill {name}")

    def join(self, name: str) -> None:
        """Adds a node with two units of the resource `name`."""
        self._send(f"join {name}")

    def lose(self, name: str) -> None:
        """Kills the node that `join(name)` added, as when its host fails."""
        self._send(f"lose {name}")

    def listen(self) -> str:
        """Starts Ray's client server and returns its ray:// address."""
        (address,) = self._send("listen")
        return f"ray://{address}"

    def stop(self) -> None:
        """Kills all processes of the Ray cluster."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for child in children:
            if child.is_running() and child.name() in ("gcs_server", "raylet"):
                child.kill()


@pytest.fixture(scope="module")
def ray():
    # The directory holds sockets, whose paths must be short.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # The server outlives the fixture, and is no child to wait for.
    fork_server()
    before = children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "t" * 64)
        # With this period Ray detects a failed node within 3 s instead of 15 s.
        patch.setenv("RAY_health_check_period_ms", "500")
        # As in a Ray that Baton starts: otherwise, workers hardly start on a busy machine.
        patch.setenv("RAY_worker_niceness", "0")
        found = Ray(directory)
        try:
            yield found
        finally:
            if found.process.poll() is None:
                found.stop()
            found.process.stdin.close()
            found.process.stdout.close()
            psutil.wait_procs(set(children()) - set(before), 10.0)
            shutil.rmtree(directory, ignore_errors=True)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def workers_of(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Returns the worker processes among the descendants of a process."""
    found = (process or psutil.Process()).children(recursive=True)
    return [
        one
        for one in found
        if "--worker-id" in cmdline(one) and "end_with_parent" not in cmdline(one)
    ]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def is_directory(path: str) -> bool:
    return Path(path).is_dir()


def ray_settings(address: str, **sections):
    """The section `ray` of a configuration; Ray takes minutes to answer on a busy machine."""
    return {"address": address, "connect_timeout_s": WAIT_S} | sections


def settings(model: str, address: str, **sections):
    tiny = {"cpus": 0.5}
    values = {
        "model": model,
        "served_model_name": "demo",
        "engine": "simulated",
        "log_level": "info",
        "launcher": "ray",
        "coordinator": {
            "listen": "127.0.0.1:0",
            "worker_timeout_s": 5,
            "max_recovery_s": 0.5,
            "drain_timeout_s": 5,
        },
        "lanes": {"interactive": {"max_queue_s": 0.5}},
        "worker": {"drain_timeout_s": 5},
        "kv_transfer": {"send_bytes": 2**23, "receive_bytes": 2**23},
        "ray": ray_settings(address, prefill=tiny, decode=tiny) | sections.pop("ray", {}),
    }
    return values | sections


@asynccontextmanager
async def launching(config, coordinator="127.0.0.1:9"):
    """Yields a launcher whose workers only wait, and the queue of reported exits."""
    exits: asyncio.Queue = asyncio.Queue()
    launcher = RayLauncher(parse(config, "test"), coordinator, exits.put_nowait, SLEEPER)
    try:
        yield launcher, exits
    finally:
        async with asyncio.timeout(WAIT_S):
            await launcher.stop()


async def until_empty(question, within_s=WAIT_S):
    """Waits until `question` returns something empty."""
    deadline = time.monotonic() + within_s
    while found := question():
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)


class Up(Closing):
    """A `baton up` process in its own process group."""

    def __init__(self, directory: Path, config) -> None:
        path = directory / "baton.yaml"
        path.write_text(yaml.safe_dump(config))
        self._log = (directory / "up.log").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, "up", "--no-http", "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
        )

    def ready(self) -> str:
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], self.err()
        line = self.process.stdout.readline()
        assert line.startswith("ready grpc="), self.err()
        return line.split()[1].removeprefix("grpc=")

    def err(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self):
        if self.process.poll() is None:
            for one in self.family():
                one.kill()
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._log.close()


async def test_up_starts_its_own_ray_and_leaves_no_process(tmp_path, model):
    with Up(tmp_path, settings(model, "")) as up:
        address = up.ready()
        async with BatonClient(address) as client:
            answer = await client.complete("hello", max_tokens=4)
        assert answer.usage.completion_tokens == 4
        shown = subprocess.run(
            [*COMMAND, "workers", "--address", address],
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "200"},
            timeout=WAIT_S,
        ).stdout.splitlines()
        async with AdminClient(address) as admin:
            workers = await admin.list_workers()
        assert {worker.worker_id for worker in workers} == {"prefill-0", "decode-0"}
        for worker in workers:
            labels = worker.labels
            assert len(labels["ray_node"]) == 56
            row = next(line for line in shown if line.startswith(f"{worker.worker_id} "))
            assert f" {labels['host']}/{labels['ray_node'][:8]} " in row
        # Ray's default would let other processes of the host slow the workers down.
        niceness = {one.nice() for one in workers_of(psutil.Process(up.process.pid))}
        assert niceness == {psutil.Process().nice()}
        family = up.family()
        (raylet,) = (one for one in family if one.name() == "raylet")
        (directory,) = set(re.findall(rf"{DIRECTORY}/{PREFIX}\w+", " ".join(raylet.cmdline())))
        assert is_directory(directory)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(WAIT_S) == 0, up.err()
        _, alive = psutil.wait_procs(family, WAIT_S)
        assert not alive
        assert not is_directory(directory)


async def test_only_the_ray_cluster_outlives_a_killed_coordinator(ray, tmp_path, model):
    with Up(tmp_path, settings(model, ray.address)) as up:
        address = up.ready()
        async with BatonClient(address) as client:
            await client.complete("hello", max_tokens=2)
        workers = workers_of(psutil.Process(ray.process.pid))
        assert len(workers) == 2
        assert len(ray.actors()) == 2
        up.process.kill()
        _, alive = psutil.wait_procs(workers, WAIT_S)
        assert not alive
        await until_empty(ray.actors)


async def test_pools_follow_the_load_and_no_token_is_lost(ray, tmp_path, model):
    """Runs steps of test_cluster_scaling.py with workers in Ray.

    Ray starts workers of both roles alike, so only the decode pool grows by load here.
    """
    small = {"cpus": 0.5, "resources": {"near": 0.5}}
    sections = {
        "launcher": "ray",
        "ray": ray_settings(ray.address, prefill=small, decode=small),
        **load_steps.autoscaled(),
    }
    with UpCluster(tmp_path, model, **sections) as cluster:
        async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:

            async def kill(worker):
                (actor,) = (name for name in ray.actors() if f".{worker.worker_id}." in name)
                ray.kill_actor(actor)

            await load_steps.decode_follows_outputs(cluster, client)
            await load_steps.pools_shrink(cluster, admin)
            await admin.set_autoscale(enabled=False)
            await load_steps.flips_and_deaths(cluster, client, kill)
            await load_steps.a_size_by_hand_wins(cluster, admin)
        await cluster.nothing_left()
    await until_empty(ray.actors)


async def test_a_failed_node_ends_only_its_workers(ray, tmp_path, model):
    """The worker's replacement waits for another node, and the pool reports the reason."""
    ray.join("far")
    sections = {
        "launcher": "ray",
        "ray": ray_settings(
            ray.address,
            prefill={"cpus": 0.5, "resources": {"near": 1}},
            decode={"cpus": 0.5, "resources": {"far": 1}},
        ),
    }
    with UpCluster(tmp_path, model, **sections) as cluster:
        async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
            before = await client.complete([5, 6, 7], max_tokens=4)
            workers = await admin.list_workers()
            assert len({one.labels["ray_node"] for one in workers}) == 2
            ray.lose("far")

            def waits(event):
                (pool,) = (one for one in event.pools.pools if one.role == DECODE)
                return "waits for room in Ray: no node of Ray has far 1 (most: 0)" in pool.problem

            event = await until(cluster, waits)
            assert ids(event, PREFILL) == {"prefill-0"}
            assert ids(event, DECODE) == set()
            ray.join("far")
            event = await until(cluster, lambda event: ids(event, DECODE))
            assert not any("waits for room" in one.problem for one in event.pools.pools)
            again = await client.complete([5, 6, 7], max_tokens=4)
            assert again.token_ids == before.token_ids
    ray.lose("far")
    await until_empty(ray.actors)


async def reason_after_kill(ray, exits, worker_id):
    """Kills a worker's actor; returns the reported reason."""
    (name,) = (name for name in ray.actors() if f".{worker_id}." in name)
    ray.kill_actor(name)
    async with asyncio.timeout(WAIT_S):
        reason = str(await exits.get())
    assert reason.startswith(f"worker {worker_id} was lost with its Ray actor: ")
    return reason


async def test_exits_are_reported_and_a_worker_can_be_started_again(ray, model):
    async with launching(settings(model, ray.address)) as (launcher, exits):
        await launcher.start("p1", "prefill")
        await launcher.start("d1", "decode")
        cluster = psutil.Process(ray.process.pid)
        await until_empty(lambda: len(workers_of(cluster)) != 2)
        assert "ray.kill" in await reason_after_kill(ray, exits, "d1")
        # The worker process ends with its actor.
        await until_empty(lambda: len(workers_of(cluster)) != 1)
        await launcher.start("d1", "decode")
        await until_empty(lambda: len(workers_of(cluster)) != 2)
        for worker in workers_of(cluster):
            if "d1" in worker.cmdline():
                worker.kill()
        async with asyncio.timeout(WAIT_S):
            assert str(await exits.get()) == "worker d1 was killed by SIGKILL"
        await launcher.end("d1")
        await launcher.end("p1")
        await until_empty(lambda: workers_of(cluster) + ray.actors())
        assert exits.empty()


async def test_the_reason_why_a_worker_cannot_start(ray, model):
    """Each case uses its own launcher, because ray.placement_timeout_s is a launcher setting."""

    dies = {"engine_args": {"die": True}}

    async def reason(worker_id, role, **options):
        config = settings(model, ray.address, ray={"address": ray.address, **options}, **dies)
        async with launching(config) as (launcher, exits):
            await launcher.start(worker_id, role)
            return str(await asyncio.wait_for(exits.get(), WAIT_S))

    assert await reason("p1", "prefill") == "worker p1 exited with code 1: no such weights"
    elsewhere = {"runtime_env": {"env_vars": {"WHY": "set by its environment"}}}
    found = await reason("p1", "prefill", **elsewhere)
    assert found == "worker p1 exited with code 1: set by its environment"
    lacking = {"placement_timeout_s": 2.0, "decode": {"cpus": 0, "gpus": 2}}
    assert await reason("d1", "decode", **lacking) == (
        "worker d1 was not placed on a node within ray.placement_timeout_s (2 s): "
        "no node of Ray has GPU 2 (most: 0)"
    )
    await until_empty(ray.actors)


async def test_pairs_share_a_node_while_it_has_room(ray, model, caplog):
    """Ray's own placement would put as many workers as possible on the larger node."""
    caplog.set_level("INFO")
    ray.join("far")
    takes = {"prefill": {"cpus": 0.5, "resources": {"far": 1}}}
    nodes = {}

    def unplaced(*workers):
        for told in re.finditer(r"worker (\w+) is on node (\w+) of Ray", caplog.text):
            nodes[told[1]] = told[2]
        return set(workers) - set(nodes)

    async with launching(settings(model, ray.address, ray=takes)) as (launcher, _):
        await launcher.start("p1", "prefill")
        # The launcher waits for a limited time until a partner has its node.
        await until_empty(lambda: unplaced("p1"))
        await launcher.start("d1", "decode")
        await launcher.start("d2", "decode")
        await until_empty(lambda: unplaced("d1", "d2"))
    assert nodes["d1"] == nodes["p1"] != nodes["d2"]
    ray.lose("far")
    await until_empty(ray.actors)


async def test_a_ray_cluster_is_used_through_a_ray_client(ray, model):
    """A ray:// address, as on Kubernetes, needs only the Ray client on this host."""
    cluster = psutil.Process(ray.process.pid)
    async with launching(settings(model, ray.listen())) as (launcher, exits):
        await launcher.start("p1", "prefill")
        await launcher.start("d1", "decode")
        await until_empty(lambda: len(workers_of(cluster)) != 2)
        await reason_after_kill(ray, exits, "d1")
        await launcher.start("d1", "decode")
        await until_empty(lambda: len(workers_of(cluster)) != 2)
        await launcher.end("d1")
        await until_empty(lambda: len(workers_of(cluster)) != 1)
    await until_empty(lambda: workers_of(cluster) + ray.actors())
    assert exits.empty()


async def test_a_namespace_has_one_coordinator(ray, model):
    config = settings(model, ray.address)
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with launching(config, address) as (launcher, exits):
        await launcher.start("p1", "prefill")
        async with launching(config) as (second, _):
            with pytest.raises(LaunchError, match=f"ray.namespace: is 'baton', .* at {address} "):
                await second.start("p1", "prefill")
            listening.close()
            await listening.wait_closed()
            # The remaining actors no longer belong to a running coordinator.
            await second.start("p1", "prefill")
            async with asyncio.timeout(WAIT_S):
                assert (await exits.get()).worker_id == "p1"


async def test_a_wrong_ray_address_is_reported(model, unused_port):
    async with launching(settings(model, f"127.0.0.1:{unused_port}")) as (launcher, _):
        with pytest.raises(LaunchError, match=f"nothing answers at 127.0.0.1:{unused_port}: "):
            await launcher.start("p1", "prefill")


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_an_actor_is_replaced_and_a_stopped_ray_blocks_nothing(ray, model, caplog):
    """This test must be the last one in the file, because it stops the Ray cluster."""
    caplog.set_level("INFO")
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    config = parse(settings(model, ray.address), "test")
    serving = asyncio.create_task(serve(config, launch=True, ready=ready.set_result, stop=stop))
    await asyncio.wait({serving, ready}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    try:
        async with BatonClient(ready.result()) as client, AdminClient(ready.result()) as admin:
            before = await client.complete("hello", max_tokens=4)
            (actor,) = (name for name in ray.actors() if ".decode-0." in name)
            ray.kill_actor(actor)
            async with asyncio.timeout(WAIT_S):
                while {one.worker_id for one in await admin.list_workers()} != {
                    "prefill-0",
                    "decode-1",
                }:
                    await asyncio.sleep(0.1)
            again = await client.complete("hello", max_tokens=4)
            assert again.token_ids == before.token_ids
            ray.stop()
            deadline = time.monotonic() + WAIT_S
            while await admin.list_workers():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            with pytest.raises(errors.UnavailableError, match="no prefill and no decode worker is"):
                await client.complete("hello", max_tokens=2, timeout_s=WAIT_S)
            # The lost workers cannot be replaced, and the log gives the reason.
            messages = ("does not answer", "prefill-1 could not be started: Ray at")
            while not all(one in caplog.text for one in messages):
                assert time.monotonic() < deadline, caplog.text
                await asyncio.sleep(0.1)
    finally:
        stop.set()
        assert await asyncio.wait_for(serving, WAIT_S) == 0
