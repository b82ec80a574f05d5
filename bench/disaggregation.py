"""What disaggregation costs: Baton beside one plain vLLM and vLLM's NixlConnector.

`make bench`, or `python -m baton.bench.disaggregation --help`. One core per engine. Baton and plain
vLLM answer the same prompts in turn, in rounds, so that noise of the machine meets both; NIXL's
progress threads spin, so its pair answers them by itself, after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from baton.bench import interrupts, nixl_transfer, stats, streams, systems
from baton.bench.stats import Reach
from baton.bench.streams import Ask, Prompt, Timed
from baton.client.client import BatonClient
from baton.runtime import demo_model

MODEL = "demo-88m"
MAX_MODEL_LEN = demo_model.SHAPES[MODEL].max_model_len
MAX_NUM_SEQS = 16
ENGINE_ARGS = systems.engine_args(MODEL, MAX_NUM_SEQS)
PLAIN, BATON, NIXL = "plain vLLM", "Baton", "vLLM NixlConnector"
# Token ids of the demo tokenizer, special ones left out.
TOKEN_IDS = range(5, 430)
READY_TIMEOUT_S = 300.0
# Counted requests of one system before it is another's turn, and those before them, at least.
ROUND = 12
WARM_UP_REQUESTS = 2
# A vLLM rank spins for a second after its last step; the next system's turn begins after that.
SPIN_S = 1.5
# What a fresh system is asked, one at a time, nothing warmed up.
FRESH_REQUESTS = 12

# What Baton is held to: exposed handoff over prefill, the gap from first to second token over the
# steady ITL by concurrency, and a fresh pair's first handoff over its steady one.
MAX_EXPOSED_SHARE, EXPOSED_FROM_TOKENS = 0.02, 512
MAX_GAP_RATIO = {1: 1.3, 4: 2.0}
MAX_FIRST_RATIO = 2.0

COLUMNS = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p95_ms": "TTFT p95",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "second_gap_p50_ms": "gap 1-2 p50",
    "second_gap_p95_ms": "gap 1-2 p95",
    "second_gap_ratio": "gap / own ITL",
    "e2e_p50_ms": "E2E p50",
    "exposed_p50_ms": "handoff p50",
    "exposed_p95_ms": "handoff p95",
    "exposed_share": "handoff / prefill",
}
NOT_OVER_PLAIN = ("second_gap_ratio", "exposed_p50_ms", "exposed_p95_ms", "exposed_share")
NOTES = """\
ms, as the client sees them. "gap 1-2": from the first to the second token, its p50 over the median
of the same system's later gaps ("own ITL"). "handoff": its exposed part; Baton's from the last
layer computed until the commit is verified.
With several in flight a new prompt follows each answer. TTFT then holds the wait behind other
prompts, with Baton in the prefill worker's queue. Baton's gap begins when the prefill worker's
token is out, so it holds none of that queue: it is the exposed handoff, what is left of the decode
worker's running step, the load and a step. Its prefill holds the chunks of other prompts computed
between its own. In plain vLLM gaps and ITL hold other requests' prefill.
NIXL's first token is its decode server's: the handoff is in TTFT, not in the gap. Its handoff
column runs from the prefill server's answer to that token, one decode step included; its prefill
holds the wait in the queue."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt length at one concurrency.

    Attributes:
        timed: counted answers by system, in the order of the prompts, which are the same for all.
    """

    prompt_tokens: int
    concurrency: int
    timed: dict[str, list[Timed]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens} tokens in, {self.concurrency} in flight"

    def prompts(self, repeats: int) -> list[Prompt]:
        source = random.Random(self.name)
        return [fresh_prompt(source, self.prompt_tokens) for _ in range(repeats)]

    def num_different(self, system: str) -> int:
        """Outputs that are not plain vLLM's."""
        pairs = zip(self.timed[PLAIN], self.timed[system], strict=False)
        return sum(plain.token_ids != one.token_ids for plain, one in pairs)


@dataclass(frozen=True, slots=True)
class Fresh:
    """The first requests ever of a system that has just started.

    Attributes:
        first: the very first.
        later: those after it.
    """

    system: str
    first: Timed
    later: list[Timed]

    def first_and_steady_ms(
        self, measure: Callable[[Timed], float | None]
    ) -> tuple[float, float] | None:
        """Of the first request, and the median of the later ones; None where there is none."""
        first = measure(self.first)
        later = [value for one in self.later if (value := measure(one)) is not None]
        return None if first is None or not later else (first * 1e3, stats.median(later) * 1e3)

    def ratio(self, measure: Callable[[Timed], float | None]) -> float:
        """The first over the steady one; nan where there is none."""
        found = self.first_and_steady_ms(measure)
        return stats.ratio(*found) if found is not None else float("nan")


@dataclass(slots=True)
class Results:
    """All that a run has seen.

    Attributes:
        resident_mb: by process and its parts.
        handoff_counters: of the coordinator that served the cells.
        num_asked: requests that it was sent.
    """

    output_tokens: int
    fresh_tokens: int
    cells: list[Cell]
    fresh: list[Fresh] = field(default_factory=list)
    resident_mb: dict[str, dict[str, float]] = field(default_factory=dict)
    handoff_counters: dict[str, float] = field(default_factory=dict)
    num_asked: int = 0


def fresh_prompt(source: random.Random, length: int) -> Prompt:
    """Never the same twice: no prefix cache helps anyone."""
    return source.choices(TOKEN_IDS, k=length)


async def fill(cell: Cell, asks: Mapping[str, Ask], repeats: int) -> None:
    """The same prompts to every system, in rounds, its concurrency held while they are counted."""
    started = time.monotonic()
    before, after = max(WARM_UP_REQUESTS, cell.concurrency), cell.concurrency - 1
    prompts = cell.prompts(repeats)
    fillers = random.Random(f"around {cell.name} {sorted(asks)}")
    for done in range(0, repeats, ROUND):
        counted = prompts[done : done + ROUND]
        for name, ask in asks.items():
            await asyncio.sleep(SPIN_S)
            around = [fresh_prompt(fillers, cell.prompt_tokens) for _ in range(before + after)]
            turn = [*around[:before], *counted, *around[before:]]
            answers = await streams.closed_loop(ask, turn, cell.concurrency)
            cell.timed.setdefault(name, []).extend(answers[before : before + len(counted)])
    spent_s = time.monotonic() - started
    progress(f"{cell.name}: {', '.join(asks)}: {repeats} requests each in {spent_s:.0f} s")


async def ask_fresh(system: str, ask: Ask, length: int, index: int = 0) -> Fresh:
    """The first requests of a system that nothing has warmed up, one at a time."""
    source = random.Random(f"fresh {system} {index}")
    first, *later = [await ask(fresh_prompt(source, length)) for _ in range(FRESH_REQUESTS)]
    progress(f"fresh {system}: {FRESH_REQUESTS} requests")
    return Fresh(system, first, later)


async def run(arguments: argparse.Namespace) -> Results:
    model = demo_model.ensure(MODEL)
    cores = sorted(os.sched_getaffinity(0))
    pair_cores = str(cores[0]), str(cores[1 % len(cores)])
    lengths, max_tokens = sorted(arguments.prompt_tokens), arguments.output_tokens
    results = Results(
        output_tokens=max_tokens,
        fresh_tokens=lengths[len(lengths) // 2],
        cells=[Cell(length, one) for length in lengths for one in sorted(arguments.concurrency)],
    )
    timeout = aiohttp.ClientTimeout(total=streams.REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        with systems.plain_vllm(model, ENGINE_ARGS, pair_cores[0]) as plain:

            async def ask_plain(prompt: Prompt) -> Timed:
                return await streams.through_vllm(http, plain.address, prompt, max_tokens)

            results.fresh.append(await ask_fresh(PLAIN, ask_plain, results.fresh_tokens))
            for index in range(arguments.fresh_pairs):
                async with baton(model, pair_cores, max_tokens) as (cluster, asked):
                    fresh = await ask_fresh(BATON, asked, results.fresh_tokens, index)
                    results.fresh.append(fresh)
                    if index < arguments.fresh_pairs - 1:
                        continue
                    for cell in results.cells:
                        asks: dict[str, Ask] = {PLAIN: ask_plain, BATON: asked}
                        await fill(cell, asks, arguments.repeats)
                    results.resident_mb = resident_mb(cluster, plain)
                    results.handoff_counters = await asyncio.to_thread(cluster.handoff_counters)
                    results.num_asked = asked.num_asked
        if arguments.nixl:
            await add_nixl(results, http, model, pair_cores, max(1, arguments.repeats // 2))
    return results


class AskBaton:
    """Counts what it asks."""

    def __init__(self, client: BatonClient, max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens
        self.num_asked = 0

    async def __call__(self, prompt: Prompt) -> Timed:
        self.num_asked += 1
        return await streams.through_baton(self._client, prompt, self._max_tokens)


@contextlib.asynccontextmanager
async def baton(
    model: str, cores: tuple[str, str], max_tokens: int
) -> AsyncIterator[tuple[systems.Baton, AskBaton]]:
    """A fresh coordinator with a fresh pair, ready and never asked."""
    # Every prompt is handed over.
    settings = {"decode": {"local_prefill": False}}
    with systems.baton(model, ENGINE_ARGS, cores, settings) as cluster:
        async with BatonClient(cluster.coordinator.address) as client:
            await client.wait_ready(READY_TIMEOUT_S)
            yield cluster, AskBaton(client, max_tokens)


async def add_nixl(
    results: Results,
    http: aiohttp.ClientSession,
    model: str,
    cores: tuple[str, str],
    repeats: int,
) -> None:
    with systems.nixl_pair(model, ENGINE_ARGS, cores) as (prefill, decode):

        async def ask(prompt: Prompt) -> Timed:
            return await streams.through_nixl(
                http, prefill.address, decode.address, prompt, results.output_tokens
            )

        results.fresh.append(await ask_fresh(NIXL, ask, results.fresh_tokens))
        for cell in results.cells:
            await fill(cell, {NIXL: ask}, repeats)


def resident_mb(cluster: systems.Baton, plain: systems.Process) -> dict[str, dict[str, float]]:
    processes = {
        "coordinator": cluster.coordinator,
        "prefill worker": cluster.prefill,
        "decode worker": cluster.decode,
        PLAIN: plain,
    }
    return {
        name: {kind: num_bytes / 1e6 for kind, num_bytes in one.resident_bytes().items()}
        for name, one in processes.items()
    }


def progress(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def summary(timed: list[Timed]) -> dict[str, float]:
    """The columns of one system in one cell; those of a handoff only where there is one."""
    ttfts, seconds = [one.ttft_s for one in timed], [one.second_gap_s for one in timed]
    gaps = [gap for one in timed for gap in one.steady_gaps_s]
    exposed = [
        (one.exposed_s, one.prefill_s)
        for one in timed
        if one.exposed_s is not None and one.prefill_s
    ]
    made = {
        **{f"ttft_p{at}_ms": stats.percentile(ttfts, at) * 1e3 for at in (50, 95, 99)},
        **{f"itl_p{at}_ms": stats.percentile(gaps, at) * 1e3 for at in (50, 99)},
        **{f"second_gap_p{at}_ms": stats.percentile(seconds, at) * 1e3 for at in (50, 95)},
        "second_gap_ratio": stats.ratio(stats.median(seconds), stats.median(gaps)),
        "e2e_p50_ms": stats.median([one.e2e_s for one in timed]) * 1e3,
    }
    if exposed:
        for at in (50, 95):
            made[f"exposed_p{at}_ms"] = stats.percentile([one for one, _ in exposed], at) * 1e3
        made["exposed_share"] = stats.median([one / prefill for one, prefill in exposed])
    return made


def reaches(results: Results) -> Iterator[Reach]:
    for cell in results.cells:
        own = summary(cell.timed[BATON])
        if (limit := MAX_GAP_RATIO.get(cell.concurrency)) is not None:
            what = f"{cell.name}: gap first to second token / own ITL"
            yield Reach(what, own["second_gap_ratio"], limit, " x")
        if cell.prompt_tokens >= EXPOSED_FROM_TOKENS:
            share = own.get("exposed_share", float("nan"))
            what = f"{cell.name}: exposed handoff / prefill"
            yield Reach(what, share * 100, MAX_EXPOSED_SHARE * 100, " %")
        if cell.concurrency == 1:
            what = f"{cell.name}: outputs that differ from plain vLLM's"
            yield Reach(what, cell.num_different(BATON), 0)
    pairs = [one for one in results.fresh if one.system == BATON]
    for name, measure in (("exposed handoff", exposed), ("gap first to second token", second_gap)):
        what = f"a fresh pair's first {name} / its steady one, worst of {len(pairs)} pairs"
        yield Reach(what, stats.worst([one.ratio(measure) for one in pairs]), MAX_FIRST_RATIO, " x")


def ttft(timed: Timed) -> float:
    return timed.ttft_s


def exposed(timed: Timed) -> float | None:
    return timed.exposed_s


def second_gap(timed: Timed) -> float:
    return timed.second_gap_s


def stage(name: str) -> Callable[[Timed], float | None]:
    return lambda timed: timed.stage_s(name) if timed.budget is not None else None


# What Baton's stages say about a first request: warming an engine up shows in prefill and in the
# gap beyond the handoff, as in plain vLLM's own first request.
FRESH_ROWS: dict[str, Callable[[Timed], float | None]] = {
    "TTFT": ttft,
    "  prefill queue": stage("prefill_queue"),
    "  prefill": stage("prefill"),
    "gap first to second token": second_gap,
    "  exposed handoff": exposed,
    "  decode queue": stage("decode_queue"),
    "network, of both": stage("network"),
}


def show(results: Results) -> None:
    for cell in results.cells:
        show_cell(cell, results.output_tokens)
    print(NOTES)
    show_fresh(results)
    rows = [
        [process, kind, f"{mb:.0f}"]
        for process, kinds in results.resident_mb.items()
        for kind, mb in kinds.items()
    ]
    stats.print_table("Resident memory without staging, MB", ["process", "part", "MB"], rows)
    rows = [["requests sent", f"{results.num_asked}"]]
    rows += [[name, f"{value:,.0f}"] for name, value in results.handoff_counters.items()]
    stats.print_table("Handoffs of the last pair", ["counter of the coordinator", "seen"], rows)
    stats.print_reaches(list(reaches(results)))


def show_cell(cell: Cell, output_tokens: int) -> None:
    plain, rows = summary(cell.timed[PLAIN]), list[list[str]]()
    for name, timed in cell.timed.items():
        one = summary(timed)
        differ = "" if name == PLAIN else f"{cell.num_different(name)} of {len(timed)}"
        rows.append([name, *(shown(column, one.get(column)) for column in COLUMNS), differ])
        if name != PLAIN:
            over = [
                "" if column in NOT_OVER_PLAIN else f"{one[column] / plain[column]:.2f}"
                for column in COLUMNS
            ]
            rows.append(["  x plain", *over, ""])
    counts = ", ".join(
        f"{name} {len(timed)} requests and {sum(len(one.steady_gaps_s) for one in timed)} gaps"
        for name, timed in cell.timed.items()
    )
    title = f"{cell.name}, {output_tokens} out ({counts})"
    stats.print_table(title, ["system", *COLUMNS.values(), "outputs differ"], rows)


def shown(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    if column == "exposed_share":
        return f"{value * 100:.2f} %"
    return f"{value:.2f}" if column == "second_gap_ratio" else f"{value:.1f}"


def show_fresh(results: Results) -> None:
    rows = []
    for name, measure in FRESH_ROWS.items():
        found = [one.first_and_steady_ms(measure) for one in results.fresh]
        seen = ["-" if one is None else f"{one[0]:.1f} / {one[1]:.1f}" for one in found]
        rows.append([name, *seen])
    title = (
        f"First request after the start / median of the next {FRESH_REQUESTS - 1}, ms "
        f"({results.fresh_tokens} tokens in, one at a time, nothing warmed up)"
    )
    stats.print_table(title, ["", *(one.system for one in results.fresh)], rows)


def as_json(results: Results) -> dict[str, Any]:
    return {
        "model": MODEL,
        "output_tokens": results.output_tokens,
        "cells": [
            {
                "prompt_tokens": cell.prompt_tokens,
                "concurrency": cell.concurrency,
                "requests": {name: len(timed) for name, timed in cell.timed.items()},
                "systems": {name: summary(timed) for name, timed in cell.timed.items()},
                "outputs that differ": {name: cell.num_different(name) for name in cell.timed},
            }
            for cell in results.cells
        ],
        "fresh": [
            {
                "system": one.system,
                "prompt_tokens": results.fresh_tokens,
                "first and steady, ms": {
                    name.strip(): one.first_and_steady_ms(measure)
                    for name, measure in FRESH_ROWS.items()
                },
            }
            for one in results.fresh
        ],
        "resident_mb": results.resident_mb,
        "requests sent": results.num_asked,
        "handoff_counters": results.handoff_counters,
        "reaches": [asdict(one) | {"reached": one.reached} for one in reaches(results)],
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--output-tokens", type=int, default=32, help="of each request; at least 3")
    parser.add_argument(
        "--repeats", type=int, default=24, help="per prompt length and concurrency; NIXL gets half"
    )
    parser.add_argument(
        "--fresh-pairs", type=int, default=3, help="of Baton; the last one answers the rest"
    )
    parser.add_argument("--no-nixl", dest="nixl", action="store_false")
    parser.add_argument("--json", type=Path, default=Path("bench/results/disaggregation.json"))
    arguments = parser.parse_args()
    max_prompt = MAX_MODEL_LEN - arguments.output_tokens
    if arguments.output_tokens < 3:
        parser.error("--output-tokens: must be at least 3, or there is no steady gap")
    if not all(1 <= length <= max_prompt for length in arguments.prompt_tokens):
        parser.error(f"--prompt-tokens: must be from 1 to {max_prompt}, the model's context")
    if not all(1 <= one <= MAX_NUM_SEQS for one in arguments.concurrency):
        parser.error(f"--concurrency: must be from 1 to {MAX_NUM_SEQS}")
    if arguments.repeats < 1:
        parser.error("--repeats: must be at least 1")
    if arguments.fresh_pairs < 1:
        parser.error("--fresh-pairs: must be at least 1")
    if arguments.nixl:
        nixl_transfer.require(parser)
    return arguments


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    started = time.monotonic()
    results = asyncio.run(run(arguments))
    stats.save(as_json(results), arguments.json)
    show(results)
    spent_s = time.monotonic() - started
    print(f"{spent_s:.0f} s; engines in {ENGINE_ARGS['dtype']}; figures in {arguments.json}")


if __name__ == "__main__":
    main()
