"""Simulated workers look prompts up in the prefix cache when their computation starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.load.traces import MOONCAKE_BLOCK_TOKENS, Arrival
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.colocated import ColocatedCell
from baton.simulator.parts import Shape

NUM_SHARED = 8
# A step computes one prompt of the trace.
SHAPE = Shape(
    LatencyModel(0.005, 1e-5, 0.0, 0.010, 1e-4, 0.0),
    kv_tokens=400_000,
    block_size_tokens=MOONCAKE_BLOCK_TOKENS,
    max_num_batched_tokens=(NUM_SHARED + 1) * MOONCAKE_BLOCK_TOKENS,
    prefix_caching=True,
    follows_step_targets=False,
)


def prompt(at_s: float, *blocks: int) -> Arrival:
    return Arrival(at_s, len(blocks) * MOONCAKE_BLOCK_TOKENS, 2, blocks)


def with_common_prefix(num_prompts: int) -> list[Arrival]:
    return [prompt(n / 1000, *range(1, NUM_SHARED + 1), 100 + n) for n in range(num_prompts)]


@pytest.mark.parametrize("follows_step_targets", [True, False])
@pytest.mark.parametrize("max_num_seqs", [256, 1])
def test_prompts_that_wait_take_what_the_first_one_computes(follows_step_targets, max_num_seqs):
    cell = ColocatedCell(
        replace(SHAPE, follows_step_targets=follows_step_targets, max_num_seqs=max_num_seqs), 1
    )
    cell.run(with_common_prefix(10), 1.0)
    # The first prompt computes the common prefix, and the others arrive before its end.
    assert cell.prompt_tokens["device"] == 9 * NUM_SHARED * MOONCAKE_BLOCK_TOKENS


def test_blocks_that_are_evicted_while_a_prompt_waits_are_computed_again():
    tight = replace(SHAPE, kv_tokens=(NUM_SHARED + 1) * MOONCAKE_BLOCK_TOKENS)
    cell = ColocatedCell(tight, 1)
    shared = range(1, NUM_SHARED + 1)
    other = range(101, 101 + NUM_SHARED)
    # The second and the third prompt arrive together, and the second takes the whole cache.
    cell.run([prompt(0.0, *shared), prompt(5.0, *other, 201), prompt(5.001, *shared, 202)], 6.0)
    assert cell.prompt_tokens["device"] == 0
    again = ColocatedCell(tight, 1)
    again.run([prompt(0.0, *shared), prompt(5.0, *shared, 202)], 6.0)
    assert again.prompt_tokens["device"] == NUM_SHARED * MOONCAKE_BLOCK_TOKENS
