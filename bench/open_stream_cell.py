"""The processes of open_streams.py: a coordinator that checks itself, workers and gateways."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from baton.bench.chaos_cell import POLL_S, SCRAPE_TIMEOUT_S, START_TIMEOUT_S, Cell
from baton.bench.checked_coordinator import CHECK, COUNT
from baton.bench.systems import free_port


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway process."""

    name: str
    popen: subprocess.Popen[bytes]
    url: str

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self.popen.kill()
        self.popen.wait()


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process, or of several.

    Attributes:
        resident_bytes: Resident memory.
        cpu_s: User and system time since the start of the process.
        num_files: Open files.
    """

    resident_bytes: int
    cpu_s: float
    num_files: int

    @classmethod
    def of(cls, *pids: int) -> Usage:
        found = [psutil.Process(pid) for pid in pids]
        times = [one.cpu_times() for one in found]
        return cls(
            sum(one.memory_info().rss for one in found),
            sum(one.user + one.system for one in times),
            sum(one.num_fds() for one in found),
        )


class StreamsCell(Cell):
    """A cell with gateways; its coordinator reports and checks its state.

    Args:
        directory: Empty directory for configuration, logs and temporary files.
        config: Configuration of all processes.

    Attributes:
        gateways: The started gateways.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        super().__init__(directory, config)
        self.gateways: list[Gateway] = []

    def start_coordinator(self) -> None:
        self._coordinator = self._start_command(
            "coordinator",
            [sys.executable, "-m", "baton.bench.checked_coordinator", str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._coordinator.stdout is not None
        if self._coordinator.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the coordinator did not start: {self.last_line('coordinator')}")

    def start_gateway(self) -> Gateway:
        address, name = f"127.0.0.1:{free_port()}", f"gateway-{len(self.gateways) + 1}"
        popen = self._start(name, "gateway", "--coordinator", self.address, "--listen", address)
        gateway = Gateway(name, popen, f"http://{address}")
        self.gateways.append(gateway)
        return gateway

    async def gateways_serve(self) -> None:
        """Waits until every gateway answers its health check."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for gateway in self.gateways:
            while not await asyncio.to_thread(_is_healthy, gateway.url):
                if gateway.popen.poll() is not None or time.monotonic() > deadline:
                    raise TimeoutError(f"{gateway.name} does not serve: {self.last_log_lines()}")
                await asyncio.sleep(POLL_S)

    async def state(self, *, checks: bool) -> dict[str, Any]:
        """Returns the coordinator's counts; `checks`: and the problem of its state, if any."""
        process = self._coordinator
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(CHECK if checks else COUNT)
        process.stdin.flush()
        line = await asyncio.to_thread(process.stdout.readline)
        found: dict[str, Any] = json.loads(line)
        return found

    def coordinator_usage(self) -> Usage:
        assert self._coordinator is not None
        return Usage.of(self._coordinator.pid)

    def workers_usage(self) -> Usage:
        """Usage of the workers with their transfer services."""
        workers = [psutil.Process(member.popen.pid) for member in self.members.values()]
        children = [child for one in workers for child in one.children(recursive=True)]
        return Usage.of(*(one.pid for one in (*workers, *children)))

    def _end(self) -> None:
        self._terminate([gateway.popen for gateway in self.gateways])
        super()._end()
        process = self._coordinator
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=SCRAPE_TIMEOUT_S):
            return True
    except (urllib.error.URLError, OSError):
        return False
