"""Compares elastic cells with plain serving and fixed splits, in cells drawn at random.

    python -m baton.bench.random_cells
    python -m baton.bench.random_cells --draw tight

Each seed draws one cell (random_draws.py): hardware, number of workers, lengths of prompts and
outputs, arrivals, rate and latency targets. The simulator then serves the same requests with
colocated workers (with two step sizes, as in `baton simulate --compare`), with fixed splits, and
with an elastic cell of the same workers. So the placement rule is judged by traffic that it was not
tuned with. A row has the share of requests within both targets; at the end come the cells in which
the elastic one attains less than the best of the others, and by how much.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.bench import interrupts
from baton.bench.random_draws import DRAWS, Cell
from baton.simulator import processes
from baton.simulator.run import COLOCATED, simulate

# Points below the best other system that count as noise.
NOISE = 1.0


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
    drawn = "; ".join(f"{name}: {draw.__doc__}" for name, draw in DRAWS.items())
    parser.add_argument("--draw", choices=DRAWS, default="any", help=drawn.replace("%", "%%"))
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
    cells = [
        DRAWS[given.draw](given.seed + number, given.requests) for number in range(given.cells)
    ]
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
