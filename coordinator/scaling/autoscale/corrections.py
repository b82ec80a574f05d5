"""Corrects the latency model's predictions by measured times to first token and gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from baton.coordinator.scaling.autoscale.types import DecodeLoad, LaneLoad, Misses, PoolState
from baton.coordinator.state.scaling_config import Targets

# Corrections above this value are mentioned in a decision's reason.
REPORTED_CORRECTION = 1.02
# Corrections stay between 1 and this.
_MAX_CORRECTION = 2.0
# Factors that raise and lower the prefill correction.
_RAISE, _LOWER = 1.15, 0.99
# Weight of the latest measurement in the decode correction (exponential moving average).
_SMOOTHING = 0.1
# Significance limit in standard errors; fewer missed targets are considered random variation.
_SIGNIFICANCE = 2.0
# Time constant with which missed targets are forgotten.
_MISS_DECAY_S = 60.0


def prefill_feedback(
    state: PoolState,
    lanes: Sequence[tuple[LaneLoad, Targets]],
    span_s: float,
) -> PoolState:
    """Updates the prefill correction factor with the TTFTs measured in the last `span_s` seconds.

    The factor multiplies the prompts' predicted work. It grows while significantly more requests
    miss the target than allowed although the pool is large enough by the model; each miss counts
    once. Otherwise it decays to 1. The factor covers effects that the model does not contain.
    Prompts whose own work exceeds the target are allowed to miss: more workers would not help.
    """
    fades = math.exp(-max(0.0, span_s) / _MISS_DECAY_S)
    allowed, seen = state.misses.allowed * fades, state.misses.seen * fades
    for lane, target in lanes:
        ttft = target.ttft
        if ttft is None:
            continue
        hopeless = sum(one.work_s >= ttft.of(one.num_prompt_tokens) for one in lane.works)
        hopeless_share = hopeless / max(1, len(lane.works))
        allowed += lane.num_first * min(1.0, target.may_miss + hopeless_share)
        seen += lane.num_late
    if seen > allowed + _SIGNIFICANCE * math.sqrt(max(1.0, allowed)):
        factor = min(_MAX_CORRECTION, state.correction * _RAISE)
        return replace(state, correction=factor, misses=Misses())
    factor = max(1.0, state.correction * _LOWER) if seen <= allowed else state.correction
    return replace(state, correction=factor, misses=Misses(allowed, seen))


def decode_correction(correction: float, load: DecodeLoad) -> float:
    """Updates the decode correction: smoothed ratio of measured to predicted gaps; at least 1."""
    measured_s, predicted_s = load.itl_s, load.itl_predicted_s
    if measured_s is None or predicted_s is None:
        return correction
    if not (math.isfinite(measured_s) and math.isfinite(predicted_s) and predicted_s > 0):
        return correction
    ratio = min(_MAX_CORRECTION, measured_s / predicted_s)
    return max(1.0, correction + (ratio - correction) * _SMOOTHING)
