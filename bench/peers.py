"""Measures the CPU cost of front ends of other projects and of Baton's, with the same streams.

`python -m baton.bench.peers --peer sglang-router=VENV --peer smg=VENV --peer vllm-router=VENV`.
Each VENV is a virtual environment in which the package of that name is installed (`pip install
sglang-router smg vllm-router`). `--peer dynamo=VENV` needs ai-dynamo and ai-dynamo-runtime. No peer
is a requirement of Baton.

Every front end has one prefill and one decode engine behind it that answer from memory at the same
pace: sse_engine.py over HTTP, and cost_worker.py behind Baton's coordinator. Dynamo has its own
simulated engines, whose pace depends on the number of streams (--dynamo-speedup). The front ends
take turns with the same load. Baton's cost is that of gateway and coordinator together. The routers
pass on the bytes of an engine that speaks HTTP; Baton and Dynamo render tokens of an engine, and
Baton's coordinator schedules them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop

from baton import __version__
from baton.bench import interrupts, systems
from baton.bench.coordinator_cost import SETTLE_S, progress, ready
from baton.bench.cost_answers import MODEL
from baton.bench.cost_client import Loop, Seen
from baton.bench.cost_http import HttpClient, HttpRoute
from baton.bench.cost_system import Load, serving
from baton.load import stats
from baton.runtime import demo_model

BATON = "Baton, gateway and coordinator"
# Text, because the routers take no token IDs with separate prefill and decode servers.
PROMPT = "What does a front end cost? " * 16
ROUTE = HttpRoute(
    "/v1/completions",
    b'" tok"',
    "max_tokens",
    {"model": MODEL, "prompt": PROMPT, "ignore_eos": True},
)
START_TIMEOUT_S, READY_TRY_S, POLL_S = 300.0, 10.0, 0.5


@dataclass(frozen=True, slots=True)
class Router:
    """A peer's command line.

    Attributes:
        program: Path in the virtual environment and first arguments.
        split: Flag that turns on separate prefill and decode servers.
        has_bootstrap_port: Whether --prefill takes a second port.
        log_level: Name of the log level that logs no requests.
    """

    program: tuple[str, ...]
    split: str
    has_bootstrap_port: bool
    log_level: str = "warn"

    def command(self, venv: Path, port: int, prefill: int, decode: int) -> list[str]:
        path, *rest = self.program
        found = [str(venv / "bin" / path), *rest, "--host", "127.0.0.1", "--port", f"{port}"]
        found += ["--prometheus-host", "127.0.0.1", "--prometheus-port", f"{systems.free_port()}"]
        found += ["--log-level", self.log_level, "--policy", "round_robin", self.split]
        found += ["--prefill", f"http://127.0.0.1:{prefill}"]
        if self.has_bootstrap_port:
            found.append(f"{systems.free_port()}")
        return [*found, "--decode", f"http://127.0.0.1:{decode}"]


ROUTERS: dict[str, Router] = {
    "sglang-router": Router(
        ("python", "-m", "sglang_router.launch_router"), "--pd-disaggregation", True
    ),
    "smg": Router(("smg", "launch"), "--pd-disaggregation", True),
    "vllm-router": Router(("vllm-router",), "--vllm-pd-disaggregation", False, "warning"),
}


DYNAMO, NAMES = "dynamo", (*ROUTERS, "dynamo")
# Packages by the name of a peer, where the names differ.
PACKAGES = {DYNAMO: "ai-dynamo"}
# A chunk with a text; the last chunk of a stream has none.
DYNAMO_ROUTE = replace(ROUTE, token=b'"index":0}]')
DYNAMO_ENVIRONMENT = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_LOG": "warn",
    "DYN_SELF_HOST_METADATA": "0",
    "HF_HUB_OFFLINE": "1",
    **dict.fromkeys(
        (
            "DYN_TCP_RPC_HOST",
            "DYN_EVENT_PLANE_HOST",
            "DYN_TCP_RESPONSE_STREAM_HOST",
            "DYN_SYSTEM_HOST",
        ),
        "127.0.0.1",
    ),
}


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A running front end.

    Attributes:
        url: Its URL.
        pids: Processes whose CPU time counts.
        route: Route of the requests.
    """

    url: str
    pids: Sequence[int]
    route: HttpRoute = ROUTE


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, or medians of several runs; CPU in ms per 1,000 tokens."""

    cpu_ms: float
    tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    resident_mb: float


COLUMNS = {
    "cpu_ms": ("CPU ms / 1,000 tokens", ".1f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "ttft_p50_ms": ("TTFT p50", ".1f"),
    "itl_p50_ms": ("ITL p50", ".1f"),
    "itl_p99_ms": ("ITL p99", ".1f"),
    "resident_mb": ("MB", ".0f"),
}


@contextlib.asynccontextmanager
async def routed(name: str, venv: Path, step_ms: float) -> AsyncIterator[FrontEnd]:
    """Starts a router with its two engines; yields when a request through it succeeds."""
    port, prefill, decode = (systems.free_port() for _ in range(3))
    with contextlib.ExitStack() as stack:
        for role, at in (("prefill", prefill), ("decode", decode)):
            arguments = ["--port", f"{at}", "--role", role, "--step-ms", f"{step_ms}"]
            await ready(stack.enter_context(systems.module("baton.bench.sse_engine", arguments)))
        command = ROUTERS[name].command(venv, port, prefill, decode)
        process = stack.enter_context(systems.command(command))
        url = f"http://127.0.0.1:{port}"
        await _answering(url, process, ROUTE)
        yield FrontEnd(url, _family(process))


@contextlib.asynccontextmanager
async def dynamo(venv: Path, most_requests: int, speedup: float) -> AsyncIterator[FrontEnd]:
    """Starts Dynamo's front end, and one prefill and one decode process of its mocker."""
    port, python = systems.free_port(), str(venv / "bin" / "python")
    engine = [python, "-m", "dynamo.mocker", "--model-path", demo_model.ensure(demo_model.GLOSSARY)]
    engine += ["--model-name", MODEL, "--max-num-seqs", f"{most_requests}"]
    engine += ["--num-gpu-blocks-override", "65536", "--speedup-ratio", f"{speedup}"]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        environment = {**DYNAMO_ENVIRONMENT, "DYN_FILE_KV": directory}
        command = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", f"{port}"]
        process = stack.enter_context(systems.command(command, **environment))
        for role in ("decode", "prefill"):
            arguments = [*engine, "--disaggregation-mode", role]
            stack.enter_context(systems.command(arguments, **environment))
        url = f"http://127.0.0.1:{port}"
        await _answering(url, process, DYNAMO_ROUTE)
        yield FrontEnd(url, _family(process), DYNAMO_ROUTE)


def _family(process: systems.Process) -> list[int]:
    main = psutil.Process(process.popen.pid)
    return [main.pid, *(one.pid for one in main.children(recursive=True))]


@contextlib.asynccontextmanager
async def baton(load: Load) -> AsyncIterator[FrontEnd]:
    async with serving(load, os.sched_getaffinity(0), {}) as system:
        gateway, coordinator, _ = system.pids
        yield FrontEnd(system.url, [gateway, coordinator])


async def _answering(url: str, process: systems.Process, route: HttpRoute) -> None:
    """Waits until a request succeeds."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        client = HttpClient(url, 0, 2, route=route)
        try:
            async with asyncio.timeout(READY_TRY_S):
                await client.request(0)
            return
        except (OSError, RuntimeError, TimeoutError):
            # Until the engines are known, requests are refused.
            pass
        finally:
            await client.close()
        if process.popen.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.popen.args!r}: did not start")
        await asyncio.sleep(POLL_S)


async def measure(front_end: FrontEnd, load: Load, seconds: float) -> Figures:
    client = HttpClient(front_end.url, 0, load.num_tokens, route=front_end.route)
    processes = [psutil.Process(pid) for pid in front_end.pids]
    spread_s = load.step_ms / 1e3 * load.num_tokens

    def cpu_s() -> float:
        times = [process.cpu_times() for process in processes]
        return float(sum(one.user + one.system for one in times))

    try:
        async with Loop(client, load.num_requests, spread_s) as loop:
            await loop.run(spread_s + SETTLE_S)
            client.seen = seen = Seen()
            began_at, before = time.perf_counter(), cpu_s()
            await loop.run(seconds)
            used_s, elapsed_s = cpu_s() - before, time.perf_counter() - began_at
            memory_bytes = sum(process.memory_info().rss for process in processes)
    finally:
        await client.close()
    return Figures(
        used_s * 1e6 / max(1, seen.num_tokens),
        seen.num_tokens / elapsed_s,
        stats.percentile(seen.ttfts_s, 50) * 1e3,
        stats.percentile(seen.gaps_s, 50) * 1e3,
        stats.percentile(seen.gaps_s, 99) * 1e3,
        memory_bytes / 1e6,
    )


async def run(
    peers: Mapping[str, Path],
    loads: Sequence[Load],
    seconds: float,
    num_repeats: int,
    speedup: float,
) -> dict[int, dict[str, Figures]]:
    """Returns the medians by number of requests at a time and front end."""
    most = max(loads, key=lambda load: load.num_requests)
    async with contextlib.AsyncExitStack() as stack:
        running = {BATON: await stack.enter_async_context(baton(most))}
        for name, venv in peers.items():
            starting = (
                dynamo(venv, most.num_requests, speedup)
                if name == DYNAMO
                else routed(name, venv, most.step_ms)
            )
            running[name] = await stack.enter_async_context(starting)
        runs: dict[int, dict[str, list[Figures]]] = {
            load.num_requests: {name: [] for name in running} for load in loads
        }
        for repeat in range(num_repeats):
            for load in loads:
                for name, front_end in running.items():
                    figures = await measure(front_end, load, seconds)
                    runs[load.num_requests][name].append(figures)
                    progress(f"{repeat + 1} of {num_repeats}: {name}, {load.num_requests} streams")
    return {
        num_requests: {name: stats.medians(found) for name, found in by_name.items()}
        for num_requests, by_name in runs.items()
    }


def version(name: str, venv: Path) -> str:
    """Returns the version of the installed package of a peer."""
    code = f"import importlib.metadata as m; print(m.version({PACKAGES.get(name, name)!r}))"
    command = [str(venv / "bin" / "python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def show(found: Mapping[int, Mapping[str, Figures]], versions: Mapping[str, str]) -> None:
    header = ["", "version", *(name for name, _ in COLUMNS.values())]
    for num_requests, by_name in found.items():
        rows = [
            [
                name,
                versions[name],
                *(format(getattr(one, field), how) for field, (_, how) in COLUMNS.items()),
            ]
            for name, one in by_name.items()
        ]
        stats.print_table(f"{num_requests} streams at once; latencies in ms", header, rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=VENV",
        help=f"NAME is one of {', '.join(NAMES)}; repeat for each peer",
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256], help="concurrency")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument(
        "--dynamo-speedup", type=float, default=0.1, help="speed of Dynamo's simulated GPU"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs per case; prints medians")
    parser.add_argument("--json", type=Path, default=Path("bench/results/peers.json"))
    arguments = parser.parse_args()
    peers: dict[str, Path] = {}
    for one in arguments.peer:
        name, _, venv = one.partition("=")
        if name not in NAMES:
            parser.error(f"--peer: is {one!r}; must be NAME=VENV; names are {', '.join(NAMES)}")
        if not (Path(venv) / "bin" / "python").exists():
            parser.error(f"--peer: {venv!r} is no virtual environment")
        peers[name] = Path(venv).absolute()
    arguments.peers = peers
    return arguments


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    versions = {name: version(name, venv) for name, venv in arguments.peers.items()}
    versions[BATON] = __version__
    loads = [
        Load(count, 0, arguments.output_tokens, arguments.itl_ms) for count in arguments.requests
    ]
    found = uvloop.run(
        run(
            arguments.peers,
            loads,
            arguments.seconds,
            arguments.repeats,
            arguments.dynamo_speedup,
        )
    )
    as_json: dict[str, Any] = {
        f"{num_requests}": {name: asdict(one) for name, one in by_name.items()}
        for num_requests, by_name in found.items()
    }
    stats.save({"versions": versions, "figures": as_json}, arguments.json)
    show(found, versions)
    print(f"figures in {arguments.json}")


if __name__ == "__main__":
    main()
