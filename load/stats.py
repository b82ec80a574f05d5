"""Percentiles and ratios, goals that a figure must meet, and printed tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Figures = TypeVar("Figures", bound="DataclassInstance")


def save(figures: object, path: Path) -> None:
    """Writes figures as JSON and creates the directory if needed; nan and inf become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(figures), indent=2) + "\n", encoding="utf-8")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile by linear interpolation between closest ranks (numpy's default)."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above, share = min(below + 1, len(ordered) - 1), position - below
    if not share or ordered[above] == ordered[below]:
        # Also for infinite values, whose difference is not a number.
        return ordered[below]
    return ordered[below] + (ordered[above] - ordered[below]) * share


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def medians(runs: Sequence[Figures]) -> Figures:
    """Returns the median of each field; the dataclass must have numeric fields only."""
    return type(runs[0])(*map(median, zip(*map(astuple, runs), strict=True)))


def ratio(value: float, base: float) -> float:
    """Returns value / base; equal values are 1, and any other value divided by 0 is infinite."""
    if value == base:
        return 1.0
    if base:
        return value / base
    return math.inf


def worst(values: Sequence[float]) -> float:
    """Returns the largest value; nan if any value is nan or there are no values."""
    return max(values) if values and not any(map(math.isnan, values)) else math.nan


@dataclass(frozen=True, slots=True)
class Goal:
    """A measured figure and its limit: a maximum, or a minimum if `at_least` is set."""

    what: str
    seen: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.seen >= self.limit if self.at_least else self.seen <= self.limit

    def row(self) -> list[str]:
        seen, limit = (f"{value:.4g}{self.unit}" for value in (self.seen, self.limit))
        bound = "at least" if self.at_least else "at most"
        return [self.what, seen, f"{bound} {limit}", "yes" if self.reached else "no"]


def print_goals(goals: Sequence[Goal]) -> None:
    print_table("Goals", ["what", "seen", "goal", "reached"], [one.row() for one in goals])


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True, pad_edge=False
    )
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
