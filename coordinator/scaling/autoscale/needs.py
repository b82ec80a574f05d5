"""Computes how many workers each pool needs, from the latency model and measured corrections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

from baton.coordinator.scaling.autoscale import forecast, queueing
from baton.coordinator.scaling.autoscale.types import (
    DecodeLoad,
    LaneLoad,
    Misses,
    Observation,
    PoolState,
    Sample,
)
from baton.coordinator.state.scaling_config import ScalingConfig, Targets
from baton.runtime.step_budget import reachable_itl_s
from baton.runtime.ttft_target import TtftTarget

# Share of a latency target kept as safety margin.
_MARGIN = 0.04
# Seconds within which a backlog of prompts should be worked off.
_DRAIN_BACKLOG_S = 20.0
# Share of a decode worker's KV cache that may be filled.
_KV_SHARE = 0.9
# Burstiness above this value is mentioned in a decision's reason.
_REPORTED_BURSTINESS = 1.3
# Corrections above this value are mentioned in a decision's reason.
_REPORTED_CORRECTION = 1.02
# Corrections from measurements stay between 1 and this.
_MAX_CORRECTION = 2.0
# Upper limit of the squared coefficient of variation of prompt sizes; estimates from few prompts
# are unreliable.
_MAX_UNEVENNESS = 4.0
# Factors that raise and lower the prefill correction.
_RAISE, _LOWER = 1.15, 0.99
# Weight of the latest measurement in the decode correction (exponential moving average).
_SMOOTHING = 0.1
# Significance limit in standard errors; smaller differences are considered random variation.
_SIGNIFICANCE = 2.0
# Time constant with which missed targets are forgotten.
_MISS_DECAY_S = 60.0


class Need(NamedTuple):
    """Workers needed in a pool.

    Attributes:
        workers: number of workers; at least 0.
        reason: explanation for operators, with the numbers.
    """

    workers: int
    reason: str


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


def prefill_need(
    observation: Observation,
    config: ScalingConfig,
    samples: tuple[Sample, ...],
    correction: float,
    num_serving: int,
    now: float,
) -> Need:
    """Prefill workers for the load expected after a cold start and for the present backlog."""
    lanes = dict(observation.lanes)
    rising = forecast.growth(samples, now, config.cold_start_s)
    offered = forecast.load(samples, now, lambda one: one.work) * rising * correction
    bursts = forecast.burstiness(samples)
    most, reason = 0, "no request is expected"
    for name, target in config.targets:
        lane = lanes.get(name)
        ttft = target.ttft
        if lane is None or ttft is None:
            continue
        within = ttft.scaled(1 - _MARGIN)
        works = [one._replace(work_s=one.work_s * correction) for one in lane.works]
        number = queueing.prefill_workers(offered, works, within, target.may_miss, bursts)
        ahead_s = _backlog_s(lane, within, num_serving)
        wanted = offered + ahead_s / _DRAIN_BACKLOG_S if ahead_s > 0 else 0.0
        cleared = math.ceil(min(wanted, queueing.MOST))
        if max(number, cleared) > most:
            most = max(number, cleared)
            late = queueing.share_late(most, offered, works, within, bursts)
            reason = (
                f"{offered:.2f} s of prompts per second"
                f"{f', rising {rising:.2f} x in {config.cold_start_s:g} s' if rising > 1 else ''}"
                f": {late:.1%} of {name} requests over {ttft} with {most}"
            )
            if cleared > number:
                reason = (
                    f"{ahead_s:.1f} s of {name} prompts have piled up beside {offered:.2f} s per "
                    f"second: {most} clear them in {_DRAIN_BACKLOG_S:g} s"
                )
            if bursts > _REPORTED_BURSTINESS:
                reason += f", in bursts ({bursts:.1f} x the variance)"
            if correction > _REPORTED_CORRECTION:
                reason += f" (counted {correction:.2f} x, since TTFT was missed)"
    return Need(most, reason)


def _backlog_s(lane: LaneLoad, within: TtftTarget, num_serving: int) -> float:
    """Seconds of queued work beyond the amount that the workers can finish within the target.

    The target is that of a prompt of mean length.
    """
    num_works = len(lane.works) or 1
    mean_s = math.fsum(one.work_s for one in lane.works) / num_works
    within_s = within.of(sum(one.num_prompt_tokens for one in lane.works) / num_works)
    return max(0.0, lane.queued_s - num_serving * max(0.0, within_s - mean_s) - mean_s)


def decode_need(
    observation: Observation,
    config: ScalingConfig,
    samples: tuple[Sample, ...],
    correction: float,
    num_serving: int,
    now: float,
) -> Need:
    """Decode workers for the present requests and for those expected after a cold start.

    Requests of lanes without targets make the pool no larger than the `num_serving` workers that it
    has for them now.
    """
    itl_s = min((one.itl_s for _, one in config.targets if one.itl_s is not None), default=math.inf)
    within_s = itl_s * (1 - _MARGIN) / correction
    load, latency = observation.decode, observation.latency
    rising = forecast.growth(samples, now, config.cold_start_s)
    rate = forecast.load(samples, now, lambda one: one.rate)
    tokens = forecast.load(samples, now, lambda one: one.output_tokens)
    held = forecast.load(samples, now, lambda one: one.kv_tokens)
    # KV tokens per request: on average during decoding, and at the end of its output.
    held_each = held / rate if rate else load.reserved_tokens / max(1, load.num_decodes)
    room_each = (held + tokens / 2) / rate if rate else held_each
    if load.num_decodes:
        room_each = max(room_each, load.reserved_tokens / load.num_decodes)
    # If one output alone takes longer than the target, more workers would not help.
    alone_s, target_s = latency.decode_step_s(1, math.ceil(held_each)), within_s
    within_s = reachable_itl_s(target_s, alone_s)
    # Maximum number of concurrent requests per worker, by step time and by KV room.
    by_time = queueing.most_requests(latency, within_s, held_each)
    room = load.kv_tokens * _KV_SHARE
    by_room = max(1.0, room / room_each) if room and room_each else math.inf
    each = min(by_time, by_room, load.most_requests or math.inf)
    # Little's law, with the step time of a worker at that number of requests.
    step_s = latency.decode_step_s(1, 0)
    if math.isfinite(each):
        step_s = latency.decode_step_s(math.ceil(each), math.ceil(each * held_each))
    expected = tokens * rising * min(step_s, within_s)
    waiting = sum(
        dict(observation.lanes).get(name, LaneLoad()).num_waiting for name in _lanes(config)
    )
    present, bursts = load.num_with_targets + waiting, forecast.burstiness(samples)
    # Outputs may be longer than expected, so the lasting number of present requests counts too.
    lasting = forecast.load(samples, now, lambda one: one.present)
    # Requests hold different numbers of KV tokens, so a few long requests can slow steps as much as
    # many short ones.
    uneven = _unevenness(observation, config) if by_time <= each else 0.0
    slope_s = latency.step_per_request_s + latency.step_per_kv_token_s * held_each
    share = latency.step_per_kv_token_s * held_each / slope_s if slope_s > 0 else 0.0
    percentile = max(
        (one.percentile for _, one in config.targets if one.itl_s is not None), default=50.0
    )
    most = _percentile(max(expected, lasting), bursts + uneven * share * share, percentile)
    # Present requests minus random variation, whose requests end before a worker could start.
    surely = present - _SIGNIFICANCE * math.sqrt(present * bursts)
    number, at_once = _workers(most, each), _workers(surely, each)
    if load.num_without_targets:
        kept = min(_workers(load.num_decodes, each), num_serving)
        if kept > max(number, at_once):
            return Need(kept, f"{load.num_without_targets} requests without targets run there")
    if not number and not at_once:
        return Need(0, "no request is expected")
    reason = f"{max(expected, lasting):.0f} requests at a time"
    if rising > 1 and expected > lasting:
        reason += f", rising {rising:.2f} x in {config.cold_start_s:g} s"
    if at_once > number:
        num_without_token = min(present, load.num_in_prefill + waiting)
        reason = f"{present} requests, {num_without_token} of them before their first token"
    reason += f": a worker takes {each:.0f}"
    if by_time <= each and alone_s > target_s:
        reason += (
            f" within {within_s * 1e3:.0f} ms: none keeps {itl_s * 1e3:.0f} ms, as one request "
            f"alone takes {alone_s * 1e3:.0f} ms"
        )
    elif by_time <= each:
        reason += f" within {itl_s * 1e3:.0f} ms"
    elif by_room <= each:
        reason += " within its KV cache"
    else:
        reason += " at a time"
    if correction > _REPORTED_CORRECTION:
        reason += f" (ITL is {correction:.2f} x what is predicted)"
    return Need(max(number, at_once), reason)


def _unevenness(observation: Observation, config: ScalingConfig) -> float:
    """Squared coefficient of variation of the prompts' work; at most _MAX_UNEVENNESS."""
    lanes = dict(observation.lanes)
    works = [one.work_s for name in _lanes(config) if name in lanes for one in lanes[name].works]
    mean_s = math.fsum(works) / len(works) if works else 0.0
    if not mean_s > 0:
        return 0.0
    ratios = [work / mean_s for work in works]
    return min(_MAX_UNEVENNESS, max(0.0, math.fsum(one * one for one in ratios) / len(works) - 1))


def _lanes(config: ScalingConfig) -> list[str]:
    return [name for name, one in config.targets if one.ttft_s is not None or one.itl_s is not None]


def _percentile(number: float, burstiness: float, percentile: float) -> float:
    """Percentile of a request count (normal approximation) with this mean; at least the mean."""
    above = max(0.0, NormalDist().inv_cdf(percentile / 100))
    return number + above * math.sqrt(number * burstiness)


def _workers(number: float, each: float) -> int:
    """Number of workers for this many concurrent requests."""
    return max(1, math.ceil(number / each - 1e-9)) if number > 0 else 0
