"""Statistics of the last minute."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.telemetry.recent import MAX_TENANTS, OTHERS, WINDOW_S, Recent
from baton.coordinator.telemetry.sketch import ACCURACY, Sketch
from baton.runtime.durations import to_seconds
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.live_status import LiveCell

LANE = common_pb2.LANE_INTERACTIVE
DURATIONS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200)


def sketch(values) -> Sketch:
    made = Sketch()
    for value in values:
        made.observe(value)
    return made


@given(values=DURATIONS, percent=st.floats(0, 100))
def test_percentiles_are_within_two_percent(values, percent):
    (estimate,) = sketch(values).percentiles_s((percent,))
    rank = max(1, math.ceil(percent / 100 * len(values)))
    exact = sorted(values)[rank - 1]
    assert abs(estimate - exact) <= ACCURACY * exact * 1.0001


@given(one=DURATIONS, other=DURATIONS)
def test_merged_is_what_observing_all_would_be(one, other):
    merged, whole = sketch(one), sketch([*one, *other])
    merged.add(sketch(other))
    assert merged.counts == whole.counts
    assert (merged.num, merged.max_s) == (whole.num, whole.max_s)


@given(values=st.lists(st.floats(0, 1e300), max_size=500))
def test_memory_is_bounded(values):
    made = sketch(values)
    assert len(made.counts) <= 634
    assert sum(made.counts.values()) == made.num == len(values)


def test_nothing_has_no_percentiles():
    assert Sketch().percentiles_s((50, 99)) == [0.0, 0.0]


def test_shares_over_a_limit():
    assert sketch([0.01, 0.04, 0.06, 0.5]).num_over(0.05) == 2


def test_a_minute_is_remembered_and_no_more():
    recent = Recent()
    for second in range(1000):
        recent.at(1000.0 + second).lanes[LANE].ttft.observe(0.1)
        held = recent.window(1000.0 + second).lanes[LANE].ttft.num
        assert held == second + 1 if second < WINDOW_S - 5 else WINDOW_S - 5 <= held <= WINDOW_S
    assert recent.window(2000.0 + WINDOW_S).lanes[LANE].ttft.num == 0


def test_late_observations_count_in_the_latest_slice():
    """Refused requests are counted at their arrival time, which may be in an earlier slice."""
    recent = Recent()
    recent.at(1000.0)
    recent.at(994.0).lanes[LANE].sheds["queue_full"] += 1
    assert recent.window(1000.0).lanes[LANE].sheds == {"queue_full": 1}


def test_tenants_are_bounded():
    recent = Recent()
    for number in range(10_000):
        recent.at(1000.0 + number / 100).lanes[LANE].tenant(f"t{number}").wait.observe(1.0)
    tenants = recent.window(1100.0).lanes[LANE].tenants
    assert len(tenants) <= MAX_TENANTS + 1
    assert tenants[OTHERS].wait.num > 5000


def test_a_sample_of_many_steps_stands_for_all():
    recent = Recent()
    steps = [cluster_pb2.StepSample(num_decodes=3, duration_us=20_000) for _ in range(256)]
    recent.at(1000.0).decode_steps(steps)
    window = recent.window(1000.0)
    assert window.steps.num == 3 * 256
    assert window.batch.num == 256
    assert window.mixed_steps.num == 0


def test_the_history_ends_now():
    cell = LiveCell().workers().load(4, 100, 10)
    cell.sample()
    for _ in range(3):
        cell.after(5).sample()
    cell.kill("d0")
    status = cell.status(include_history=True)
    serving = [[pool.num_serving for pool in one.pools] for one in status.history]
    assert serving == [[1, 1]] * 4 + [[1, 0]]
    times_s = [to_seconds(one.at) for one in status.history]
    assert times_s == sorted(times_s)
    before, *after = (one.lanes[0] for one in status.history)
    assert (before.ttft_p95_us, before.itl_p95_us) == (0, 0)
    assert after[-1].ttft_p95_us == status.lanes[0].ttft.p95_us > 0
    assert after[-1].itl_p95_us == status.lanes[0].itl.p95_us > 0
    assert not cell.status().history


def test_tokens_count_when_they_are_sent_and_not_at_the_end_of_their_request():
    """Two streams of about 90 s, so that none ends within a minute."""
    cell = LiveCell().workers()
    cell.submit(100, 9000)
    cell.submit(100, 9000, lane=common_pb2.LANE_BATCH)
    cell.after(70)
    interactive, batch = cell.status().lanes
    sent = [len(one.token_times) for one in cell.outcomes]
    assert interactive.num_ended == batch.num_ended == 0
    # The window has 55 to 60 s of the 70 s.
    for lane, num_sent in zip((interactive, batch), sent, strict=True):
        assert num_sent * 54 / 70 < lane.num_output_tokens < num_sent * 61 / 70


def test_a_request_without_a_worker_waits_and_does_not_run():
    cell = LiveCell().workers()
    for _ in range(5):
        cell.submit(100, 500)
    cell.after(1)
    lane = cell.status().lanes[0].info
    assert (lane.num_queued, lane.num_running) == (0, 5)
    # No other worker can continue the outputs.
    cell.kill("d0")
    cell.after(1)
    lane = cell.status().lanes[0].info
    assert (lane.num_queued, lane.num_running) == (5, 0)


def test_the_oldest_wait_leaves_out_the_time_on_a_worker():
    cell = LiveCell().workers()
    cell.submit(100, 9000)
    cell.after(30)
    cell.kill("d0")
    cell.after(2)
    # The request waits again, and another one arrives.
    cell.submit(100, 10)
    cell.after(3)
    lane = cell.status().lanes[0].info
    assert lane.num_queued == 2
    assert 4 < to_seconds(lane.oldest_wait) < 6
