"""What the results of `baton bench`, `replay` and `simulate` have in common as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PERCENTS = (50, 90, 95, 99)


def targets(ttft_s: float | None, itl_s: float | None) -> dict[str, float | None]:
    """In milliseconds; None: no target."""
    return {
        name: None if value is None else round(value * 1e3, 6)
        for name, value in (("ttft_ms", ttft_s), ("itl_ms", itl_s))
    }


def plain(value: Any) -> Any:
    """For JSON: keys are strings; what is not a number is null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
