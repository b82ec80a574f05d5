"""Measures the cost of HTTP, TLS and tracing, each compared with a run without it.

`python -m baton.bench.gateway_cost --help`. The gateway has a core to itself. The coordinator,
workers with prepared answers (cost_worker.py) and the client share the other cores. All arms run in
turn with the same load. Spans go to a process that discards them (otlp_sink.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from baton.bench import interrupts
from baton.bench.coordinator_cost import MAX_OTHERS, MAX_TRIES, SETTLE_S, progress
from baton.bench.cost_client import Loop
from baton.bench.cost_http import COMPLETIONS, MESSAGES, RESPONSES, TOOLS, HttpRoute
from baton.bench.cost_system import Figures, Load, Meter, System, certificates, serving, spans_sink
from baton.load import stats
from baton.load.stats import Goal

PLAIN, TLS, TRACING = "plain", "TLS", "tracing"
NUM_REQUESTS = 64
MAX_GATEWAY_CPU_MS, MAX_ADDED_P50_MS, MAX_ADDED_P99_MS = 30.0, 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to send requests.

    Attributes:
        system: Processes that serve: PLAIN, TLS (between all processes) or TRACING (spans are
            exported).
        route: Route of the gateway; None: requests go through a gRPC session.
        traced: Whether every request carries a sampled traceparent. Without it, TRACING uses tail
            sampling: the coordinator keeps the spans of failed requests, of the slowest requests,
            and of 1 % of the others.
    """

    name: str
    system: str
    route: HttpRoute | None = None
    traced: bool = False


GRPC, HTTP = Arm("gRPC session", PLAIN), Arm("HTTP, SSE", PLAIN, route=COMPLETIONS)
GRPC_TLS, HTTP_TLS = Arm("gRPC session, TLS", TLS), Arm("HTTP, SSE, TLS", TLS, route=COMPLETIONS)
GRPC_ALL = Arm("gRPC session, all traced", TRACING, traced=True)
GRPC_TAIL = Arm("gRPC session, tail sampling", TRACING)
HTTP_ALL = Arm("HTTP, SSE, all traced", TRACING, route=COMPLETIONS, traced=True)
HTTP_MESSAGES = Arm("HTTP, Messages", PLAIN, route=MESSAGES)
HTTP_RESPONSES = Arm("HTTP, Responses", PLAIN, route=RESPONSES)
HTTP_TOOLS = Arm("HTTP, chats with tools", PLAIN, route=TOOLS)
CONVERTED = (HTTP_MESSAGES, HTTP_RESPONSES, HTTP_TOOLS)
# vLLM's parser of the outputs of chats with tools.
PARSER = "hermes"
ARMS = (GRPC, HTTP, *CONVERTED, GRPC_TLS, HTTP_TLS, GRPC_ALL, GRPC_TAIL, HTTP_ALL)
# Pairs of arms whose difference is an overhead: with and without the feature.
OVERHEADS = (
    (HTTP, GRPC),
    *((arm, HTTP) for arm in CONVERTED),
    (GRPC_TLS, GRPC),
    (HTTP_TLS, HTTP),
    (GRPC_ALL, GRPC),
    (GRPC_TAIL, GRPC),
    (HTTP_ALL, HTTP),
)
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
Gateway and coordinator: CPU ms per 1,000 tokens, all threads; "others" are cores used by processes
outside this benchmark. TTFT and ITL are in ms, as the client sees them. A new request follows when
one has ended. The workers answer from memory and send no spans."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """The overhead of one feature, from the medians with and without the feature.

    Attributes:
        gateway_cpu, coordinator_cpu: CPU time with / without; None if an arm has no gateway.
        ttft_p50_ms, ttft_p99_ms, itl_p99_ms: Added latency.
    """

    what: str
    gateway_cpu: float | None
    coordinator_cpu: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float

    @classmethod
    def of(cls, what: str, with_it: Figures, without: Figures, *, gateways: bool) -> Overhead:
        ratio = stats.ratio(with_it.gateway_cpu_ms, without.gateway_cpu_ms)
        return cls(
            what,
            ratio if gateways else None,
            stats.ratio(with_it.coordinator_cpu_ms, without.coordinator_cpu_ms),
            with_it.ttft_p50_ms - without.ttft_p50_ms,
            with_it.ttft_p99_ms - without.ttft_p99_ms,
            with_it.itl_p99_ms - without.itl_p99_ms,
        )

    def row(self) -> list[str]:
        gateway = "-" if self.gateway_cpu is None else f"{self.gateway_cpu:.2f} x"
        added = (self.ttft_p50_ms, self.ttft_p99_ms, self.itl_p99_ms)
        return [
            self.what,
            gateway,
            f"{self.coordinator_cpu:.2f} x",
            *(f"{one:+.2f}" for one in added),
        ]


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings that all runs share; `cores` are the cores of the gateways."""

    cores: set[int]
    load: Load
    seconds: float

    async def run(self, arms: tuple[Arm, ...], num_repeats: int) -> dict[Arm, Figures]:
        runs: dict[Arm, list[Figures]] = {arm: [] for arm in arms}
        async with contextlib.AsyncExitStack() as stack:
            running: dict[str, System] = {}
            idle: list[int] = []
            for name in dict.fromkeys(arm.system for arm in arms):
                sections: dict[str, Any] = {}
                if name == PLAIN and HTTP_TOOLS in arms:
                    sections["tool_call_parser"] = PARSER
                elif name == TLS:
                    directory = stack.enter_context(tempfile.TemporaryDirectory())
                    sections["security"] = certificates(directory)
                elif name == TRACING:
                    endpoint, sink = await stack.enter_async_context(spans_sink())
                    sections["tracing"] = {"otlp_endpoint": endpoint}
                    idle.append(sink)
                running[name] = await stack.enter_async_context(
                    serving(self.load, self.cores, sections)
                )
            for repeat in range(num_repeats):
                for arm, figures in runs.items():
                    rest = [
                        pid
                        for name, one in running.items()
                        if name != arm.system
                        for pid in one.pids
                    ]
                    tries: list[Figures] = []
                    while len(tries) < MAX_TRIES:
                        tries.append(await self._measure(arm, running[arm.system], [*idle, *rest]))
                        if tries[-1].others <= MAX_OTHERS:
                            break
                    figures.append(min(tries, key=lambda one: one.others))
                    progress(f"{repeat + 1} of {num_repeats}: {arm.name}")
        return {arm: stats.medians(figures) for arm, figures in runs.items()}

    async def _measure(self, arm: Arm, system: System, idle: list[int]) -> Figures:
        client = system.client(self.load, route=arm.route, traced=arm.traced)
        spread_s = self.load.step_ms / 1e3 * self.load.num_tokens
        try:
            # The first request of a route imports what the route needs.
            await client.request(0)
            async with Loop(client, self.load.num_requests, spread_s) as loop:
                await loop.run(spread_s + SETTLE_S)
                meter = Meter(client, system, idle)
                await loop.run(self.seconds)
                return meter.stop()
        finally:
            await client.close()


def overheads(found: Mapping[Arm, Figures]) -> Iterator[Overhead]:
    for arm, base in OVERHEADS:
        if arm in found and base in found:
            what = f"{arm.name} / {base.name}"
            gateways = arm.route is not None and base.route is not None
            yield Overhead.of(what, found[arm], found[base], gateways=gateways)


def goals(found: Mapping[Arm, Figures]) -> list[Goal]:
    grpc, http = found[GRPC], found[HTTP]
    added_p50 = http.ttft_p50_ms - grpc.ttft_p50_ms
    added_p99 = http.ttft_p99_ms - grpc.ttft_p99_ms
    return [
        Goal("TTFT p50 over gRPC", added_p50, MAX_ADDED_P50_MS, " ms"),
        Goal("TTFT p99 over gRPC", added_p99, MAX_ADDED_P99_MS, " ms"),
        Goal("CPU of the gateway per 1,000 tokens", http.gateway_cpu_ms, MAX_GATEWAY_CPU_MS, " ms"),
    ]


def show(found: Mapping[Arm, Figures], num_requests: int) -> None:
    rows = [
        [arm.name, *(format(getattr(figures, name), how) for name, (_, how) in COLUMNS.items())]
        for arm, figures in found.items()
    ]
    header = ["", *(name for name, _ in COLUMNS.values())]
    stats.print_table(f"{num_requests} streams at once", header, rows)
    print(NOTE)
    header = ["", "CPU of gateway", "CPU of coordinator", "TTFT p50", "TTFT p99", "ITL p99"]
    stats.print_table(
        "Overheads: CPU as a ratio, added latencies in ms",
        header,
        [one.row() for one in overheads(found)],
    )
    stats.print_goals(goals(found))


def as_json(found: Mapping[Arm, Figures]) -> dict[str, Any]:
    return {
        "arms": {arm.name: asdict(figures) for arm, figures in found.items()},
        "overheads": [asdict(one) for one in overheads(found)],
        "reaches": [asdict(one) | {"reached": one.reached} for one in goals(found)],
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="concurrency")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs per arm; prints medians")
    parser.add_argument(
        "--converted",
        action="store_true",
        help="also Messages, Responses and parsed chats; needs vLLM",
    )
    parser.add_argument("--no-tls", dest="tls", action="store_false", help="skip TLS")
    parser.add_argument("--no-tracing", dest="tracing", action="store_false", help="skip tracing")
    parser.add_argument("--quick", action="store_true", help="one run of 2 s per arm")
    parser.add_argument("--json", type=Path, default=Path("bench/results/gateway_cost.json"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.repeats = 2.0, 1
    return arguments


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    started = time.monotonic()
    *rest, last = sorted(os.sched_getaffinity(0))
    # gRPC has not started its threads yet; they inherit the affinity of this thread.
    os.sched_setaffinity(0, set(rest) or {last})
    load = Load(
        arguments.requests, arguments.prompt_tokens, arguments.output_tokens, arguments.itl_ms
    )
    wanted = {PLAIN, *([TLS] * arguments.tls), *([TRACING] * arguments.tracing)}
    left_out = () if arguments.converted else CONVERTED
    arms = tuple(arm for arm in ARMS if arm.system in wanted and arm not in left_out)
    bench = Bench({last}, load, arguments.seconds)
    found = uvloop.run(bench.run(arms, arguments.repeats))
    stats.save(as_json(found), arguments.json)
    show(found, arguments.requests)
    print(f"{time.monotonic() - started:.0f} s; figures in {arguments.json}")


if __name__ == "__main__":
    main()
