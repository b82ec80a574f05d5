"""Percentiles, and tables that show them beside their baseline."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as numpy's default."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
