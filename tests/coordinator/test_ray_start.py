"""Resources requested from Ray for a worker, and attempts to connect to Ray."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import yaml

from baton.coordinator.launchers.launcher import LaunchError
from baton.coordinator.launchers.ray_launch.driver_process import DriverProcess
from baton.coordinator.launchers.ray_launch.launcher import RayLauncher, start_of
from baton.coordinator.state.revision import Revision
from baton.runtime.config import parse


def start(configured, revision):
    return start_of("w", "decode", revision.over(configured), configured)


@pytest.mark.parametrize(("gpus", "asked"), [(None, None), (0.5, 2.0), (1, 4.0), (0, 0.0)])
def test_a_revision_with_more_ranks_asks_for_more(gpus, asked):
    configured = parse({"ray": {"decode": {"gpus": gpus, "cpus": 3}}}, "test")
    made = start(configured, Revision("r2", "", {"tensor_parallel_size": 4}))
    assert (made.gpus, made.num_ranks, made.cpus) == (asked, 4, 3)
    assert start(configured, Revision("r3")).gpus == gpus


def test_every_stage_has_its_own_ranks():
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    configured = parse({"engine_args": sizes, "ray": {"decode": {"gpus": 4}}}, "test")
    made = start(configured, Revision("r2", "", {"pipeline_parallel_size": 3}))
    assert (made.gpus, made.num_ranks) == (6, 6)


def test_a_simulated_engine_has_no_ranks():
    configured = parse({"engine": "simulated", "ray": {"decode": {"gpus": 1}}}, "test")
    made = start(configured, Revision("r2", "", {"tensor_parallel_size": 4}))
    assert (made.gpus, made.num_ranks) == (1, 0)


class StartedWorkers:
    """Replaces the driver, and keeps the configurations of the workers that are started."""

    ended = False

    def __init__(self):
        self.configs = []

    async def start_worker(self, start):
        self.configs.append(yaml.safe_load(start.config))


@pytest.mark.parametrize(
    ("runtime_env", "stay"),
    [({"env_vars": {"A": "b"}}, False), ({"working_dir": "s3://b/files.zip"}, True)],
)
async def test_files_of_workers_are_those_of_the_coordinator(
    monkeypatch, tmp_path, runtime_env, stay
):
    """Ray starts actors in other directories; its `working_dir` has the files of the actors."""

    driver = StartedWorkers()

    async def connect(*arguments):
        return driver

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(DriverProcess, "open", connect)
    monkeypatch.chdir(tmp_path)
    values = {
        "launcher": "ray",
        "ray": {"address": "127.0.0.1:9", "runtime_env": runtime_env},
        "security": {
            "ca_file": "certs/ca.pem",
            "cert_file": "certs/server.pem",
            "key_file": "/etc/server.key",
            "cluster_token_file": "token",
        },
        "kv_store": {"disk_dir": "blocks"},
    }
    launcher = RayLauncher(parse(values, "test"), "127.0.0.1:9", lambda worker_exit: None)
    await launcher.start("p1", "prefill")
    await launcher.start("p2", "prefill", Revision("r2"))
    for config in driver.configs:
        security = config["security"]
        where = "" if stay else f"{tmp_path}/"
        assert security["ca_file"] == f"{where}certs/ca.pem"
        assert security["cert_file"] == f"{where}certs/server.pem"
        assert security["key_file"] == "/etc/server.key"
        assert security["cluster_token_file"] == f"{where}token"
        assert not security.get("metrics_token_file")
        assert config["kv_store"]["disk_dir"] == f"{where}blocks"
    assert len(driver.configs) == 2


@pytest.mark.parametrize(("configured", "used"), [(None, 1234.0), (5.0, 5.0)])
async def test_a_worker_may_wait_for_a_node_as_long_as_for_its_start(monkeypatch, configured, used):
    async def connect(opening, *callbacks):
        raise LaunchError(f"{opening.placement_timeout_s}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(DriverProcess, "open", connect)
    ray = {"address": "127.0.0.1:9", "placement_timeout_s": configured}
    values = {"launcher": "ray", "ray": ray, "scaling": {"start_timeout_s": 1234}}
    launcher = RayLauncher(parse(values, "test"), "127.0.0.1:9", lambda worker_exit: None)
    with pytest.raises(LaunchError, match=f"^{used}$"):
        await launcher.start("p1", "prefill")


async def test_calls_waiting_for_a_failed_connection_do_not_retry_it(monkeypatch):
    tries, refuses = [], asyncio.Event()

    async def connect(*arguments):
        tries.append(arguments)
        await refuses.wait()
        raise LaunchError("ray.address: nothing answers")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(DriverProcess, "open", connect)
    config = parse({"model": "demo", "launcher": "ray", "ray": {"address": "127.0.0.1:9"}}, "test")
    launcher = RayLauncher(config, "127.0.0.1:9", lambda worker_exit: None)
    starts = [asyncio.create_task(launcher.start(f"p{n}", "prefill")) for n in range(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    refuses.set()
    ended = await asyncio.gather(*starts, return_exceptions=True)
    assert [str(one) for one in ended] == ["ray.address: nothing answers"] * 4
    assert len(tries) == 1
    with pytest.raises(LaunchError):
        await launcher.start("p4", "prefill")
    assert len(tries) == 2
