"""Measures transfer services with every transport, compared with NIXL and memcpy.

`python -m baton.bench.transport --help`. Real services move synthetic KV caches; one process plays
both engines (see transport_driver.py). The receiver's service verifies every byte, and this process
reads all bytes of some handoffs again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.bench import bare_stream, copies, interrupts, nixl_transfer
from baton.bench.copies import CopyCounter
from baton.bench.transport_driver import (
    GB,
    HANDOFF_TIMEOUT_S,
    SHAPES,
    STAGED_HANDOFFS,
    Driver,
    Run,
    Shape,
    write_content,
)
from baton.kvtransfer import arena, loopback
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.frames import FRAME_TARGET_BYTES
from baton.load import stats
from baton.runtime.config import KvTransferConfig

TRANSPORTS = ("shm", "nixl", "gloo", "grpc")
RATES_GB_S = (0.5, 1.0, 2.0, 4.0)
# Handoffs in flight in a paced engine: one in prefill, one opening, one committing.
PACED_HANDOFFS = 3
# Combinations of concurrent handoffs and connections for the runs at full speed.
GRPC_STREAMS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4))
STAGING_BYTES = 1280 * 2**20
MEMCPY_REPEATS = 5
# Message sizes for which gRPC's own copies are counted; the last one is the size of a frame.
MESSAGE_BYTES = (2**14, 2**16, FRAME_TARGET_BYTES)
# A core counts as fully used from this share of its time on.
FULL = 0.9


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings that all runs share.

    Attributes:
        directory: Directory of the services' sockets.
        staging_bytes: Size of each staging segment.
        seconds: Smallest duration of a run.
        memcpy_gb_s: Speeds of memcpy, measured before each pair of services starts, so that the
            state of the machine is similar.
    """

    directory: Path
    staging_bytes: int
    seconds: float
    memcpy_gb_s: list[float] = field(default_factory=list)

    async def measure(
        self,
        transport: str,
        shape: Shape,
        plans: Sequence[tuple[float | None, int]],
        *,
        grpc_connections: int = 1,
    ) -> list[Run]:
        """Makes a run for each (rate, streams), one after the other, with the same services."""
        common = {
            "transports": [transport],
            "grpc_connections": grpc_connections,
            "open_timeout_s": HANDOFF_TIMEOUT_S,
        }
        sending = KvTransferConfig(send_bytes=self.staging_bytes, receive_bytes=2**20, **common)
        receiving = KvTransferConfig(send_bytes=2**20, receive_bytes=self.staging_bytes, **common)
        self.memcpy_gb_s.extend(memcpy_gb_s(shape.handoff_bytes, MEMCPY_REPEATS))
        async with loopback.pair(sending, receiving, self.directory, shape.layout) as workers:
            driver = Driver(*workers, shape, transport)
            try:
                # Warm-up: touches every page of both segments, computes the checksums, and opens
                # the connections.
                await driver.run(None, STAGED_HANDOFFS, 0)
                return [
                    await driver.run(rate_gb_s, streams, self.seconds)
                    for rate_gb_s, streams in plans
                ]
            finally:
                driver.close()

    async def copies(
        self, transport: str, shape: Shape, counter: CopyCounter
    ) -> tuple[float, float]:
        """Returns copied bytes per moved byte for the sender's and the receiver's service."""
        config = KvTransferConfig(
            send_bytes=shape.handoff_bytes,
            receive_bytes=shape.handoff_bytes,
            transports=[transport],
            grpc_connections=1,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(copies.in_environment(counter.environment))
            workers = await stack.enter_async_context(
                loopback.pair(config, config, self.directory, shape.layout)
            )
            driver = Driver(*workers, shape, transport)
            stack.callback(driver.close)
            await driver.run(None, 1, 0)
            pids = [worker.client.pid for worker in workers]
            before = [counter.copied_bytes(pid) for pid in pids]
            run = await driver.run(None, 1, self.seconds / 2)
            sent, received = (
                (counter.copied_bytes(pid) - count) / run.num_bytes
                for pid, count in zip(pids, before, strict=True)
            )
            return sent, received


def memcpy_gb_s(handoff_bytes: int, repeats: int) -> list[float]:
    """Returns speeds of one thread that copies frames from one shared mapping to another."""
    source, target = mmap.mmap(-1, handoff_bytes), mmap.mmap(-1, handoff_bytes)
    speeds = []
    with memoryview(source) as reading, memoryview(target) as writing:
        write_content(reading)
        writing[:] = reading
        for _ in range(repeats):
            started = time.perf_counter()
            for start in range(0, handoff_bytes, FRAME_TARGET_BYTES):
                end = start + FRAME_TARGET_BYTES
                writing[start:end] = reading[start:end]
            speeds.append(handoff_bytes / GB / (time.perf_counter() - started))
    source.close()
    target.close()
    return speeds


async def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    staging_bytes = min(STAGING_BYTES, arena.free_shared_bytes() * 2 // 5)
    shapes = [SHAPES[name].fitting(staging_bytes) for name in arguments.shapes]
    main, seconds = shapes[0], arguments.seconds
    results: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "handoffs": {each.name: each.handoff_bytes for each in shapes},
        "nixl": {},
        "copies": {},
        "bare_copies": {},
        "failed": {},
    }
    paced: list[Run] = []
    flat: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        bench = Bench(Path(name), staging_bytes, seconds)
        plans = [*((rate, PACED_HANDOFFS) for rate in arguments.rates), (None, 1)]
        for transport in arguments.transports:
            try:
                for shape in shapes:
                    *at_rates, flat_out = await bench.measure(transport, shape, plans)
                    paced += at_rates
                    flat.append(flat_out)
            except* TransferError as errors:
                results["failed"][transport] = str(errors.exceptions[0])
        working = [each for each in arguments.transports if each not in results["failed"]]
        streams = []
        if "grpc" in working:
            for connections in sorted({connections for _, connections in GRPC_STREAMS}):
                many = [(None, each) for each, over in GRPC_STREAMS if over == connections]
                runs = await bench.measure("grpc", main, many, grpc_connections=connections)
                streams += [{"connections": connections, **run.figures()} for run in runs]
        with copies.compiled() as counter:
            if counter is not None:
                for transport in working:
                    results["copies"][transport] = await bench.copies(transport, main, counter)
                for size in MESSAGE_BYTES:
                    bare = await bare_stream.received_copies(counter, size)
                    results["bare_copies"][size] = bare
    if arguments.nixl:
        for name, ucx in (("NIXL", "all"), ("NIXL over TCP", "tcp")):
            moved = nixl_transfer.measure(main.handoff_bytes, FRAME_TARGET_BYTES, seconds, ucx)
            results["nixl"][name] = {**asdict(moved), "gb_s": moved.num_bytes / GB / moved.wall_s}
    results["memcpy_gb_s"] = stats.median(bench.memcpy_gb_s)
    results["paced"] = [run.figures() for run in paced]
    results["flat"] = [run.figures() for run in flat]
    results["streams"] = streams
    results["reaches"] = goals(results, main.name)
    return results


def goals(results: dict[str, Any], shape: str) -> list[dict[str, Any]]:
    """Returns the goals with their measured values and whether they are reached."""
    speed = {run["transport"]: run["gb_s"] for run in results["flat"] if run["shape"] == shape}
    made: list[dict[str, Any]] = []

    def add(what: str, seen: float, reach: str, reached: bool) -> None:
        made.append({"what": what, "seen": seen, "reach": reach, "reached": reached})

    for transport in results["failed"]:
        add(f"{transport}, handoffs that failed", 1, "none", False)
    if "shm" in speed:
        share = speed["shm"] / results["memcpy_gb_s"]
        add("shm / memcpy", share, "at least 0.5", share >= 0.5)
    if "shm" in speed and "grpc" in speed:
        times = speed["shm"] / speed["grpc"]
        add("shm / grpc", times, "at least 3", times >= 3)
    if results["streams"]:
        one, *more = results["streams"]
        add("grpc, one stream, GB/s", one["gb_s"], "at least 1", one["gb_s"] >= 1)
        for run in more:
            what = f"grpc, {run['streams']} handoffs by {run['connections']} connections / one"
            times, core, machine = run["gb_s"] / one["gb_s"], *_cores(run)
            reach = f"1.1, or a core or all full ({core:.2f}, {machine:.2f})"
            full = core >= FULL or machine >= FULL * results["cores"]
            add(what, times, reach, times >= 1.1 or full)
    for transport, (sent, received) in results["copies"].items():
        if transport == "grpc":
            worse = max(sent, received)
            add("grpc, copies per byte, worse side", worse, "at most 2", worse < 2.05)
    return made


def _cores(run: dict[str, Any]) -> tuple[float, float]:
    """Returns the cores used by the busier service, and by all processes of the run."""
    cpu_s = [run[f"{who}_cpu_s"] for who in ("sender", "receiver", "driver")]
    return max(cpu_s[:2]) / run["wall_s"], sum(cpu_s) / run["wall_s"]


def show(results: dict[str, Any]) -> None:
    for shape, handoff_bytes in results["handoffs"].items():
        rows = [
            [
                run["transport"],
                f"{run['rate_gb_s']:g}",
                f"{run['gb_s']:.2f}",
                f"{run['exposed_p50_ms']:.1f}",
                f"{run['exposed_p95_ms']:.1f}",
                *(f"{run[f'{who}_cpu_s_per_gb']:.2f}" for who in ("sender", "receiver", "driver")),
                f"{run['num_verified']} of {run['num_handoffs']}",
            ]
            for run in results["paced"]
            if run["shape"] == shape
        ]
        header = ["transport", "made GB/s", "moved GB/s", "exposed p50 ms", "p95 ms"]
        header += ["sender CPU s/GB", "receiver", "driver", "read again"]
        title = f"{shape}, handoffs of {handoff_bytes / 2**20:.0f} MiB, made at a set rate"
        stats.print_table(title, header, rows)
    memcpy = results["memcpy_gb_s"]
    rows = [["memcpy, one thread", "", f"{memcpy:.2f}", "1.00", "", "", "", ""]]
    for name, moved in results["nixl"].items():
        cpu = [moved[f"{who}_cpu_s"] / moved["num_bytes"] * GB for who in ("sender", "receiver")]
        speed = [f"{moved['gb_s']:.2f}", f"{moved['gb_s'] / memcpy:.2f}"]
        rows.append([name, "", *speed, *(f"{each:.2f}" for each in cpu), "", ""])
    for run in results["flat"]:
        counted = results["copies"].get(run["transport"], (math.nan, math.nan))
        cpu = [run[f"{who}_cpu_s_per_gb"] for who in ("sender", "receiver")]
        speed = [f"{run['gb_s']:.2f}", f"{run['gb_s'] / memcpy:.2f}"]
        figures = [*speed, *(f"{each:.2f}" for each in (*cpu, *counted))]
        rows.append([run["transport"], run["shape"], *figures])
    header = ["flat out, one handoff at a time", "shape", "GB/s", "/ memcpy", "sender CPU s/GB"]
    header += ["receiver", "copies per byte, sender", "receiver"]
    stats.print_table("Every path (copies: user space, those of 1 KiB and more)", header, rows)
    if results["bare_copies"]:
        rows = [[f"{size:,}", f"{bare:.2f}"] for size, bare in results["bare_copies"].items()]
        title = "Copies by gRPC itself before a handler gets the message"
        stats.print_table(title, ["bytes per message", "copies per byte"], rows)
    if results["streams"]:
        rows = [
            [f"{run['streams']}", f"{run['connections']}", f"{run['gb_s']:.2f}"]
            + [f"{run[f'{who}_cpu_s'] / run['wall_s']:.2f}" for who in ("sender", "receiver")]
            for run in results["streams"]
        ]
        header = ["handoffs at a time", "connections", "GB/s", "sender's cores", "receiver's cores"]
        stats.print_table("gRPC, flat out", header, rows)
    for transport, detail in results["failed"].items():
        print(f"{transport} did not work: {detail}")
    rows = [
        [each["what"], f"{each['seen']:.2f}", each["reach"], "yes" if each["reached"] else "no"]
        for each in results["reaches"]
    ]
    if rows:
        stats.print_table("Goals", ["what", "seen", "goal", "reached"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES)[:2])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=RATES_GB_S, help="GB/s at which KV is made"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="smallest duration of a run")
    parser.add_argument(
        "--no-nixl", dest="nixl", action="store_false", help="measure nothing that needs NIXL"
    )
    parser.add_argument("--quick", action="store_true", help="half a second per run")
    parser.add_argument("--json", type=Path, default=Path("bench/results/transport.json"))
    arguments = parser.parse_args()
    interrupts.on_sigterm()
    if arguments.nixl:
        nixl_transfer.require(parser)
    else:
        arguments.transports = [each for each in arguments.transports if each != "nixl"]
    if arguments.quick:
        arguments.seconds = 0.5
    # gRPC would log every closed connection, which is no error here.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    started = time.monotonic()
    results = asyncio.run(run_all(arguments))
    stats.save(results, arguments.json)
    show(results)
    print(f"{time.monotonic() - started:.0f} s; figures in {arguments.json}")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
