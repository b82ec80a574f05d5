"""Compares two result files of `baton bench`, `replay` or `simulate` (`baton bench compare`)."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from baton.load.results import PERCENTS

_LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
_FIGURES = {
    "requests_per_s": "requests/s",
    "goodput_per_s": "goodput/s",
    "output_tokens_per_s": "output tokens/s",
    "attained": "within the targets",
    "num_requests": "requests",
    "num_failed": "failed",
}


class ResultError(ValueError):
    """A file is not a result of these commands. The message names the file and the problem."""


class Row(NamedTuple):
    """One figure of both results; nan where a result lacks the figure."""

    name: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """The second value divided by the first; nan if the first is 0 or missing."""
        return self.second / self.first if self.first else math.nan

    def cells(self) -> list[str]:
        values = (f"{one:.4g}" if abs(one) < 1000 else f"{one:.0f}" for one in self[1:])
        cells = [*values, f"{self.ratio:.3f}"]
        return [self.name, *("-" if "nan" in cell else cell for cell in cells)]


def read(path: Path) -> dict[str, Any]:
    """Reads a result file.

    Raises:
        ResultError: the file cannot be read, or is not a result.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ResultError(f"{path}: cannot be read: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path}: not JSON: {error}") from None
    for key in _LATENCIES:
        if not isinstance(found, dict) or not isinstance(found.get(key), dict):
            raise ResultError(
                f"{path}: not a result of baton bench, replay or simulate: {key} is missing"
            )
    return found


def compared(first: dict[str, Any], second: dict[str, Any]) -> list[Row]:
    """Returns rows for latency percentiles in ms, then for rates and shares."""
    rows = [
        Row(f"{name} p{percent}, ms", *(_number(one[key], str(percent)) for one in (first, second)))
        for key, name in _LATENCIES.items()
        for percent in PERCENTS
    ]
    rows += [Row(name, _number(first, key), _number(second, key)) for key, name in _FIGURES.items()]
    return rows


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [
        {
            "figure": row.name,
            **{
                key: None if math.isnan(value) else value
                for key, value in (("a", row.first), ("b", row.second), ("b_over_a", row.ratio))
            },
        }
        for row in rows
    ]


def _number(values: dict[str, Any], key: str) -> float:
    """The value of a key; nan if the key is missing, or its value is no finite number."""
    value, number = values.get(key), math.nan
    if isinstance(value, int | float):
        with contextlib.suppress(OverflowError):
            number = float(value)
    return number if math.isfinite(number) else math.nan
