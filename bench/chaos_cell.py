"""A coordinator and workers on the simulated engine, each a process of its own that may die.

What the processes leave behind in their directory and in shared memory is looked for at the end.
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
from baton.runtime.errors import RemoteError
from baton.v1 import cluster_pb2

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1
SCRAPE_TIMEOUT_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "baton-kv-*"
POOLS = ("prefill", "decode")
# Of the coordinator: what it did about workers that died or stood still.
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
        stopped: by SIGSTOP, at the moment.
        killed: by SIGKILL, also while that is about to happen.
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
        """-9; its transfer service ends by itself."""
        self.killed = True
        self.popen.kill()

    def stop(self) -> None:
        """SIGSTOP, its transfer service included."""
        self.stopped = True
        main = psutil.Process(self.popen.pid)
        self._family = [main, *main.children(recursive=True)]
        for process in self._family:
            process.suspend()

    def go_on(self) -> None:
        self.stopped = False
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


class Cell(AsyncClosing):
    """The processes of one cell, for `async with`.

    Args:
        directory: for their configuration, logs and temporary files; empty.
        config: of all of them; where the coordinator listens is filled in.

    Attributes:
        address: of the coordinator, also after a restart.
        members: workers that were started and not seen dead, by id.
        counted: COUNTERS of the coordinators that are gone.
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
        """-9; what it counted until then is kept."""
        self.counted += await self.counters()
        assert self._coordinator is not None
        self._coordinator.kill()
        await asyncio.to_thread(self._coordinator.wait)

    async def listening(self) -> None:
        """Until a coordinator answers."""
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
        """COUNTERS of the coordinator that runs."""
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
        """Starts one; without an id it gets one that nobody had."""
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
        """Members that were heard lately, by pool; nobody while no coordinator answers."""
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
                and worker.silent_for.ToNanoseconds() < 1e9
            ):
                found[member.pool].append(member)
        return found

    async def all_serve(self) -> None:
        """Until every member serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while sum(map(len, (await self.serving()).values())) < len(self.members):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {sorted(self.members)} serve; {self.last_words()}")
            await asyncio.sleep(POLL_S)
        async with BatonClient(self.address) as client:
            await client.wait_ready(START_TIMEOUT_S)

    # ---- What must be free at the end

    async def held(self) -> list[str]:
        """What the coordinator and the workers hold, in words; and workers that nobody runs."""
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
        """What is still held after so long; seen thrice in a row when it is nothing."""
        deadline, num_free = time.monotonic() + within_s, 0
        while True:
            held = await self.held()
            num_free = 0 if held else num_free + 1
            if num_free == 3 or time.monotonic() > deadline:
                return held
            # The workers' reports come twice a second.
            await asyncio.sleep(0.6)

    def remains(self) -> list[str]:
        """Processes, directories and segments that outlived the cell; call it after its end."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (left := self._remains()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def last_line(self, name: str) -> str:
        """Of a process's log."""
        log = self._directory / f"{name}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def last_words(self) -> str:
        """The last line of each log that has any."""
        names = sorted(log.stem for log in self._directory.glob("*.log"))
        return "\n".join(f"{name}: {line}" for name in names if (line := self.last_line(name)))

    # ---- Inside

    def _remains(self) -> list[str]:
        left = [f"process group {group}" for group in self._groups if _group_lives(group)]
        left += [str(path) for path in self._temporary.iterdir()]
        # Others' cells may run beside this one: what nobody maps any more is nobody's.
        segments = set(SHARED_MEMORY.glob(SEGMENTS)) - self._segments
        return left + sorted(str(path) for path in segments if not _mapped(path))

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "baton.cli.main", *arguments, "--config", str(self._path)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._temporary)},
                start_new_session=True,
            )
        self._groups.append(popen.pid)
        return popen

    def _end(self) -> None:
        """Workers first, while somebody listens to what they say last."""
        for member in self.members.values():
            if member.stopped:
                member.go_on()
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
    """Whether any process maps the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(path) in maps.read_text(encoding="utf-8"):
                return True
    return False
