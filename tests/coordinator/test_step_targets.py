"""The coordinator tells workers the targets of their steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.coordinator.server.metrics import registry
from baton.coordinator.state import events as ev
from baton.runtime.config import (
    BatonConfig,
    LaneTargetsConfig,
    NoTargetsConfig,
    StepsConfig,
    TargetsConfig,
)
from baton.runtime.enum_names import lane_name
from baton.runtime.steps.request_targets import own_itl_s
from baton.v1 import common_pb2


def milliseconds(targets) -> tuple[float | None, float | None, float]:
    fields = (targets.itl, targets.longest_gap, targets.prompt_step)
    itl, longest, prompt = (one.ToNanoseconds() / 1e6 for one in fields)
    return (itl, longest, prompt) if targets.HasField("itl") else (None, None, prompt)


def change(world, **changes) -> None:
    targets = replace(world.core.targets.by_lane["interactive"], **changes)
    world.handle(ev.TargetsRequested({"interactive": targets}))


def test_the_default_targets_follow_from_the_interactive_itl_target(world):
    assert milliseconds(world.core.step_targets()) == (50, 60, 200)


def test_every_worker_gets_a_changed_itl_target_once(world):
    change(world, itl_s=0.02)
    change(world, ttft_s=0.1)
    for worker_id in ("p", "d"):
        (command,) = world.commands[worker_id]
        assert milliseconds(command) == (20, 24, 200)


def test_workers_are_told_the_itl_target_that_a_request_named(world):
    for asked_s, told_ms in ((None, 0), (0.02, 20), (1e-5, 1)):
        world.submit(slo_itl_s=asked_s)
        spec = world.commands["p"][-1].spec
        assert spec.itl_ms == told_ms
        assert own_itl_s(spec) == (told_ms / 1e3 or None)


def test_without_an_itl_target_streams_do_not_limit_steps(world):
    change(world, itl_s=None)
    assert milliseconds(world.commands["d"][0]) == (None, None, 200)


def test_the_longest_gap_is_configurable_and_never_below_the_itl_target(new_world):
    world = new_world(steps=StepsConfig(longest_gap_ms=80, prompt_step_ms=100)).pair()
    assert milliseconds(world.core.step_targets()) == (50, 80, 100)
    change(world, itl_s=0.1)
    assert milliseconds(world.commands["d"][0]) == (100, 100, 100)


def exported_gap_s(world):
    labels = {"lane": "interactive", "signal": "gap"}
    return registry(world.core, BatonConfig()).get_sample_value("baton_target_seconds", labels)


def test_the_target_of_a_single_gap_is_a_metric(new_world):
    world = new_world(steps=StepsConfig(longest_gap_ms=80)).pair()
    assert world.core.longest_gap_s == exported_gap_s(world) == pytest.approx(0.08)
    change(world, itl_s=None)
    assert world.core.longest_gap_s is exported_gap_s(world) is None


def test_workers_with_the_scheduler_of_vllm_have_no_longest_gap(new_world):
    world = new_world(steps=StepsConfig(scheduler="vllm")).pair()
    assert world.core.longest_gap_s is exported_gap_s(world) is None


def exported_gaps(world, lane):
    """The exported number of gaps within their target, and of all gaps."""
    metrics, labels = registry(world.core, BatonConfig()), {"lane": lane}
    name = "baton_gap_target_ratio"
    within = metrics.get_sample_value(f"{name}_bucket", labels | {"le": "1.0"})
    return within, metrics.get_sample_value(f"{name}_count", labels)


@pytest.mark.parametrize(
    ("lane", "target_s", "expected"),
    [
        # 1.2 times the ITL target.
        (common_pb2.LANE_INTERACTIVE, 0.048, (2, 3)),
        (common_pb2.LANE_BATCH, 0.031, (2, 3)),
        (common_pb2.LANE_BATCH, None, (0, 0)),
    ],
)
def test_gaps_are_counted_by_the_target_of_a_single_gap(new_world, out, lane, target_s, expected):
    batch = NoTargetsConfig(itl_ms=target_s and target_s * 1e3)
    targets = LaneTargetsConfig(interactive=TargetsConfig(itl_ms=40), batch=batch)
    world = new_world(targets=targets).pair()
    world.submit(lane=lane)
    world.step("p", out("r1", [7], finish=0))
    for offset, gap_s in enumerate((0.01, 0.99 * (target_s or 0.04), 1.01 * (target_s or 0.04)), 1):
        world.now += gap_s
        world.step("d", out("r1", [8], offset=offset))
    assert exported_gaps(world, lane_name(lane)) == expected
