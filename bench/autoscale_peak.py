"""Searches for the smallest pools that meet the targets, one pool at a time, in the simulator.

The targets have a percentile, for example 95. A window of time meets them if this share of its
requests have their first token in time and this share keep the gap target. Requests that are late
with any number of workers are left out. The sizes of the policies "static at peak" and "hindsight"
come from this search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import Targets
from baton.load.traces import Arrival
from baton.runtime.ttft_target import TtftTarget
from baton.simulator.record import Record

Sizes = Mapping[Pool, int]
Trial = Callable[[Sequence[Arrival], Sizes], Record]
"""Simulates arrivals with fixed pool sizes."""


class Within(NamedTuple):
    """Number of requests of a window that were within the TTFT and the TPOT target."""

    ttft: int
    tpot: int

    def of(self, pool: Pool) -> int:
        """Returns the count that depends on this pool: TTFT for prefill, TPOT for decode."""
        return self.ttft if pool is Pool.PREFILL else self.tpot


def within(
    record: Record, targets: Targets, window_s: float, begins_s: float = 0.0
) -> list[Within]:
    """Returns the counts of each window of arrival times, from `begins_s` on."""
    counts: list[list[int]] = []
    target = targets.ttft or TtftTarget(math.inf)
    most_itl_s = math.inf if targets.itl_s is None else targets.itl_s
    for arrived, first, end, num_prompt, count in zip(
        *(record.arrivals, record.firsts, record.ends, record.prompts, record.outputs), strict=True
    ):
        index = math.floor((arrived - record.began_at - begins_s) / window_s)
        while len(counts) <= index:
            counts.append([0, 0])
        if index < 0 or math.isnan(end) or math.isnan(first):
            continue
        counts[index][0] += first - arrived <= target.of(num_prompt)
        counts[index][1] += count < 2 or (end - first) / (count - 1) <= most_itl_s
    return [Within(*one) for one in counts]


@dataclass(frozen=True, slots=True)
class Search:
    """Searches for the smallest pool sizes.

    Attributes:
        trial: Runs one simulation.
        targets: Latency targets.
        plenty: More workers than either pool can use.
        window_s: Length of a window; every window must meet the targets.
        warm_up_s: Part of the trace before a window that is simulated with the window.
    """

    trial: Trial
    targets: Targets
    plenty: int
    window_s: float = 60.0
    warm_up_s: float = 30.0

    def best(self, arrivals: Sequence[Arrival]) -> list[Within]:
        """Returns the counts of each window with `plenty` workers in both pools."""
        return self._run(arrivals, dict.fromkeys(Pool, self.plenty))

    def of_window(
        self, arrivals: Sequence[Arrival], index: int, best: Within, guess: Sizes
    ) -> dict[Pool, int]:
        """Returns the smallest pool sizes for one window, simulated by itself.

        Args:
            arrivals: The whole trace, in order of time.
            index: Index of the window.
            best: Counts of this window with `plenty` workers.
            guess: Sizes that are tried first.
        """
        begins_s = index * self.window_s
        from_s = max(0.0, begins_s - self.warm_up_s)
        some = [
            one._replace(at_s=one.at_s - from_s)
            for one in arrivals
            if from_s <= one.at_s < begins_s + self.window_s
        ]
        if not some:
            return dict.fromkeys(Pool, 1)
        return {pool: self.fewest(some, pool, [best], guess, begins_s - from_s) for pool in Pool}

    def fewest(
        self,
        arrivals: Sequence[Arrival],
        pool: Pool,
        best: Sequence[Within],
        guess: Sizes,
        begins_s: float = 0.0,
    ) -> int:
        """Returns the smallest size of one pool with which every window meets the targets.

        The other pool has `plenty` workers.

        Args:
            arrivals: Requests in order of time.
            pool: Pool that is sized.
            best: Counts of the same windows with `plenty` workers, from `best`.
            guess: Sizes that are tried first.
            begins_s: Start of the first window.
        """

        def is_enough(number: int) -> bool:
            if number >= self.plenty:
                return True
            sizes = {**dict.fromkeys(Pool, self.plenty), pool: number}
            found = self._run(arrivals, sizes, begins_s)
            share = self.targets.percentile / 100
            # Rounding may put a request at the very end of a window into the next window.
            return all(
                one.of(pool) >= share * most.of(pool)
                for one, most in zip(found, best, strict=False)
            )

        number = min(max(1, guess[pool]), self.plenty)
        if is_enough(number):
            while number > 1 and is_enough(number - 1):
                number -= 1
            return number
        number += 1
        while not is_enough(number):
            number += 1
        return number

    def _run(
        self, arrivals: Sequence[Arrival], sizes: Sizes, begins_s: float = 0.0
    ) -> list[Within]:
        record = self.trial(arrivals, sizes)
        return within(record, self.targets, self.window_s, begins_s)
