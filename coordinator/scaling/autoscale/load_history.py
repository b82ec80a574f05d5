"""Keeps the load history by interval between decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.coordinator.scaling.autoscale.need import lanes_with_targets
from baton.coordinator.scaling.autoscale.types import LaneLoad, Observation, Sample, State
from baton.coordinator.state.scaling_config import ScalingConfig

# Age limit of samples.
_KEPT_S = 900.0
# After a pause of more than this many intervals between decisions, load counts are not usable.
_LONGEST_PAUSE = 12
# An observation older than this freezes the pools.
_STALE_S = 20.0
_FIELDS = ("num_arrived", "work_s", "num_output_tokens", "num_kv_tokens")
_NO_HISTORY = "nothing is known of the load yet"


def unusable(observation: Observation, now: float) -> str:
    """Returns why the observation cannot be used; empty if it can."""
    age_s = now - observation.observed_at
    if not math.isfinite(age_s) or age_s > _STALE_S:
        return f"the workers were last heard of {age_s:.0f} s ago"
    for number in observation.required:
        if not math.isfinite(number) or number < 0:
            return f"a measurement is {number}"
    return ""


def with_sample(
    observation: Observation, config: ScalingConfig, state: State, now: float
) -> tuple[tuple[Sample, ...], str]:
    """Appends a sample since the last decision to the history.

    Returns:
        The history, and the reason why no history is available (empty if one is).
    """
    if state.now is None:
        return (), _NO_HISTORY
    span_s = now - state.now
    if span_s < 0:
        return (), f"the clock went back {-span_s:.0f} s"
    if span_s > _LONGEST_PAUSE * config.interval_s:
        return (), f"nothing was decided for {span_s:.0f} s"
    past = tuple(one for one in state.samples if now - _KEPT_S <= one.at <= now)
    if not span_s:
        return past, "" if past else _NO_HISTORY
    sample = _sample(
        state.lanes,
        observation.lanes,
        frozenset(lanes_with_targets(config)),
        now,
        span_s,
        observation.decode.num_with_targets,
    )
    if sample is None:
        return (), "the coordinator's counts began again"
    return (*past, sample), ""


def is_busy(observation: Observation, state: State) -> bool:
    """Whether any request was present since the last decision, including lanes without targets."""
    before = dict(state.lanes)
    return observation.decode.num_decodes > 0 or any(
        lane.queued_s > 0
        or lane.num_waiting > 0
        or lane.num_arrived != before.get(name, lane).num_arrived
        for name, lane in observation.lanes
    )


def _sample(
    before: Sequence[tuple[str, LaneLoad]],
    after: Sequence[tuple[str, LaneLoad]],
    lanes: frozenset[str],
    now: float,
    span_s: float,
    num_decodes: int,
) -> Sample | None:
    """Load of these lanes between two observations; None if a total is lower than before.

    Totals fall when the coordinator has restarted.
    """
    old = dict(before)
    sums = dict.fromkeys(_FIELDS, 0.0)
    for name, load in after:
        if name not in lanes:
            continue
        earlier = old.get(name, LaneLoad())
        for one in _FIELDS:
            difference = getattr(load, one) - getattr(earlier, one)
            if not (math.isfinite(difference) and difference >= 0):
                return None
            sums[one] += difference
    rate, work, output_tokens, kv_tokens = (sums[one] / span_s for one in _FIELDS)
    present = num_decodes + sum(load.num_before_decode for name, load in after if name in lanes)
    return Sample(now, span_s, rate, work, output_tokens, kv_tokens, present)
