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

from baton.bench.simulate.record import Record
from baton.bench.simulate.traces import Arrival
from baton.coordinator.autoscale.types import Targets
from baton.coordinator.load_index import Pool

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

    def needs(self, arrivals: Sequence[Arrival], guess: Sizes) -> list[dict[Pool, int]]:
        """The fewest workers of each window, run by itself.

        Args:
            arrivals: in order of time.
            guess: sizes that are tried first.
        """
        found: list[dict[Pool, int]] = []
        for index in range(math.floor(arrivals[-1].at_s / self.window_s) + 1):
            begins_s = index * self.window_s
            from_s = max(0.0, begins_s - self.warm_up_s)
            some = [
                one._replace(at_s=one.at_s - from_s)
                for one in arrivals
                if from_s <= one.at_s < begins_s + self.window_s
            ]
            if not some:
                found.append(dict.fromkeys(Pool, 1))
                continue
            near = found[-1] if found else guess
            found.append(self._fewest(some, begins_s - from_s, near))
        return found

    def at_peak(self, arrivals: Sequence[Arrival], guess: Sizes) -> dict[Pool, int]:
        """The smallest pools with which every window is held, without ever changing."""
        return self._fewest(arrivals, 0.0, guess)

    def _fewest(
        self, arrivals: Sequence[Arrival], begins_s: float, guess: Sizes
    ) -> dict[Pool, int]:
        """Of each pool, with plenty of the other."""
        plenty = dict.fromkeys(Pool, self.plenty)

        def run(sizes: Sizes) -> list[Within]:
            record = self.trial(arrivals, sizes)
            return within(record, self.targets, self.window_s, begins_s)

        best, share = run(plenty), self.targets.percentile / 100

        def held(pool: Pool, number: int) -> bool:
            return number >= self.plenty or all(
                one.of(pool) >= share * most.of(pool)
                for one, most in zip(run({**plenty, pool: number}), best, strict=True)
            )

        found = {}
        for pool in Pool:
            number = min(max(1, guess[pool]), self.plenty)
            if held(pool, number):
                while number > 1 and held(pool, number - 1):
                    number -= 1
            else:
                number += 1
                while not held(pool, number):
                    number += 1
            found[pool] = number
        return found
