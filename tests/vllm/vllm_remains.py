"""What a worker's processes hold of this machine, to be looked for when they are dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"
GONE_TIMEOUT_S = 20.0


def family(main: psutil.Process) -> list[psutil.Process]:
    """A worker's main process and all it has started."""
    return [main, *main.children(recursive=True)]


def transfer_service(main: psutil.Process) -> psutil.Process:
    for process in main.children():
        if "baton.kvtransfer.service" in process.cmdline():
            return process
    raise AssertionError(f"no transfer service beside {main}")


def control_socket(main: psutil.Process) -> str:
    """Of a worker's transfer service."""
    return str(json.loads(transfer_service(main).cmdline()[-1])["socket_path"])


@contextlib.contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stops processes as kill -STOP does, and lets those that still live go on after."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


class Remains:
    """A worker's processes, its segments in shared memory and its directory, as they are now."""

    def __init__(self, main: psutil.Process) -> None:
        self._processes = family(main)
        self._files = {Path(control_socket(main)).parent}
        for process in self._processes:
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, separator, name = line.partition(SHARED_MEMORY)
                if separator and not name.endswith(" (deleted)"):
                    self._files.add(Path(SHARED_MEMORY + name))

    async def gone(self) -> None:
        """Raises AssertionError unless all of it is gone soon."""
        left: list[object] = ["never looked"]
        try:
            async with asyncio.timeout(GONE_TIMEOUT_S):
                while left := [*filter(_lives, self._processes), *filter(Path.exists, self._files)]:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"left behind: {left}") from None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
