"""A `baton up` on real vLLM as a child process, with access to its parts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import yaml

from baton.client.admin import AdminClient
from baton.client.client import BatonClient
from baton.kvtransfer.engine_port import EnginePort
from baton.runtime.process.affinity import VLLM_BIND_THREADS
from baton.v1 import admin_pb2, common_pb2
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_programs import TORCH, fork, run_baton
from tests.vllm.vllm_relay import Relay
from tests.vllm.worker_parts import metric

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
START_TIMEOUT_S = 480
# Resources must be free before a lease could free them, even on a busy machine.
IDLE_TIMEOUT_S, COMMIT_TTL_S = 10.0, 12
MAX_DECODES = 10
SEND_BYTES = 64 * 2**20
RELAY_HOST = "127.0.0.2"

ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": cases.BLOCK_SIZE,
    "max_num_batched_tokens": cases.CHUNK,
    "max_model_len": cases.MAX_MODEL_LEN,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 * 2**20,
    **cases.SHARED_GPU,
}
CONFIG = {
    "engine": "vllm",
    "engine_args": ENGINE_ARGS,
    "coordinator": {"listen": "127.0.0.1:0", "heartbeat_s": 0.2, "handoff_timeout_s": 5},
    # The cache has 64 blocks; a few long requests overflow it, and vLLM preempts.
    "decode": {
        "engine_args": {"kv_cache_memory_bytes": 8 * 2**20},
        "max_requests_per_worker": MAX_DECODES,
        # Every prompt is handed over.
        "local_prefill": False,
    },
    "kv_transfer": {
        "send_bytes": SEND_BYTES,
        "receive_bytes": SEND_BYTES,
        # Other workers dial the relay, which listens on the same port.
        "advertise_host": RELAY_HOST,
        "commit_ttl_s": COMMIT_TTL_S,
    },
}


@dataclass
class Cluster:
    """A running `baton up` with one prefill and one decode worker."""

    config: dict[str, Any]
    address: str
    process: subprocess.Popen[str]
    log: list[str]
    log_reader: threading.Thread
    relay: Relay | None = None

    def worker_process(self, role: str) -> psutil.Process:
        """Returns the main process of a role's only worker."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            line = process.cmdline()
            if "worker" in line and role in line:
                return process
        raise AssertionError(f"no {role} worker is running")

    def transfer_service(self, role: str) -> psutil.Process:
        for process in self.worker_process(role).children(recursive=True):
            if "baton.kvtransfer.service " in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no transfer service beside the {role} worker")

    def port(self, role: str) -> EnginePort:
        """Opens the test's own connection to the transfer service of a worker."""
        return EnginePort(self.socket_path(role))

    def socket_path(self, role: str) -> str:
        """Returns the control socket of a worker's transfer service."""
        arguments = json.loads(self.transfer_service(role).cmdline()[-1])
        return str(arguments["socket_path"])

    def handoff_tokens(self) -> int:
        """Returns the number of prompt tokens that the decode worker has loaded from handoffs."""
        return metric(self.worker_process("decode"), "baton_worker_handoff_prompt_tokens_total")

    def engine_processes(self, role: str) -> list[psutil.Process]:
        """Returns vLLM's engine core and rank."""
        found = [
            process
            for process in self.worker_process(role).children(recursive=True)
            if "VLLM" in " ".join(process.cmdline())
        ]
        assert found
        return found

    def client(self) -> BatonClient:
        return BatonClient(self.address)

    async def workers(self) -> dict[int, admin_pb2.WorkerInfo]:
        return {worker.role: worker for worker in await self.all_workers()}

    async def all_workers(self) -> list[admin_pb2.WorkerInfo]:
        async with AdminClient(self.address) as admin:
            return await admin.list_workers()

    async def worker(self, worker_id: str) -> admin_pb2.WorkerInfo:
        (found,) = [one for one in await self.all_workers() if one.worker_id == worker_id]
        return found

    async def requests(self) -> list[admin_pb2.RequestInfo]:
        async with AdminClient(self.address) as admin:
            return await admin.list_requests()

    async def assert_idle(self, *, dead: Collection[str] = ()) -> None:
        """Asserts that live workers soon hold nothing of any request, before any lease expires."""
        left = ["never looked"]
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while left:
                    left = await self._leftovers(dead)
                    # The values change with the next load report.
                    await asyncio.sleep(0.05 if left else 0)
        except TimeoutError:
            raise AssertionError(f"left behind: {'; '.join(left)}") from None

    async def _leftovers(self, dead: Collection[str]) -> list[str]:
        left = [f"request {r.request_id} in state {r.state}" for r in await self.requests()]
        for worker in await self.all_workers():
            if worker.worker_id in dead:
                continue
            load = worker.load
            for name in ("kv_tokens_used", "staging_bytes_used", "num_running", "num_waiting"):
                if (value := getattr(load, name)) != 0:
                    left.append(f"{worker.worker_id} {name}={value}")
            if worker.num_requests or load.num_handoffs:
                left.append(
                    f"{worker.worker_id} requests={worker.num_requests} "
                    f"handoffs={load.num_handoffs}"
                )
        return left


def start_cluster(config: dict[str, Any], directory: Path) -> Cluster:
    path = directory / "baton.yaml"
    path.write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.cli.main", "up", "--no-http", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | TORCH,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    log: list[str] = []
    drain = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    drain.start()
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    ready = re.match(r"ready grpc=(\S+)", line)
    assert ready, f"did not start: {line!r}\n{''.join(log)[-4000:]}"
    return Cluster(config, ready[1], process, log, drain)


def start_worker(
    address: str, config: dict[str, Any], directory: Path, role: str, name: str, core: int
) -> BaseProcess:
    """Starts another worker of a coordinator on one core; its output goes to a file."""
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = ["worker", "--role", role, "--worker-id", name, "--coordinator", address]
    arguments += ["--config", str(path)]
    log, environment = directory / f"{name}.log", {VLLM_BIND_THREADS: str(core)}
    return fork(run_baton, *arguments, log=log, environment=environment)


def stop_cluster(cluster: Cluster) -> None:
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    cluster.process.send_signal(signal.SIGINT)
    try:
        assert cluster.process.wait(timeout=200) == 0, "".join(cluster.log)[-4000:]
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, f"still running: {alive}"
    finally:
        for process in [*children, cluster.process]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        cluster.log_reader.join(timeout=10)
        for pipe in (cluster.process.stdout, cluster.process.stderr):
            assert pipe is not None
            pipe.close()
