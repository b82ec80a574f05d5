"""Double faults: a worker is stopped and the coordinator dies, with the default configuration.

This is the cell of bench/chaos.py under the virtual clock. The longest pause happens if the
coordinator dies just before the streams of the stopped worker continue elsewhere:

1. The coordinator notices the silence of the worker.
2. Other workers compute the prompts again.
3. The coordinator dies and another one starts.
4. The client and the workers reconnect.
5. The prompts are computed once more.
"""

from __future__ import annotations

import itertools

import pytest

from baton.coordinator.state.config import CoreConfig
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import common_pb2
from tests.coordinator.restarted_cell import RestartedCell
from tests.coordinator.virtual_cell import WorkerShape

SHAPE = WorkerShape(
    LatencyModel(0.010, 0.0001, 0.0, 0.100, 0.0001, 0.0),
    kv_tokens=2**19,
    max_num_seqs=400,
    max_num_batched_tokens=2048,
)
NUM_STREAMS = 200
# Time from the death of a coordinator until the next one listens, measured on real processes.
OUTAGE_S = 0.65


def streaming_cell() -> RestartedCell:
    """Returns a cell in which all streams decode and all workers have sent heartbeats for 10 s."""
    cell = RestartedCell(CoreConfig.of(parse({"model": "simulated", "elastic": False}, "test")))
    for index in range(4):
        cell.add_worker(f"p{index}", common_pb2.ROLE_PREFILL, SHAPE)
        cell.add_worker(f"d{index}", common_pb2.ROLE_DECODE, SHAPE)
    for number in range(NUM_STREAMS):
        cell.at(
            cell.now + 3 + 6 * number / NUM_STREAMS,
            lambda: cell.submit(cell.random.randint(20, 500), 120),
        )
    cell.run(cell.now + 10)
    return cell


def longest_pause_s(cell: RestartedCell) -> float:
    """Returns the longest time without a new token over all streams, TTFT included."""
    return max(
        after - before
        for one in cell.outcomes
        for before, after in itertools.pairwise([one.arrived_at, *one.token_times])
    )


@pytest.mark.parametrize("dies_after_s", [0.1, 0.95, 1.1, 1.3, 1.5, 1.8])
@pytest.mark.parametrize("name", ["d1", "p1"])
def test_streams_pause_for_less_than_3_s_in_a_double_fault(name, dies_after_s):
    cell = streaming_cell()
    cell.stop(name)
    cell.run(cell.now + dies_after_s)
    cell.restart(OUTAGE_S)
    cell.run(cell.now + 30)
    for one in cell.outcomes:
        assert one.error is None
        assert len(one.token_times) == one.num_output_tokens
    assert longest_pause_s(cell) < 3.0
    cell.core.check_integrity()


def test_a_coordinator_restart_alone_computes_nothing_again():
    cell = streaming_cell()
    cell.restart(OUTAGE_S)
    cell.run(cell.now + 30)
    assert all(len(one.token_times) == one.num_output_tokens for one in cell.outcomes)
    assert cell.core.stats.num_adopted == NUM_STREAMS
    assert cell.core.stats.num_recoveries == 0
    assert longest_pause_s(cell) < 1.5
