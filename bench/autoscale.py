"""Baton's autoscaler against other ways to size the pools, on real traces, simulated.

`make bench`, or `python -m baton.bench.autoscale --help`. The production coordinator core serves
the Azure conversation trace and half an hour of Mooncake's on simulated workers: Llama2-70B on
eight H100s each, as Splitwise measured it. Every policy begins with what the first minute needs. A
request attains its targets with a TTFT within 500 ms (Mooncake: 2,000 ms) and a mean gap between
its tokens within 50 ms. The two traces hardly vary; "tides" is Azure's, repeated and thinned so
that the load ebbs to a fifth and returns every 20 minutes. GPUs are paid for from the order to
start a worker until it has gone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.bench import stats
from baton.bench.simulate import baselines, hardware, traces
from baton.bench.simulate.cell import ColdStart, SimulatedCell
from baton.bench.simulate.parts import Shape
from baton.bench.simulate.policies import Baton, Policy, Static
from baton.bench.simulate.report import Figures, as_json, figures
from baton.bench.simulate.traces import Arrival
from baton.bench.stats import Reach
from baton.coordinator.autoscale import queueing
from baton.coordinator.autoscale.types import PoolLimits, ScalingConfig, Targets
from baton.coordinator.core_config import CoreConfig
from baton.coordinator.load_index import Pool
from baton.runtime.config import parse
from baton.runtime.latency import LatencyModel

DATA = Path("tests/data")
GPUS = 8
# 640 GB less 140 GB of weights, nine tenths of it, by 327,680 bytes per token (80 layers, 8 heads
# of 128, two bytes, keys and values).
KV_TOKENS = 1_370_000
# 80 layers of 8,192, 70 billion parameters.
ATTENTION_SHARE = 80 * 8192 / 70e9
BLOCK_TOKENS = 512
SPAN_S = 10.0
BATON, STATIC, HPA, PLANNER, HINDSIGHT = "Baton", "static at peak", "HPA", "planner", "hindsight"


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace, scaled.

    Attributes:
        factor: of its load.
        hit_share: of its prompt tokens, found in caches.
        lasts_s: it is repeated until then, with two tides that ebb to a fifth; 0: as it is.
    """

    name: str
    path: Path
    ttft_s: float
    factor: float
    hit_share: float = 0.0
    lasts_s: float = 0.0

    def arrivals(self, factor: float) -> list[Arrival]:
        found = traces.read(self.path)
        if self.lasts_s:
            found = traces.tidal(traces.repeated(found, self.lasts_s), self.lasts_s / 2, 0.2)
        return traces.scaled(found, self.factor * factor)


AZURE = DATA / "azure/conv_first3000.csv"
TRACES = (
    Trace("azure", AZURE, 0.5, 4.0),
    Trace("mooncake", DATA / "mooncake_conversation.csv", 2.0, 0.75, hit_share=0.3),
    Trace("tides", AZURE, 0.5, 4.0, lasts_s=2400.0),
)


def scaling(ttft_s: float, cold_start_s: float) -> ScalingConfig:
    limits = PoolLimits(1, 32, GPUS)
    return ScalingConfig(
        targets=(("interactive", Targets(ttft_s, 0.05)),),
        prefill=limits,
        decode=limits,
        cold_start_s=cold_start_s,
    )


def core_config(latency: LatencyModel) -> CoreConfig:
    free = {"max_queued": 10**6, "max_queue_s": 600}
    values = {
        "model": "simulated",
        "coordinator": {"max_running_requests": 10**6},
        "decode": {"local_prefill": False},
        "lanes": {"interactive": {**free, "itl_ms": 50}},
    }
    return replace(CoreConfig.of(parse(values, "bench")), latency=latency)


@dataclass(slots=True)
class Setting:
    """One trace with one cold start."""

    trace: Trace
    cold_start_s: float
    arrivals: list[Arrival]
    latency: LatencyModel

    @property
    def config(self) -> ScalingConfig:
        return scaling(self.trace.ttft_s, self.cold_start_s)

    @property
    def sizes(self) -> list[dict[Pool, int]]:
        return baselines.needed_sizes(
            self.arrivals,
            self.config,
            self.latency,
            KV_TOKENS,
            span_s=SPAN_S,
            hit_share=self.trace.hit_share,
        )

    def policies(self) -> dict[str, Policy]:
        config, sizes = self.config, self.sizes
        held = sum(one.num_prompt_tokens + one.num_output_tokens for one in self.arrivals) / len(
            self.arrivals
        )
        batch = queueing.most_requests(self.latency, 0.05, held)
        return {
            STATIC: Static(config),
            # One prompt waiting for each that is computed; four fifths of the largest batch.
            HPA: baselines.Hpa(config, 2.0, 0.8 * batch),
            PLANNER: baselines.Planner(config, self.latency, KV_TOKENS),
            BATON: Baton(config),
            HINDSIGHT: baselines.Hindsight(config, sizes, SPAN_S, self.cold_start_s),
        }

    def begins_with(self, policy: str) -> dict[Pool, int]:
        sizes = self.sizes
        if policy == STATIC:
            return {pool: max(one[pool] for one in sizes) for pool in Pool}
        first = sizes[: max(1, round(60 / SPAN_S))]
        return {pool: max(one[pool] for one in first) for pool in Pool}

    def run(self, name: str, policy: Policy) -> tuple[Figures, dict[str, Any]]:
        shape = Shape(
            self.latency,
            kv_tokens=KV_TOKENS,
            block_size_tokens=BLOCK_TOKENS if self.trace.hit_share else 16,
            prefix_caching=self.trace.hit_share > 0,
            max_num_batched_tokens=4096,
        )
        cell = SimulatedCell(
            core_config(self.latency),
            dict.fromkeys(Pool, shape),
            policy,
            cold_start=ColdStart.lasting(self.cold_start_s),
            gpus=dict.fromkeys(Pool, GPUS),
        )
        record = cell.run(self.arrivals, self.begins_with(name), self.arrivals[-1].at_s + 1)
        cell.core.check_integrity()
        found = figures(record, cell.tally, dict(self.config.targets)["interactive"])
        return found, as_json(found, record)


Results = dict[tuple[str, float], dict[str, Figures]]


def run(arguments: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    latency = hardware.splitwise(
        DATA / "splitwise/llama2-70b-h100-tp8.csv", "llama2-70b", "h100-80gb", 8, ATTENTION_SHARE
    )
    results: Results = {}
    details: dict[str, Any] = {}
    for trace in TRACES:
        if trace.name not in arguments.traces:
            continue
        arrivals = trace.arrivals(arguments.factor)
        for cold_start_s in arguments.cold_starts:
            setting = Setting(trace, cold_start_s, arrivals, latency)
            found = results[trace.name, cold_start_s] = {}
            for name, policy in setting.policies().items():
                if arguments.policies and name not in arguments.policies:
                    continue
                began = time.monotonic()
                found[name], details[f"{trace.name}, {cold_start_s:g} s, {name}"] = setting.run(
                    name, policy
                )
                print(
                    f"{trace.name}, cold start {cold_start_s:g} s, {name}: "
                    f"{time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            show(trace.name, cold_start_s, found)
    return results, details


HEADER = [
    "policy",
    "attained",
    "of static",
    "GPU-hours",
    "of static",
    "TTFT p95",
    "ITL p95",
    "goodput/GPU",
    "cold starts",
    "failed",
]


def show(trace: str, cold_start_s: float, found: dict[str, Figures]) -> None:
    static = found.get(STATIC)
    rows = [
        [
            name,
            f"{one.attained:.1%}",
            f"{one.attained / static.attained:.1%}" if static else "",
            f"{one.gpu_hours:.1f}",
            f"{one.gpu_hours / static.gpu_hours:.1%}" if static else "",
            f"{one.ttft_ms[95]:.0f} ms",
            f"{one.itl_ms[95]:.1f} ms",
            f"{one.goodput_per_gpu:.3f}/s",
            str(one.num_cold_starts),
            str(one.num_failed),
        ]
        for name, one in found.items()
    ]
    count = next(iter(found.values())).num_requests if found else 0
    title = f"{trace}, {count} requests, cold start {cold_start_s:g} s"
    stats.print_table(title, HEADER, rows)


def reaches(results: Results) -> Iterator[Reach]:
    for (trace, cold_start_s), found in results.items():
        if not {BATON, STATIC, HPA, PLANNER} <= found.keys():
            continue
        baton, static = found[BATON], found[STATIC]
        where = f"{trace}, {cold_start_s:g} s: "
        share = stats.ratio(baton.attained, static.attained)
        yield Reach(f"{where}attained / static's", share, 0.99, at_least=True)
        yield Reach(f"{where}GPU-hours / static's", baton.gpu_hours / static.gpu_hours, 0.7)
        for other in (HPA, PLANNER):
            one = found[other]
            more = baton.attained - one.attained
            yield Reach(f"{where}attained - {other}'s", more, 0.0, at_least=True)
            yield Reach(f"{where}GPU-hours / {other}'s", baton.gpu_hours / one.gpu_hours, 1.0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", nargs="+", default=[one.name for one in TRACES])
    parser.add_argument("--cold-starts", nargs="+", type=float, default=[60.0, 180.0])
    parser.add_argument("--policies", nargs="+", help="all unless told")
    parser.add_argument("--factor", type=float, default=1.0, help="of the load, on top")
    parser.add_argument("--json", type=Path, default=Path("bench/results/autoscale.json"))
    arguments = parser.parse_args()
    known = {one.name for one in TRACES}
    if set(arguments.traces) - known:
        parser.error(f"--traces: must be of {', '.join(sorted(known))}")
    if not (math.isfinite(arguments.factor) and arguments.factor > 0):
        parser.error("--factor: must be more than 0")
    if any(not one > 0 for one in arguments.cold_starts):
        parser.error("--cold-starts: must be more than 0 s")
    return arguments


def main() -> None:
    arguments = parsed()
    results, details = run(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(details) + "\n")
    stats.print_reaches(list(reaches(results)))
    print(f"figures in {arguments.json}")


if __name__ == "__main__":
    main()
