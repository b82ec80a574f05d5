"""Simulated workers fill their steps by the policy of runtime/steps/step_budget.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets, Streams
from baton.runtime.steps.step_messages import to_message
from baton.simulator.colocated import ColocatedCell
from baton.simulator.parts import Shape, SimulatedRequest
from baton.simulator.prompt_turns import within_targets
from baton.simulator.run import shape_of

MODEL = LatencyModel(0.005, 1e-4, 0.0, 0.010, 1e-4, 0.0)
IN_TURN = Shape(
    MODEL,
    kv_tokens=100_000,
    max_num_batched_tokens=2048,
    max_model_len=8192,
    follows_step_targets=False,
)
TARGETS = StepTargets(itl_s=0.03, longest_gap_s=0.04, prompt_step_s=0.1)
BY_TARGETS = replace(IN_TURN, follows_step_targets=True)


def served(shape, *arrivals, targets=TARGETS):
    """Serves requests on one worker; returns the gaps, TTFTs and times per output token."""
    cell = ColocatedCell(shape, 1)
    cell.workers[0].take(to_message(targets))
    record = cell.run(list(arrivals), arrivals[-1].at_s + 1.0)
    ttfts = [first - at for first, at in zip(record.firsts, record.arrivals, strict=True)]
    per_token = [
        (end - first) / max(1, one.num_output_tokens - 1)
        for first, end, one in zip(record.firsts, record.ends, arrivals, strict=True)
    ]
    return cell.gaps, ttfts, per_token


def test_prompts_beside_a_stream_keep_its_gaps_and_its_mean_within_the_targets():
    stream = Arrival(0.0, 10, 400)
    prompts = [Arrival(1.0 + n / 2, 2000, 1) for n in range(10)]
    gaps, _, per_token = served(BY_TARGETS, stream, *prompts)
    assert gaps.percentile(100) <= TARGETS.longest_gap_s
    assert per_token[0] <= TARGETS.itl_s
    # Without targets, the stream waits for whole prompts.
    gaps, _, _ = served(IN_TURN, stream, *prompts)
    assert gaps.percentile(100) > 5 * TARGETS.longest_gap_s


def test_steps_are_short_while_a_stream_waits_for_its_handoff():
    """Its first token was made elsewhere, and the wait is part of its first gap."""
    transfer_s = 0.5
    cell = ColocatedCell(replace(BY_TARGETS, handoff_s=transfer_s), 1)
    (worker,) = cell.workers
    worker.take(to_message(TARGETS))
    take = worker.take

    def handed_over(command):
        if command.spec.sampling.max_tokens > 1:
            command.spec.known_token_ids.append(1)
            command.handoff.num_tokens = len(command.spec.prompt_token_ids)
        take(command)

    worker.take = handed_over
    cell.run([Arrival(0.0, 8000, 1), Arrival(0.3, 100, 20)], 1.0)
    assert transfer_s < cell.gaps.percentile(100) <= transfer_s + 2 * TARGETS.longest_gap_s


def test_a_stream_that_is_handed_over_with_known_tokens_computes_only_the_latest():
    """After a move, the handoff holds the prompt and all known tokens but one."""
    gaps = []
    for num_known in (1, 300):
        cell = ColocatedCell(BY_TARGETS, 1)
        (worker,) = cell.workers
        worker.take(to_message(TARGETS))
        take = worker.take

        def handed_over(command, take=take, num_known=num_known):
            command.spec.known_token_ids.extend([1] * num_known)
            command.spec.sampling.max_tokens += num_known
            command.handoff.num_tokens = len(command.spec.prompt_token_ids) + num_known - 1
            take(command)

        worker.take = handed_over
        cell.run([Arrival(0.0, 1000, 20)], 1.0)
        gaps.append(cell.gaps.percentile(100))
    assert gaps[1] == pytest.approx(gaps[0], rel=0.1)


def test_a_short_prompt_overtakes_a_long_one_between_two_steps():
    arrivals = Arrival(0.0, 6000, 1), Arrival(0.01, 100, 1)
    _, (long_s, short_s), _ = served(BY_TARGETS, *arrivals)
    assert short_s < 2.5 * TARGETS.prompt_step_s < long_s
    _, (_, in_turn_s), _ = served(replace(IN_TURN, max_num_batched_tokens=8192), *arrivals)
    assert in_turn_s > 0.6


def test_without_an_itl_target_only_the_length_of_prompt_steps_is_limited():
    arrivals = Arrival(0.0, 10, 200), Arrival(1.0, 2000, 1)
    gaps, _, _ = served(BY_TARGETS, *arrivals, targets=StepTargets(prompt_step_s=0.1))
    assert gaps.percentile(100) == pytest.approx(TARGETS.prompt_step_s, rel=0.05)


def test_a_preempted_stream_does_not_wait_behind_prompts_that_are_in_time():
    def request(name, num_uncomputed, due_at, last_at):
        return SimulatedRequest(
            request_id=name,
            attempt=1,
            priority=0,
            order=0,
            num_output_tokens=10,
            num_uncomputed=num_uncomputed,
            num_computed=0,
            num_tokens=num_uncomputed,
            num_outputs_left=10,
            offset=0,
            num_prompt_tokens=num_uncomputed,
            hashes=(),
            due_at=due_at,
            last_at=last_at,
        )

    now = 5.0
    prompt = request("prompt", 4000, due_at=6.0, last_at=math.nan)
    preempted = request("preempted", 500, due_at=1.0, last_at=4.9)
    turns = within_targets([prompt, preempted], IN_TURN, TARGETS, Streams(), now)
    assert turns[0] == (preempted, 500)


def test_simulated_workers_follow_step_targets_unless_vllm_schedules():
    assert shape_of(parse({}, "test")).follows_step_targets
    assert not shape_of(parse({"steps": {"scheduler": "vllm"}}, "test")).follows_step_targets


def test_simulated_workers_are_as_slow_as_the_simulated_engine():
    slow, usual = (
        shape_of(parse({"simulated": {"time_scale": scale}}, "test")) for scale in (3, 1)
    )
    assert slow.model.decode_step_s(7, 100) == pytest.approx(3 * usual.model.decode_step_s(7, 100))
    assert slow.host_load_s(1000) == pytest.approx(3 * usual.host_load_s(1000))


@pytest.mark.parametrize(
    "settings", [{"time_scale": 0}, {"step_base_ms": 0, "step_per_request_ms": 0}]
)
def test_steps_that_take_no_time_cannot_be_simulated(settings):
    with pytest.raises(ValueError, match="simulated: a decode step takes no time"):
        shape_of(parse({"simulated": settings}, "test"))
