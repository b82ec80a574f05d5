"""Decides which pools have a fixed size, which does not depend on the load."""

from __future__ import annotations

from collections.abc import Mapping

from baton.coordinator.state.pools import POOLS, Pool


class PoolSizes:
    """Knows the fixed sizes of the pools.

    A size set by an operator is fixed until autoscaling is switched on (again). While autoscaling
    is off, other pools keep the size they had when it was switched off.

    Args:
        autoscale: Whether autoscaling is on at the start.

    Attributes:
        autoscale: whether the load sizes the pools that have no size set by an operator.
    """

    def __init__(self, *, autoscale: bool) -> None:
        self.autoscale = autoscale
        self._by_hand: dict[Pool, int] = {}
        # Times at which the sizes were set.
        self._by_hand_at: dict[Pool, float] = {}
        # Number of workers started here, as last decided; pools keep it without autoscaling.
        self._started = dict.fromkeys(POOLS, 0)

    def by_hand(self, pool: Pool) -> int | None:
        """The size set by an operator; None: no size is set."""
        return self._by_hand.get(pool)

    def started(self, pool: Pool) -> int:
        """Desired number of workers in the pool that this coordinator starts."""
        return self._started[pool]

    def fixed(self, pool: Pool) -> int | None:
        """The fixed size of a pool; None: the load sizes the pool."""
        size = self._by_hand.get(pool)
        return size if size is not None or self.autoscale else self._started[pool]

    def begin(self, sizes: Mapping[Pool, int]) -> None:
        """Sets the initial sizes of the pools."""
        self._started.update(sizes)

    def decided(self, pool: Pool, num_started: int) -> None:
        """Records the autoscaler's decision; the pool keeps it when autoscaling is switched off."""
        if self.autoscale:
            self._started[pool] = num_started

    def set_by_hand(self, pool: Pool, num_workers: int, now: float) -> None:
        self._by_hand[pool], self._by_hand_at[pool] = num_workers, now

    def set_autoscale(self, enabled: bool) -> None:
        """Switches autoscaling; on: drops sizes set by operators, off: pools keep their sizes."""
        self.autoscale = enabled
        if enabled:
            self._by_hand.clear()

    def move(self, pool: Pool, into: Pool, before: float, *, started_here: bool) -> None:
        """Adjusts the fixed sizes after a worker has moved from one pool to the other.

        Args:
            pool: pool that the worker leaves.
            into: pool that the worker joins.
            before: sizes that an operator set at this time or later are not adjusted.
            started_here: whether this coordinator started the worker.
        """
        for one, change in ((pool, -1), (into, 1)):
            if one in self._by_hand and self._by_hand_at[one] < before:
                self._by_hand[one] = max(0, self._by_hand[one] + change)
            if started_here:
                self._started[one] = max(0, self._started[one] + change)
