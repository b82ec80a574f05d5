"""Elastic cells with conversations, whose prompts begin with earlier prompts."""

from __future__ import annotations

from baton.load.traces import MOONCAKE_BLOCK_TOKENS, Arrival
from baton.runtime.config import parse
from baton.simulator.run import simulate

NUM_CONVERSATIONS, NUM_TURNS, NUM_WORKERS = 24, 4, 4


def conversations() -> list[Arrival]:
    """Conversations that take turns, one request per second, so that workers are idle again."""
    found = []
    for turn in range(NUM_TURNS):
        for number in range(NUM_CONVERSATIONS):
            num_blocks = 2 * (turn + 1)
            blocks = tuple(1000 * (number + 1) + block for block in range(num_blocks))
            tokens = num_blocks * MOONCAKE_BLOCK_TOKENS
            found.append(Arrival(float(len(found)), tokens, 8, blocks))
    return found


def test_idle_workers_share_the_conversations_so_that_no_cache_drops_their_prefixes():
    requests = conversations()
    # All caches together hold the conversations at their end, with the copies of decode workers.
    values = {
        "simulated": {
            "prefill_per_token_ms": 0.1,
            "step_base_ms": 10,
            "kv_tokens": 2 * NUM_CONVERSATIONS * requests[-1].num_prompt_tokens // NUM_WORKERS,
            "block_size_tokens": MOONCAKE_BLOCK_TOKENS,
            "max_model_len": 8192,
        },
        "scaling": {"targets": {"interactive": {"ttft_ms": 5000, "itl_ms": 50}}},
        "prefill": {"workers": NUM_WORKERS // 2},
        "decode": {"workers": NUM_WORKERS // 2},
        "elastic": True,
    }
    hits = simulate(parse(values, "test"), requests, "static").figures.hits
    assert hits.of_infinite > 0.95
