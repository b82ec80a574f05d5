"""The places in a lane's queue, and which tenant may take one more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

# Tenants together hold at most this many times the limit.
_MOST = 2


class QueuePlaces:
    """Counts the requests that wait, by tenant, and bounds their number.

    While the limit is reached, a tenant that has less than its fair share of the places may take
    further ones, so that no tenant keeps the others out. A tenant alone may take all places. All
    tenants together hold at most twice as many as the limit.

    Args:
        limit: Number of places.
        weight_of: Returns the weight of a tenant, by which the places are shared.
    """

    __slots__ = ("_limit", "_num", "_num_of", "_weight", "_weight_of")

    def __init__(self, limit: int, weight_of: Callable[[str], float]) -> None:
        self._limit, self._weight_of = limit, weight_of
        self._num, self._num_of = 0, Counter[str]()
        # Sum of the weights of the tenants that hold a place.
        self._weight = 0.0

    def __len__(self) -> int:
        """Number of places that are taken."""
        return self._num

    def num_of(self, tenant: str) -> int:
        """Returns how many places a tenant holds."""
        return self._num_of[tenant]

    def has_room(self, tenant: str) -> bool:
        """Whether a new request of a tenant may take a place."""
        if self._num < self._limit:
            return True
        num, weight = self._num_of[tenant], self._weight_of(tenant)
        weights = self._weight if num else self._weight + weight
        return self._num < _MOST * self._limit and num * weights < self._limit * weight

    def take(self, tenant: str) -> None:
        """Takes a place, whether or not there is room."""
        if not self._num_of[tenant]:
            self._weight += self._weight_of(tenant)
        self._num_of[tenant] += 1
        self._num += 1

    def give_back(self, tenant: str) -> None:
        """Gives back a place of a tenant."""
        self._num_of[tenant] -= 1
        self._num -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
            # A sum of floats drifts; without any tenant it is exact again.
            self._weight = self._weight - self._weight_of(tenant) if self._num_of else 0.0

    def check_integrity(self, waiting: Counter[str]) -> None:
        """Raises AssertionError when the counts differ from the requests that wait, by tenant."""
        assert self._num_of == waiting
        assert self._num == waiting.total()
        weight = sum(map(self._weight_of, waiting))
        assert abs(self._weight - weight) <= 1e-6 * (1 + weight)
