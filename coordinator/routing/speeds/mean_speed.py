"""Mean speed of copies of KV blocks, from the copies so far; old measurements count less."""

from __future__ import annotations

import math
from typing import NamedTuple

# Copies of fewer bytes say more about delays than about speed.
LEAST_BYTES = 2**17
# Time after which a measurement counts half, in seconds, so that slow copies are tried again.
_HALF_LIFE_S = 600.0
# Weight of the latest copy in the mean seconds per byte.
_WEIGHT = 0.3


class MeanSpeed(NamedTuple):
    """Mean seconds per byte, and when it was measured last, by the core's clock."""

    s_per_byte: float
    at: float

    def is_recent(self, now: float) -> bool:
        """Whether the measurement counts at least half."""
        return now - self.at <= _HALF_LIFE_S

    def share(self, now: float) -> float:
        """How much the measurement counts, from 1 when it is made towards 0."""
        return math.exp2(-(now - self.at) / _HALF_LIFE_S)


def with_latest(before: MeanSpeed | None, num_bytes: int, seconds: float, now: float) -> MeanSpeed:
    """Returns the mean with a copy that has just ended.

    Args:
        before: Mean of the copies before; None: there were none.
        num_bytes: Bytes that were copied, at least LEAST_BYTES.
        seconds: Time that this took.
        now: Time by the core's clock.
    """
    latest = max(seconds, 1e-6) / num_bytes
    if before is not None and before.is_recent(now):
        latest = before.s_per_byte + _WEIGHT * (latest - before.s_per_byte)
    return MeanSpeed(latest, now)
