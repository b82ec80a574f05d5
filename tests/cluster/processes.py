"""A cluster of real processes on the simulated engine; it stops with the test that started it."""

import asyncio
import contextlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import yaml

from baton.client import AdminClient, BatonClient
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.runtime.closing import Closing
from tests.cluster.fork_server import Command, fork_server

HEARTBEAT_S = 0.1
START_S = 200.0
# LoRA adapters of the shared cluster.
ADAPTERS = ("clerk", "poet")
COMMAND = (sys.executable, "-m", "baton.cli.main")


class Cluster(Closing):
    """A coordinator and the workers that a test starts; their logs are files in `directory`."""

    _command = "coordinator"

    def __init__(self, directory: Path, model: str, **sections: dict[str, object]) -> None:
        self.vocabulary = Vocabulary.load(model)
        self._directory = directory
        self._config = directory / "baton.yaml"
        # The timeouts for silent workers are the defaults; tests of dying workers shorten them.
        # Requests wait for a replacement worker however slowly it starts.
        coordinator = {
            "listen": "127.0.0.1:0",
            "heartbeat_s": HEARTBEAT_S,
            "max_recovery_s": START_S,
        }
        simulated = {
            "step_base_ms": 4,
            "step_per_request_ms": 0.05,
            "prefill_base_ms": 4,
            "prefill_per_token_ms": 0.1,
            "max_num_batched_tokens": 256,
            "max_model_len": 2048,
            "kv_tokens": 16384,
            # Tests choose an output's length with max_tokens.
            "mean_output_tokens": 0,
        }
        config = {
            "model": model,
            "served_model_name": "demo",
            "engine": "simulated",
            "log_level": "warning",
            "coordinator": coordinator | sections.pop("coordinator", {}),
            "simulated": simulated | sections.pop("simulated", {}),
            "kv_transfer": {"send_bytes": 2**23, "receive_bytes": 2**23},
            **sections,
        }
        self._config.write_text(yaml.safe_dump(config))
        self._processes: dict[str, Command] = {}
        self.address = ""

    def __enter__(self) -> "Cluster":
        try:
            self._start_coordinator()
        except BaseException:
            self.close()
            raise
        return self

    def restart_coordinator(self, *, gently: bool = False) -> None:
        """Stops the coordinator and starts another at its address.

        Args:
            gently: Send SIGTERM and wait for exit code 0; otherwise send SIGKILL.
        """
        process = self._processes["coordinator"]
        if gently:
            process.terminate()
            assert process.wait(START_S) == 0
        else:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._start_coordinator("--listen", self.address)

    def _start_coordinator(self, *arguments: str) -> None:
        process = self._start("coordinator", self._command, *arguments)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0], "no coordinator"
        line = process.stdout.readline()
        assert line.startswith("ready grpc="), self.stderr("coordinator")
        self.address = line.removeprefix("ready grpc=").strip()

    def close(self) -> None:
        # Workers stop first, so that the coordinator receives their last messages.
        self._end(*(name for name in self._processes if name != "coordinator"))
        self._end("coordinator")

    def start_worker(self, role: str, name: str, *arguments: str) -> None:
        self._start(
            name,
            *("worker", "--role", role, "--worker-id", name),
            *("--coordinator", self.address, *arguments),
        )

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self._processes[name].pid)

    def lives(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    async def exit_code(self, name: str) -> int:
        return await asyncio.to_thread(self._processes[name].wait, 60)

    def stderr(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def expected(self, prompt: list[int], num_tokens: int, adapter: str = "") -> tuple[int, ...]:
        return tuple(expected_tokens(self.vocabulary, prompt, num_tokens, adapter))

    async def serving(self, num_workers: int = 2) -> None:
        """Waits until `num_workers` workers are attached and the model is ready."""
        async with AdminClient(self.address) as admin:
            deadline = time.monotonic() + START_S
            while len(await admin.list_workers()) < num_workers:
                assert time.monotonic() < deadline, "the workers do not serve"
                await asyncio.sleep(HEARTBEAT_S)
        async with BatonClient(self.address) as client:
            await client.wait_ready(START_S)

    async def attached(self, *names: str) -> None:
        """Waits until all these workers are attached to the coordinator."""
        async with AdminClient(self.address) as admin:
            deadline = time.monotonic() + START_S
            while set(names) - {worker.worker_id for worker in await admin.list_workers()}:
                assert time.monotonic() < deadline, f"not all of {names} attach"
                await asyncio.sleep(HEARTBEAT_S / 2)

    async def kv_address(self, name: str) -> str:
        async with AdminClient(self.address) as admin:
            workers = {worker.worker_id: worker for worker in await admin.list_workers()}
        return workers[name].kv_address

    async def nothing_left(self, within_s: float = START_S, *, dead: Collection[str] = ()) -> None:
        """Waits until no request, KV block and staging memory is in use; fails after the timeout.

        Args:
            within_s: Timeout in seconds; it only bounds a test that hangs.
            dead: Names of workers whose last load report is ignored.
        """
        deadline = time.monotonic() + within_s
        num_clean = 0
        # Three clean polls span two load reports, so at least one report was sent after the call.
        while num_clean < 3:
            await asyncio.sleep(HEARTBEAT_S)
            left = await self._left(dead)
            num_clean = 0 if left else num_clean + 1
            assert num_clean or time.monotonic() < deadline, left

    async def _left(self, dead: Collection[str]) -> list[str]:
        async with AdminClient(self.address) as admin:
            left = [f"request {one.request_id}" for one in await admin.list_requests()]
            for worker in await admin.list_workers():
                if worker.worker_id in dead:
                    continue
                found = {
                    "requests": worker.num_requests,
                    "running": worker.load.num_running,
                    "waiting": worker.load.num_waiting,
                    "KV tokens": worker.load.kv_tokens_used,
                    "staging bytes": worker.load.staging_bytes_used,
                    "handoffs": worker.load.num_handoffs,
                }
                left += [f"{worker.worker_id}: {n} {what}" for what, n in found.items() if n]
            return left

    def _end(self, *names: str) -> None:
        """Stops the named processes together and kills those that do not stop."""
        processes = [self._processes.pop(name) for name in names]
        family: list[psutil.Process] = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        _, alive = psutil.wait_procs(family, timeout=START_S)
        for left in alive:
            left.kill()
        assert not alive, f"{' or '.join(names)} left processes behind: {alive}"

    def _start(self, name: str, *arguments: str) -> Command:
        with (self._directory / f"{name}.log").open("w") as log:
            process = fork_server().start(
                [*arguments, "--config", str(self._config)],
                log=log,
                with_stdout=name == "coordinator",
            )
        self._processes[name] = process
        return process


class UpCluster(Cluster):
    """A cluster started with `baton up`, which also starts the workers."""

    _command = "up"

    def _start_coordinator(self, *arguments: str) -> None:
        super()._start_coordinator(*arguments, "--no-http")
