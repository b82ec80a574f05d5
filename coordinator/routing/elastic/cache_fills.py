"""Counts how much each worker of a cell stored in its KV cache lately."""

from __future__ import annotations

import math

from baton.coordinator.state.requests import WorkerKey

# Mean age of the tokens that count, in seconds.
_MEAN_AGE_S = 120.0
# When new tokens have this weight, all sums are scaled down. Workers with smaller sums than the
# least sum have stored nothing for long, and are forgotten.
_MOST_WEIGHT, _LEAST_SUM = 1e12, 1e-6


class CacheFills:
    """Tokens that workers stored, as a share of their caches; old tokens count less.

    New tokens get a weight that grows with time, so that old ones need no update. Only the order of
    the sums has a meaning.
    """

    def __init__(self) -> None:
        self._began_at = -math.inf
        self._sums: dict[WorkerKey, float] = {}

    def add(self, worker: WorkerKey, num_tokens: int, cache_tokens: int, now: float) -> None:
        """Records tokens that a worker stores in its cache of `cache_tokens` tokens."""
        added = self._weight(now) * num_tokens / cache_tokens
        self._sums[worker] = self._sums.get(worker, 0.0) + added

    def of(self, worker: WorkerKey) -> float:
        """Returns how much a worker stored, in a unit that is the same for all workers."""
        return self._sums.get(worker, 0.0)

    def _weight(self, now: float) -> float:
        """Weight of tokens that are stored now."""
        exponent = (now - self._began_at) / _MEAN_AGE_S
        if exponent < math.log(_MOST_WEIGHT):
            return math.exp(exponent)
        factor = math.exp(-exponent)
        scaled = {worker: total * factor for worker, total in self._sums.items()}
        self._sums = {worker: total for worker, total in scaled.items() if total >= _LEAST_SUM}
        self._began_at = now
        return 1.0
