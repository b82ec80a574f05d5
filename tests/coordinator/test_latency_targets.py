"""The latency targets of the lanes, which an operator may change."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.latency_targets import LatencyTargets
from baton.coordinator.state.requests import StreamKey, Submission
from baton.coordinator.state.scaling_config import Targets
from baton.runtime.config import LaneTargetsConfig
from baton.runtime.steps.step_messages import from_message
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import common_pb2
from tests.coordinator.live_status import LiveCell

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH


def submission(lane: common_pb2.Lane.ValueType, **fields: object) -> Submission:
    """A submission with a prompt of 1,000 tokens."""
    sampling = common_pb2.SamplingParams(max_tokens=1)
    return Submission(StreamKey(1, 1), "r1", [1] * 1000, sampling, lane, 0.0, **fields)


def test_a_requests_own_targets_come_before_those_of_its_lane() -> None:
    targets = LatencyTargets(LaneTargetsConfig())
    targets.change({"interactive": Targets(0.5, 0.05, ttft_s_per_1k_tokens=0.2)})
    plain = submission(INTERACTIVE)
    assert (targets.ttft_s(plain), targets.itl_s(plain)) == (0.7, 0.05)
    assert targets.ttft_growth_s(plain) == 0.2
    own = submission(INTERACTIVE, slo_ttft=TtftTarget(2.0), slo_itl_s=0.01)
    assert (targets.ttft_s(own), targets.itl_s(own)) == (2.0, 0.01)
    assert targets.ttft_growth_s(own) == 0.0
    batch = submission(BATCH)
    assert (targets.ttft_s(batch), targets.itl_s(batch)) == (None, None)


def test_a_change_leaves_other_lanes_and_earlier_mappings_alone() -> None:
    targets = LatencyTargets(LaneTargetsConfig())
    before = targets.by_lane
    targets.change({"batch": Targets(60.0, None)})
    assert before["batch"].ttft_s is None
    assert targets.of_lane(BATCH) == Targets(60.0, None)
    assert targets.of_lane(INTERACTIVE) == before["interactive"]


def test_all_parts_of_a_coordinator_follow_a_change() -> None:
    made = LiveCell().workers(max_model_len=32_768)
    made.post(ev.TargetsRequested({"interactive": Targets(2.0, 0.02)}))
    served = made.submit(20_000, 8)
    made.after(5)
    lane = made.status().lanes[0]
    # The first token takes more than the 0.5 s of the configuration.
    assert 0.5 < served.ttft_s < 2.0
    assert lane.num_late == 0
    assert (lane.targets.ttft_ms, lane.targets.itl_ms) == (2000, 20)
    record = made.core.request("r0", "")
    assert (record.ttft_target_s, record.itl_target_s) == (2.0, 0.02)
    assert from_message(made.core.step_targets()).itl_s == pytest.approx(0.02)
