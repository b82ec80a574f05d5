"""Log of the decisions on each pool and their input numbers, shown by `baton why`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.coordinator.state.pools import POOLS, Pool
from baton.coordinator.state.scaling_decision import PoolDecision

# Maximum number of entries per pool.
_MAX_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """A decision on a pool, possibly repeated several times with the same sizes.

    Attributes:
        since: time of the first of these decisions, by the core's clock.
        at: time of the last of these decisions.
        decision: the last decision.
        numbers: input numbers of the last decision.
    """

    since: float
    at: float
    decision: PoolDecision
    numbers: Mapping[str, float]


class DecisionLog:
    """The latest decisions on each pool; consecutive decisions with equal sizes share an entry."""

    def __init__(self) -> None:
        self._entries: dict[Pool, deque[LoggedDecision]] = {
            pool: deque(maxlen=_MAX_REMEMBERED) for pool in POOLS
        }

    def __getitem__(self, pool: Pool) -> Sequence[LoggedDecision]:
        """The decisions on a pool, oldest first."""
        return self._entries[pool]

    def add(self, decision: PoolDecision, numbers: Mapping[str, float], now: float) -> None:
        entries, since = self._entries[decision.pool], now
        if entries and _sizes(entries[-1].decision) == _sizes(decision):
            since = entries.pop().since
        entries.append(LoggedDecision(since, now, decision, numbers))


def _sizes(decision: PoolDecision) -> tuple[int, int, int]:
    return decision.current, decision.needed, decision.target
