"""How large pools have to be, by trying: each pool alone, on the workers that are simulated.

A window of time is held when so many of its requests have their first token in time, and so many
their gaps, as the targets' percentile says; those that would be late on any number of workers are
left out. The sizes of "static at peak" and of hindsight are both found so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import Targets
from baton.load.traces import Arrival
from baton.simulator.record import Record

Sizes = Mapping[Pool, int]
Trial = Callable[[Sequence[Arrival], Sizes], Record]
"""Runs arrivals on pools that keep these sizes."""


class Within(NamedTuple):
    """Of the requests of a window. Attributes: ttft, tpot: how many were within the targets."""

    ttft: int
    tpot: int

    def of(self, pool: Pool) -> int:
        """What this pool has to answer for."""
        return self.ttft if pool is Pool.PREFILL else self.tpot


def within(
    record: Record, targets: Targets, window_s: float, begins_s: float = 0.0
) -> list[Within]:
    """By window of arrivals, from `begins_s` on."""
    counts: list[list[int]] = []
    most_ttft_s = math.inf if targets.ttft_s is None else targets.ttft_s
    most_itl_s = math.inf if targets.itl_s is None else targets.itl_s
    for arrived, first, end, count in zip(
        record.arrivals, record.firsts, record.ends, record.outputs, strict=True
    ):
        index = math.floor((arrived - record.began_at - begins_s) / window_s)
        while len(counts) <= index:
            counts.append([0, 0])
        if index < 0 or math.isnan(end) or math.isnan(first):
            continue
        counts[index][0] += first - arrived <= most_ttft_s
        counts[index][1] += count < 2 or (end - first) / (count - 1) <= most_itl_s
    return [Within(*one) for one in counts]


@dataclass(frozen=True, slots=True)
class Search:
    """Finds sizes.

    Attributes:
        trial: makes the runs.
        targets: that are to be held.
        plenty: more workers than either pool can use.
        window_s: of which each is to be held.
        warm_up_s: of the trace before a window, that is run with it.
    """

    trial: Trial
    targets: Targets
    plenty: int
    window_s: float = 60.0
    warm_up_s: float = 30.0

    def best(self, arrivals: Sequence[Arrival]) -> list[Within]:
        """What plenty of workers would serve in time, by window."""
        return self._run(arrivals, dict.fromkeys(Pool, self.plenty))

    def of_window(
        self, arrivals: Sequence[Arrival], index: int, best: Within, guess: Sizes
    ) -> dict[Pool, int]:
        """The fewest workers of one window, run by itself.

        Args:
            arrivals: all, in order of time.
            index: of the window.
            best: of the same window.
            guess: sizes that are tried first.
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
        """The fewest workers of one pool, with plenty of the other, that hold every window.

        Args:
            arrivals: in order of time.
            pool: that is meant.
            best: as `best` says, of the same windows.
            guess: that is tried first.
            begins_s: of the first window.
        """

        def held(number: int) -> bool:
            if number >= self.plenty:
                return True
            sizes = {**dict.fromkeys(Pool, self.plenty), pool: number}
            found = self._run(arrivals, sizes, begins_s)
            share = self.targets.percentile / 100
            # A request at the very end of a window may round into the next.
            return all(
                one.of(pool) >= share * most.of(pool)
                for one, most in zip(found, best, strict=False)
            )

        number = min(max(1, guess[pool]), self.plenty)
        if held(number):
            while number > 1 and held(number - 1):
                number -= 1
            return number
        number += 1
        while not held(number):
            number += 1
        return number

    def _run(
        self, arrivals: Sequence[Arrival], sizes: Sizes, begins_s: float = 0.0
    ) -> list[Within]:
        record = self.trial(arrivals, sizes)
        return within(record, self.targets, self.window_s, begins_s)
