"""What was decided on each pool, and by which numbers: what `baton why` shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.coordinator.scaling.autoscale.sizing import POOLS
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_decision import PoolDecision

# Of each pool.
_MAX_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Remembered:
    """A decision on a pool that was made, and made again without a change, for some time.

    Attributes:
        since: when it was made first, by the core's clock.
        at: when it was made last.
        decision: the last one.
        numbers: what the last one rests on.
    """

    since: float
    at: float
    decision: PoolDecision
    numbers: Mapping[str, float]


class DecisionLog:
    """The latest decisions on each pool; the same sizes again and again are one entry."""

    def __init__(self) -> None:
        self._entries: dict[Pool, deque[Remembered]] = {
            pool: deque(maxlen=_MAX_REMEMBERED) for pool in POOLS
        }

    def __getitem__(self, pool: Pool) -> Sequence[Remembered]:
        """The decisions on a pool, oldest first."""
        return self._entries[pool]

    def add(self, decision: PoolDecision, numbers: Mapping[str, float], now: float) -> None:
        entries, since = self._entries[decision.pool], now
        if entries and _sizes(entries[-1].decision) == _sizes(decision):
            since = entries.pop().since
        entries.append(Remembered(since, now, decision, numbers))


def _sizes(decision: PoolDecision) -> tuple[int, int, int]:
    return decision.current, decision.needed, decision.target
