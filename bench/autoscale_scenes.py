"""The traces, worker models and policies of baton.bench.autoscale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from baton.bench import hardware
from baton.bench.autoscale_peak import Search, Sizes
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig, Targets
from baton.load import traces
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.simulator import baselines
from baton.simulator.cell import ColdStart, SimulatedCell
from baton.simulator.parts import Shape
from baton.simulator.policies import Baton, Policy, Static
from baton.simulator.record import Record

DATA = Path("tests/data")
GPUS = 8
# 90 % of the 500 GB that 140 GB of weights leave of 640 GB, divided by 327,680 bytes per token
# (80 layers, 8 KV heads of size 128, two bytes, keys and values).
KV_TOKENS = 1_370_000
# Layers * hidden size / parameters: 80 layers, hidden size 8,192, 70 billion parameters.
ATTENTION_SHARE = 80 * 8192 / 70e9
BLOCK_TOKENS = 512
SPAN_S = 60.0
# Number of workers that is more than a pool can use.
PLENTY = 12
ITL_S = 0.05
STATIC, HPA, PLANNER, HINDSIGHT = "static at peak", "HPA", "planner", "hindsight"
# Percentile of the autoscaler's targets; 95 is the default of `scaling.targets`.
ELASTIC_AT = {"Baton": 95.0, "Baton, p99": 99.0}
BATON_AT = {**ELASTIC_AT, "Baton, strict roles": 95.0}
BATON = "Baton"
# HPA's target depth of the prefill pool, in requests per worker. The best one depends on the TTFT
# target and the prompts, so an operator would try several.
HPA_AT = {HPA: 2.0, "HPA, depth 1": 1.0, "HPA, depth 0.7": 0.7}
# Workers of the other policies have fixed roles.
POLICIES = (STATIC, *BATON_AT, *HPA_AT, PLANNER, HINDSIGHT)
# Size of a decode worker's batch: the default of `simulated.max_num_seqs`.
MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace and how it is scaled.

    Attributes:
        factor: Factor by which the load is scaled.
        hit_share: Share of the prompt tokens that come from prefix caches.
        tide_s: The trace is repeated for this many seconds, and its load rises from a fifth to
            the full load and falls back once; 0: the trace is used as it is.
        warm_up_s: Part of the trace that must be simulated before a minute, so that the minute
            behaves as within the whole trace.
        num_seeds: Default number of seeds.
    """

    name: str
    path: Path
    ttft_s: float
    factor: float
    hit_share: float = 0.0
    tide_s: float = 0.0
    warm_up_s: float = 30.0
    num_seeds: int = 1

    def arrivals(
        self, seed: int, factor: float, at_most_s: float, tide_s: float | None = None
    ) -> list[Arrival]:
        """Reads the trace; `seed` chooses the requests that are kept and moves their copies.

        `tide_s` is another length for a trace with a tide.
        """
        found = traces.read(self.path)
        if self.tide_s:
            lasts_s = tide_s or self.tide_s
            found = traces.tidal(traces.repeated(found, lasts_s), lasts_s, 0.2, seed)
        found = traces.scaled(found, self.factor * factor, seed)
        return [one for one in found if one.at_s < at_most_s]


AZURE = DATA / "azure/conv_first3000.csv"
TRACES = {
    one.name: one
    for one in (
        Trace("azure", AZURE, 0.5, 4.0, num_seeds=3),
        Trace(
            "mooncake",
            DATA / "mooncake_conversation.csv",
            2.0,
            0.6,
            hit_share=0.3,
            warm_up_s=120.0,
        ),
        Trace("tides", AZURE, 0.5, 4.0, tide_s=1200.0),
        Trace("code", DATA / "azure/code_from_1800s.csv", 1.0, 1.0),
    )
}


def scaling(ttft_s: float, cold_start_s: float, percentile: float = 95.0) -> ScalingConfig:
    limits = PoolLimits(1, 32, GPUS)
    return ScalingConfig(
        targets=(("interactive", Targets(ttft_s, ITL_S, percentile)),),
        prefill=limits,
        decode=limits,
        cold_start_s=cold_start_s,
    )


def core_config(latency: LatencyModel, *, elastic: bool, local_prefill: bool) -> CoreConfig:
    """Returns the default configuration of a cell, except that no request is refused.

    Args:
        latency: Step times of the workers.
        elastic: Whether every worker computes prompts and decodes.
        local_prefill: Whether decode workers with fixed roles compute prompts if that is faster.
    """
    free = {"max_queued": 10**6, "max_queue_s": 600}
    values = {
        "model": "simulated",
        "coordinator": {"max_running_requests": 10**6},
        "elastic": elastic,
        "decode": {"local_prefill": local_prefill},
        "lanes": {"interactive": {**free, "itl_ms": round(ITL_S * 1e3)}},
    }
    return replace(CoreConfig.of(parse(values, "bench")), latency=latency)


@dataclass(frozen=True, slots=True)
class Needs:
    """Numbers of workers that a trace needs.

    Attributes:
        by_span: Needs of each span of SPAN_S.
        peak: Pool sizes that are enough for every span.
        lasts_s: Length of the trace.
    """

    by_span: list[dict[Pool, int]]
    peak: dict[Pool, int]
    lasts_s: float

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of exactly the needed workers, without starts and drains."""
        spans = [SPAN_S] * (len(self.by_span) - 1)
        spans.append(self.lasts_s - sum(spans))
        workers = (sum(one.values()) for one in self.by_span)
        return GPUS / 3600 * math.fsum(s * n for s, n in zip(spans, workers, strict=True))

    @property
    def peak_gpu_hours(self) -> float:
        return GPUS / 3600 * self.lasts_s * sum(self.peak.values())


@dataclass(frozen=True)
class Scene:
    """One trace with one seed, and the workers that serve the trace.

    Attributes:
        at_most_s: Only this many seconds of the trace are used.
        tide_s: Length of the trace if it has a tide; None: its default length.
    """

    name: str
    seed: int = 0
    factor: float = 1.0
    at_most_s: float = math.inf
    tide_s: float | None = None

    @property
    def trace(self) -> Trace:
        return TRACES[self.name]

    @cached_property
    def arrivals(self) -> list[Arrival]:
        return self.trace.arrivals(self.seed, self.factor, self.at_most_s, self.tide_s)

    @cached_property
    def latency(self) -> LatencyModel:
        return hardware.splitwise(
            DATA / "splitwise/llama2-70b-h100-tp8.csv",
            "llama2-70b",
            "h100-80gb",
            GPUS,
            ATTENTION_SHARE,
        )

    @property
    def lasts_s(self) -> float:
        return self.arrivals[-1].at_s + 1

    @property
    def num_spans(self) -> int:
        return math.floor(self.arrivals[-1].at_s / SPAN_S) + 1

    def cell(
        self,
        policy: Policy,
        cold_start_s: float,
        *,
        elastic: bool = False,
        local_prefill: bool = True,
    ) -> SimulatedCell:
        shape = Shape(
            self.latency,
            kv_tokens=KV_TOKENS,
            block_size_tokens=BLOCK_TOKENS if self.trace.hit_share else 16,
            prefix_caching=self.trace.hit_share > 0,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=4096,
            follows_step_targets=True,
        )
        return SimulatedCell(
            core_config(self.latency, elastic=elastic, local_prefill=local_prefill),
            dict.fromkeys(Pool, shape),
            policy,
            cold_start=ColdStart.lasting(cold_start_s),
            gpus=dict.fromkeys(Pool, GPUS),
            seed=self.seed,
        )

    @property
    def search(self) -> Search:
        config = scaling(self.trace.ttft_s, 1.0)

        def trial(arrivals: Sequence[Arrival], sizes: Sizes) -> Record:
            # Without local prefill, because many decode workers would compute all prompts and
            # no prefill worker would be needed.
            cell = self.cell(Static(config), 1.0, local_prefill=False)
            return cell.run(arrivals, dict(sizes), arrivals[-1].at_s + 1)

        targets = dict(config.targets)["interactive"]
        return Search(trial, targets, PLENTY, SPAN_S, self.trace.warm_up_s)

    @cached_property
    def predicted(self) -> list[dict[Pool, int]]:
        """Needs of each span by queueing theory, from which the search begins."""
        return baselines.needed_sizes(
            self.arrivals,
            scaling(self.trace.ttft_s, 1.0),
            self.latency,
            KV_TOKENS,
            span_s=SPAN_S,
            hit_share=self.trace.hit_share,
        )

    def policy(self, name: str, cold_start_s: float, needs: Needs) -> Policy:
        """Returns the policy with this name in POLICIES; `needs` may be those of another seed."""
        config = scaling(self.trace.ttft_s, cold_start_s, BATON_AT.get(name, 95.0))
        if name in BATON_AT:
            return Baton(config)
        if name == STATIC:
            return Static(config)
        if name == PLANNER:
            return baselines.Planner(config, self.latency, KV_TOKENS)
        if name == HINDSIGHT:
            return baselines.Hindsight(config, needs.by_span, SPAN_S, cold_start_s)
        decode_depth = baselines.hpa_decode_depth(
            self.arrivals, self.latency, ITL_S, MAX_NUM_SEQS, KV_TOKENS
        )
        return baselines.Hpa(config, HPA_AT[name], decode_depth)


@lru_cache(maxsize=2)
def scene(
    name: str, seed: int, factor: float, at_most_s: float, tide_s: float | None = None
) -> Scene:
    """Returns a scene; the cache ensures that each process reads a trace only once."""
    return Scene(name, seed, factor, at_most_s, tide_s)
