"""Simulated workers that fetch the beginning of a prompt from each other."""

from __future__ import annotations

import random

import pytest

from baton.load.traces import MOONCAKE_BLOCK_TOKENS, Arrival
from baton.runtime.config import parse
from baton.simulator.run import simulate

NUM_BURSTS, NUM_REQUESTS, NUM_SHARED, NUM_OWN = 6, 24, 8, 4
# A 70B model on eight H100s (deploy/examples/conversations.yaml).
LARGE = {
    "prefill_base_ms": 20.7,
    "prefill_per_token_ms": 0.0704,
    "prefill_per_token_squared_ms": 6.59e-7,
    "step_base_ms": 29.9,
    "step_per_request_ms": 0.188,
    "step_per_kv_token_ms": 0.000199,
    "kv_tokens": 1_370_000,
    "num_layers": 80,
    "block_bytes": 2**21,
    "max_num_batched_tokens": 4096,
}


def bursts() -> list[Arrival]:
    """Bursts of prompts with a common beginning, which one prompt has had before."""
    found = []
    for burst in range(NUM_BURSTS):
        shared = tuple(1000 * (burst + 1) + block for block in range(NUM_SHARED))
        for number in range(NUM_REQUESTS):
            first = 100_000 + 1000 * burst + 10 * number
            blocks = (*shared, *range(first, first + NUM_OWN))
            at_s = 10.0 * burst + (3.0 if number else 0.0)
            found.append(Arrival(at_s, len(blocks) * MOONCAKE_BLOCK_TOKENS, 20, blocks))
    return found


def served(arrivals=None, *, fetch=True, **simulated):
    values = {
        "simulated": {
            "prefill_per_token_ms": 0.1,
            "step_base_ms": 10,
            "kv_tokens": 200_000,
            "block_size_tokens": 512,
            "block_bytes": 2**22,
            "max_model_len": 16384,
            **simulated,
        },
        "kv_store": {"host_bytes": 0, "fetch": fetch},
        "scaling": {"targets": {"interactive": {"ttft_ms": 5000, "itl_ms": 50}}},
        "prefill": {"workers": 3},
        "decode": {"workers": 1},
        "elastic": True,
    }
    found = simulate(parse(values, "test"), arrivals or bursts(), "static")
    assert not found.figures.num_failed
    return found.figures


def test_a_burst_finds_its_beginning_on_every_worker():
    without, fetched = served(fetch=False), served()
    assert without.hits.fetched == 0
    assert fetched.hits.fetched > 0
    assert fetched.hits.of_infinite > 0.95 > without.hits.of_infinite
    assert fetched.ttft_ms[90] < without.ttft_ms[90]
    # Each worker fetches the beginning of a burst at most once.
    num_blocks = NUM_BURSTS * NUM_REQUESTS * (NUM_SHARED + NUM_OWN)
    assert fetched.hits.fetched <= 3 * NUM_BURSTS * NUM_SHARED / num_blocks


def test_nothing_is_fetched_for_long_over_a_slow_network():
    # The blocks of 512 tokens take 3.4 s, and 0.05 s to compute.
    without, slow = served(fetch=False), served(network_bytes_per_s=5_000_000)
    assert slow.hits.fetched == 0
    # Each pair of workers has tried once, for at most as long as the computation takes.
    assert slow.ttft_ms[50] == pytest.approx(without.ttft_ms[50], rel=0.5)


def test_a_fetch_that_comes_too_late_is_not_waited_for():
    quick, slow = served(), served(network_bytes_per_s=200_000_000)
    assert slow.hits.total < quick.hits.total
    without = served(fetch=False)
    assert slow.ttft_ms[99] < 1.5 * without.ttft_ms[99]


@pytest.mark.parametrize("rate", [3.0, 4.0])
def test_a_system_prompt_gets_more_holders_when_its_holder_is_busy(rate):
    """Many prompts begin with one system prompt, which one worker has at first."""
    rng, arrivals, at_s = random.Random(1), [], 0.0
    for number in range(240):
        at_s += rng.expovariate(rate)
        blocks = (*range(16), 10_000 + 2 * number, 10_001 + 2 * number)
        arrivals.append(Arrival(at_s, len(blocks) * MOONCAKE_BLOCK_TOKENS, 100, blocks))
    alone, fetched = served(arrivals, fetch=False, **LARGE), served(arrivals, **LARGE)
    assert fetched.ttft_ms[90] < 0.95 * alone.ttft_ms[90]
    assert fetched.ttft_ms[99] < 0.7 * alone.ttft_ms[99]
    # Each of the other workers fetches the system prompt at most once.
    assert 0 < fetched.hits.fetched <= 3 * 16 / (240 * 18)
