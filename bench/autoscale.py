"""Baton's autoscaler against other ways to size the pools, on real traces, simulated.

`make bench`, or `python -m baton.bench.autoscale --help`. The production coordinator core serves
the Azure conversation trace and half an hour of Mooncake's on simulated workers: Llama2-70B on
eight H100s each, as Splitwise measured it. Every policy begins with the sizes of static at peak. A
request attains its targets with a TTFT within 500 ms (Mooncake: 2,000 ms) and a mean gap between
its tokens within 50 ms. GPUs are paid for from the order to start a worker until it has gone.

What each minute needs is found by trying: the fewest workers with which 95 % of its requests, of
those that plenty of workers would serve in time, have their first token in time, and 95 % their
gaps. "Static at peak" is the smallest pair of pools with which that is so of every minute;
"hindsight" has in each minute what that minute needs, and knew it a cold start before; "instant"
too, with workers that start in no time. Nothing that holds each minute can have fewer GPU-hours
than the needs themselves. Azure's and Mooncake's loads hardly vary; "tides" is Azure's, repeated
and thinned so that the load rises from a fifth of itself and ebbs back to it in 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.bench import stats
from baton.bench.simulate import baselines, hardware, traces
from baton.bench.simulate.cell import ColdStart, SimulatedCell
from baton.bench.simulate.parts import Shape
from baton.bench.simulate.peak import Search, Sizes
from baton.bench.simulate.policies import Baton, Policy, Static
from baton.bench.simulate.record import Record
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
SPAN_S = 60.0
# Workers of a pool that are more than it can use.
PLENTY = 12
BATON, STATIC, HPA, PLANNER = "Baton", "static at peak", "HPA", "planner"
HINDSIGHT, INSTANT = "hindsight", "instant"


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace, scaled.

    Attributes:
        factor: of its load.
        hit_share: of its prompt tokens, found in caches.
        lasts_s: it is repeated until then, with one tide that rises from a fifth and ebbs back to
            it; 0: as it is.
        warm_up_s: of it, that a minute needs before it to be as it is within the whole.
    """

    name: str
    path: Path
    ttft_s: float
    factor: float
    hit_share: float = 0.0
    lasts_s: float = 0.0
    warm_up_s: float = 30.0

    def arrivals(self, factor: float) -> list[Arrival]:
        found = traces.read(self.path)
        if self.lasts_s:
            found = traces.tidal(traces.repeated(found, self.lasts_s), self.lasts_s, 0.2)
        return traces.scaled(found, self.factor * factor)


AZURE = DATA / "azure/conv_first3000.csv"
TRACES = (
    Trace("azure", AZURE, 0.5, 4.0),
    Trace("mooncake", DATA / "mooncake_conversation.csv", 2.0, 0.6, hit_share=0.3, warm_up_s=120.0),
    Trace("tides", AZURE, 0.5, 4.0, lasts_s=1200.0),
)


def scaling(ttft_s: float, cold_start_s: float) -> ScalingConfig:
    limits = PoolLimits(1, 32, GPUS)
    return ScalingConfig(
        targets=(("interactive", Targets(ttft_s, 0.05)),),
        prefill=limits,
        decode=limits,
        cold_start_s=cold_start_s,
        # The default, or twice a cold start: what is let go is not back before.
        down_window_s=max(ScalingConfig().down_window_s, 2 * cold_start_s),
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


@dataclass(frozen=True, slots=True)
class Scene:
    """One trace and the workers that serve it."""

    trace: Trace
    arrivals: list[Arrival]
    latency: LatencyModel

    def cell(self, policy: Policy, cold_start_s: float) -> SimulatedCell:
        shape = Shape(
            self.latency,
            kv_tokens=KV_TOKENS,
            block_size_tokens=BLOCK_TOKENS if self.trace.hit_share else 16,
            prefix_caching=self.trace.hit_share > 0,
            max_num_batched_tokens=4096,
        )
        return SimulatedCell(
            core_config(self.latency),
            dict.fromkeys(Pool, shape),
            policy,
            cold_start=ColdStart.lasting(cold_start_s),
            gpus=dict.fromkeys(Pool, GPUS),
        )

    def trial(self, arrivals: Sequence[Arrival], sizes: Sizes) -> Record:
        cell = self.cell(Static(scaling(self.trace.ttft_s, 1.0)), 1.0)
        return cell.run(arrivals, dict(sizes), arrivals[-1].at_s + 1)

    def needs(self) -> Needs:
        config = scaling(self.trace.ttft_s, 1.0)
        search = Search(
            self.trial,
            dict(config.targets)["interactive"],
            PLENTY,
            SPAN_S,
            self.trace.warm_up_s,
        )
        predicted = baselines.needed_sizes(
            self.arrivals,
            config,
            self.latency,
            KV_TOKENS,
            span_s=SPAN_S,
            hit_share=self.trace.hit_share,
        )
        by_span = search.needs(self.arrivals, predicted[0])
        most = {pool: max(one[pool] for one in by_span) for pool in Pool}
        return Needs(by_span, search.at_peak(self.arrivals, most), self.arrivals[-1].at_s + 1)


@dataclass(frozen=True, slots=True)
class Needs:
    """In workers.

    Attributes:
        by_span: what each span of SPAN_S needs.
        peak: what all of them need.
        lasts_s: the whole.
    """

    by_span: list[dict[Pool, int]]
    peak: dict[Pool, int]
    lasts_s: float

    @property
    def gpu_hours(self) -> float:
        """Of the needs alone: without a start, a drain or a worker too many."""
        spans = [SPAN_S] * (len(self.by_span) - 1)
        spans.append(self.lasts_s - sum(spans))
        return (
            GPUS
            / 3600
            * math.fsum(
                span_s * sum(one.values()) for span_s, one in zip(spans, self.by_span, strict=True)
            )
        )

    @property
    def peak_gpu_hours(self) -> float:
        return GPUS / 3600 * self.lasts_s * sum(self.peak.values())


@dataclass(frozen=True, slots=True)
class Setting:
    """One scene with one cold start."""

    scene: Scene
    cold_start_s: float
    needs: Needs

    def policies(self) -> dict[str, Policy]:
        scene = self.scene
        config = scaling(scene.trace.ttft_s, self.cold_start_s)
        held = sum(one.num_prompt_tokens + one.num_output_tokens for one in scene.arrivals)
        batch = queueing.most_requests(scene.latency, 0.05, held / len(scene.arrivals))
        by_span = self.needs.by_span
        return {
            STATIC: Static(config),
            # One prompt waiting for each that is computed; four fifths of the largest batch.
            HPA: baselines.Hpa(config, 2.0, 0.8 * batch),
            PLANNER: baselines.Planner(config, scene.latency, KV_TOKENS),
            BATON: Baton(config),
            HINDSIGHT: baselines.Hindsight(config, by_span, SPAN_S, self.cold_start_s),
            INSTANT: baselines.Hindsight(config, by_span, SPAN_S, 0.0),
        }

    def run(self, name: str, policy: Policy) -> tuple[Figures, dict[str, Any]]:
        scene = self.scene
        cell = scene.cell(policy, 0.0 if name == INSTANT else self.cold_start_s)
        record = cell.run(scene.arrivals, dict(self.needs.peak), self.needs.lasts_s)
        cell.core.check_integrity()
        found = figures(record, cell.tally, dict(policy.config.targets)["interactive"])
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
        scene = Scene(trace, trace.arrivals(arguments.factor), latency)
        began = time.monotonic()
        needs = scene.needs()
        tell(f"{trace.name}: {time.monotonic() - began:.0f} s for what each minute needs")
        show_needs(trace.name, needs)
        details[f"{trace.name}, needs"] = {
            pool.value: [one[pool] for one in needs.by_span] for pool in Pool
        }
        for cold_start_s in arguments.cold_starts:
            setting = Setting(scene, cold_start_s, needs)
            found = results[trace.name, cold_start_s] = {}
            for name, policy in setting.policies().items():
                if arguments.policies and name not in arguments.policies:
                    continue
                began = time.monotonic()
                where = f"{trace.name}, {cold_start_s:g} s, {name}"
                found[name], details[where] = setting.run(name, policy)
                tell(f"{where}: {time.monotonic() - began:.0f} s")
            show(trace.name, cold_start_s, found)
    return results, details


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def show_needs(trace: str, needs: Needs) -> None:
    rows = [
        [pool.value, " ".join(str(one[pool]) for one in needs.by_span), str(needs.peak[pool])]
        for pool in Pool
    ]
    share = needs.gpu_hours / needs.peak_gpu_hours
    title = (
        f"{trace}: workers that each minute needs, {needs.gpu_hours:.1f} GPU-hours, "
        f"{share:.1%} of the {needs.peak_gpu_hours:.1f} at peak"
    )
    stats.print_table(title, ["pool", "by minute", "at peak"], rows)


HEADER = [
    "policy",
    "attained",
    "of static",
    "GPU-hours",
    "of static",
    "TTFT p95",
    "ITL p95",
    "good/GPU-hour",
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
            f"{one.goodput_per_gpu * 3600:.0f}",
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
