"""Compares elastic cells with plain serving and fixed splits, in cells drawn at random.

    python -m baton.bench.random_cells

Each seed draws one cell: hardware, number of workers, lengths of prompts and outputs, arrivals,
rate and latency targets. The simulator then serves the same requests with colocated workers (with
two step sizes, as in `baton simulate --compare`), with fixed splits, and with an elastic cell of
the same workers. So the placement rule is judged by
traffic that it was not tuned with. A row has the share of requests within both targets; at the end
come the cells in which the elastic one attains less than the best of the others, and by how much.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from baton.bench import interrupts
from baton.load.traces import Arrival
from baton.runtime.config import BatonConfig, parse
from baton.simulator import comparison, processes
from baton.simulator.comparison import Setup
from baton.simulator.run import COLOCATED, simulate

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
# Points below the best other system that count as noise.
NOISE = 1.0

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


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell and its traffic.

    Attributes:
        load: requests' work as a share of what the workers can do, roughly.
        rate: mean arrivals per second.
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

    def config(self) -> BatonConfig:
        targets = {"ttft_ms": self.ttft_ms, "itl_ms": self.itl_ms}
        values = {
            "simulated": HARDWARE[self.hardware] | {"max_model_len": MAX_MODEL_LEN},
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


def lengths(family: str, rng: random.Random) -> Lengths:
    kinds = FAMILIES[family]
    _, prompt, output = rng.choices(kinds, [kind[0] for kind in kinds])[0]
    num_output = min(output.draw(rng), MAX_MODEL_LEN - MAX_PROMPT)
    return min(prompt.draw(rng), MAX_PROMPT), num_output


def random_cell(seed: int, num_requests: int) -> Cell:
    """Draws a cell; one seed always gives the same one."""
    rng = random.Random(seed)
    hardware, family = rng.choice(list(HARDWARE)), rng.choice(list(FAMILIES))
    workers, arrivals = rng.choice([2, 3, 4, 6, 8]), rng.choice(ARRIVALS)
    steps = HARDWARE[hardware]
    base_ms = steps["step_base_ms"]
    itl_ms = round(base_ms * rng.choice([1.4, 1.8, 2.5, 4]))
    sample = [lengths(family, rng) for _ in range(400)]

    def prompt_ms(num_tokens: int) -> float:
        square_ms = steps["prefill_per_token_squared_ms"] * num_tokens**2
        return steps["prefill_per_token_ms"] * num_tokens + square_ms

    # The target leaves time for long prompts, and for some steps.
    long_ms = sorted(prompt_ms(prompt) for prompt, _ in sample)[len(sample) * 9 // 10]
    ttft_ms = round(max(long_ms * rng.choice([2, 4, 8]), itl_ms * rng.choice([3, 10])))
    num_outputs = sum(output for _, output in sample)
    kv_tokens = sum((prompt + output / 2) * output for prompt, output in sample) / num_outputs
    request_ms = steps["step_per_request_ms"] + steps["step_per_kv_token_ms"] * kv_tokens
    batch = min(
        steps["max_num_seqs"], steps["kv_tokens"] / kv_tokens, (itl_ms - base_ms) / request_ms
    )
    prompt_s = sum(prompt_ms(prompt) for prompt, _ in sample) / len(sample) / 1e3
    output_s = num_outputs / len(sample) * itl_ms / 1e3 / max(1.0, batch)
    load = rng.choice([0.5, 0.65, 0.75, 0.85, 0.95, 1.1])
    rate = load * workers / (prompt_s + output_s)
    # At least a minute, unless these were too many requests to simulate.
    count = min(4 * num_requests, max(num_requests, math.ceil(60 * rate)))
    return Cell(
        seed, hardware, family, arrivals, workers, ttft_ms, itl_ms, load, round(rate, 2), count
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Shares of requests within both targets, in percent, by the name of the setup.

    Attributes:
        ttft_p99_ms: 99th percentile of TTFT in ms, by the name of the setup.
    """

    cell: Cell
    attained: dict[str, float]
    ttft_p99_ms: dict[str, float]

    @property
    def elastic(self) -> float:
        return self.attained["elastic"]

    @property
    def colocated(self) -> float:
        """The best of the step sizes with colocated serving."""
        return max(share for name, share in self.attained.items() if name.startswith(COLOCATED))

    @property
    def best_other(self) -> tuple[str, float]:
        others = ((name, share) for name, share in self.attained.items() if name != "elastic")
        return max(others, key=lambda one: one[1])

    @property
    def gain(self) -> float:
        """Points that the elastic cell is above the best other system."""
        return self.elastic - self.best_other[1]


def measure(cell: Cell) -> Result:
    config, requests = cell.config(), cell.requests()
    found = {
        one.name: simulate(one.applied(config), requests, one.policy).figures
        for one in cell.setups()
    }
    return Result(
        cell,
        {name: round(100 * one.attained, 1) for name, one in found.items()},
        {name: round(one.ttft_ms[99]) for name, one in found.items()},
    )


def line(result: Result) -> str:
    cell, (best, share) = result.cell, result.best_other
    return (
        f"{cell.seed:>6} {cell.hardware:<6} {cell.family:<15} {cell.workers} workers "
        f"{cell.arrivals:<8} load {cell.load:<4} TTFT {cell.ttft_ms:>6} ITL {cell.itl_ms:>4} ms"
        f"{result.colocated:>8.1f} %{share:>8.1f} % ({best})"
        f"{result.elastic:>8.1f} %{result.gain:>+8.1f}"
    )


def summary(results: Sequence[Result]) -> list[str]:
    """Says how often the elastic cell was at least as good, and where it was not."""
    worse = sorted((one for one in results if one.gain < -NOISE), key=lambda one: one.gain)
    num_good, mean = len(results) - len(worse), sum(one.gain for one in results) / len(results)
    made = [
        f"{num_good} of {len(results)} elastic cells attain what the best other system does, less "
        f"{NOISE:.0f} point, or more; on average {mean:+.1f} points"
    ]
    return made + [f"less in: {line(one)}" for one in worse]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=40, help="number of cells")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first cell")
    parser.add_argument("--requests", type=int, default=700, help="least requests per cell")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    for name in ("cells", "requests", "processes"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: must be at least 1, and not {getattr(given, name)}")
    interrupts.on_sigterm()
    cells = [random_cell(given.seed + number, given.requests) for number in range(given.cells)]
    results = []
    print("share within both targets: colocated, the best other system, elastic, and its gain")
    for _, result in processes.results(measure, cells, given.processes):
        results.append(result)
        print(line(result), flush=True)
    for text in summary(results):
        print(text)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in results], indent=2))


if __name__ == "__main__":
    main()
