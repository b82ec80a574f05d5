"""Each attempt of a request has its own stages and stalls, with its own workers and timings."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.slow_steps import Cause
from baton.coordinator.telemetry.budget import latency_budget
from baton.runtime.config import LaneTargetsConfig, NoTargetsConfig
from baton.runtime.enum_names import enum_name
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE, LENGTH = (
    common_pb2.ROLE_PREFILL,
    common_pb2.ROLE_DECODE,
    common_pb2.FINISH_REASON_LENGTH,
)
# Two seconds until the first token, and 50 ms until the second one.
PROMPT = {"queue_us": 1_900_000, "run_us": 100_000}
HANDED = {"queue_us": 20_000, "run_us": 20_000, "handoff_wait_us": 10_000}
FIRST_ATTEMPT = [
    ("prefill_queue", 1900, "p"),
    ("prefill", 100, "p"),
    ("handoff", 10, "d"),
    ("decode_queue", 10, "d"),
    ("network", 10, ""),
    ("decode", 40, "d"),
]


def stages(budget: common_pb2.LatencyBudget) -> list[tuple[str, int, str]]:
    """Names of the stages, their milliseconds, and their workers."""
    ends = [one.start_us + one.duration_us for one in budget.stages]
    assert [one.start_us for one in budget.stages] == [0, *ends[:-1]]
    assert ends[-1] == budget.total_us
    return [
        (
            enum_name(common_pb2.Stage.DESCRIPTOR, one.stage),
            round(one.duration_us / 1e3),
            one.worker_id,
        )
        for one in budget.stages
    ]


def so_far(world) -> list[tuple[str, int, str]]:
    return stages(latency_budget(world.core.request("r1"), world.now))


def decode_in_batch(world, out):
    """Lets a batch request get two tokens from "d", and 20 ms pass."""
    to = world.submit(lane=common_pb2.LANE_BATCH)
    world.now += 2.0
    world.step("p", out("r1", [7], finish=0, timings=PROMPT))
    world.now += 0.05
    world.step("d", out("r1", [8], offset=1, timings=HANDED))
    world.now += 0.02
    return to


def causes(world) -> list[tuple[Cause, str]]:
    """Causes and workers of the gaps over the target."""
    return [(one.cause, one.worker_id) for one in world.core.stalls(world.core.request("r1"))]


def park(world):
    world.core._clock.now = world.now
    world.core._attempts.park(world.core.request("r1"))


def lose(world):
    world.handle(ev.WorkerLost("d", "was killed"))


def leave(world):
    world.handle(ev.DrainRequested("d", 0.0, "restart"))
    stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
    world.handle(ev.WorkerChanged(("d", 1), stopped))


@pytest.mark.parametrize(
    ("interrupt", "stage"), [(park, "parked"), (lose, "recovery"), (leave, "parked")]
)
def test_stages_before_an_interruption_stay(world, out, interrupt, stage):
    to = decode_in_batch(world, out)
    assert so_far(world) == FIRST_ATTEMPT
    interrupt(world)
    world.now += 1.0
    assert so_far(world) == [*FIRST_ATTEMPT, (stage, 1000, "")]
    world.handle(ev.StreamCancelled(to))
    assert stages(world.last(to).budget) == [*FIRST_ATTEMPT, (stage, 1000, "")]


def test_each_attempt_has_its_own_stages(new_world, out):
    world = new_world().pair()
    to = decode_in_batch(world, out)
    lose(world)
    world.attach("d2", DECODE)
    world.now += 1.0
    world.step("p", out("r1", [7], finish=0, attempt=2, timings={"queue_us": 0, "run_us": 5000}))
    world.now += 0.5
    world.step("d2", out("r1", [9], offset=2, attempt=2, timings={"run_us": 30_000}))
    world.now += 0.03
    world.handle(ev.WorkerLost("d2", "was killed"))
    world.attach("d3", DECODE)
    world.now += 0.2
    world.step("p", out("r1", [7], finish=0, attempt=3))
    world.step("d3", out("r1", [10], offset=3, attempt=3))
    world.now += 0.04
    world.step("d3", out("r1", [11], offset=4, attempt=3, finish=LENGTH))
    assert stages(world.last(to).budget) == [
        *FIRST_ATTEMPT,
        ("recovery", 1500, ""),
        ("decode", 30, "d2"),
        ("recovery", 200, ""),
        ("decode", 40, "d3"),
    ]


def test_an_attempt_without_a_report_is_prefill_of_its_worker(world, out):
    to = world.submit()
    world.now += 2.0
    world.handle(ev.WorkerLost("p", "was killed"))
    world.now += 0.1
    world.attach("p2", PREFILL)
    world.now += 0.2
    timings = {"queue_us": 10_000, "run_us": 190_000}
    world.step("p2", out("r1", [7], finish=0, attempt=2, timings=timings))
    world.now += 0.05
    world.step("d", out("r1", [8], offset=1, attempt=2, finish=LENGTH, timings=HANDED))
    assert stages(world.last(to).budget) == [
        ("prefill", 2000, "p"),
        ("recovery", 300, ""),
        ("handoff", 10, "d"),
        ("decode_queue", 10, "d"),
        ("network", 10, ""),
        ("decode", 20, "d"),
    ]


def test_an_attempt_without_an_output_of_its_decode_worker_is_a_handoff_to_it(world, out):
    to = world.submit()
    world.now += 0.1
    world.step("p", out("r1", [7], finish=0, timings={"run_us": 100_000}))
    world.now += 2.0
    world.handle(ev.WorkerLost("d", "was silent"))
    world.attach("d2", DECODE)
    world.now += 0.1
    world.step("p", out("r1", [7], finish=0, attempt=2, timings={"run_us": 100_000}))
    world.now += 0.05
    world.step("d2", out("r1", [8], offset=1, attempt=2, finish=LENGTH, timings=HANDED))
    assert stages(world.last(to).budget) == [
        ("prefill", 100, "p"),
        ("handoff", 2000, "d"),
        ("recovery", 150, ""),
    ]


def test_a_resumed_output_waits_for_its_handoff_and_not_for_the_network(world, out):
    """No token shows when its prompt was computed, because the client knows the first ones."""
    to = world.submit(known_token_ids=[7, 8])
    world.now += 0.1
    world.step("p", out("r1", [7], finish=0, timings={"run_us": 100_000}))
    world.now += 0.3
    assert so_far(world) == [("prefill", 100, "p"), ("handoff", 300, "d")]
    timings = {"run_us": 20_000, "queue_us": 270_000, "handoff_wait_us": 270_000}
    world.step("d", out("r1", [9], offset=2, finish=LENGTH, timings=timings))
    assert stages(world.last(to).budget) == [
        ("prefill", 100, "p"),
        ("handoff", 270, "d"),
        ("network", 10, ""),
        ("decode", 20, "d"),
    ]


@pytest.mark.parametrize("interrupt", [park, leave])
def test_gaps_before_an_interruption_keep_their_causes(new_world, out, interrupt):
    """The worker that caused the gaps is still attached, or it has left."""
    targets = LaneTargetsConfig(batch=NoTargetsConfig(itl_ms=40))
    world = new_world(targets=targets).pair()
    decode_in_batch(world, out)
    world.now += 0.08
    world.step("d", out("r1", [9], offset=2))
    before = [(Cause.HANDOFF, "d"), (Cause.BATCH, "d")]
    assert causes(world) == before
    interrupt(world)
    if interrupt is leave:
        # The steps of a worker that is gone are forgotten.
        before[1] = (Cause.UNKNOWN, "d")
    assert causes(world) == before
    world.attach("d2", DECODE)
    world.now += 1.0
    world.step("p", out("r1", [7], finish=0, attempt=2))
    name = world.core.request("r1").decode[0]
    world.step(name, out("r1", [10], offset=3, attempt=2))
    assert causes(world) == [*before, (Cause.PARKED, "")]
