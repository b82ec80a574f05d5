"""The targets of the workers' steps, as the coordinator tells them to workers."""

from __future__ import annotations

from baton.coordinator.state.scaling_config import Targets
from baton.coordinator.telemetry.times import duration
from baton.runtime.config import StepsConfig
from baton.runtime.step_budget import StepTargets
from baton.v1 import cluster_pb2


def step_targets(config: StepsConfig, interactive: Targets | None) -> cluster_pb2.StepTargets:
    """Returns the message with the targets of every worker's steps.

    Args:
        config: The limits of steps.
        interactive: Targets of the interactive lane; None: it has none.
    """
    targets = StepTargets.of(config, interactive.itl_s if interactive is not None else None)
    message = cluster_pb2.StepTargets(prompt_step=duration(targets.prompt_step_s))
    if targets.itl_s is not None:
        message.itl.CopyFrom(duration(targets.itl_s))
        message.longest_gap.CopyFrom(duration(targets.longest_gap_s))
    return message
