"""Input numbers of a scaling decision by name, for operators and graphs."""

from __future__ import annotations

from collections.abc import Mapping

from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.scaling.autoscale.types import LaneLoad, Observation, Phase
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig


def numbers(
    observation: Observation,
    before: Observation | None,
    span_s: float,
    pool: Pool,
    config: ScalingConfig,
) -> Mapping[str, float]:
    """Returns the input numbers of a decision on one pool, without unmeasured values.

    Args:
        observation: observation that the decision was based on.
        before: previous observation; rates are computed from the difference.
        span_s: seconds between the two observations.
        pool: pool of the decision.
        config: configuration with the targets.
    """
    members = Members.of(observation, pool, config, observation.observed_at)
    found = {
        "serving": float(len(members.serving)),
        "starting": float(len(members.starting) + len(members.stuck)),
        "draining": float(len(observation.of(pool, Phase.DRAINING))),
    }
    targets = dict(config.targets)
    if pool is Pool.DECODE:
        load = observation.decode
        found["requests"] = float(load.num_decodes)
        found["requests_in_prefill"] = float(load.num_in_prefill)
        num_decoding = len(members.serving)
        if observation.shared:
            num_decoding += len(observation.of(Pool.PREFILL, Phase.SERVING))
        if load.kv_tokens and num_decoding:
            found["kv_reserved_share"] = load.reserved_tokens / (load.kv_tokens * num_decoding)
        if load.itl_s is not None:
            found["itl_ms"] = load.itl_s * 1e3
        if load.itl_predicted_s is not None:
            found["itl_predicted_ms"] = load.itl_predicted_s * 1e3
        targets_s = [one.itl_s for one in targets.values() if one.itl_s is not None]
        if targets_s:
            found["itl_target_ms"] = min(targets_s) * 1e3
        return found
    earlier = dict(before.lanes) if before is not None else {}
    for name, lane in observation.lanes:
        found[f"{name}_waiting"] = float(lane.num_waiting)
        found[f"{name}_queued_s"] = lane.queued_s
        if before is not None and span_s > 0:
            old = earlier.get(name, LaneLoad())
            found[f"{name}_requests_per_s"] = (lane.num_arrived - old.num_arrived) / span_s
            found[f"{name}_work_s_per_s"] = (lane.work_s - old.work_s) / span_s
        if lane.ttft_s is not None:
            found[f"{name}_ttft_ms"] = lane.ttft_s * 1e3
        target = targets.get(name)
        if target is not None and target.ttft_s is not None:
            # The target of the measured request; without one, the target of an empty prompt.
            target_s = target.ttft_s if lane.ttft_target_s is None else lane.ttft_target_s
            found[f"{name}_ttft_target_ms"] = target_s * 1e3
            if target.ttft_s_per_1k_tokens:
                found[f"{name}_ttft_target_ms_per_1k_tokens"] = target.ttft_s_per_1k_tokens * 1e3
    return found
