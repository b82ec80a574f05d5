"""A cell of real processes that may be killed: a coordinator and workers on the simulated engine.

At the end the cell checks that the processes left nothing in their directory and in shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.bench.systems import free_port
from baton.client import AdminClient, BatonClient
from baton.client.errors import UnavailableError
from baton.runtime.closing import AsyncClosing
from baton.runtime.durations import to_seconds
from baton.runtime.errors import RemoteError
from baton.v1 import cluster_pb2

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1
SCRAPE_TIMEOUT_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "baton-kv-*"
POOLS = ("prefill", "decode")
# Counters of the coordinator for workers that died or did not respond.
COUNTERS = (
    "baton_recoveries",
    "baton_workers_lost",
    "baton_workers_unresponsive",
    "baton_adopted",
)


@dataclass(slots=True, eq=False)
class Member:
    """One worker process.

    Attributes:
        stopped: Whether the process is currently stopped by SIGSTOP.
        killed: Whether the process was, or is about to be, killed by SIGKILL.
    """

    pool: str
    worker_id: str
    popen: subprocess.Popen[bytes]
    stopped: bool = False
    killed: bool = False
    _family: list[psutil.Process] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """Kills the process with SIGKILL; the worker's transfer service then ends by itself."""
        self.killed = True
        self.popen.kill()

    def stop(self) -> None:
        """Stops the process and its transfer service with SIGSTOP."""
        self.stopped = True
        main = psutil.Process(self.popen.pid)
        self._family = [main, *main.children(recursive=True)]
        for process in self._family:
            process.suspend()

    def resume(self) -> None:
        self.stopped = False
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


class Cell(AsyncClosing):
    """The processes of one cell; an asynchronous context manager.

    Args:
        directory: Empty directory for configuration, logs and temporary files.
        config: Configuration of all processes; the coordinator's addresses are filled in.

    Attributes:
        address: Address of the coordinator; a restarted coordinator has the same address.
        members: Workers that were started and were not found dead, by worker ID.
        counted: Sums of COUNTERS of the coordinators that were killed.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self._directory, self._temporary = directory, directory / "tmp"
        self._temporary.mkdir()
        self._path = directory / "baton.yaml"
        self.address = f"127.0.0.1:{free_port()}"
        self._metrics = f"127.0.0.1:{free_port()}"
        listening = {"listen": self.address, "metrics_listen": self._metrics}
        coordinator = {**config.get("coordinator", {}), **listening}
        self._path.write_text(
            yaml.safe_dump({**config, "coordinator": coordinator}), encoding="utf-8"
        )
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._num_started: Counter[str] = Counter()
        self._groups: list[int] = []
        self._segments = set(SHARED_MEMORY.glob(SEGMENTS))
        self.members: dict[str, Member] = {}
        self.counted: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self.start_coordinator()
        await self.listening()
        return self

    async def aclose(self) -> None:
        await asyncio.to_thread(self._end)

    # ---- The coordinator

    def start_coordinator(self) -> None:
        self._coordinator = self._start("coordinator", "coordinator")

    async def kill_coordinator(self) -> None:
        """Kills the coordinator with SIGKILL; its counters are saved before."""
        self.counted += await self.counters()
        assert self._coordinator is not None
        self._coordinator.kill()
        await asyncio.to_thread(self._coordinator.wait)

    async def listening(self) -> None:
        """Waits until a coordinator answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                async with AdminClient(self.address, timeout_s=SCRAPE_TIMEOUT_S) as admin:
                    await admin.list_pools()
                    return
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(POLL_S)

    async def counters(self) -> Counter[str]:
        """Returns COUNTERS of the running coordinator."""
        text = await asyncio.to_thread(_fetch, f"http://{self._metrics}/metrics")
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            if family.name in COUNTERS:
                found[family.name] += sum(
                    int(one.value) for one in family.samples if one.name.endswith("_total")
                )
        return found

    # ---- Workers

    def start_worker(self, pool: str, worker_id: str = "") -> Member:
        """Starts a worker; an empty `worker_id` means a new, unused ID."""
        if not worker_id:
            self._num_started[pool] += 1
            worker_id = f"{pool}-{self._num_started[pool]}"
        popen = self._start(
            worker_id,
            *("worker", "--role", pool, "--worker-id", worker_id),
            *("--coordinator", self.address),
        )
        member = self.members[worker_id] = Member(pool, worker_id, popen)
        return member

    async def serving(self) -> dict[str, list[Member]]:
        """Returns the serving members by pool; empty while no coordinator answers.

        A member counts as serving if the coordinator heard from it within the last second.
        """
        found: dict[str, list[Member]] = {pool: [] for pool in POOLS}
        try:
            async with AdminClient(self.address, timeout_s=SCRAPE_TIMEOUT_S) as admin:
                workers = await admin.list_workers()
        except RemoteError:
            return found
        for worker in workers:
            member = self.members.get(worker.worker_id)
            if (
                member is not None
                and member.popen.pid == worker.pid
                and member.lives
                and not member.stopped
                and not member.killed
                and worker.state == cluster_pb2.WORKER_STATE_SERVING
                and to_seconds(worker.silent_for) < 1
            ):
                found[member.pool].append(member)
        return found

    async def all_serve(self) -> None:
        """Waits until every member serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while sum(map(len, (await self.serving()).values())) < len(self.members):
            if time.monotonic() > deadline:
                members, lines = sorted(self.members), self.last_log_lines()
                raise TimeoutError(f"some of {members} do not serve; last log lines: {lines}")
            await asyncio.sleep(POLL_S)
        async with BatonClient(self.address) as client:
            await client.wait_ready(START_TIMEOUT_S)

    # ---- Resources that must be free at the end

    async def held(self) -> list[str]:
        """Lists resources that coordinator and workers hold, and workers without a process."""
        async with AdminClient(self.address) as admin:
            held = [f"request {one.request_id}" for one in await admin.list_requests()]
            workers = await admin.list_workers()
        pids = {member.popen.pid for member in self.members.values() if member.lives}
        held += [f"dead worker {one.worker_id}" for one in workers if one.pid not in pids]
        for worker in workers:
            parts = {
                "requests assigned": worker.num_requests,
                "running": worker.load.num_running,
                "waiting": worker.load.num_waiting,
                "KV tokens": worker.load.kv_tokens_used,
                "staging bytes": worker.load.staging_bytes_used,
                "handoffs": worker.load.num_handoffs,
            }
            held += [f"{worker.worker_id}: {n} {what}" for what, n in parts.items() if n]
        return held

    async def settled(self, within_s: float) -> list[str]:
        """Returns the resources still held after `within_s` seconds.

        Returns early with an empty list when nothing was held in three checks in a row.
        """
        deadline, num_free = time.monotonic() + within_s, 0
        while True:
            held = await self.held()
            num_free = 0 if held else num_free + 1
            if num_free == 3 or time.monotonic() > deadline:
                return held
            # Workers send load reports twice a second.
            await asyncio.sleep(0.6)

    def remains(self) -> list[str]:
        """Lists processes, files and segments that outlived the cell; call this after its end."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (left := self._remains()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def last_line(self, name: str) -> str:
        """Returns the last line of a process's log."""
        log = self._directory / f"{name}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def last_log_lines(self) -> str:
        """Returns the last line of each log that is not empty."""
        names = sorted(log.stem for log in self._directory.glob("*.log"))
        return "\n".join(f"{name}: {line}" for name in names if (line := self.last_line(name)))

    # ---- Inside

    def _remains(self) -> list[str]:
        left = [f"process group {group}" for group in self._groups if _group_lives(group)]
        left += [str(path) for path in self._temporary.iterdir()]
        # Another cell may run at the same time. A segment without a mapping belongs to no process.
        segments = set(SHARED_MEMORY.glob(SEGMENTS)) - self._segments
        return left + sorted(str(path) for path in segments if not _mapped(path))

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "baton.cli.main", *arguments]
        return self._start_command(name, [*command, "--config", str(self._path)])

    def _start_command(
        self,
        name: str,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("ab") as log:
            popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._temporary)},
                start_new_session=True,
            )
        self._groups.append(popen.pid)
        return popen

    def _end(self) -> None:
        """Ends the workers before the coordinator, which still reads their last messages."""
        for member in self.members.values():
            if member.stopped:
                member.resume()
        self._terminate([member.popen for member in self.members.values()])
        if self._coordinator is not None:
            self._terminate([self._coordinator])

    @staticmethod
    def _terminate(processes: list[subprocess.Popen[bytes]]) -> None:
        for popen in processes:
            with contextlib.suppress(ProcessLookupError):
                popen.terminate()
        for popen in processes:
            try:
                popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
                popen.wait()


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as response:
        text: bytes = response.read()
    return text.decode()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _mapped(path: Path) -> bool:
    """Returns whether any process maps the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(path) in maps.read_text(encoding="utf-8"):
                return True
    return False
