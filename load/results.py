"""JSON helpers that `baton bench`, `replay` and `simulate` share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PERCENTS = (50, 90, 95, 99)


def targets(ttft_s: float | None, itl_s: float | None) -> dict[str, float | None]:
    """Returns the latency targets in milliseconds; None: no target."""
    return {
        name: None if value is None else round(value * 1e3, 6)
        for name, value in (("ttft_ms", ttft_s), ("itl_ms", itl_s))
    }


def plain(value: Any) -> Any:
    """Converts keys to strings, and nan and infinite values to None, for JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
