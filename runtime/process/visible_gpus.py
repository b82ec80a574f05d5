"""GPUs that CUDA shows to a process."""

from __future__ import annotations

import os
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Indices or UUIDs in CUDA_VISIBLE_DEVICES, in order; None when the variable is not set."""
    named = environment.get(VISIBLE)
    if named is None:
        return None
    return [one.strip() for one in named.split(",") if one.strip()]
