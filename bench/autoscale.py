"""Compares Baton's autoscaler with other scaling policies, on real traces, in the simulator.

`make bench`, or `python -m baton.bench.autoscale --help`. The production coordinator core serves
the Azure conversation and code traces and half an hour of Mooncake's trace on simulated workers. A
worker is Llama2-70B on eight H100s, as measured by Splitwise. Every policy begins with the pool
sizes of "static at peak". A request attains its targets if its TTFT is within 500 ms (Mooncake:
2,000 ms, code: 1,000 ms) and its mean gap between tokens is within 50 ms. GPUs are paid for from
the start order of a worker to the end of the worker.

A search finds the needs of each minute: the fewest workers with which 95 % of its requests have
their first token in time and 95 % keep the gap target. Requests that are late even with many
workers are left out. "Static at peak" is the smallest pair of pools that is enough for every
minute. "Hindsight" has exactly the needs of each minute and orders workers one cold start earlier.
No policy that meets the targets in each minute can use fewer GPU-hours than the needs. The loads
of Azure and Mooncake hardly vary. "tides" is Azure's trace, repeated and thinned so that the load
rises from a fifth to the full load and falls back within 20 minutes; with `--tide-s`, within that
time. "Static at peak" then has the sizes for the tide of 20 minutes, whose peak is the same.

Azure runs with three seeds by default, the other traces with one because they take longer. The seed
moves the copies of requests in a trace that is scaled up, chooses the requests of a trace that is
scaled down, and moves the workers' load reports. The needs are those of the first seed.
"Baton" is an elastic cell with its targets at the 95th percentile, "Baton, p99" with another one,
which an operator sets in `scaling.targets`. "HPA" has a target depth of two requests per prefill
worker, and further settings have others; Baton is compared with the best of them, which takes the
fewest GPU-hours of those that attain 95 % (or attains most, if none does). The workers of "Baton,
strict roles" and of the other policies have fixed roles. The share of attained requests is computed
in the same way for all policies.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.bench.autoscale_runs import Results, Runs, Where, cells, log, needs_of
from baton.bench.autoscale_scenes import (
    BATON,
    BATON_AT,
    HINDSIGHT,
    HPA_AT,
    PLANNER,
    POLICIES,
    STATIC,
    TRACES,
    Needs,
)
from baton.coordinator.state.pools import Pool
from baton.load import stats
from baton.load.stats import Goal

# Share of the requests within the targets that is enough: the percentile of the targets.
ATTAINED = 0.95
# Length of a trace with --quick.
QUICK_S = 240.0


def run(arguments: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    names = [name for name in POLICIES if not arguments.policies or name in arguments.policies]
    results: Results = {}
    details: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context) as pool:
        for trace in arguments.traces:
            wheres = [
                Where(trace, seed, arguments.factor, arguments.at_most_s, arguments.tide_s)
                for seed in range(arguments.seeds or TRACES[trace].num_seeds)
            ]
            began = time.monotonic()
            # A longer tide has the same peak.
            needs = needs_of(replace(wheres[0], tide_s=None), pool)
            log(f"{trace}: {time.monotonic() - began:.0f} s for the needs of each minute")
            show_needs(trace, needs)
            details[f"{trace}, needs"] = {
                role.value: [one[role] for one in needs.by_span] for role in Pool
            }
            found, more = cells(wheres, arguments.cold_starts, names, needs, pool)
            results.update(found)
            details.update(more)
            for (_, cold_start_s), by_name in found.items():
                show(trace, cold_start_s, by_name)
            log(f"{trace}: {time.monotonic() - began:.0f} s in all")
    return results, details


# ---- Tables.


def show_needs(trace: str, needs: Needs) -> None:
    rows = [
        [pool.value, " ".join(str(one[pool]) for one in needs.by_span), str(needs.peak[pool])]
        for pool in Pool
    ]
    share = needs.gpu_hours / needs.peak_gpu_hours
    title = (
        f"{trace}: workers needed in each minute, {needs.gpu_hours:.1f} GPU-hours, "
        f"{share:.1%} of the {needs.peak_gpu_hours:.1f} at peak"
    )
    stats.print_table(title, ["pool", "by minute", "at peak"], rows)


HEADER = [
    "policy",
    "attained",
    "least to most",
    "GPU-hours",
    "least to most",
    "of static's: attained",
    "GPU-hours",
    "good/GPU-hour",
    "cold starts",
    "failed",
]


def show(trace: str, cold_start_s: float, found: Mapping[str, Runs]) -> None:
    static = found.get(STATIC)
    rows = []
    for name, runs in found.items():
        attained, hours = runs.of(lambda one: one.attained), runs.of(lambda one: one.gpu_hours)
        rows.append(
            [
                name,
                f"{runs.attained:.1%}",
                f"{min(attained):.1%} to {max(attained):.1%}",
                f"{runs.gpu_hours:.1f}",
                f"{min(hours):.1f} to {max(hours):.1f}",
                f"{runs.attained / static.attained:.1%}" if static else "",
                f"{runs.gpu_hours / static.gpu_hours:.1%}" if static else "",
                f"{runs.median(lambda one: one.goodput_per_gpu) * 3600:.0f}",
                f"{runs.median(lambda one: one.num_cold_starts):.0f}",
                str(sum(one.num_failed for one in runs.by_seed)),
            ]
        )
    seeds = len(next(iter(found.values())).by_seed)
    of = "one seed" if seeds == 1 else f"medians of {seeds} seeds"
    title = f"{trace}, cold start {cold_start_s:g} s: {of}"
    stats.print_table(title, HEADER, rows)
    for line in frontier(found):
        print(line)


def frontier(found: Mapping[str, Runs]) -> Iterator[str]:
    """Yields a line per setting of a baseline: the best of Baton with at most its GPU-hours.

    A setting that another one of the same baseline beats on both axes has no line.
    """
    for name in (*HPA_AT, PLANNER):
        if name not in found:
            continue
        other = found[name]
        if name in HPA_AT and any(found[one].beats(other) for one in HPA_AT if one in found):
            continue
        line = f"{name}: {other.attained:.1%} for {other.gpu_hours:.1f} GPU-hours; "
        affordable = [
            (runs.attained, own)
            for own, runs in found.items()
            if own in BATON_AT and runs.gpu_hours <= other.gpu_hours
        ]
        if not affordable:
            yield line + "every setting of Baton uses more"
            continue
        attained, own = max(affordable)
        yield line + f"{own} {attained:.1%} for {found[own].gpu_hours:.1f}"


def best_hpa(found: Mapping[str, Runs]) -> str | None:
    """Returns the HPA setting with the fewest GPU-hours of those that attain enough.

    If none does, it is the setting that attains most; None: HPA did not run.
    """

    def rank(name: str) -> tuple[bool, float]:
        runs = found[name]
        enough = runs.attained >= ATTAINED
        return enough, -runs.gpu_hours if enough else runs.attained

    return max((name for name in HPA_AT if name in found), key=rank, default=None)


def goals(results: Results) -> Iterator[Goal]:
    for (trace, cold_start_s), found in results.items():
        hpa = best_hpa(found)
        if hpa is None or not {BATON, STATIC, PLANNER} <= found.keys():
            continue
        baton, static = found[BATON], found[STATIC]
        where = f"{trace}, {cold_start_s:g} s: "
        share = stats.ratio(baton.attained, static.attained)
        yield Goal(f"{where}attained / static's", share, 0.99, at_least=True)
        yield Goal(f"{where}GPU-hours / static's", baton.gpu_hours / static.gpu_hours, 0.7)
        for name in (hpa, PLANNER):
            other = found[name]
            more = baton.attained - other.attained
            yield Goal(f"{where}attained - {name}'s", more, 0.0, at_least=True)
            yield Goal(f"{where}GPU-hours / {name}'s", baton.gpu_hours / other.gpu_hours, 1.0)
            better = sum(found[own].beats(other) for own in BATON_AT if own in found)
            yield Goal(f"{where}settings better than {name} on both", better, 1, at_least=True)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", nargs="+", default=list(TRACES))
    parser.add_argument("--cold-starts", nargs="+", type=float, default=[60.0, 180.0])
    parser.add_argument("--policies", nargs="+", help="policies to run (default: all)")
    parser.add_argument(
        "--seeds", type=int, help="seeds per trace (default: 3 for azure, 1 for the others)"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--tide-s",
        type=float,
        help='length of the trace "tides" in seconds, without hindsight (default: 1200)',
    )
    parser.add_argument("--factor", type=float, default=1.0, help="additional scale of the load")
    parser.add_argument(
        "--quick", action="store_true", help="four minutes of Azure's trace, one cold start"
    )
    parser.add_argument("--json", type=Path, default=Path("bench/results/autoscale.json"))
    arguments = parser.parse_args(argv)
    arguments.at_most_s = math.inf
    if arguments.quick:
        arguments.traces, arguments.cold_starts, arguments.seeds = ["azure"], [60.0], 1
        arguments.at_most_s = QUICK_S
    _check(parser, "--traces", arguments.traces, TRACES)
    _check(parser, "--policies", arguments.policies or (), POLICIES)
    if not (math.isfinite(arguments.factor) and arguments.factor > 0):
        parser.error(f"--factor: is {arguments.factor}; must be more than 0")
    if any(not 0 < one < math.inf for one in arguments.cold_starts):
        parser.error("--cold-starts: must be more than 0 s")
    if arguments.tide_s is not None:
        if not TRACES["tides"].tide_s <= arguments.tide_s < math.inf:
            parser.error(f"--tide-s: is {arguments.tide_s}; must be at least 1200")
        if arguments.traces != ["tides"]:
            parser.error("--tide-s: needs --traces tides")
        # Its needs are known for the tide of 20 minutes only.
        arguments.policies = [name for name in arguments.policies or POLICIES if name != HINDSIGHT]
    for name in ("seeds", "processes"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            parser.error(f"--{name}: is {given}; must be at least 1")
    return arguments


def _check(
    parser: argparse.ArgumentParser, option: str, given: Iterable[str], known: Iterable[str]
) -> None:
    if unknown := set(given) - set(known):
        parser.error(f"{option}: {', '.join(sorted(unknown))}; must be among {', '.join(known)}")


def main() -> None:
    arguments = parsed()
    results, details = run(arguments)
    stats.save(details, arguments.json)
    stats.print_goals(list(goals(results)))
    print(f"figures in {arguments.json}")


if __name__ == "__main__":
    main()
