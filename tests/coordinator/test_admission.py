"""When a refused request may be retried, and how wrong predictions are corrected."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.runtime.config import BatchLaneConfig, LanesConfig, parse
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import common_pb2
from tests.coordinator.virtual_cell import VirtualCell, WorkerShape

BATCH = common_pb2.LANE_BATCH
# A prompt token takes 0.1 ms.
QUICK = LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7)


def cell(prefill_per_token_ms: float = 0.1, **interactive: object) -> VirtualCell:
    """One worker in each pool; `prefill_per_token_ms` is predicted before it is measured."""
    values = {
        "model": "simulated",
        "decode": {"local_prefill": False},
        "latency": {"prefill_per_token_ms": prefill_per_token_ms},
        "lanes": {"interactive": interactive},
    }
    made = VirtualCell(CoreConfig.of(parse(values, "test")))
    shape = WorkerShape(QUICK, max_num_batched_tokens=256)
    made.add_worker("p", common_pb2.ROLE_PREFILL, shape)
    made.add_worker("d", common_pb2.ROLE_DECODE, shape)
    made.run(made.now + 1)
    return made


def test_a_request_that_would_be_late_on_an_idle_worker_gets_no_retry_time():
    made = cell()
    made.submit(64, 2)
    made.run(made.now + 1)
    hopeless = made.submit(4000, 2, slo_ttft_s=0.2)
    assert hopeless.error.reason == "TOO_LATE"
    assert hopeless.error.retry_after_s is None
    assert "the prompt alone takes 0." in str(hopeless.error)
    # A request that is late because of the queue is told when to retry.
    for _ in range(4):
        made.submit(4000, 2)
    late = made.submit(1000, 2, slo_ttft_s=0.5)
    assert late.error.reason == "TOO_LATE"
    made.run(made.now + late.error.retry_after_s)
    again = made.submit(1000, 2, slo_ttft_s=0.5)
    made.run(made.now + 5)
    assert again.ttft_s <= 0.5


def test_a_cluster_faster_than_predicted_does_not_refuse_all_requests_forever():
    """A refused request measures nothing, so some must be admitted to correct the prediction."""
    made = cell(prefill_per_token_ms=1.0, ttft_ms=600)
    begin = made.now
    outcomes = []
    while made.now < begin + 60:
        outcomes.append(made.submit(1000, 2))
        made.run(made.now + 0.5)
    late = [one for one in outcomes if one.arrived_at > begin + 30]
    assert not any(one.shed for one in late)
    assert all(one.ttft_s < 0.6 for one in late)


def test_a_cluster_as_slow_as_predicted_admits_few_requests():
    made = cell(prefill_per_token_ms=0.1, ttft_ms=200)
    outcomes = []
    for _ in range(600):
        outcomes.append(made.submit(4000, 2))
        made.run(made.now + 0.1)
    assert sum(not one.shed for one in outcomes) <= 60 / 5 + 1


def test_no_late_request_is_admitted_while_others_measure_the_prefill_time():
    made = cell(prefill_per_token_ms=0.1, ttft_ms=200)
    hopeless = []
    for _ in range(200):
        short = made.submit(64, 2)
        made.run(made.now + 0.1)
        hopeless.append(made.submit(4000, 2))
        made.run(made.now + 0.1)
        assert not short.shed
    assert all(one.shed for one in hopeless)


def test_a_full_lane_says_when_to_retry(new_world):
    lanes = LanesConfig(batch=BatchLaneConfig(max_queued=2))
    world = new_world(lanes=lanes)
    for _ in range(2):
        world.submit(lane=BATCH)
    assert world.last(world.submit(lane=BATCH)).error.retry_after_s == 1.0
    world.after(60.0)
    error = world.last(world.submit(lane=BATCH)).error
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", pytest.approx(30.0))


def test_the_time_that_a_request_ran_is_no_wait(new_world, out):
    """Its worker was lost after an hour; the requests behind it did not wait for that long."""
    lanes = LanesConfig(batch=BatchLaneConfig(max_queued=2))
    world = new_world(lanes=lanes, max_request_s=1e5).pair()
    long = world.submit(lane=BATCH)
    world.step("p", out("r1", [7], finish=0))
    world.step("d", out("r1", [8], 1))
    world.now += 3600
    world.handle(ev.WorkerLost("d", "was killed"))
    world.submit(lane=BATCH)
    world.now += 4
    oldest = world.core.oldest_queued(BATCH)
    assert (oldest.submission.to, world.now - oldest.state_since) == (long, pytest.approx(4.0))
    assert world.last(world.submit(lane=BATCH)).error.retry_after_s == pytest.approx(2.0)
