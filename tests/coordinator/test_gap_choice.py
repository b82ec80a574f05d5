"""The coordinator chooses the longest gap of an elastic cell whose operator has set none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.coordinator.core.gap_choice import LEAST_OUTPUTS, GapChoice, Workload
from baton.coordinator.state import events as ev
from baton.runtime.config import StepsConfig
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_messages import from_message
from baton.v1 import cluster_pb2, common_pb2

DECODE, LENGTH = common_pb2.ROLE_DECODE, common_pb2.FINISH_REASON_LENGTH
LONG_MS, DEFAULT_MS = 150, 60
# Decode steps take at least 30 ms, and prompts 0.1 ms per token.
MODEL = LatencyModel(0.02, 1e-4, 0.0, 0.03, 1e-4, 0.0)


class Cell:
    """An elastic cell with workers "w0", "w1", ... that answer at once."""

    def __init__(
        self, new_world, out, num_workers=2, *, elastic=True, model=MODEL, **steps
    ) -> None:
        self.world = new_world(elastic=elastic, latency=model, steps=StepsConfig(**steps))
        self._out = out
        for number in range(num_workers):
            self.attach(number)

    def attach(self, number, incarnation=1) -> None:
        self.world.attach(f"w{number}", DECODE, incarnation)

    def serve(self, num_tokens, num_requests=LEAST_OUTPUTS, *, num_prompt=20) -> None:
        """Serves requests with outputs of this length, one after the other."""
        world = self.world
        for _ in range(num_requests):
            for commands in world.commands.values():
                commands.clear()
            world.submit(num_prompt=num_prompt, sampling={"max_tokens": num_tokens})
            ((worker_id, spec),) = (
                (worker_id, one.spec)
                for worker_id, commands in world.commands.items()
                for one in commands
                if isinstance(one, cluster_pb2.DecodeCommand)
            )
            incarnation = world.core.workers.by_id(worker_id).hello.incarnation
            output = self._out(spec.request_id, range(num_tokens), finish=LENGTH)
            world.step(worker_id, output, incarnation=incarnation)

    def told_ms(self) -> dict[str, list[float]]:
        """Returns the longest gaps that workers were told in commands since the last call."""
        found = {}
        for worker_id, commands in self.world.commands.items():
            gaps = [one for one in commands if isinstance(one, cluster_pb2.StepTargets)]
            if gaps:
                found[worker_id] = [one.longest_gap.ToNanoseconds() / 1e6 for one in gaps]
            commands.clear()
        return found

    @property
    def gap_ms(self) -> float:
        """The longest gap that a worker is told when it attaches; placement must use the same."""
        core = self.world.core
        told = from_message(core.step_targets())
        (fleet,) = core.fleets
        placed_by = core.placers.of(fleet).view.loads.step_targets
        if placed_by is not None:
            assert told.longest_gap_s == pytest.approx(placed_by.longest_gap_s)
        return round(told.longest_gap_s * 1e3, 6)


@pytest.fixture
def new_cell(new_world, out):
    def make(*arguments, **keywords):
        return Cell(new_world, out, *arguments, **keywords)

    return make


@pytest.fixture
def long_cell(new_cell):
    """A cell with two workers whose gaps are long."""
    cell = new_cell()
    cell.serve(200)
    cell.world.wait(62)
    assert cell.gap_ms == LONG_MS
    cell.told_ms()
    return cell


def test_few_workers_with_long_outputs_get_long_gaps_after_a_minute(new_cell):
    cell = new_cell()
    assert cell.gap_ms == DEFAULT_MS
    assert "no interactive prompt yet" in cell.world.core.gap_reason
    cell.serve(200, 1)
    cell.world.wait(2)
    assert "outputs have ended" in cell.world.core.gap_reason
    cell.serve(200)
    cell.world.wait(58)
    assert cell.gap_ms == DEFAULT_MS
    assert "not yet for 60 s" in cell.world.core.gap_reason
    assert not cell.told_ms()
    cell.world.wait(4)
    assert cell.gap_ms == LONG_MS
    assert cell.told_ms() == {"w0": [LONG_MS], "w1": [LONG_MS]}
    assert cell.world.core.gap_reason == "few workers, long outputs and short prompts"


@pytest.mark.parametrize(
    ("num_workers", "num_tokens", "reason"),
    [
        pytest.param(4, 200, "4 workers", id="many workers"),
        pytest.param(2, 100, "100 tokens", id="short outputs"),
    ],
)
def test_many_workers_and_short_outputs_keep_the_default(new_cell, num_workers, num_tokens, reason):
    cell = new_cell(num_workers)
    cell.serve(num_tokens)
    cell.world.wait(120)
    assert cell.gap_ms == DEFAULT_MS
    assert reason in cell.world.core.gap_reason


def test_steps_that_take_most_of_the_target_get_long_gaps_at_once(new_cell):
    cell = new_cell(model=replace(MODEL, step_base_s=0.04))
    assert cell.gap_ms == DEFAULT_MS
    cell.serve(200, 1)
    cell.world.wait(2)
    assert cell.gap_ms == LONG_MS
    cell.serve(20, 60)
    cell.world.wait(2)
    assert cell.gap_ms == LONG_MS


@pytest.mark.parametrize("step_base_s", [0.025, 0.04])
def test_long_prompts_keep_the_default(new_cell, step_base_s):
    cell = new_cell(model=replace(MODEL, prefill_per_token_s=1e-3, step_base_s=step_base_s))
    cell.serve(200, num_prompt=20)
    cell.serve(200, 8, num_prompt=800)
    cell.world.wait(120)
    assert cell.gap_ms == DEFAULT_MS
    assert "prompts take 14.6 ITL targets" in cell.world.core.gap_reason


def test_short_decode_steps_keep_the_default(new_cell):
    cell = new_cell(model=replace(MODEL, step_base_s=0.01))
    cell.serve(200)
    cell.world.wait(120)
    assert cell.gap_ms == DEFAULT_MS
    assert "decode steps take 0.20 ITL targets" in cell.world.core.gap_reason


def test_without_enough_outputs_gaps_keep_the_default(new_cell):
    cell = new_cell()
    cell.serve(200, LEAST_OUTPUTS - 1)
    cell.world.wait(120)
    assert cell.gap_ms == DEFAULT_MS


def test_a_fourth_worker_takes_long_gaps_back_at_once_and_a_third_one_learns_them(long_cell):
    long_cell.attach(2)
    assert long_cell.gap_ms == LONG_MS
    assert not long_cell.told_ms()
    long_cell.attach(3)
    assert long_cell.gap_ms == DEFAULT_MS
    told = long_cell.told_ms()
    assert told == {f"w{number}": [DEFAULT_MS] for number in range(4)}
    # Long gaps return a minute after the fourth worker has left.
    long_cell.world.handle(ev.WorkerLost("w3", "is gone"))
    long_cell.world.wait(58)
    assert long_cell.gap_ms == DEFAULT_MS
    long_cell.world.wait(4)
    assert long_cell.gap_ms == LONG_MS


def test_a_worker_that_restarts_changes_no_gap(long_cell, new_cell):
    long_cell.world.handle(ev.WorkerLost("w1", "is gone"))
    long_cell.world.wait(30)
    long_cell.attach(1, incarnation=2)
    long_cell.world.wait(30)
    assert long_cell.gap_ms == LONG_MS
    four = new_cell(4)
    four.serve(200)
    for incarnation in (2, 3, 4):
        four.world.handle(ev.WorkerLost("w3", "is gone"))
        four.world.wait(50)
        four.attach(3, incarnation)
        four.world.wait(50)
    assert not four.told_ms()


def test_short_outputs_take_long_gaps_back_but_a_mean_near_the_limit_does_not_flap(long_cell):
    long_cell.serve(80, LEAST_OUTPUTS)
    long_cell.world.wait(5)
    assert long_cell.gap_ms == LONG_MS  # 140 tokens on average: fewer than begin, enough to stay.
    long_cell.serve(10, 10)
    long_cell.world.wait(2)
    assert long_cell.gap_ms == DEFAULT_MS
    long_cell.told_ms()
    # Now 140 tokens on average are too few.
    long_cell.serve(259, 12)
    long_cell.world.wait(120)
    assert long_cell.gap_ms == DEFAULT_MS
    assert "tokens; long gaps need 150" in long_cell.world.core.gap_reason


@pytest.mark.parametrize("longest_ms", [60, 80, 400])
def test_a_number_of_the_operator_is_kept(new_cell, longest_ms):
    cell = new_cell(longest_gap_ms=longest_ms)
    cell.serve(200)
    cell.world.wait(120)
    assert cell.gap_ms == longest_ms
    assert "steps.longest_gap_ms" in cell.world.core.gap_reason


def test_only_batons_scheduler_gets_long_gaps(new_cell):
    cell = new_cell(scheduler="vllm")
    cell.serve(200)
    cell.world.wait(120)
    assert cell.gap_ms == DEFAULT_MS


def test_a_cell_with_strict_roles_keeps_the_default(new_cell):
    world = new_cell(0, elastic=False).world.pair()
    for _ in range(LEAST_OUTPUTS):
        world.core.placers.outputs.observe(common_pb2.LANE_INTERACTIVE, 200)
    world.wait(120)
    assert from_message(world.core.step_targets()).longest_gap_s == pytest.approx(0.06)


def test_long_gaps_follow_a_changed_itl_target(long_cell):
    world = long_cell.world
    targets = replace(world.core.targets.by_lane["interactive"], itl_s=0.02)
    world.handle(ev.TargetsRequested({"interactive": targets}))
    assert long_cell.gap_ms == 60  # Three times the target.
    assert long_cell.told_ms() == {"w0": [60], "w1": [60]}


def test_small_changes_of_the_step_do_not_change_the_gap():
    choice, found = GapChoice(), []
    for second in range(6):
        step_itls = (0.76, 0.74)[second % 2]
        choice.update(2, Workload(60.0, 6.0, step_itls), float(second))
        found.append(choice.is_long)
    assert all(found)
    assert "decode steps take 0.74 ITL targets" in choice.reason
    choice.update(2, Workload(60.0, 6.0, 0.69), 7.0)
    assert not choice.is_long
