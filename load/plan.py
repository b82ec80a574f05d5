"""Which requests are sent, and when: drawn by chance, or from a trace."""

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
    """One request.

    Attributes:
        number: tells requests of a run apart.
        at_s: since the run began, when it is to be sent; of a closed loop 0: when its turn comes.
        block_ids: as in Arrival: equal ones are equal prefixes.
    """

    number: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    lane: LaneName = "interactive"
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaneRule:
    """Which requests go to the batch lane.

    Attributes:
        batch_share: of all requests, by chance.
        batch_prompt_tokens: prompts of at least so many go there; None: length does not matter.
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
        # Drawn for every request: a rule by length changes nobody else's lane.
        by_chance = chance.random() < self.batch_share
        return "batch" if by_length or by_chance else "interactive"


def arrival_times(rate: float, burstiness: float, chance: random.Random) -> Iterator[float]:
    """Yields arrival times in seconds after the start, without an end.

    Gaps are gamma distributed, as in vLLM's `bench serve`: with a burstiness of 1 arrivals are
    Poisson, below they come in bursts, above they are more regular.

    Args:
        rate: requests/s.
        burstiness: the shape of the distribution; the gaps' variance over their squared mean is
            1 / burstiness.
        chance: the source of random numbers.

    Raises:
        ValueError: `rate` or `burstiness` is not more than 0.
    """
    for name, value in (("rate", rate), ("burstiness", burstiness)):
        if not 0 < value < math.inf:
            raise ValueError(f"--{name} is {value}; must be finite and more than 0")
    gaps = (chance.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in itertools.count())
    return itertools.accumulate(gaps)


def generated(
    times: Iterable[float], prompt: Lengths, output: Lengths, rule: LaneRule, seed: int
) -> Iterator[Planned]:
    """A request at each of these times; of the same seed always the same ones."""
    chance = random.Random(f"requests {seed}")
    for number, at_s in enumerate(times):
        num_prompt, num_output = prompt.draw(chance), output.draw(chance)
        yield Planned(number, at_s, num_prompt, num_output, rule.lane(num_prompt, chance))


def replayed(
    arrivals: Sequence[Arrival], speed: float, rule: LaneRule, seed: int
) -> Iterator[Planned]:
    """A trace's requests, `speed` times as fast as they came.

    Raises:
        ValueError: the speed is not more than 0.
    """
    if not speed > 0:
        raise ValueError(f"--speed is {speed}; must be more than 0")
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
