"""Cells and their traffic, drawn at random for baton.bench.random_cells.

A draw names a kind of cell. Every cell has hardware, a number of workers, lengths of prompts and
outputs, arrivals, a rate, and latency targets that its workers can keep.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from baton.load.traces import MOONCAKE_BLOCK_TOKENS, Arrival
from baton.runtime.config import BatonConfig, parse
from baton.simulator import comparison
from baton.simulator.comparison import Setup
from baton.simulator.run import COLOCATED

# Steps in ms. The names are rough: a 70B model on eight H100s, an 8B model on one, and a small GPU.
HARDWARE: dict[str, dict[str, float]] = {
    "70b": {
        "prefill_base_ms": 30,
        "prefill_per_token_ms": 0.1,
        "prefill_per_token_squared_ms": 1e-6,
        "step_base_ms": 28,
        "step_per_request_ms": 0.1,
        "step_per_kv_token_ms": 3e-5,
        "kv_tokens": 1_000_000,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    },
    "8b": {
        "prefill_base_ms": 8,
        "prefill_per_token_ms": 0.05,
        "prefill_per_token_squared_ms": 5e-7,
        "step_base_ms": 9,
        "step_per_request_ms": 0.06,
        "step_per_kv_token_ms": 5e-5,
        "kv_tokens": 400_000,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    },
    "small": {
        "prefill_base_ms": 25,
        "prefill_per_token_ms": 0.25,
        "prefill_per_token_squared_ms": 5e-6,
        "step_base_ms": 26,
        "step_per_request_ms": 0.3,
        "step_per_kv_token_ms": 2e-4,
        "kv_tokens": 100_000,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 4096,
    },
}
MAX_MODEL_LEN, MAX_PROMPT = 40_000, 30_000
# Prompt and output tokens of a request.
Lengths: TypeAlias = tuple[int, int]


class LogNormal(NamedTuple):
    """Numbers of tokens, by their median and the deviation of their logarithm."""

    median: int
    deviation: float

    def draw(self, rng: random.Random) -> int:
        return max(1, int(self.median * math.exp(rng.gauss(0, self.deviation))))


# Traffic: prompts, outputs, and for mixed traffic the share, prompts and outputs of a second kind.
FAMILIES: dict[str, list[tuple[float, LogNormal, LogNormal]]] = {
    "chat": [(1.0, LogNormal(600, 1.0), LogNormal(250, 0.7))],
    "code": [(1.0, LogNormal(2500, 0.8), LogNormal(25, 1.0))],
    "retrieval": [(1.0, LogNormal(6000, 0.5), LogNormal(200, 0.6))],
    "classification": [(1.0, LogNormal(400, 0.7), LogNormal(2, 0.5))],
    "reasoning": [(1.0, LogNormal(300, 0.8), LogNormal(1500, 0.6))],
    "summaries": [(1.0, LogNormal(8000, 0.4), LogNormal(400, 0.4))],
    "agents": [(1.0, LogNormal(9000, 0.8), LogNormal(90, 0.9))],
    "short": [(1.0, LogNormal(60, 0.5), LogNormal(60, 0.6))],
    "mixed": [
        (0.8, LogNormal(150, 0.5), LogNormal(120, 0.6)),
        (0.2, LogNormal(12000, 0.4), LogNormal(60, 0.6)),
    ],
}
ARRIVALS = ("poisson", "bursts", "waves")
# Traffic of groups with a shared prefix.
SHARED = "shared prefixes"
# Number of requests in the sample from which a cell's rate follows.
_SAMPLE = 400


class SharedPrefix(NamedTuple):
    """Groups of requests whose prompts begin with the same tokens, as from one agent or document.

    Attributes:
        num_blocks: Blocks of MOONCAKE_BLOCK_TOKENS tokens that a group shares.
        num_requests: Requests of a group.
        within_s: Time in which they arrive.
        own: Further prompt tokens of each.
        output: Output tokens of each.
    """

    num_blocks: int
    num_requests: int
    within_s: float
    own: LogNormal
    output: LogNormal

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * MOONCAKE_BLOCK_TOKENS

    def lengths(self, rng: random.Random) -> Lengths:
        """Draws the tokens of a request: those of its prompt after the prefix, and its output."""
        own, output = self.own.draw(rng), self.output.draw(rng)
        return min(own, MAX_PROMPT - self.num_tokens), min(output, MAX_MODEL_LEN - MAX_PROMPT)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell and its traffic.

    Attributes:
        family: Traffic; a name in FAMILIES, or SHARED for a `prefix`.
        load: Requests' work as a share of what the workers can do, roughly.
        rate: Mean arrivals per second.
        kv_tokens: Size of a worker's KV cache; None: that of the hardware.
        prefix: Requests in groups with a shared prefix; None: prompts share nothing.
    """

    seed: int
    hardware: str
    family: str
    arrivals: str
    workers: int
    ttft_ms: int
    itl_ms: int
    load: float
    rate: float
    num_requests: int
    kv_tokens: int | None = None
    prefix: SharedPrefix | None = None

    def config(self) -> BatonConfig:
        targets = {"ttft_ms": self.ttft_ms, "itl_ms": self.itl_ms}
        simulated = HARDWARE[self.hardware] | {"max_model_len": MAX_MODEL_LEN}
        if self.kv_tokens is not None:
            simulated["kv_tokens"] = self.kv_tokens
        values = {
            "simulated": simulated,
            "scaling": {"targets": {"interactive": targets}},
        }
        return parse(values, f"cell {self.seed}")

    def setups(self) -> list[Setup]:
        """Returns the setups; the elastic cell comes last.

        Colocated serving has vLLM's default step size and that of the hardware; there are at most
        five splits.
        """
        num, half, quarter = self.workers, self.workers // 2, max(1, self.workers // 4)
        splits = sorted({1, quarter, half, num - quarter, num - 1})
        workers = Setup("", COLOCATED, half, num - half)
        return [
            *comparison.colocated(workers.applied(self.config())),
            *(Setup(f"{one}P{num - one}D", "static", one, num - one) for one in splits),
            Setup("elastic", "static", half, num - half, elastic=True),
        ]

    def requests(self) -> list[Arrival]:
        rng = random.Random(f"{self.seed} requests")
        if self.prefix is not None:
            return self._groups(self.prefix, rng)
        at_s, found = 0.0, []
        for _ in range(self.num_requests):
            if self.arrivals == "bursts":
                at_s += rng.gammavariate(0.3, 1 / (0.3 * self.rate))
            elif self.arrivals == "waves":
                # 30 s with many requests, and 30 s with few.
                at_s += rng.expovariate(self.rate * (1.65 if at_s % 60 < 30 else 0.35))
            else:
                at_s += rng.expovariate(self.rate)
            found.append(Arrival(at_s, *lengths(self.family, rng)))
        return found

    def _groups(self, prefix: SharedPrefix, rng: random.Random) -> list[Arrival]:
        at_s, found, ids = 0.0, list[Arrival](), itertools.count(1)
        while len(found) < self.num_requests:
            at_s += rng.expovariate(self.rate / prefix.num_requests)
            blocks = tuple(itertools.islice(ids, prefix.num_blocks))
            for _ in range(prefix.num_requests):
                own, output = prefix.lengths(rng)
                arrives_s = at_s + rng.uniform(0, prefix.within_s)
                found.append(Arrival(arrives_s, prefix.num_tokens + own, output, blocks))
        return sorted(found)


def lengths(family: str, rng: random.Random) -> Lengths:
    kinds = FAMILIES[family]
    _, prompt, output = rng.choices(kinds, [kind[0] for kind in kinds])[0]
    num_output = min(output.draw(rng), MAX_MODEL_LEN - MAX_PROMPT)
    return min(prompt.draw(rng), MAX_PROMPT), num_output


def _prompt_ms(steps: Mapping[str, float], num_tokens: int, num_cached: int = 0) -> float:
    """Time of a prompt of which `num_cached` tokens are computed already, without step bases."""
    square = num_tokens**2 - num_cached**2
    return (
        steps["prefill_per_token_ms"] * (num_tokens - num_cached)
        + steps["prefill_per_token_squared_ms"] * square
    )


class _Streams(NamedTuple):
    """Outputs of average length that one worker decodes.

    Attributes:
        kv_tokens: KV tokens of one, on average.
        request_ms: Time that one adds to a step.
        num_outputs: Output tokens of one.
        batch: Number of them that fit into the ITL target and the KV cache.
    """

    kv_tokens: float
    request_ms: float
    num_outputs: float
    batch: float

    @classmethod
    def of(
        cls,
        steps: Mapping[str, float],
        sample: Sequence[Lengths],
        itl_ms: float,
        room: float | None = None,
    ) -> _Streams:
        """Returns the streams of requests with these lengths; `room` is that of the KV cache."""
        total = sum(output for _, output in sample)
        kv_tokens = sum((prompt + output / 2) * output for prompt, output in sample) / total
        request_ms = steps["step_per_request_ms"] + steps["step_per_kv_token_ms"] * kv_tokens
        room = steps["kv_tokens"] if room is None else room
        in_time = (itl_ms - steps["step_base_ms"]) / request_ms
        batch = min(steps["max_num_seqs"], room / kv_tokens, in_time)
        return cls(kv_tokens, request_ms, total / len(sample), max(1.0, batch))

    def output_s(self, step_ms: float) -> float:
        """Time of a worker that one output takes, if a step of the batch takes `step_ms`."""
        return self.num_outputs * step_ms / 1e3 / self.batch


def _prompt_s(steps: Mapping[str, float], sample: Sequence[Lengths]) -> float:
    return sum(_prompt_ms(steps, prompt) for prompt, _ in sample) / len(sample) / 1e3


def _long_ms(steps: Mapping[str, float], sample: Sequence[Lengths]) -> float:
    """Time of a prompt that is longer than nine of ten."""
    return sorted(_prompt_ms(steps, prompt) for prompt, _ in sample)[len(sample) * 9 // 10]


def _count(num_requests: int, rate: float) -> int:
    """Requests of at least a minute, unless these were too many to simulate."""
    return min(4 * num_requests, max(num_requests, math.ceil(60 * rate)))


def any_cell(seed: int, num_requests: int) -> Cell:
    """Any hardware and traffic, with an ITL target of 1.4 to 4 decode steps of one stream."""
    rng = random.Random(seed)
    hardware, family = rng.choice(list(HARDWARE)), rng.choice(list(FAMILIES))
    workers, arrivals = rng.choice([2, 3, 4, 6, 8]), rng.choice(ARRIVALS)
    steps = HARDWARE[hardware]
    itl_ms = round(steps["step_base_ms"] * rng.choice([1.4, 1.8, 2.5, 4]))
    sample = [lengths(family, rng) for _ in range(_SAMPLE)]
    # The target leaves time for long prompts, and for some steps.
    long_ms = _long_ms(steps, sample)
    ttft_ms = round(max(long_ms * rng.choice([2, 4, 8]), itl_ms * rng.choice([3, 10])))
    load = rng.choice([0.5, 0.65, 0.75, 0.85, 0.95, 1.1])
    streams = _Streams.of(steps, sample, itl_ms)
    rate = load * workers / (_prompt_s(steps, sample) + streams.output_s(itl_ms))
    count = _count(num_requests, rate)
    return Cell(
        seed, hardware, family, arrivals, workers, ttft_ms, itl_ms, load, round(rate, 2), count
    )


def tight_cell(seed: int, num_requests: int) -> Cell:
    """Two or three workers; the decode step of one stream takes 0.78 to 0.9 ITL targets."""
    rng = random.Random(f"tight {seed}")
    hardware = rng.choice(list(HARDWARE))
    family = rng.choice(["chat", "short", "reasoning", "mixed", "retrieval", "agents"])
    steps = HARDWARE[hardware]
    itl_ms = math.ceil(steps["step_base_ms"] * rng.choice([1.12, 1.2, 1.28]))
    workers = rng.choice([2, 2, 3])
    sample = [lengths(family, rng) for _ in range(_SAMPLE)]
    streams, load = _Streams.of(steps, sample, itl_ms), rng.choice([0.3, 0.45, 0.6, 0.8])
    rate = load * workers / (_prompt_s(steps, sample) + streams.output_s(itl_ms))
    long_ms = _long_ms(steps, sample)
    ttft_ms = round(max(long_ms * rng.choice([2, 4]), itl_ms * rng.choice([3, 10])))
    arrivals, count = rng.choice(["poisson", "bursts"]), _count(num_requests, rate)
    return Cell(
        seed, hardware, family, arrivals, workers, ttft_ms, itl_ms, load, round(rate, 3), count
    )


def scarce_cell(seed: int, num_requests: int) -> Cell:
    """The KV cache holds 15 to 50 % of the outputs that fit into the ITL target."""
    rng = random.Random(f"scarce {seed}")
    hardware, workers = rng.choice(list(HARDWARE)), rng.choice([2, 3, 4, 6, 8])
    steps = HARDWARE[hardware]
    itl_ms = round(steps["step_base_ms"] * rng.choice([1.4, 1.8, 2.5, 4]))
    family = rng.choice(["chat", "reasoning", "mixed", "agents", "retrieval", "summaries"])
    sample = [lengths(family, rng) for _ in range(_SAMPLE)]
    within_itl = _Streams.of(steps, sample, itl_ms, room=math.inf)
    # The longest request must fit.
    room = max(
        within_itl.batch * within_itl.kv_tokens * rng.choice([0.15, 0.3, 0.5]),
        1.5 * (MAX_PROMPT + max(output for _, output in sample)),
    )
    kv_tokens = int(room) // 16 * 16
    streams = _Streams.of(steps, sample, itl_ms, kv_tokens)
    step_ms = steps["step_base_ms"] + streams.batch * streams.request_ms
    load = rng.choice([0.5, 0.65, 0.75, 0.85, 0.95, 1.1])
    rate = load * workers / (_prompt_s(steps, sample) + streams.output_s(step_ms))
    long_ms = _long_ms(steps, sample)
    ttft_ms = round(max(long_ms * rng.choice([2, 4, 8]), itl_ms * rng.choice([3, 10])))
    arrivals, count = rng.choice(["poisson", "bursts"]), _count(num_requests, rate)
    return Cell(
        seed,
        hardware,
        family,
        arrivals,
        workers,
        ttft_ms,
        itl_ms,
        load,
        round(rate, 2),
        count,
        kv_tokens=kv_tokens,
    )


def shared_cell(seed: int, num_requests: int) -> Cell:
    """Groups of 8 to 40 requests with a shared prefix of 1,024 to 20,480 tokens."""
    rng = random.Random(f"shared {seed}")
    hardware, workers = rng.choice(list(HARDWARE)), rng.choice([2, 3, 4, 6, 8])
    steps = HARDWARE[hardware]
    itl_ms = round(steps["step_base_ms"] * rng.choice([1.4, 1.8, 2.5, 4]))
    prefix = SharedPrefix(
        num_blocks=rng.choice([2, 8, 20, 40]),
        num_requests=rng.choice([8, 20, 40]),
        within_s=rng.choice([0.1, 1, 5]),
        own=LogNormal(rng.choice([50, 300, 1000]), 0.6),
        output=LogNormal(rng.choice([8, 60, 250]), 0.7),
    )
    load, cached = rng.choice([0.4, 0.6, 0.8, 0.95, 1.1]), prefix.num_tokens
    sample = [
        (cached + own, output) for own, output in (prefix.lengths(rng) for _ in range(_SAMPLE))
    ]
    own_s = sum(_prompt_ms(steps, prompt, cached) for prompt, _ in sample) / len(sample) / 1e3
    # One worker computes the prefix for its group.
    prompt_s = own_s + _prompt_ms(steps, cached) / 1e3 / prefix.num_requests
    streams = _Streams.of(steps, sample, itl_ms)
    rate = load * workers / (prompt_s + streams.output_s(itl_ms))
    whole_ms = _prompt_ms(steps, cached + prefix.own.median)
    ttft_ms = round(max(whole_ms * rng.choice([1.5, 3, 6]), itl_ms * rng.choice([3, 10])))
    return Cell(
        seed,
        hardware,
        SHARED,
        "groups",
        workers,
        ttft_ms,
        itl_ms,
        load,
        round(rate, 2),
        _count(num_requests, rate),
        prefix=prefix,
    )


DRAWS: dict[str, Callable[[int, int], Cell]] = {
    "any": any_cell,
    "tight": tight_cell,
    "scarce-kv": scarce_cell,
    "shared-prefixes": shared_cell,
}
"""How cells are drawn, by name: functions of a seed and of the least number of requests.

One seed always gives the same cell.
"""
