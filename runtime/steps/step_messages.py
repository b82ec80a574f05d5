"""Converts step targets to the message for workers, and back."""

from __future__ import annotations

from baton.runtime.durations import duration, to_seconds
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2


def to_message(targets: StepTargets) -> cluster_pb2.StepTargets:
    """Returns the message that tells a worker these targets."""
    message = cluster_pb2.StepTargets(prompt_step=duration(targets.prompt_step_s))
    if targets.itl_s is not None:
        message.itl.CopyFrom(duration(targets.itl_s))
        message.longest_gap.CopyFrom(duration(targets.longest_gap_s))
    return message


def from_message(message: cluster_pb2.StepTargets) -> StepTargets:
    """Returns the targets that a worker was told."""
    prompt_step_s = to_seconds(message.prompt_step)
    if not message.HasField("itl"):
        return StepTargets(prompt_step_s=prompt_step_s)
    itl_s = to_seconds(message.itl)
    longest_s = to_seconds(message.longest_gap)
    return StepTargets(itl_s, max(itl_s, longest_s), prompt_step_s)
