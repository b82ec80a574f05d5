"""Baton's autoscaler against other ways to size the pools, on real traces, simulated.

`make bench`, or `python -m baton.bench.autoscale --help`. The production coordinator core serves
the Azure conversation trace and half an hour of Mooncake's on simulated workers: Llama2-70B on
eight H100s each, as Splitwise measured it. Every policy begins with the sizes of static at peak. A
request attains its targets with a TTFT within 500 ms (Mooncake: 2,000 ms) and a mean gap between
its tokens within 50 ms. GPUs are paid for from the order to start a worker until it has gone.

What each minute needs is found by trying: the fewest workers with which 95 % of its requests, of
those that plenty of workers would serve in time, have their first token in time, and 95 % their
gaps. "Static at peak" is the smallest pair of pools with which that is so of every minute;
"hindsight" has in each minute what that minute needs, and knew it a cold start before. Nothing that
holds each minute can have fewer GPU-hours than the needs themselves. Azure's and Mooncake's loads
hardly vary; "tides" is Azure's, repeated and thinned so that the load rises from a fifth of itself
and ebbs back to it in 20 minutes.

Azure's cells run with three seeds unless told, the others, which take longer, with one. Seeds move
the copies of requests that scale a trace up, choose those that are left of one scaled down, and
move workers' reports. The needs are the first seed's.
"Baton" has its targets at p95; the others of its rows have them at another percentile, which an
operator chooses (`scaling.targets`): what is attained is counted alike for all.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from baton.bench.autoscale_runs import Results, Runs, Where, cells, needs_of, tell
from baton.bench.autoscale_scenes import (
    BATON,
    BATON_AT,
    HPA,
    PLANNER,
    POLICIES,
    STATIC,
    TRACES,
    Needs,
)
from baton.coordinator.state.pools import Pool
from baton.load import stats
from baton.load.stats import Goal

# Of a trace, with --quick.
QUICK_S = 240.0


def run(arguments: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    names = [name for name in POLICIES if not arguments.policies or name in arguments.policies]
    results: Results = {}
    details: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context) as pool:
        for trace in arguments.traces:
            wheres = [
                Where(trace, seed, arguments.factor, arguments.at_most_s)
                for seed in range(arguments.seeds or TRACES[trace].num_seeds)
            ]
            began = time.monotonic()
            needs = needs_of(wheres[0], pool)
            tell(f"{trace}: {time.monotonic() - began:.0f} s for what each minute needs")
            show_needs(trace, needs)
            details[f"{trace}, needs"] = {
                role.value: [one[role] for one in needs.by_span] for role in Pool
            }
            found, more = cells(wheres, arguments.cold_starts, names, needs, pool)
            results.update(found)
            details.update(more)
            for (_, cold_start_s), by_name in found.items():
                show(trace, cold_start_s, by_name)
            tell(f"{trace}: {time.monotonic() - began:.0f} s in all")
    return results, details


# ---- What is shown.


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
    """For each baseline, what Baton has for no more GPU-hours than it."""
    for name in (HPA, PLANNER):
        if name not in found:
            continue
        other = found[name]
        said = f"{name}: {other.attained:.1%} for {other.gpu_hours:.1f} GPU-hours; "
        affordable = [
            (runs.attained, own)
            for own, runs in found.items()
            if own in BATON_AT and runs.gpu_hours <= other.gpu_hours
        ]
        if not affordable:
            yield said + "no setting of Baton has as few"
            continue
        attained, own = max(affordable)
        yield said + f"{own} {attained:.1%} for {found[own].gpu_hours:.1f}"


def goals(results: Results) -> Iterator[Goal]:
    for (trace, cold_start_s), found in results.items():
        if not {BATON, STATIC, HPA, PLANNER} <= found.keys():
            continue
        baton, static = found[BATON], found[STATIC]
        where = f"{trace}, {cold_start_s:g} s: "
        share = stats.ratio(baton.attained, static.attained)
        yield Goal(f"{where}attained / static's", share, 0.99, at_least=True)
        yield Goal(f"{where}GPU-hours / static's", baton.gpu_hours / static.gpu_hours, 0.7)
        for name in (HPA, PLANNER):
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
    parser.add_argument("--policies", nargs="+", help="all unless told")
    parser.add_argument(
        "--seeds", type=int, help="three of Azure's and one of the others unless told"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--factor", type=float, default=1.0, help="of the load, on top")
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
    for name in ("seeds", "processes"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            parser.error(f"--{name}: is {given}; must be at least 1")
    return arguments


def _check(
    parser: argparse.ArgumentParser, option: str, given: Iterable[str], known: Iterable[str]
) -> None:
    if unknown := set(given) - set(known):
        parser.error(f"{option}: {', '.join(sorted(unknown))}; must be of {', '.join(known)}")


def main() -> None:
    arguments = parsed()
    results, details = run(arguments)
    stats.save(details, arguments.json)
    stats.print_goals(list(goals(results)))
    print(f"figures in {arguments.json}")


if __name__ == "__main__":
    main()
