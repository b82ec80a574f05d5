"""A bounded number of places, as in a queue, and who may take one more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

# Holders together have at most this many times the limit.
_MOST = 2


class FairPlaces:
    """Counts the places that are taken, by holder, and bounds their number.

    While the limit is reached, a holder that has less than its fair share of the places may take
    further ones, so that no holder keeps the others out. A holder alone may take all places. All
    holders together have at most twice as many as the limit.

    Args:
        limit: Number of places.
        weight_of: Returns the weight of a holder, by which the places are shared.
    """

    __slots__ = ("_limit", "_num", "_num_of", "_weight", "_weight_of")

    def __init__(self, limit: int, weight_of: Callable[[str], float] = lambda _: 1.0) -> None:
        self._limit, self._weight_of = limit, weight_of
        self._num, self._num_of = 0, Counter[str]()
        # Sum of the weights of the holders.
        self._weight = 0.0

    def __len__(self) -> int:
        """Number of places that are taken."""
        return self._num

    def num_of(self, holder: str) -> int:
        """Returns how many places a holder has."""
        return self._num_of[holder]

    def has_room(self, holder: str) -> bool:
        """Whether a holder may take one more place."""
        if self._num < self._limit:
            return True
        num, weight = self._num_of[holder], self._weight_of(holder)
        weights = self._weight if num else self._weight + weight
        return self._num < _MOST * self._limit and num * weights < self._limit * weight

    def take(self, holder: str) -> None:
        """Takes a place, whether or not there is room."""
        if not self._num_of[holder]:
            self._weight += self._weight_of(holder)
        self._num_of[holder] += 1
        self._num += 1

    def give_back(self, holder: str) -> None:
        """Gives back a place of a holder."""
        self._num_of[holder] -= 1
        self._num -= 1
        if not self._num_of[holder]:
            del self._num_of[holder]
            # A sum of floats drifts; without any holder it is exact again.
            self._weight = self._weight - self._weight_of(holder) if self._num_of else 0.0

    def check_integrity(self, taken: Counter[str]) -> None:
        """Raises AssertionError when the counts differ from the places taken, by holder."""
        assert self._num_of == taken
        assert self._num == taken.total()
        weight = sum(map(self._weight_of, taken))
        assert abs(self._weight - weight) <= 1e-6 * (1 + weight)
