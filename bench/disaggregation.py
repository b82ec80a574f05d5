"""What disaggregation costs: Baton beside one plain vLLM and vLLM's NixlConnector.

`make bench`, or `python -m baton.bench.disaggregation --help`. One core per engine. Baton and plain
vLLM answer the same prompts in turn, in rounds, so that noise of the machine meets both; NIXL's
progress threads spin, so its pair runs by itself, after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from baton.bench import stats, streams, systems
from baton.bench.streams import Timed
from baton.client.client import BatonClient
from baton.runtime import demo_model

MODEL = "demo-88m"
ENGINE_ARGS = {
    "dtype": "bfloat16",
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 512 * 2**20,
}
# Token ids of the demo tokenizer, special ones left out.
TOKEN_IDS = range(5, 430)
READY_TIMEOUT_S = 300.0
# Requests of one system before it is another's turn, and those before them that do not count.
ROUND = 10
WARM_UP_REQUESTS = 2
# A vLLM rank spins for a second after its last step; the next system's turn begins after that.
SPIN_S = 1.5

Ask = Callable[[list[int]], Awaitable[Timed]]


def fresh_prompt(source: random.Random, length: int) -> list[int]:
    """Never the same twice: no prefix cache helps anyone."""
    return source.choices(TOKEN_IDS, k=length)


async def in_turn(
    asks: dict[str, Ask], length: int, repeats: int, seed: int
) -> dict[str, list[Timed]]:
    """The same prompts to every system, one request at a time, in rounds."""
    source, results = random.Random(seed), {name: list[Timed]() for name in asks}
    for done in range(0, repeats, ROUND):
        prompts = [fresh_prompt(source, length) for _ in range(min(ROUND, repeats - done))]
        for name, ask in asks.items():
            await asyncio.sleep(SPIN_S)
            for _ in range(WARM_UP_REQUESTS):
                await ask(fresh_prompt(source, length))
            results[name] += [await ask(prompt) for prompt in prompts]
    return results


async def cold_requests(ask: Ask, length: int, repeats: int) -> list[Timed]:
    """A fresh pair's first requests, nothing warmed up."""
    source = random.Random(17)
    return [await ask(fresh_prompt(source, length)) for _ in range(repeats)]


def mismatches(left: list[Timed], right: list[Timed]) -> int:
    return sum(a.token_ids != b.token_ids for a, b in zip(left, right, strict=True))


def summary(timed: list[Timed]) -> dict[str, float]:
    gaps = [gap for one in timed for gap in one.steady_gaps_s]
    handoff = [(stage_ms(one, "handoff"), stage_ms(one, "prefill")) for one in timed if one.budget]
    made = {
        "ttft_p50_ms": stats.median([one.ttft_s for one in timed]) * 1e3,
        "ttft_p95_ms": stats.percentile([one.ttft_s for one in timed], 95) * 1e3,
        "ttft_max_ms": max(one.ttft_s for one in timed) * 1e3,
        "itl_p50_ms": stats.median(gaps) * 1e3,
        "itl_p99_ms": stats.percentile(gaps, 99) * 1e3,
        "second_gap_p50_ms": stats.median([one.second_gap_s for one in timed]) * 1e3,
        "e2e_p50_ms": stats.median([one.e2e_s for one in timed]) * 1e3,
    }
    if handoff:
        made["handoff_p50_ms"] = stats.median([ms for ms, _ in handoff])
        made["handoff_share"] = stats.median([ms / prefill for ms, prefill in handoff if prefill])
    return made


def stage_ms(timed: Timed, stage: str) -> float:
    assert timed.budget is not None
    return sum(one.duration_ms for one in timed.budget.stages if one.stage == stage)


def tree_bytes(process: psutil.Process) -> dict[str, int]:
    """Proportional memory of a process and of each of its children, by what they are."""
    found: dict[str, int] = {}
    for one in [process, *process.children(recursive=True)]:
        line = " ".join(one.cmdline())
        kind = (
            "engine core"
            if "EngineCore" in line
            else "rank"
            if "VLLM::Worker" in line or "Worker" in one.name()
            else "transfer service"
            if "kvtransfer.service" in line
            else "resource tracker"
            if "resource_tracker" in line
            else "main"
        )
        found[kind] = found.get(kind, 0) + int(one.memory_info().rss)
    return found


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model = demo_model.ensure(MODEL)
    cores = sorted(os.sched_getaffinity(0))
    first, second = str(cores[0]), str(cores[1 % len(cores)])
    length, max_tokens = arguments.prompt_tokens, arguments.output_tokens
    results: dict[str, Any] = {"model": MODEL, "prompt_tokens": length, "output_tokens": max_tokens}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        with (
            systems.plain_vllm(model, ENGINE_ARGS, first) as plain,
            systems.baton(model, ENGINE_ARGS, (first, second)) as cluster,
        ):
            async with BatonClient(cluster.coordinator.address) as client:
                await client.wait_ready(READY_TIMEOUT_S)
                asks: dict[str, Ask] = {
                    "plain vLLM": lambda p: streams.through_vllm(
                        http, plain.address, p, max_tokens
                    ),
                    "Baton": lambda p: streams.through_baton(client, p, max_tokens),
                }
                cold = await cold_requests(asks["Baton"], length, arguments.repeats)
                timed = await in_turn(asks, length, arguments.repeats, seed=1)
                results["memory_mb"] = {
                    "coordinator": cluster.coordinator.resident_bytes() / 1e6,
                    "prefill worker": _megabytes(cluster.prefill),
                    "decode worker": _megabytes(cluster.decode),
                    "plain vLLM": _megabytes(plain),
                }
        results["systems"] = {name: summary(one) for name, one in timed.items()}
        results["outputs that differ"] = mismatches(timed["plain vLLM"], timed["Baton"])
        results["cold_worst_ttft_ms"] = max(one.ttft_s for one in cold) * 1e3
        results["cold_first_second_gap_ms"] = cold[0].second_gap_s * 1e3
        if arguments.nixl:
            with systems.nixl_pair(model, ENGINE_ARGS, (first, second)) as (prefill, decode):
                nixl: Ask = lambda p: streams.through_nixl(  # noqa: E731
                    http, prefill.address, decode.address, p, max_tokens
                )
                nixl_cold = await cold_requests(nixl, length, min(10, arguments.repeats))
                nixl_timed = await in_turn({"NIXL": nixl}, length, arguments.repeats // 2, seed=1)
            results["systems"]["vLLM NixlConnector"] = summary(nixl_timed["NIXL"])
            results["nixl_cold_worst_ttft_ms"] = max(one.ttft_s for one in nixl_cold) * 1e3
    return results


def _megabytes(process: systems.Process) -> dict[str, float]:
    return {
        kind: num_bytes / 1e6
        for kind, num_bytes in tree_bytes(psutil.Process(process.popen.pid)).items()
    }


def show(results: dict[str, Any]) -> None:
    plain = results["systems"]["plain vLLM"]
    columns = (
        "ttft_p50_ms",
        "ttft_p95_ms",
        "itl_p50_ms",
        "itl_p99_ms",
        "second_gap_p50_ms",
        "e2e_p50_ms",
    )
    rows = []
    for name, one in results["systems"].items():
        rows.append([name, *(f"{one[column]:.1f}" for column in columns)])
        if name != "plain vLLM":
            rows.append(
                ["  x plain", *(f"{one[column] / plain[column]:.2f}" for column in columns)]
            )
    title = (
        f"{results['model']}, {results['prompt_tokens']} tokens in, "
        f"{results['output_tokens']} out, "
        "one request at a time, one core per engine"
    )
    stats.print_table(title, ["system", *columns], rows)
    own = results["systems"]["Baton"]
    rows = [
        ["outputs that differ from plain vLLM", str(results["outputs that differ"])],
        [
            "gap first to second token / steady ITL",
            f"{own['second_gap_p50_ms'] / own['itl_p50_ms']:.2f}",
        ],
        ["exposed handoff p50", f"{own['handoff_p50_ms']:.2f} ms"],
        ["exposed handoff / prefill", f"{own['handoff_share'] * 100:.2f} %"],
        ["worst TTFT of a fresh pair's first requests", f"{results['cold_worst_ttft_ms']:.0f} ms"],
    ]
    if "nixl_cold_worst_ttft_ms" in results:
        rows.append(["the same, NIXL", f"{results['nixl_cold_worst_ttft_ms']:.0f} ms"])
    stats.print_table("Handoff", ["what", "seen"], rows)
    rows = [["coordinator", "", f"{results['memory_mb']['coordinator']:.0f}"]]
    for name in ("plain vLLM", "prefill worker", "decode worker"):
        rows += [[name, kind, f"{mb:.0f}"] for kind, mb in results["memory_mb"][name].items()]
    stats.print_table("Resident memory, MB", ["process", "part", "MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--no-nixl", dest="nixl", action="store_false")
    parser.add_argument("--json", type=Path, default=Path("bench/results/disaggregation.json"))
    arguments = parser.parse_args()
    started = time.monotonic()
    results = asyncio.run(run(arguments))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results)
    print(f"{time.monotonic() - started:.0f} s; figures in {arguments.json}")


if __name__ == "__main__":
    main()
