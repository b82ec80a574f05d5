"""Requests of the batch lane that need much KV room get their share beside interactive ones."""

from __future__ import annotations

import pytest

from baton.runtime.config import BatchLaneConfig, InteractiveLaneConfig, LanesConfig
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.simulated_cell import Cell

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
SHARE, RUN_S = 0.2, 40.0


@pytest.fixture
def crowd(say_hello):
    """Factory of a cell that ran with more interactive requests than its KV room can hold."""

    def small(name, role, **changes):
        """A worker with room for 12 interactive requests, or for one request of 1,300 tokens."""
        capacity = cluster_pb2.Capacity(
            kv_tokens=2048,
            block_size_tokens=16,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_send_bytes=2**30,
            max_receive_bytes=2**30,
            supports_forced_tokens=True,
            keeps_prefixes=True,
        )
        return say_hello(name, role, capacity=capacity, **changes)

    def run(*others, elastic: bool, long_prompt_tokens: int = 0) -> Cell:
        free = {"max_queued": 10**6, "max_queue_s": 1e6}
        lanes = LanesConfig(
            interactive=InteractiveLaneConfig(**free, itl_ms=1000),
            batch=BatchLaneConfig(**free, share=SHARE),
            long_prompt_tokens=long_prompt_tokens,
        )
        cell = Cell(small, lanes=lanes, max_decode_requests=64, elastic=elastic)
        begin = cell.now
        # Four workers decode in an elastic cell, and two of them with strict roles.
        cell.every(
            0.03 if elastic else 0.06,
            begin,
            begin + RUN_S,
            tenant="chat",
            num_prompt=64,
            num_output=100,
        )
        for other in others:
            cell.every(begin=begin + 10, end=begin + RUN_S, **other)
        cell.run(begin + RUN_S)
        return cell

    return run


LARGE = {"tenant": "large", "period_s": 1.0, "num_prompt": 1250, "num_output": 20}
SMALL = {"tenant": "small", "period_s": 1.0, "num_prompt": 20, "num_output": 10, "lane": BATCH}


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("lane", [INTERACTIVE, BATCH])
def test_a_large_request_is_not_passed_for_ever(crowd, elastic, lane):
    """Neither are small requests behind it. Long interactive prompts wait in the batch lane."""
    cell = crowd(LARGE | {"lane": lane}, SMALL, elastic=elastic, long_prompt_tokens=1000)
    served = cell.tokens(cell.now - RUN_S, cell.now)
    assert served["large"] >= SHARE / 4 * sum(served.values())
    assert served["small"] > 0
    if lane == BATCH:
        # Interactive requests lose no more than the share of the batch lane.
        alone = crowd(elastic=elastic)
        was_served = alone.tokens(alone.now - RUN_S, alone.now)
        assert served["chat"] >= (1 - SHARE) * was_served["chat"]
