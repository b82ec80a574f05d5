"""Which prompts the next step of a simulated worker computes, and how many tokens of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.runtime.steps.step_budget import (
    Prompt,
    StepTargets,
    Streams,
    prompt_order,
    prompt_tokens,
)
from baton.simulator.parts import Shape, SimulatedRequest

# Prompts in a step, each with the number of its tokens that the step computes.
Turns = list[tuple[SimulatedRequest, int]]


def in_order(prompts: Sequence[SimulatedRequest], shape: Shape, num_decodes: int) -> Turns:
    """Returns the prompts of the next step: first come, first served, as in vLLM."""
    budget = max(1, shape.max_num_batched_tokens - num_decodes)
    turns: Turns = []
    for request in prompts:
        count = min(request.num_uncomputed, budget)
        if count < request.num_uncomputed and not shape.chunked:
            if turns:
                break
            count = request.num_uncomputed
        if count <= 0:
            break
        budget -= count
        turns.append((request, count))
    return turns


def within_targets(
    requests: Sequence[SimulatedRequest],
    shape: Shape,
    targets: StepTargets,
    streams: Streams,
    now: float,
) -> Turns:
    """Returns the prompts of the next step: as many tokens as the targets allow.

    Args:
        requests: Requests with a prompt to compute.
        shape: The worker.
        targets: Targets of its steps.
        streams: Its decoding requests, which limit the step.
        now: Time of the simulation, in seconds.
    """
    model = shape.model
    prompts = [
        Prompt(
            num_done=one.num_computed - one.num_held,
            num_left=one.num_uncomputed,
            priority=one.priority,
            waited_s=now - one.arrived_at,
            running=one.has_begun,
            # A stream that was preempted is not late: its first token is out.
            due_in_s=one.due_at - now if math.isnan(one.last_at) else math.inf,
        )
        for one in requests
    ]
    order = sorted(range(len(prompts)), key=lambda index: prompt_order(prompts[index], model))
    counts = prompt_tokens(
        model,
        targets,
        streams,
        [prompts[index] for index in order],
        # A batch that fills the step still leaves room for one prompt token.
        max(shape.max_num_batched_tokens, streams.num_streams + 1),
    )
    return [(requests[index], count) for index, count in zip(order, counts, strict=True) if count]
