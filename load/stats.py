"""Percentiles, tables that show them beside their baseline, and what is kept of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
    """Figures as JSON, in a directory that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as numpy's default."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each field, of dataclasses that have nothing but figures."""
    return type(runs[0])(*map(median, zip(*map(astuple, runs), strict=True)))


def ratio(value: float, base: float) -> float:
    """Value / base; nothing over nothing is 1, something over nothing infinite."""
    if base:
        return value / base
    return math.inf if value else 1.0


def worst(values: Sequence[float]) -> float:
    """The largest; nan when any is, or none is there."""
    return max(values) if values and not any(map(math.isnan, values)) else math.nan


@dataclass(frozen=True, slots=True)
class Reach:
    """A figure beside what it must not exceed, or must not fall short of."""

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


def print_reaches(reaches: Sequence[Reach]) -> None:
    print_table("Reaches", ["what", "seen", "reach", "reached"], [one.row() for one in reaches])


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True, pad_edge=False
    )
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
