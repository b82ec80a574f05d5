"""A worker's processes as the operating system shows them, for any engine."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from baton.kvtransfer import local_wire
from baton.v1 import kv_transfer_pb2

SHARED_MEMORY = "/dev/shm/"
SEGMENT = "baton-kv-"
# The kernel marks a mapped file that is deleted with this suffix.
DELETED = " (deleted)"
GONE_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0


def family(main: psutil.Process) -> list[psutil.Process]:
    """Returns a worker's main process and all its children."""
    return [main, *main.children(recursive=True)]


def transfer_service(main: psutil.Process) -> psutil.Process:
    for process in main.children():
        if "baton.kvtransfer.service" in process.cmdline():
            return process
    raise AssertionError(f"no transfer service beside {main}")


def metric(main: psutil.Process, name: str) -> int:
    """Returns a metric of a worker, which has one value."""
    for each in main.net_connections("tcp"):
        if each.status != psutil.CONN_LISTEN:
            continue
        with contextlib.suppress(OSError, http.client.HTTPException):
            url = f"http://{each.laddr.ip}:{each.laddr.port}/metrics"
            with urllib.request.urlopen(url, timeout=2) as answer:
                lines = answer.read().decode().splitlines()
            (found,) = [line for line in lines if line.startswith(f"{name}{{")]
            return int(float(found.split()[-1]))
    raise AssertionError(f"{main} serves no metrics")


def control_socket(main: psutil.Process) -> str:
    """Returns the control socket of a worker's transfer service."""
    return str(json.loads(transfer_service(main).cmdline()[-1])["socket_path"])


def staging(main: psutil.Process) -> kv_transfer_pb2.LocalStatistics:
    """Returns a transfer service's statistics, even while its main process is stopped."""
    asked = kv_transfer_pb2.LocalRequest(call_id=1, stats=kv_transfer_pb2.LocalStats())
    return _answer(main, asked).statistics


def segment(main: psutil.Process) -> str:
    """Returns the file name of the segment of a worker's transfer service."""
    asked = kv_transfer_pb2.LocalRequest(call_id=1, describe=kv_transfer_pb2.LocalDescribe())
    return _answer(main, asked).configured.shm_name


def _answer(
    main: psutil.Process, asked: kv_transfer_pb2.LocalRequest
) -> kv_transfer_pb2.LocalReply:
    unpacker = local_wire.Unpacker()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(control_socket(main))
        connection.sendall(local_wire.encode(asked))
        while data := connection.recv(2**16):
            for message in unpacker.feed(data):
                return kv_transfer_pb2.LocalReply.FromString(message)
    raise AssertionError(f"the transfer service of {main} has ended")


async def released(main: psutil.Process, within_s: float) -> None:
    """Raises AssertionError unless a worker's staging is soon free and no handoff is live."""
    deadline = time.monotonic() + within_s
    while _held(seen := staging(main)):
        assert time.monotonic() < deadline, f"{main} still holds {seen}"
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stops processes like kill -STOP, and continues those that still live afterwards."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def forgotten_by(main: psutil.Process, within_s: float) -> None:
    """Raises AssertionError unless a worker soon unmaps segments of ended services."""
    deadline = time.monotonic() + within_s
    service = transfer_service(main)
    while left := [name for name in _mapped(service) if SEGMENT in name and DELETED in name]:
        assert time.monotonic() < deadline, f"{main} still maps {left}"
        await asyncio.sleep(0.05)


class Remains:
    """A worker's processes, its segments in shared memory and its directory."""

    def __init__(self, main: psutil.Process) -> None:
        self._processes = family(main)
        self._files = {Path(control_socket(main)).parent, Path(SHARED_MEMORY + segment(main))}
        for process in self._processes:
            # Segments of other services are left out.
            mapped = (name for name in _mapped(process) if not name.startswith(SEGMENT))
            self._files.update(Path(SHARED_MEMORY + name) for name in mapped if DELETED not in name)

    async def gone(self) -> None:
        """Raises AssertionError unless all of them are soon gone."""
        left: list[object] = ["never looked"]
        try:
            async with asyncio.timeout(GONE_TIMEOUT_S):
                while left := [*filter(_lives, self._processes), *filter(Path.exists, self._files)]:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"left behind: {left}") from None


def _mapped(process: psutil.Process) -> Iterator[str]:
    """Returns the names of the shared memory files that a process maps."""
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        _, separator, name = line.partition(SHARED_MEMORY)
        if separator:
            yield name


def _held(seen: kv_transfer_pb2.LocalStatistics) -> int:
    return seen.send_bytes_used + seen.receive_bytes_used + seen.num_sends + seen.num_receives


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
