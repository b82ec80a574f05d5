"""The figures of a simulation, as JSON and as table rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import Targets
from baton.load import stats
from baton.load.duration_histogram import DurationHistogram
from baton.load.results import PERCENTS, number, plain, targets
from baton.runtime.ttft_target import TtftTarget
from baton.simulator.record import Record


@dataclass(frozen=True, slots=True)
class PromptHits:
    """Prompt tokens that were not computed.

    Attributes:
        device, host, fetched: Share of the prompt tokens from prefix caches, from host memory and
            from other workers.
        infinite: Share that one infinite cache for the whole trace would have had: tokens in blocks
            that an earlier prompt had too.
    """

    device: float
    host: float
    fetched: float
    infinite: float

    @classmethod
    def of(cls, prompt_tokens: Mapping[str, int], most_hits: tuple[int, int]) -> PromptHits:
        """Returns the shares.

        Args:
            prompt_tokens: Tokens by source: "device", "host", "fetched" and "computed".
            most_hits: Tokens that an infinite cache would have had, and all prompt tokens.
        """
        total = max(1, sum(prompt_tokens.values()))
        num_shared, num_tokens = most_hits
        return cls(
            prompt_tokens.get("device", 0) / total,
            prompt_tokens.get("host", 0) / total,
            prompt_tokens.get("fetched", 0) / total,
            num_shared / max(1, num_tokens),
        )

    @property
    def total(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return self.device + self.host + self.fetched

    @property
    def of_infinite(self) -> float:
        """The part of an infinite cache's hits; 1 if the trace shares nothing."""
        return self.total / self.infinite if self.infinite else 1.0


NO_HITS = PromptHits(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a whole simulation; `_ms` fields are milliseconds by percentile.

    Attributes:
        num_failed: Requests that were refused or failed later.
        lasted_s: Seconds for which the workers are paid: until a second after the last arrival.
        attained: Share of all requests that ended well, with TTFT within its target and the mean
            gap between tokens (TPOT) within the ITL target.
        itl_within: Share of all gaps that are within the ITL target.
        ttft_ratio: TTFT divided by the request's own target, by percentile; 0 without a target.
        requests_per_s, goodput_per_s: Requests that ended, and those that met the targets, per
            second until the last of them ended: as `baton bench` and `replay` measure.
        goodput_per_gpu: Requests that met the targets, per second and paid GPU.
    """

    num_requests: int
    num_failed: int
    lasted_s: float
    targets: dict[str, float | None]
    ttft_ms: dict[int, float]
    ttft_ratio: dict[int, float]
    itl_ms: dict[int, float]
    tpot_ms: dict[int, float]
    e2e_ms: dict[int, float]
    attained: float
    ttft_within: float
    tpot_within: float
    itl_within: float
    requests_per_s: float
    goodput_per_s: float
    goodput_per_gpu: float
    gpu_hours: float
    num_cold_starts: int
    cold_start_s: float
    num_events: int
    hits: PromptHits = NO_HITS


def figures(
    record: Record, gaps: DurationHistogram, limits: Targets, hits: PromptHits = NO_HITS
) -> Figures:
    """Computes the figures of a whole simulation."""
    ttfts, ratios, tpots, lasted = list[float](), list[float](), list[float](), list[float]()
    num_failed = num_attained = num_ttft = num_tpot = 0
    target = limits.ttft or TtftTarget(math.inf)
    most_itl = math.inf if limits.itl_s is None else limits.itl_s
    for arrived, first, end, num_prompt, count in zip(
        *(record.arrivals, record.firsts, record.ends, record.prompts, record.outputs), strict=True
    ):
        if math.isnan(end) or math.isnan(first):
            num_failed += 1
            continue
        ttft_s, most_ttft_s = first - arrived, target.of(num_prompt)
        tpot_s = (end - first) / (count - 1) if count > 1 else 0.0
        ttfts.append(ttft_s)
        ratios.append(ttft_s / most_ttft_s)
        lasted.append(end - arrived)
        if count > 1:
            tpots.append(tpot_s)
        num_ttft += ttft_s <= most_ttft_s
        num_tpot += tpot_s <= most_itl
        num_attained += ttft_s <= most_ttft_s and tpot_s <= most_itl
    total = max(1, len(record.arrivals))
    # An overloaded cell serves its backlog long after the last arrival.
    ended_at = max((end for end in record.ends if not math.isnan(end)), default=record.began_at)
    served_s = max(1e-9, ended_at - record.began_at)
    return Figures(
        num_requests=len(record.arrivals),
        num_failed=num_failed,
        lasted_s=record.lasted_s,
        targets=targets(limits.ttft, limits.itl_s),
        ttft_ms=_percentiles(ttfts, 1e3),
        ttft_ratio=_percentiles(ratios),
        itl_ms={percent: gaps.percentile(percent) * 1e3 for percent in PERCENTS},
        tpot_ms=_percentiles(tpots, 1e3),
        e2e_ms=_percentiles(lasted, 1e3),
        attained=num_attained / total,
        ttft_within=num_ttft / total,
        tpot_within=num_tpot / total,
        itl_within=gaps.share_within(most_itl) if math.isfinite(most_itl) else 1.0,
        requests_per_s=len(lasted) / served_s,
        goodput_per_s=num_attained / served_s,
        goodput_per_gpu=num_attained / max(1e-9, record.gpu_hours * 3600),
        gpu_hours=record.gpu_hours,
        num_cold_starts=record.num_cold_starts,
        cold_start_s=record.cold_start_s,
        num_events=len(record.events),
        hits=hits,
    )


def _percentiles(values: list[float], factor: float = 1.0) -> dict[int, float]:
    ordered = sorted(values)
    return {percent: stats.percentile(ordered, percent) * factor for percent in PERCENTS}


def as_json(found: Figures, record: Record) -> dict[str, Any]:
    """Returns all figures as JSON; those shared with `baton bench` and `replay` have equal keys."""
    return {
        "kind": "simulate",
        **{name: plain(value) for name, value in asdict(found).items()},
        "failures": dict(record.reasons),
        "scale_events": [{"at_s": round(at, 3), "what": what} for at, what in record.events],
        "decisions": [
            {
                "at_s": round(at, 3),
                **{
                    pool.value: {
                        "current": one.current,
                        "needed": one.needed,
                        "target": one.target,
                        "reason": one.reason,
                    }
                    for pool, one in (
                        (Pool.PREFILL, decision.prefill),
                        (Pool.DECODE, decision.decode),
                    )
                },
            }
            for at, decision in record.decisions
        ],
        "moments": [plain(asdict(one)) for one in record.moments],
    }


def table(found: Figures) -> list[list[str]]:
    """Returns table rows with one column per percentile."""
    return [
        [name, *(number(values[percent], 1) for percent in PERCENTS)]
        for name, values in (
            ("TTFT, ms", found.ttft_ms),
            ("ITL, ms", found.itl_ms),
            ("TPOT, ms", found.tpot_ms),
            ("E2E, ms", found.e2e_ms),
        )
    ]
