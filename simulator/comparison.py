"""Compares ways to serve one trace with the same workers (`baton simulate --compare`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import Targets, check_limits
from baton.load.results import limits, number, plain
from baton.load.traces import Arrival
from baton.runtime.config import BatonConfig, SimulatedConfig
from baton.simulator import processes
from baton.simulator.report import Figures
from baton.simulator.run import COLOCATED, SCALING_POLICIES, simulate

# Default of vLLM's max_num_batched_tokens (vllm/config/scheduler.py). Servers on GPUs with less
# than 70 GiB, and on A100, use this default; others 8,192, from 160 GiB on 16,384
# (vllm/engine/arg_utils.py, get_batch_defaults).
VLLM_STEP_TOKENS = 2048
# Up to this many workers every split is simulated; with more workers, this many splits.
_MOST_SPLITS = 7


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to serve a trace; a row of the comparison.

    Attributes:
        policy: Policy of `baton simulate`.
        prefill, decode: Workers at the start. For colocated serving only the sum counts.
        step_tokens: Largest number of tokens in a step; None: as configured.
        elastic: Whether any worker computes prompts and decodes.
    """

    name: str
    policy: str
    prefill: int
    decode: int
    step_tokens: int | None = None
    elastic: bool = False

    @property
    def is_split(self) -> bool:
        """Whether this is a fixed split into workers for prompts and workers that decode."""
        return self.policy == "static" and not self.elastic

    @property
    def ratio(self) -> str:
        divisor = math.gcd(self.prefill, self.decode)
        return f"{self.prefill // divisor}:{self.decode // divisor}"

    def applied(self, config: BatonConfig) -> BatonConfig:
        """Returns the configuration of this setup."""
        simulated = config.simulated
        if self.step_tokens is not None:
            simulated = simulated.model_copy(update={"max_num_batched_tokens": self.step_tokens})
        return config.model_copy(
            update={
                "simulated": simulated,
                "elastic": self.elastic,
                "prefill": config.prefill.model_copy(update={"workers": self.prefill}),
                "decode": config.decode.model_copy(update={"workers": self.decode}),
            }
        )


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one setup.

    Attributes:
        failures: Number of failed requests, by reason.
    """

    setup: Setup
    figures: Figures
    failures: Mapping[str, int] = field(default_factory=dict)


def setups(config: BatonConfig) -> list[Setup]:
    """Returns the rows of a comparison, in the order of the table.

    Every setup has the total number of workers of both pools, at least at the start.

    Raises:
        ValueError: there are fewer than 2 workers.
        ConfigError: the autoscaled rows would begin with pools over the limits of the section
            `scaling`.
    """
    prefill, decode = config.prefill.workers, config.decode.workers
    if prefill + decode < 2:
        raise ValueError(
            f"--compare: prefill.workers is {prefill} and decode.workers is {decode}; must be at "
            "least 2 together, because a split needs one of each"
        )
    own = max(1, min(prefill, prefill + decode - 1))
    found = [
        *colocated(config),
        *(
            Setup(f"{one} prefill + {prefill + decode - one} decode", "static", one, rest)
            for one in splits(prefill + decode, own)
            if (rest := prefill + decode - one)
        ),
        Setup("elastic", "static", own, prefill + decode - own, elastic=True),
        Setup("Baton, autoscaled", "baton", own, prefill + decode - own),
        Setup("elastic, autoscaled", "baton", own, prefill + decode - own, elastic=True),
        Setup("HPA, autoscaled", "hpa", own, prefill + decode - own),
    ]
    for one in found:
        if one.policy in SCALING_POLICIES:
            check_limits(one.applied(config), "--compare also simulates autoscaled pools")
    return found


def colocated(config: BatonConfig, others: Iterable[SimulatedConfig] = ()) -> list[Setup]:
    """Returns plain servers with vLLM's default step size, and with the configured step sizes.

    Args:
        config: Configuration of the workers.
        others: Further engine settings whose step sizes are used.
    """
    configured = {one.max_num_batched_tokens for one in (config.simulated, *others)}
    return [
        Setup(
            f"colocated, {tokens}/step",
            COLOCATED,
            config.prefill.workers,
            config.decode.workers,
            tokens,
        )
        for tokens in sorted({VLLM_STEP_TOKENS, *configured})
    ]


def splits(num_workers: int, own: int) -> list[int]:
    """Returns numbers of prefill workers to try: all, or for many workers an even selection.

    The selection contains both ends and `own`.
    """
    most = num_workers - 1
    if most <= _MOST_SPLITS:
        return list(range(1, num_workers))
    spread = (1 + round(index * (most - 1) / (_MOST_SPLITS - 1)) for index in range(_MOST_SPLITS))
    return sorted({*spread, own})


# ---- Runs.


@dataclass(frozen=True, slots=True)
class _Job:
    """Simulates one setup after another in a process that has the trace."""

    config: BatonConfig
    arrivals: Sequence[Arrival]
    engines: Mapping[Pool, SimulatedConfig] | None

    def __call__(self, setup: Setup) -> Row:
        config = setup.applied(self.config)
        found = simulate(config, self.arrivals, setup.policy, self.engines)
        return Row(setup, found.figures, dict(found.record.reasons))


def run(
    config: BatonConfig,
    arrivals: Sequence[Arrival],
    chosen: Sequence[Setup],
    num_processes: int,
    engines: Mapping[Pool, SimulatedConfig] | None = None,
) -> Iterator[tuple[int, Row]]:
    """Simulates each setup in one of several processes.

    Args:
        config: Configuration that the setups change.
        arrivals: Requests in order of time.
        chosen: The setups.
        num_processes: Number of processes.
        engines: As in `simulate`.

    Yields:
        Index of a setup and its row, as soon as the simulation has ended.

    Raises:
        ValueError: as `simulate`.
    """
    return processes.results(_Job(config, arrivals, engines), chosen, num_processes)


# ---- The conclusion.


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The best row of a comparison, and what it means.

    Attributes:
        best: The row with the fewest GPU-hours of those that attain the targets' percentile. If no
            row does, the row that attains most.
        rule: Why this row is the best one.
        text: Which split is the best one, and how it compares with colocated serving.
    """

    best: Row
    rule: str
    text: str


def concluded(rows: Sequence[Row], targets: Targets) -> Conclusion:
    """Chooses the best row of a comparison."""
    best = _best(rows, targets)
    if _is_enough(best, targets):
        rule = f"fewest GPU-hours with at least {targets.percentile:g} % attained"
    else:
        rule = f"most attained; no row attains {targets.percentile:g} %"
    fixed = [row for row in rows if row.setup.is_split]
    split = _best(fixed, targets)
    all_splits = split.setup.prefill + split.setup.decode - 1
    of = "" if len(fixed) == all_splits else f" among {len(fixed)} of {all_splits} splits"
    plain_row = _best([row for row in rows if row.setup.policy == COLOCATED], targets)
    one, other = split.figures, plain_row.figures
    # The difference of the printed percentages.
    points = round(100 * one.attained, 1) - round(100 * other.attained, 1)
    text = (
        f"Best split of this trace{of}: {split.setup.name} ({split.setup.ratio}). "
        f"It attains {100 * one.attained:.1f} %, {_difference(points)} "
        f"colocated serving with {plain_row.setup.step_tokens} tokens per step "
        f"({100 * other.attained:.1f} %); "
        f"TTFT p99 is {number(one.ttft_ms[99], 0)} ms instead of "
        f"{number(other.ttft_ms[99], 0)} ms, mean ITL p99 {number(one.tpot_ms[99], 1)} ms "
        f"instead of {number(other.tpot_ms[99], 1)} ms."
    )
    for row in rows:
        if row.setup.elastic and row.setup.policy == "static":
            text += (
                f" An elastic cell, without a split, attains {100 * row.figures.attained:.1f} %."
            )
    return Conclusion(best, rule, text)


def _difference(points: float) -> str:
    if abs(points) < 0.05:
        return "as much as"
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'} than"


def _is_enough(row: Row, targets: Targets) -> bool:
    return row.figures.attained >= targets.percentile / 100


def _best(rows: Sequence[Row], targets: Targets) -> Row:
    def rank(row: Row) -> tuple[bool, float, float, float]:
        found, enough = row.figures, _is_enough(row, targets)
        hours = round(found.gpu_hours, 3) if enough else 0.0
        # Among rows that attain equally much, the latency that is closest to its target decides.
        used = found.ttft_ratio[99], found.tpot_ms[99] / 1e3 / (targets.itl_s or math.inf)
        closest = max(math.inf if math.isnan(one) else one for one in used)
        return enough, -hours, round(found.attained, 4), -closest

    return max(rows, key=rank)


# ---- Output.

# Share of the prompt tokens that were not computed.
HITS = ">HITS"
# A name that begins with ">" is aligned right.
COLUMNS = (
    "SETUP",
    ">ATTAINED",
    ">TTFT p50",
    ">TTFT p90",
    ">TTFT p99",
    ">ITL p50",
    ">ITL p99",
    ">MEAN ITL p99",
    ">FAILED",
    HITS,
    ">GPU-HOURS",
    "",
)
# Columns that a narrow terminal lacks, the first to go first.
DROP_FIRST = ("HITS", "ITL p50", "TTFT p90", "TTFT p50", "FAILED", "ITL p99")


def legend(targets: Targets) -> str:
    """Explains the units, the column "attained" and the name of colocated rows."""
    met = [f"{name} within {one}" for name, one in limits(targets.ttft, targets.itl_s).items()]
    return (
        f"Times are in ms. attained: requests with {' and '.join(met) or 'all their tokens'}.\n"
        "colocated, N/step: plain servers with chunked prefill, at most N tokens per step."
    )


def has_hits(rows: Sequence[Row]) -> bool:
    """Whether the trace's prompts share prefixes, so that the column HITS says something."""
    return any(row.figures.hits.infinite for row in rows)


def table(rows: Sequence[Row], best: Row) -> list[list[str]]:
    """Returns one line per row with the cells of COLUMNS; latencies are in ms."""
    return [
        [
            row.setup.name,
            f"{found.attained:.1%}",
            *(number(found.ttft_ms[percent], 0) for percent in (50, 90, 99)),
            *(number(found.itl_ms[percent], 1) for percent in (50, 99)),
            number(found.tpot_ms[99], 1),
            str(found.num_failed),
            f"{found.hits.total:.1%}",
            f"{found.gpu_hours:.3f}",
            "best" if row is best else "",
        ]
        for row in rows
        for found in (row.figures,)
    ]


def as_json(rows: Sequence[Row], conclusion: Conclusion) -> dict[str, Any]:
    """Returns a comparison as JSON."""
    return {
        "kind": "simulate-compare",
        "best": conclusion.best.setup.name,
        "rule": conclusion.rule,
        "conclusion": conclusion.text,
        "rows": [
            {**one, "best": row is conclusion.best}
            for one, row in zip(rows_as_json(rows), rows, strict=True)
        ],
    }


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows as JSON; their figures have the keys of a single simulation."""
    return [
        {
            **asdict(row.setup),
            **{name: plain(value) for name, value in asdict(row.figures).items()},
            "failures": dict(row.failures),
        }
        for row in rows
    ]
