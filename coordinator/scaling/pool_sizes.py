"""The sizes that pools are held at, whatever their load."""

from __future__ import annotations

from collections.abc import Mapping

from baton.coordinator.scaling.autoscale.sizing import POOLS
from baton.coordinator.state.pools import Pool


class PoolSizes:
    """Which pools are held at a size, and at which.

    A size that an operator has set holds until autoscaling is switched on (again). With
    autoscaling off, a pool without such a size is held at the one it had then.

    Args:
        autoscale: whether pools size themselves to begin with.

    Attributes:
        autoscale: whether pools without a size by hand size themselves.
    """

    def __init__(self, *, autoscale: bool) -> None:
        self.autoscale = autoscale
        self._by_hand: dict[Pool, int] = {}
        # When each was set.
        self._by_hand_at: dict[Pool, float] = {}
        # Workers started here: what pools keep without autoscaling; with it, as decided last.
        self._started = dict.fromkeys(POOLS, 0)

    def by_hand(self, pool: Pool) -> int | None:
        """The size that an operator has set; None: there is none."""
        return self._by_hand.get(pool)

    def started(self, pool: Pool) -> int:
        """How many workers that were started here the pool is to have."""
        return self._started[pool]

    def held(self, pool: Pool) -> int | None:
        """The size that the load does not change; None: the load sizes the pool."""
        size = self._by_hand.get(pool)
        return size if size is not None or self.autoscale else self._started[pool]

    def begin(self, sizes: Mapping[Pool, int]) -> None:
        """Takes the sizes that pools begin with."""
        self._started.update(sizes)

    def decided(self, pool: Pool, num_started: int) -> None:
        """Takes what the autoscaler wants, so that the pool keeps it once it is switched off."""
        if self.autoscale:
            self._started[pool] = num_started

    def set_by_hand(self, pool: Pool, num_workers: int, now: float) -> None:
        self._by_hand[pool], self._by_hand_at[pool] = num_workers, now

    def set_autoscale(self, enabled: bool) -> None:
        """Switched on, it takes over from sizes by hand; off, pools keep the sizes they have."""
        self.autoscale = enabled
        if enabled:
            self._by_hand.clear()

    def move(self, pool: Pool, into: Pool, before: float, *, started_here: bool) -> None:
        """A worker leaves a pool for the other one, and the sizes that count it follow.

        Args:
            pool: the pool that it leaves.
            into: the other one.
            before: sizes that were set by hand at this time or later do not follow.
            started_here: whether the worker was.
        """
        for one, change in ((pool, -1), (into, 1)):
            if one in self._by_hand and self._by_hand_at[one] < before:
                self._by_hand[one] = max(0, self._by_hand[one] + change)
            if started_here:
                self._started[one] = max(0, self._started[one] + change)
