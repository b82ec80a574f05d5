"""JSON helpers that `baton bench`, `replay` and `simulate` share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from baton.runtime.ttft_target import TtftTarget

PERCENTS = (50, 90, 95, 99)


def targets(ttft: TtftTarget | None, itl_s: float | None) -> dict[str, float | None]:
    """Returns the latency targets in milliseconds; None: no target."""
    values = {
        "ttft_ms": None if ttft is None else ttft.base_s,
        "ttft_ms_per_1k_tokens": None if ttft is None else ttft.s_per_1k_tokens,
        "itl_ms": itl_s,
    }
    return {
        name: None if value is None else round(value * 1e3, 6) for name, value in values.items()
    }


def limits(ttft: TtftTarget | None, itl_s: float | None) -> dict[str, str]:
    """Returns the latency targets that are set in words, such as {"TTFT": "500 ms"}."""
    itl = None if itl_s is None else TtftTarget(itl_s)
    return {name: str(one) for name, one in (("TTFT", ttft), ("mean ITL", itl)) if one is not None}


def number(value: float, digits: int) -> str:
    """Formats a figure; "-" if no request has it."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def plain(value: Any) -> Any:
    """Converts keys to strings, and nan and infinite values to None, for JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
