"""Simulated workers with a KV store in host memory, compared with one infinite cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.coordinator.routing.prefixes.prefix_index import Tier
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import scaling_config
from baton.load.traces import MOONCAKE_BLOCK_TOKENS, Arrival, shared_prompt_tokens
from baton.runtime.config import parse
from baton.runtime.prompts.block_hashes import block_hashes
from baton.simulator.cell import SimulatedCell
from baton.simulator.colocated import ColocatedCell
from baton.simulator.parts import PrefixCache
from baton.simulator.policies import Static
from baton.simulator.run import shape_of, simulate
from baton.v1 import cluster_pb2

NUM_CONVERSATIONS, NUM_TURNS = 23, 4
# Turns of one conversation are this far apart, in seconds.
TURN_S = 30.0


def conversations() -> list[Arrival]:
    """Conversations whose turns each add two blocks, one conversation after the other."""
    found = []
    for turn in range(NUM_TURNS):
        for number in range(NUM_CONVERSATIONS):
            num_blocks = 2 * (turn + 1)
            blocks = tuple(1000 * (number + 1) + block for block in range(num_blocks))
            at_s = turn * TURN_S + number * TURN_S / NUM_CONVERSATIONS
            found.append(Arrival(at_s, num_blocks * MOONCAKE_BLOCK_TOKENS, 8, blocks))
    return found


def configured(*, host_kv_tokens=0, block_bytes=4096, **simulated):
    values = {
        "simulated": {
            "prefill_per_token_ms": 0.1,
            "step_base_ms": 10,
            "kv_tokens": 10240,
            "block_size_tokens": 512,
            "block_bytes": block_bytes,
            "max_model_len": 8192,
            **simulated,
        },
        # A block has 4 layers.
        "kv_store": {"host_bytes": host_kv_tokens // 512 * 4 * block_bytes},
        "scaling": {"targets": {"interactive": {"ttft_ms": 5000, "itl_ms": 50}}},
        "prefill": {"workers": 1},
        "decode": {"workers": 1},
        "elastic": True,
    }
    return parse(values, "test")


def served(policy="static", **changes):
    found = simulate(configured(**changes), conversations(), policy)
    assert not found.figures.num_failed
    return found.figures


def test_host_memory_of_the_size_of_the_trace_hits_what_an_infinite_cache_hits():
    without, kept = served(), served(host_kv_tokens=200_000)
    # A turn shares all blocks but its last two with the turn before it.
    shared = sum(2 * turn for turn in range(NUM_TURNS))
    assert kept.hits.infinite == pytest.approx(shared / sum(range(2, 2 * NUM_TURNS + 1, 2)))
    assert without.hits.of_infinite < 0.5
    assert without.hits.host == 0
    assert kept.hits.of_infinite > 0.95
    assert kept.hits.host > 0.3
    assert kept.ttft_ms[90] < without.ttft_ms[90]


def test_colocated_servers_have_the_same_host_memory():
    without, kept = served("colocated"), served("colocated", host_kv_tokens=200_000)
    assert without.hits.host == 0
    assert kept.hits.total > without.hits.total
    # Their balancer does not look for the prefix, so half of the turns go elsewhere.
    assert kept.hits.of_infinite < 0.9


def test_a_slow_load_delays_the_first_token():
    quick = served(host_kv_tokens=200_000)
    # The blocks of 512 tokens take 0.1 s, twice as long as to compute them.
    slow = served(host_kv_tokens=200_000, host_bytes_per_s=160_000)
    assert slow.ttft_ms[50] > quick.ttft_ms[50]


def test_a_load_begins_after_the_loads_before_it():
    """As on a real worker: two loads at a time share the speed of one."""
    # A block takes 0.1 s to load and 0.05 s to compute.
    shape = shape_of(configured(host_kv_tokens=200_000, host_bytes_per_s=160_000))

    def arrival(at_s: float, conversation: int, num_blocks: int) -> Arrival:
        blocks = tuple(100 * conversation + block for block in range(num_blocks))
        return Arrival(at_s, num_blocks * MOONCAKE_BLOCK_TOKENS, 1, blocks)

    # The device holds 20 blocks, those of the last three prompts before both come again.
    before = [arrival(10.0 * number, number, 8) for number in range(5)]
    again = [arrival(60.0, number, 9) for number in range(2)]
    cell = ColocatedCell(shape, 1)
    record = cell.run([*before, *again], 70.0)
    assert cell.prompt_tokens["host"] == 2 * 8 * MOONCAKE_BLOCK_TOKENS
    first, second = (
        at - arrived for at, arrived in zip(record.firsts[-2:], record.arrivals[-2:], strict=True)
    )
    assert 8 * 0.1 < first < 9 * 0.1
    assert second - first == pytest.approx(8 * 0.1, abs=0.02)


def test_the_coordinator_measures_the_workers_loads():
    config = configured(host_kv_tokens=200_000, block_bytes=2**16, host_bytes_per_s=10**8)
    shape = shape_of(config)
    core = replace(CoreConfig.of(config), model_name="simulated", latency=shape.model)
    cell = SimulatedCell(core, dict.fromkeys(Pool, shape), Static(scaling_config(config)))
    cell.run(conversations(), dict.fromkeys(Pool, 1), NUM_TURNS * TURN_S)
    assert cell.prompt_tokens["host"] > 0
    loads = [cell.core.placers.load(one).tier_speeds for one in cell.core.workers]
    slowest = max(one.seconds(Tier.HOST, 10**8, cell.now) for one in loads)
    # The assumed speed is a hundred times as fast.
    assert slowest == pytest.approx(1.0, rel=0.1)


def test_a_full_cache_evicts_the_longest_unused_prompt_from_its_end():
    cache = PrefixCache(10, 1, cluster_pb2.CACHE_TIER_HOST)
    first, second = (list(block_hashes(range(n, n + 6), 1)) for n in (0, 100))
    assert list(cache.keep(first, 6).stored) == first
    assert cache.num_cached(first) == 6
    change = cache.keep(second, 6)
    assert (list(change.stored), set(change.removed)) == (second, set(first[4:]))
    assert change.tier == cluster_pb2.CACHE_TIER_HOST
    assert cache.num_cached(first) == 4
    assert cache.num_cached(second, 2) == 4
    assert cache.keep(first, 4) is None
    long = list(block_hashes(range(200, 220), 1))
    assert list(cache.keep(long, 20).stored) == long[:10]
    assert cache.num_cached(long) == 10


def test_an_infinite_cache_serves_whole_blocks_of_earlier_prompts():
    arrivals = [
        Arrival(0.0, 1000, 1, (1, 2)),
        Arrival(1.0, 1024, 1, (1, 2)),
        Arrival(2.0, 1024, 1, (1, 2)),
        Arrival(3.0, 600, 1, (3, 2)),
        Arrival(4.0, 600, 1),
    ]
    # The second prompt shares 1,000 tokens; the third all but the last, which is computed.
    assert shared_prompt_tokens(arrivals, 16) == (992 + 1008, 4248)
    assert shared_prompt_tokens(arrivals, 512) == (512 + 512, 4248)


def test_the_command_prints_hits_by_tier(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": round(one.at_s * 1e3),
            "input_length": one.num_prompt_tokens,
            "output_length": one.num_output_tokens,
            "hash_ids": one.block_ids,
        }
        for one in conversations()
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "baton.yaml"
    config.write_text("simulated: {kv_tokens: 10240, max_model_len: 8192}\nelastic: true\n")
    arguments = ["simulate", str(trace), "--config", str(config), "--policy", "static"]
    out = tmp_path / "out.json"
    for num_tokens in (0, 100_000):
        more = ["--host-kv-tokens", str(num_tokens), "--json", str(out)]
        found = CliRunner().invoke(app, [*arguments, *more])
        assert found.exit_code == 0, found.output
        hits = json.loads(out.read_text())["hits"]
        assert (hits["host"] > 0.3) == (num_tokens > 0)
        assert f"{hits['host']:.2%}" in found.output
