"""TTFT targets that grow with the prompt, through the coordinator's core under a virtual clock."""

from __future__ import annotations

import pytest

from baton.client import doctor
from baton.coordinator.server.metrics import registry
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import common_pb2
from tests.coordinator.live_status import LiveCell

INTERACTIVE = common_pb2.LANE_INTERACTIVE
# Computing this prompt takes 1 s.
LONG = 20_000


def cell(slope_ms: int = 0, *, admission: bool = False) -> LiveCell:
    """A cell with a base target of 500 ms, also for admission if `admission` is true."""
    targets = {"ttft_ms": 500, "ttft_ms_per_1k_tokens": slope_ms}
    made = LiveCell(
        scaling={"targets": {"interactive": targets}},
        lanes={"interactive": targets if admission else {}},
        # Steps are predicted as they are measured.
        latency={"prefill_base_ms": 5, "prefill_per_token_ms": 0.05},
    ).workers(max_model_len=32_768)
    # A measured first token: without one, a hopeless request is admitted to measure prompts.
    made.submit(64, 2)
    return made.after(1)


def attained(made: LiveCell) -> float:
    return made.status().lanes[0].ttft_attained


def ratio_samples(made: LiveCell) -> dict[str, float]:
    """Interactive requests whose TTFT was at most this multiple of their target."""
    families = registry(made.core, made.config).collect()
    (ratios,) = (one for one in families if one.name == "baton_ttft_target_ratio")
    return {
        sample.labels["le"]: sample.value
        for sample in ratios.samples
        if sample.name.endswith("_bucket") and sample.labels["lane"] == "interactive"
    }


def test_a_long_prompt_that_was_refused_is_admitted_and_in_time() -> None:
    made = cell(admission=True)
    refused = made.submit(LONG, 2)
    made.after(5)
    assert refused.error.reason == "TOO_LATE"
    assert "the target 0.5 s" in str(refused.error)
    made = cell(100, admission=True)
    served = made.submit(LONG, 2)
    made.after(5)
    assert 0.5 < served.ttft_s < 2.5
    assert attained(made) == 1.0
    assert not made.core.stats.sheds


@pytest.mark.parametrize(("slope_ms", "met"), [(0, 1), (100, 2)])
def test_a_request_is_in_time_by_its_own_target(slope_ms: int, met: int) -> None:
    made = cell(slope_ms)
    served = made.submit(LONG, 2)
    made.after(5)
    assert served.ttft_s > 0.5
    assert attained(made) == met / 2
    found = ratio_samples(made)
    assert (found["1.0"], found["+Inf"]) == (met, 2)
    lane = made.status().lanes[0]
    assert lane.num_late == 2 - met
    target_s = 0.5 + slope_ms / 1e3 * LONG / 1000
    assert lane.ttft_ratio.p99 == pytest.approx(served.ttft_s / target_s, rel=0.03)
    record = made.core.request("r1", "")
    assert record.ttft_target_s == pytest.approx(target_s)


def test_a_request_may_name_a_target_that_grows() -> None:
    made = cell(admission=True)
    assert made.submit(LONG, 2, slo_ttft=TtftTarget(0.5, 0.01)).shed
    served = made.submit(LONG, 2, slo_ttft=TtftTarget(0.5, 0.1))
    made.after(5)
    assert served.ttft_s < 2.5
    assert attained(made) == 1.0
    # Its own fixed target does not grow with the lane's slope.
    made = cell(100, admission=True)
    assert made.submit(LONG, 2, slo_ttft=TtftTarget(0.5)).shed


def test_without_a_lane_target_only_requests_that_name_one_are_counted() -> None:
    made = LiveCell(scaling={"targets": {"interactive": {"ttft_ms": None}}})
    made.workers(max_model_len=32_768)
    made.submit(64, 2, slo_ttft=TtftTarget(0.5))
    made.submit(LONG, 2)
    made.after(5)
    lane = made.status().lanes[0]
    assert (lane.ttft.num, lane.ttft_ratio.num, lane.ttft_attained) == (2, 1, 1.0)


def test_the_doctor_finds_long_prompts_late_only_by_a_fixed_target() -> None:
    for slope_ms, kinds in ((0, [doctor.Kind.PREFILL]), (100, [])):
        made = cell(slope_ms).load(0.6, LONG, 2, 18).after(20)
        assert [one.kind for one in doctor.diagnose(made.status())] == kinds


def test_the_oldest_wait_is_compared_with_that_requests_target() -> None:
    made = cell(100)
    for _ in range(20):
        made.submit(LONG, 2)
    made.after(0.3)
    lane = made.status().lanes[0]
    assert lane.info.num_queued >= 8
    assert lane.oldest_ttft_target.ToNanoseconds() == 2.5e9
    # A wait of more than twice the base target, and less than twice the request's target.
    made.after(2)
    assert doctor.diagnose(made.status()) == []
    made.after(5)
    (finding,) = doctor.diagnose(made.status())
    assert "the target is 500 ms + 100 ms per 1,000 prompt tokens" in finding.evidence[0]
