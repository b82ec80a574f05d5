"""The planner measures steps, and starts small while it knows nothing about its machine."""

from __future__ import annotations

import pytest

from baton.engine.step_planner import StepPlanner
from baton.kvtransfer.connector.step_work import StepWork
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import Prompt, StepTargets, Streams

# The model of a GPU, and of the machine that the steps run on.
PRIOR = LatencyModel(10e-3, 1e-4, 2e-9, 15e-3, 5e-5, 2e-7)
SLOW = LatencyModel(5e-3, 1e-3, 0.0, 8e-3, 5e-5, 2e-7)
TARGETS = StepTargets(0.05, 0.06, 0.2)
# Share of the ITL target that the policy aims at (runtime/steps/step_budget.py).
MEAN_MARGIN = 0.97


def run(planner: StepPlanner, num_left: int, num_steps: int) -> list[tuple[int, float]]:
    """Runs steps of one long prompt; returns each step's tokens and time."""
    now, done, found = 100.0, 0, []
    for _ in range(num_steps):
        planner.begin(now, ())
        prompt = Prompt(done, num_left, 0, 0.0, running=True)
        (count,) = planner.tokens(Streams(), [prompt], 8192)
        work = StepWork(now, count, count * (2 * done + count), 0, 0)
        planner.made(work, work)
        step_s = SLOW.prefill_s(count)
        now, done = now + step_s, done + count
        planner.ended(work, now)
        found.append((count, step_s))
    return found


def test_the_first_steps_are_short_on_a_machine_that_is_much_slower_than_the_prior() -> None:
    steps = run(StepPlanner(PRIOR, lambda: TARGETS), 100_000, 12)
    assert steps[0][0] == 64
    assert max(step_s for _, step_s in steps) < 0.3
    assert 0.1 < steps[-1][1] < 0.25


def test_a_warm_up_has_no_limit() -> None:
    planner = StepPlanner(PRIOR, lambda: TARGETS)
    planner.begin(1.0, ())
    prompt = Prompt(0, 512, 0, 0.0, running=False)
    assert planner.tokens(Streams(), [prompt], 2048, limit=False) == [512]


def test_a_stream_saves_time_with_each_token_that_comes_early() -> None:
    planner = StepPlanner(PRIOR, lambda: TARGETS)
    planner.begin(10.0, ("r",))
    assert planner.pace("r", 1).saved_s == 0.0
    planner.begin(10.1, ("r",))
    assert planner.pace("r", 11).saved_s == pytest.approx(10 * MEAN_MARGIN * 0.05 - 0.1)


def test_a_step_keeps_the_tightest_target_of_its_streams() -> None:
    planner = StepPlanner(PRIOR, lambda: TARGETS)
    run(planner, 100_000, 12)
    planner.begin(200.0, ("own", "other"))
    prompt = Prompt(0, 9000, 0, 0.0, running=True)

    def granted(*itls: float | None) -> int:
        paces = [planner.pace(f"{len(itls)} {itl}", 1, itl_s=itl) for itl in itls]
        limit_s = min(pace.limit_s(planner.targets) for pace in paces)
        return planner.tokens(Streams(len(itls), 100, limit_s), [prompt], 8192)[0]

    assert granted(0.02, None) < granted(None, None) == granted(0.2, None) < granted(0.2, 0.2)


def test_a_stream_that_was_handed_over_begins_with_the_gap_since_its_first_token() -> None:
    planner = StepPlanner(PRIOR, lambda: TARGETS)
    planner.begin(10.0, ("r",))
    assert planner.pace("r", 0, waited_s=0.03).saved_s == pytest.approx(-0.03)
    planner.begin(10.04, ("r",))
    # Only the first call takes the wait into account.
    assert planner.pace("r", 1, waited_s=0.07).saved_s == pytest.approx(MEAN_MARGIN * 0.05 - 0.07)


def test_a_step_made_while_another_runs_begins_when_that_one_ends() -> None:
    planner = StepPlanner(PRIOR, lambda: TARGETS)
    planner.begin(10.0, ("r",))
    planner.ended(None, 10.0)
    planner.pace("r", 1)
    planner.made("first", StepWork(10.0, 0, 0, 1, 100))
    planner.begin(10.001, ("r",))
    step_s = PRIOR.decode_step_s(1, 100)
    assert planner.pace("r", 2).saved_s == pytest.approx(MEAN_MARGIN * 0.05 - step_s)
    planner.made("second", StepWork(10.001, 0, 0, 1, 101))
    # The first step ended early. The third one begins one predicted step later.
    planner.ended("first", 10.004)
    planner.begin(10.005, ("r",))
    step_s = PRIOR.decode_step_s(1, 101)
    assert planner.pace("r", 3).saved_s == pytest.approx(2 * MEAN_MARGIN * 0.05 - 0.004 - step_s)


def test_a_dropped_step_is_not_measured() -> None:
    planner = StepPlanner(PRIOR, lambda: TARGETS)
    planner.begin(10.0, ())
    planner.made("dropped", StepWork(10.0, 2048, 2048**2, 0, 0))
    planner.begin(10.5, ())
    planner.made("next", StepWork(10.5, 0, 0, 1, 100))
    planner.ended("next", 10.6)
    planner.begin(10.6, ())
    assert planner.tokens(Streams(), [Prompt(0, 9000, 0, 0.0, running=False)], 8192) == [64]
