"""What HTTP and TLS cost: the gateway's streams beside those of a gRPC session, in the same run.

`python -m baton.bench.gateway_cost --help`. The gateway has a core to itself; the coordinator,
workers with prepared answers (cost_worker.py) and the client share the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import psutil
import uvloop
import yaml

from baton.bench import stats, systems
from baton.bench.coordinator_cost import MAX_OTHERS, MAX_TRIES, SETTLE_S, pinned, progress, ready
from baton.bench.cost_answers import MODEL
from baton.bench.cost_client import Client, Loop, Seen, SessionClient
from baton.bench.cost_http import HttpClient
from baton.bench.stats import Reach
from baton.runtime import dev_certs
from baton.runtime.dial import PLAIN, Dial
from baton.runtime.tls import TlsFiles

GRPC, HTTP = "gRPC session", "HTTP, SSE"
# The same with TLS between all of them.
GRPC_TLS, HTTP_TLS = f"{GRPC}, TLS", f"{HTTP}, TLS"
NUM_REQUESTS = 64
MAX_GATEWAY_CPU_MS, MAX_ADDED_P50_MS, MAX_ADDED_P99_MS = 30.0, 2.0, 10.0
COLUMNS = {
    "tokens_per_s": ("tokens/s", ",.0f"),
    "gateway_cpu_ms": ("gateway", ".2f"),
    "coordinator_cpu_ms": ("coordinator", ".2f"),
    "ttft_p50_ms": ("TTFT p50", ".2f"),
    "ttft_p99_ms": ("TTFT p99", ".2f"),
    "itl_p50_ms": ("ITL p50", ".2f"),
    "itl_p99_ms": ("ITL p99", ".2f"),
    "gateway_mb": ("gateway MB", ".0f"),
    "others": ("others", ".2f"),
}
NOTE = """\
Gateway and coordinator: CPU ms per 1,000 tokens, all threads; "others" are cores that processes
took which are no part of this. TTFT and ITL in ms, as the client sees them. Each request's next
follows its last."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, or the medians of some; times in ms, CPU per 1,000 tokens."""

    tokens_per_s: float
    gateway_cpu_ms: float
    coordinator_cpu_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    gateway_mb: float
    others: float


class Meter:
    """Processor seconds and what the client saw, from when it is made."""

    def __init__(self, client: Client, gateway: int, coordinator: int, worker: int) -> None:
        self._client = client
        self._processes = [psutil.Process(one) for one in (gateway, coordinator, worker)]
        self._processes.append(psutil.Process(os.getpid()))
        client.seen = Seen()
        self._began_at = time.perf_counter()
        self._before = self._used_s()

    def stop(self) -> Figures:
        elapsed_s = time.perf_counter() - self._began_at
        gateway_s, coordinator_s, worker_s, client_s, all_s = (
            now - before for now, before in zip(self._used_s(), self._before, strict=True)
        )
        seen, own_s = self._client.seen, gateway_s + coordinator_s + worker_s + client_s
        num_tokens = max(1, seen.num_tokens)
        return Figures(
            tokens_per_s=seen.num_tokens / elapsed_s,
            gateway_cpu_ms=gateway_s * 1e6 / num_tokens,
            coordinator_cpu_ms=coordinator_s * 1e6 / num_tokens,
            ttft_p50_ms=stats.percentile(seen.ttfts_s, 50) * 1e3,
            ttft_p99_ms=stats.percentile(seen.ttfts_s, 99) * 1e3,
            itl_p50_ms=stats.percentile(seen.gaps_s, 50) * 1e3,
            itl_p99_ms=stats.percentile(seen.gaps_s, 99) * 1e3,
            gateway_mb=self._processes[0].memory_info().rss / 1e6,
            others=max(0.0, all_s - own_s) / elapsed_s,
        )

    def _used_s(self) -> list[float]:
        found = []
        for process in self._processes:
            times = process.cpu_times()
            found.append(float(times.user + times.system))
        everything = psutil.cpu_times()
        return [*found, sum(everything) - everything.idle - everything.iowait]


@dataclass(frozen=True, slots=True)
class System:
    """Processes that serve, with TLS (`ca_file`) or without."""

    coordinator: systems.Process
    gateway: systems.Process
    worker: systems.Process
    url: str
    ca_file: str

    def client(
        self, path: str, num_requests: int, num_prompt_tokens: int, num_tokens: int
    ) -> Client:
        """That asks over one path: GRPC, HTTP and so on."""
        if path in (GRPC, GRPC_TLS):
            dial = Dial(TlsFiles(self.ca_file)) if self.ca_file else PLAIN
            address = self.coordinator.address
            return SessionClient(address, num_requests, num_prompt_tokens, num_tokens, dial)
        context = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None
        return HttpClient(self.url, num_prompt_tokens, num_tokens, context)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs have in common; `cores` are the gateway's."""

    cores: set[int]
    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    step_ms: float
    seconds: float

    async def run(self, num_repeats: int, *, with_tls: bool) -> dict[str, Figures]:
        runs: dict[str, list[Figures]] = {GRPC: [], HTTP: []}
        async with contextlib.AsyncExitStack() as stack:
            plain = await stack.enter_async_context(self._system({}))
            systems_of = dict.fromkeys(runs, plain)
            if with_tls:
                directory = stack.enter_context(tempfile.TemporaryDirectory())
                secured = await stack.enter_async_context(self._system(certificates(directory)))
                runs |= {GRPC_TLS: [], HTTP_TLS: []}
                systems_of |= {GRPC_TLS: secured, HTTP_TLS: secured}
            for repeat in range(num_repeats):
                for path, figures in runs.items():
                    tries: list[Figures] = []
                    while len(tries) < MAX_TRIES:
                        tries.append(await self._measure(path, systems_of[path]))
                        if tries[-1].others <= MAX_OTHERS:
                            break
                    figures.append(min(tries, key=lambda one: one.others))
                    progress(f"{repeat + 1} of {num_repeats}: {path}")
        return {
            path: Figures(
                *(stats.median(values) for values in zip(*map(astuple, figures), strict=True))
            )
            for path, figures in runs.items()
        }

    @contextlib.asynccontextmanager
    async def _system(self, security: dict[str, str]) -> AsyncIterator[System]:
        """Coordinator, gateway and worker; with TLS where `security` names certificates."""
        config = {
            "model": "demo",
            "served_model_name": MODEL,
            "engine": "simulated",
            "log_level": "warning",
            "prefill": {"max_requests_per_worker": self.num_requests},
            "decode": {"max_requests_per_worker": self.num_requests},
            "security": security,
        }
        ca_file = security.get("ca_file", "")
        with contextlib.ExitStack() as stack:
            coordinator = stack.enter_context(systems.coordinator(config))
            await ready(coordinator)
            arguments = ["--tokens", f"{self.num_tokens}", "--step-ms", f"{self.step_ms}"]
            arguments += ["--coordinator", coordinator.address, "--tls-ca", ca_file]
            arguments += ["--requests", f"{self.num_requests}"]
            worker = stack.enter_context(systems.module("baton.bench.cost_worker", arguments))
            await ready(worker)
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
            yaml.safe_dump({"security": security}, file)
            file.flush()
            arguments = ["gateway", "--coordinator", coordinator.address]
            arguments += ["--listen", "127.0.0.1:0", "--config", file.name]
            with pinned(self.cores):
                gateway = stack.enter_context(systems.module("baton.cli.main", arguments))
            await ready(gateway)
            told = re.search(r"ready http=(\S+)", gateway.log.read_text())
            assert told is not None
            yield System(coordinator, gateway, worker, told[1], ca_file)

    async def _measure(self, path: str, system: System) -> Figures:
        pids = [one.popen.pid for one in (system.gateway, system.coordinator, system.worker)]
        client = system.client(path, self.num_requests, self.num_prompt_tokens, self.num_tokens)
        spread_s = self.step_ms / 1e3 * self.num_tokens
        try:
            async with Loop(client, self.num_requests, spread_s) as loop:
                await loop.run(spread_s + SETTLE_S)
                meter = Meter(client, *pids)
                await loop.run(self.seconds)
                return meter.stop()
        finally:
            await client.close()


def certificates(directory: str) -> dict[str, str]:
    """A `security` section with certificates made there."""
    dev_certs.make(directory)
    names = {"ca_file": "ca.pem", "cert_file": "server.pem", "key_file": "server.key"}
    return {key: str(Path(directory) / name) for key, name in names.items()}


def reaches(found: dict[str, Figures]) -> list[Reach]:
    grpc, http = found[GRPC], found[HTTP]
    added_p50 = http.ttft_p50_ms - grpc.ttft_p50_ms
    added_p99 = http.ttft_p99_ms - grpc.ttft_p99_ms
    return [
        Reach("TTFT p50 over gRPC", added_p50, MAX_ADDED_P50_MS, " ms"),
        Reach("TTFT p99 over gRPC", added_p99, MAX_ADDED_P99_MS, " ms"),
        Reach(
            "CPU of the gateway per 1,000 tokens", http.gateway_cpu_ms, MAX_GATEWAY_CPU_MS, " ms"
        ),
    ]


def show(found: dict[str, Figures], num_requests: int) -> None:
    rows = [
        [path, *(format(getattr(figures, name), how) for name, (_, how) in COLUMNS.items())]
        for path, figures in found.items()
    ]
    header = ["", *(name for name, _ in COLUMNS.values())]
    stats.print_table(f"{num_requests} streams at once", header, rows)
    print(NOTE)
    stats.print_reaches(reaches(found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="medians are shown")
    parser.add_argument("--no-tls", dest="tls", action="store_false", help="leave TLS out")
    parser.add_argument("--quick", action="store_true", help="two seconds, once")
    parser.add_argument("--json", type=Path, default=Path("bench/results/gateway_cost.json"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.repeats = 2.0, 1
    return arguments


def main() -> None:
    arguments = parsed()
    # Ends as Ctrl-C does: what was started is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    *rest, last = sorted(os.sched_getaffinity(0))
    # gRPC's threads are not there yet: they will run where this one does.
    os.sched_setaffinity(0, set(rest) or {last})
    bench = Bench(
        {last},
        arguments.requests,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.itl_ms,
        arguments.seconds,
    )
    found = uvloop.run(bench.run(arguments.repeats, with_tls=arguments.tls))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results = {path: asdict(figures) for path, figures in found.items()}
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    show(found, arguments.requests)
    print(f"{time.monotonic() - started:.0f} s; figures in {arguments.json}")


if __name__ == "__main__":
    main()
