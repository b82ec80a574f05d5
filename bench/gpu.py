"""Measures what a handoff adds to the time to first token on one GPU; needs a CUDA GPU.

    python -m baton.bench.gpu --json gpu.json

A plain vLLM server, a prefill worker and a decode worker share one GPU. All have the shape of
Llama 3 8B with random weights, which are the same in all of them. They answer the same prompts in
alternating rounds, one at a time, so that only one of them computes. Every prompt is handed over;
with `--elastic`, the cell has the default settings, and one worker computes the prompt and decodes.
The report has the times of both systems, and how many outputs differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from baton.bench import disaggregation, interrupts, streams, systems
from baton.bench.disaggregation_report import BATON, ELASTIC, PLAIN, Cell, Results, as_json, show
from baton.client.client import BatonClient
from baton.load import stats
from baton.runtime import demo_model

MODEL = "demo-8b"
LONGEST_PROMPT, MOST_OUTPUTS = 8192, 256
# Keys and values of one token in bfloat16: 32 layers, 8 heads of 128.
TOKEN_BYTES = 32 * 8 * 2 * 128 * 2
ENGINE_ARGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": LONGEST_PROMPT + MOST_OUTPUTS,
    "max_num_batched_tokens": LONGEST_PROMPT,
    "max_num_seqs": 16,
    # Three engines share the memory of the GPU; vLLM wants this share to be free at its start.
    "gpu_memory_utilization": 0.28,
    "kv_cache_memory_bytes": 4 * LONGEST_PROMPT * TOKEN_BYTES,
}
STAGING_BYTES = 3 * LONGEST_PROMPT * TOKEN_BYTES
KV_TRANSFER = {"send_bytes": STAGING_BYTES, "receive_bytes": STAGING_BYTES}


async def run(arguments: argparse.Namespace, model: str) -> Results:
    engine_args = ENGINE_ARGS | arguments.engine_args
    max_tokens = arguments.output_tokens
    name, hands_over = (ELASTIC, {}) if arguments.elastic else (BATON, disaggregation.HANDS_OVER)
    settings = {**hands_over, "kv_transfer": KV_TRANSFER}
    results = Results(output_tokens=max_tokens, fresh_tokens=0, cells=[])
    timeout = aiohttp.ClientTimeout(total=streams.REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        with (
            systems.baton(model, engine_args, ("0", "1"), settings) as cluster,
            systems.plain(model, engine_args) as server,
        ):
            async with BatonClient(cluster.coordinator.address) as client:
                await cluster.wait_ready(client)
                sender = disaggregation.CountingSender(client, max_tokens)
                senders: dict[str, streams.Send] = {
                    PLAIN: disaggregation.plain_sender(http, server, max_tokens),
                    name: sender,
                }
                for length in sorted(arguments.prompt_tokens):
                    cell = Cell(length, 1)
                    await disaggregation.fill(cell, senders, arguments.repeats)
                    results.cells.append(cell)
                    results.handoff_counters = await asyncio.to_thread(cluster.handoff_counters)
                    results.num_sent = sender.num_sent
                    # GPU time is dear: what is measured stays if a later length fails.
                    stats.save(as_json(results, MODEL), arguments.json)
    return results


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 2048, LONGEST_PROMPT])
    parser.add_argument("--output-tokens", type=int, default=32, help="per request; at least 3")
    parser.add_argument("--repeats", type=int, default=24, help="requests per prompt length")
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="further arguments of vLLM, as JSON"
    )
    parser.add_argument("--elastic", action="store_true", help="with Baton's default settings")
    parser.add_argument("--json", type=Path, default=Path("bench/results/gpu.json"))
    arguments = parser.parse_args()
    if not all(1 <= length <= LONGEST_PROMPT for length in arguments.prompt_tokens):
        parser.error(f"--prompt-tokens: must be from 1 to {LONGEST_PROMPT}")
    if not 3 <= arguments.output_tokens <= MOST_OUTPUTS:
        parser.error(f"--output-tokens: must be from 3 to {MOST_OUTPUTS}")
    if arguments.repeats < 1:
        parser.error("--repeats: must be at least 1")
    return arguments


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        model = demo_model.ensure(MODEL, weights=False, root=Path(root))
        results = asyncio.run(run(arguments, model))
    show(results)
    print(f"{time.monotonic() - started:.0f} s; figures in {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
