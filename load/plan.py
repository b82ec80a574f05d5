"""Plans which requests are sent and when: drawn at random, or taken from a trace."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.client.request import LaneName
from baton.load.lengths import Lengths
from baton.load.traces import Arrival


class Planned(NamedTuple):
    """A request that is to be sent.

    Attributes:
        number: Unique within a run.
        at_s: Planned send time in seconds since the run began; ignored in a closed loop.
        block_ids: Prefix blocks, as in `Arrival.block_ids`.
    """

    number: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    lane: LaneName = "interactive"
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaneRule:
    """Decides which requests go to the batch lane.

    Attributes:
        batch_share: Share of all requests that go there, chosen at random.
        batch_prompt_tokens: Prompts with at least this many tokens go there too; None: no limit.
    """

    batch_share: float = 0.0
    batch_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.batch_share <= 1:
            raise ValueError(f"--batch-share is {self.batch_share}; must be 0 to 1")

    def lane(self, num_prompt_tokens: int, chance: random.Random) -> LaneName:
        by_length = (
            self.batch_prompt_tokens is not None and num_prompt_tokens >= self.batch_prompt_tokens
        )
        # A number is drawn for every request, so that adding a length rule does not change which
        # other requests are chosen at random.
        by_chance = chance.random() < self.batch_share
        return "batch" if by_length or by_chance else "interactive"


def arrival_times(rate: float, burstiness: float, chance: random.Random) -> Iterator[float]:
    """Yields an endless series of arrival times in seconds after the start.

    Gaps are gamma distributed, as in vLLM's `bench serve`. With a burstiness of 1 the arrivals are
    Poisson; smaller values give bursts, larger values more regular arrivals.

    Args:
        rate: Requests/s.
        burstiness: Shape of the gamma distribution: the variance of the gaps divided by their
            squared mean is 1 / burstiness.
        chance: Source of random numbers.

    Raises:
        ValueError: `rate` or `burstiness` is not finite or not more than 0.
    """
    for name, value in (("rate", rate), ("burstiness", burstiness)):
        if not 0 < value < math.inf:
            raise ValueError(f"--{name} is {value}; must be finite and more than 0")
    gaps = (chance.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in itertools.count())
    return itertools.accumulate(gaps)


def generated(
    times: Iterable[float], prompt: Lengths, output: Lengths, rule: LaneRule, seed: int
) -> Iterator[Planned]:
    """Yields a random request for each of these times; the same seed gives the same requests."""
    chance = random.Random(f"requests {seed}")
    for number, at_s in enumerate(times):
        num_prompt, num_output = prompt.draw(chance), output.draw(chance)
        yield Planned(number, at_s, num_prompt, num_output, rule.lane(num_prompt, chance))


def replayed(
    arrivals: Sequence[Arrival], speed: float, rule: LaneRule, seed: int
) -> Iterator[Planned]:
    """Yields the requests of a trace, sent `speed` times as fast as in the trace.

    Raises:
        ValueError: the speed is not finite or not more than 0.
    """
    if not 0 < speed < math.inf:
        raise ValueError(f"--speed is {speed}; must be finite and more than 0")
    chance = random.Random(f"lanes {seed}")
    return (
        Planned(
            number,
            one.at_s / speed,
            one.num_prompt_tokens,
            one.num_output_tokens,
            rule.lane(one.num_prompt_tokens, chance),
            one.block_ids,
        )
        for number, one in enumerate(arrivals)
    )
