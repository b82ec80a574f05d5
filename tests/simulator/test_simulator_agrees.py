"""The simulator agrees with DistServe's published measurements on real A100s.

OPT-13B, one prefill worker of tensor-parallel size 2 and one decode worker of size 1, 300 ShareGPT
requests at Poisson rates. Nothing in this test is fitted to these runs. The step times come from
the profile that was published with the measurements. The behaviour of the engine comes from its
source, github.com/LLMServe/DistServe:

- prompts are computed whole, first come first served, up to 8,192 tokens or 128 prompts a step
  (evaluation/2-benchmark-serving/2-start-api-server.py, distserve/context_stage_scheduler.py);
- Ray adds 2 ms and 0.0001 ms per token to each step of the profile (`add_ray_overhead` of
  simdistserve/base/worker.py), and also to each migration, which is a Ray call;
- the decode loop stalls while a prompt's KV cache is fetched (`post_process` is awaited in `_step`
  of distserve/single_stage_engine.py): 819,200 bytes per token (40 layers, hidden size 5,120, two
  bytes, keys and values) at 300 GB/s, NVLink 3's speed in one direction;
- when requests outgrow the decode worker's 66,144 tokens (max_num_tokens.csv), the last request is
  swapped out (distserve/decoding_stage_scheduler.py);
- a request joins the batch when the KV cache has room for the request and 5 % of the cache stay
  free for waiting requests (`_check_add_to_cur_batch` of the same file; the share is
  `waiting_block_prop_threshold` of distserve/config.py);
- the dispatcher forwards every request at once and ignores the room of the decode worker, so the
  simulated workers announce no limit.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.load import stats
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.cell import SimulatedCell
from baton.simulator.parts import Shape
from baton.simulator.policies import Static

DATA = Path(__file__).parents[1] / "data" / "distserve"
RAY_S, RAY_PER_TOKEN_S = 0.002, 1e-7
KV_BYTES_PER_TOKEN, NVLINK_BYTES_PER_S = 2 * 40 * 5120 * 2, 300e9
WAITING_SHARE = 0.05
SLO_TTFT_MS, SLO_TPOT_MS = 200, 100


def model() -> LatencyModel:
    profile = json.loads((DATA / "profiler-a100-80g.distserve.json").read_text())
    sizes = profile["facebook/opt-13b"]
    # The profile has another formula for 95 requests and more, which do not fit into the KV cache.
    (base, token, square), (step, kv_token, request) = (
        sizes["2"]["prefill"],
        sizes["1"]["decoding_smallbs"],
    )
    return LatencyModel(
        prefill_base_s=base / 1e3 + RAY_S,
        prefill_per_token_s=token / 1e3 + RAY_PER_TOKEN_S,
        prefill_per_token_squared_s=square / 1e3,
        step_base_s=step / 1e3 + RAY_S,
        step_per_request_s=request / 1e3,
        step_per_kv_token_s=kv_token / 1e3 + RAY_PER_TOKEN_S,
    )


def shape(kv_tokens: int, max_num_seqs: int, waiting_share: float = 0.0) -> Shape:
    return Shape(
        model(),
        kv_tokens=kv_tokens,
        announced_kv_tokens=0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        chunked=False,
        follows_step_targets=False,
        join_reserve_share=waiting_share,
        swaps=True,
        handoff_s=RAY_S,
        handoff_per_token_s=KV_BYTES_PER_TOKEN / NVLINK_BYTES_PER_S,
        handoff_stalls=True,
        # Both engines and their front end run on one machine, so messages are fast.
        delay_s=0.0005,
    )


def simulated(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    """Returns TTFT and TPOT in milliseconds for each request."""
    free = {"max_queued": 10**6, "max_queue_s": 3600}
    config = CoreConfig.of(
        parse(
            {
                "model": "simulated",
                "decode": {"local_prefill": False, "max_requests_per_worker": 1024},
                "lanes": {"interactive": free},
            },
            "test",
        )
    )
    arrivals = [
        Arrival(one["arrival_s"], int(one["prompt_tokens"]), int(one["output_tokens"]))
        for one in rows
    ]
    shapes = {Pool.PREFILL: shape(163_008, 128), Pool.DECODE: shape(66_144, 1024, WAITING_SHARE)}
    cell = SimulatedCell(config, shapes, Static(ScalingConfig()))
    sizes = {Pool.PREFILL: 1, Pool.DECODE: 1}
    record = cell.run(arrivals, sizes, rows[-1]["arrival_s"] + 1)
    cell.core.check_integrity()
    assert not record.reasons
    return [
        ((first - arrived) * 1e3, (end - first) / (count - 1) * 1e3 if count > 1 else 0.0)
        for arrived, first, end, count in zip(
            record.arrivals, record.firsts, record.ends, record.outputs, strict=True
        )
    ]


def met(found: list[tuple[float, float]]) -> float:
    kept = sum(ttft <= SLO_TTFT_MS and tpot <= SLO_TPOT_MS for ttft, tpot in found)
    return kept / len(found)


@pytest.mark.parametrize("rate", [3, 6, 9])
def test_the_simulator_agrees_with_the_measured_latencies(rate):
    with (DATA / f"distserve-c21d11-300-{rate}.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    measured = [(one["ttft_ms"], one["tpot_ms"]) for one in rows]
    found = simulated(rows)
    assert len(found) == len(rows) == 300
    assert met(found) == pytest.approx(met(measured), abs=0.05)
    for column, percent, within in ((0, 50, 0.1), (0, 90, 0.1), (1, 50, 0.12)):
        seen, real = (
            stats.percentile([one[column] for one in side], percent) for side in (found, measured)
        )
        assert seen == pytest.approx(real, rel=within)
