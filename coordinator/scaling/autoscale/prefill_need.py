"""Computes how many prefill workers the prompts need, by the latency model and TTFT targets."""

from __future__ import annotations

import math

from baton.coordinator.scaling.autoscale import forecast, queueing
from baton.coordinator.scaling.autoscale.corrections import REPORTED_CORRECTION
from baton.coordinator.scaling.autoscale.need import TARGET_MARGIN, Need
from baton.coordinator.scaling.autoscale.types import LaneLoad, Observation, Sample
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.runtime.ttft_target import TtftTarget

# Seconds within which a backlog of prompts should be worked off.
_DRAIN_BACKLOG_S = 20.0
# Burstiness above this value is mentioned in a decision's reason.
_REPORTED_BURSTINESS = 1.3


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
    largest, reason = 0, "no request is expected"
    for name, target in config.targets:
        lane = lanes.get(name)
        ttft = target.ttft
        if lane is None or ttft is None:
            continue
        within = ttft.scaled(1 - TARGET_MARGIN)
        works = [one._replace(work_s=one.work_s * correction) for one in lane.works]
        for_load = queueing.prefill_workers(offered, works, within, target.may_miss, bursts)
        ahead_s = _backlog_s(lane, within, num_serving)
        for_backlog = _workers_for_backlog(offered, ahead_s)
        if max(for_load, for_backlog) <= largest:
            continue
        largest = max(for_load, for_backlog)
        if for_backlog > for_load:
            reason = (
                f"{ahead_s:.1f} s of {name} prompts have piled up beside {offered:.2f} s per "
                f"second: {largest} clear them in {_DRAIN_BACKLOG_S:g} s"
            )
        else:
            late = queueing.share_late(largest, offered, works, within, bursts)
            reason = (
                f"{offered:.2f} s of prompts per second"
                f"{f', rising {rising:.2f} x in {config.cold_start_s:g} s' if rising > 1 else ''}"
                f": {late:.1%} of {name} requests over {ttft} with {largest}"
            )
        if bursts > _REPORTED_BURSTINESS:
            reason += f", in bursts ({bursts:.1f} x the variance)"
        if correction > REPORTED_CORRECTION:
            reason += f" (counted {correction:.2f} x, since TTFT was missed)"
    return Need(largest, reason)


def _workers_for_backlog(offered: float, ahead_s: float) -> int:
    """Workers that clear a backlog in time while `offered` seconds of work arrive per second."""
    if not ahead_s > 0:
        return 0
    return math.ceil(min(offered + ahead_s / _DRAIN_BACKLOG_S, queueing.MOST))


def _backlog_s(lane: LaneLoad, within: TtftTarget, num_serving: int) -> float:
    """Seconds of queued work beyond the amount that the workers can finish within the target.

    The target is that of a prompt of mean length.
    """
    num_works = len(lane.works) or 1
    mean_s = math.fsum(one.work_s for one in lane.works) / num_works
    within_s = within.of(sum(one.num_prompt_tokens for one in lane.works) / num_works)
    return max(0.0, lane.queued_s - num_serving * max(0.0, within_s - mean_s) - mean_s)
