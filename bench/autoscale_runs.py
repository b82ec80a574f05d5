"""Runs the simulations of baton.bench.autoscale in a pool of processes, grouped by seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.bench.autoscale_peak import Within
from baton.bench.autoscale_scenes import ELASTIC_AT, STATIC, Needs, Scene, scene
from baton.coordinator.state.pools import Pool
from baton.load import stats
from baton.simulator.report import Figures, as_json, figures

# ---- Jobs of the worker processes. Each process reads a trace only once.


@dataclass(frozen=True, slots=True)
class Where:
    """The arguments of `autoscale_scenes.scene`."""

    trace: str
    seed: int
    factor: float
    at_most_s: float
    tide_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One run; `policy` is a name in POLICIES."""

    where: Where
    cold_start_s: float
    policy: str


def _scene(where: Where) -> Scene:
    return scene(where.trace, where.seed, where.factor, where.at_most_s, where.tide_s)


def best(where: Where) -> list[Within]:
    one = _scene(where)
    return one.search.best(one.arrivals)


def span_needs(where: Where, most: Sequence[Within], index: int) -> dict[Pool, int]:
    one = _scene(where)
    return one.search.of_window(one.arrivals, index, most[index], one.predicted[index])


def peak_needs(where: Where, most: Sequence[Within], guess: Mapping[Pool, int], pool: Pool) -> int:
    one = _scene(where)
    return one.search.fewest(one.arrivals, pool, most, guess)


def ran(needs: Needs, cell: Cell) -> tuple[Figures, dict[str, Any]]:
    where = cell.where
    one = _scene(where)
    policy = one.policy(cell.policy, cell.cold_start_s, needs)
    made = one.cell(policy, cell.cold_start_s, elastic=cell.policy in ELASTIC_AT)
    record = made.run(one.arrivals, dict(needs.peak), one.lasts_s)
    made.core.check_integrity()
    found = figures(record, made.gaps, dict(policy.config.targets)["interactive"])
    return found, as_json(found, record)


@dataclass(frozen=True, slots=True)
class Runs:
    """Figures of one policy in one setting, by seed."""

    by_seed: list[Figures]

    def of(self, value: Callable[[Figures], float]) -> list[float]:
        return [value(one) for one in self.by_seed]

    def median(self, value: Callable[[Figures], float]) -> float:
        return stats.median(self.of(value))

    @property
    def attained(self) -> float:
        return self.median(lambda one: one.attained)

    @property
    def gpu_hours(self) -> float:
        return self.median(lambda one: one.gpu_hours)

    def beats(self, other: Runs) -> bool:
        """Whether more requests attained the targets with fewer GPU-hours, by the medians."""
        return self.attained > other.attained and self.gpu_hours < other.gpu_hours


Setting = tuple[str, float]
"""A trace's name and a cold start in seconds."""
Results = dict[Setting, dict[str, Runs]]


def needs_of(where: Where, pool: Executor) -> Needs:
    one = _scene(where)
    most = pool.submit(best, where).result()
    by_span = list(pool.map(partial(span_needs, where, most), range(one.num_spans)))
    guess = {role: max(each[role] for each in by_span) for role in Pool}
    peak = pool.map(partial(peak_needs, where, most, guess), Pool)
    return Needs(by_span, dict(zip(Pool, peak, strict=True)), one.lasts_s)


def cells(
    wheres: Sequence[Where],
    cold_starts: Sequence[float],
    names: Sequence[str],
    needs: Needs,
    pool: Executor,
) -> tuple[Results, dict[str, Any]]:
    """Runs every policy with every cold start and seed.

    The static policy starts no workers, so it runs only once per seed.

    Args:
        wheres: One trace, with each seed.
        cold_starts: Cold starts in seconds.
        names: Names of policies.
        needs: Needed pool sizes of the trace.
        pool: Pool of processes.

    Returns:
        The figures, and the full JSON of each run by the name of the run.
    """
    jobs = [
        Cell(where, cold_start_s, name)
        for where in wheres
        for cold_start_s in cold_starts
        for name in names
        if name != STATIC or cold_start_s == cold_starts[0]
    ]
    done: dict[Cell, Figures] = {}
    details: dict[str, Any] = {}
    for cell, (found, detail) in zip(jobs, pool.map(partial(ran, needs), jobs), strict=True):
        done[cell] = found
        name = f"{cell.where.trace}, {cell.cold_start_s:g} s, {cell.policy}, seed {cell.where.seed}"
        details[name] = detail
        log(f"{name}: {found.attained:.2%} for {found.gpu_hours:.2f} GPU-hours")
    results = {
        (wheres[0].trace, cold_start_s): {
            name: Runs(
                [
                    done[Cell(where, cold_starts[0] if name == STATIC else cold_start_s, name)]
                    for where in wheres
                ]
            )
            for name in names
        }
        for cold_start_s in cold_starts
    }
    return results, details


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
