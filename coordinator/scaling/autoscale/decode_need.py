"""Computes how many decode workers the requests need, by the latency model and ITL targets.

The demand is a number of concurrent requests; the capacity is the number of concurrent requests
that one worker takes within the ITL target and its KV cache.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from baton.coordinator.scaling.autoscale import forecast, queueing
from baton.coordinator.scaling.autoscale.corrections import REPORTED_CORRECTION
from baton.coordinator.scaling.autoscale.need import TARGET_MARGIN, Need, lanes_with_targets
from baton.coordinator.scaling.autoscale.types import Observation, Sample
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.runtime.steps.step_budget import reachable_itl_s

# Share of a decode worker's KV cache that may be filled.
_KV_SHARE = 0.9
# Upper limit of the squared coefficient of variation of prompt sizes; estimates from few prompts
# are unreliable.
_MAX_UNEVENNESS = 4.0
# Significance limit in standard errors; fewer present requests are considered random variation.
_SIGNIFICANCE = 2.0


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
    load = observation.decode
    capacity = _Capacity.of(observation, config, samples, correction, now)
    demand = _Demand.of(observation, config, samples, capacity, now)
    for_forecast = _workers(demand.num_expected, capacity.num_requests)
    for_present = _workers(demand.num_surely_present, capacity.num_requests)
    needed = max(for_forecast, for_present)
    if load.num_without_targets:
        kept = min(_workers(load.num_decodes, capacity.num_requests), num_serving)
        if kept > needed:
            return Need(kept, f"{load.num_without_targets} requests without targets run there")
    if not needed:
        return Need(0, "no request is expected")
    reason = demand.explained(config.cold_start_s, is_present=for_present > for_forecast)
    reason += f": a worker takes {capacity.explained()}"
    if correction > REPORTED_CORRECTION:
        reason += f" (ITL is {correction:.2f} x what is predicted)"
    return Need(needed, reason)


class _Capacity(NamedTuple):
    """Number of concurrent requests that one decode worker takes.

    Attributes:
        num_requests: the smallest of all limits; infinite without a limit.
        by_time: limit by step time.
        by_room: limit by KV room; infinite if the room is unknown.
        num_kv_tokens: KV tokens that a request holds on average during decoding.
        itl_s: smallest ITL target of all lanes; infinite without a target.
        target_s: that target after the margin and the correction.
        within_s: step time that the worker keeps: longer than the target if one request alone
            takes longer.
        alone_s: step time of one request alone.
        step_s: step time at that number of requests.
    """

    num_requests: float
    by_time: float
    by_room: float
    num_kv_tokens: float
    itl_s: float
    target_s: float
    within_s: float
    alone_s: float
    step_s: float

    @classmethod
    def of(
        cls,
        observation: Observation,
        config: ScalingConfig,
        samples: tuple[Sample, ...],
        correction: float,
        now: float,
    ) -> _Capacity:
        load, latency = observation.decode, observation.latency
        itl_s = min(
            (one.itl_s for _, one in config.targets if one.itl_s is not None), default=math.inf
        )
        target_s = itl_s * (1 - TARGET_MARGIN) / correction
        held_each, room_each = _kv_tokens_per_request(observation, samples, now)
        # If one output alone takes longer than the target, more workers would not help.
        alone_s = latency.decode_step_s(1, math.ceil(held_each))
        within_s = reachable_itl_s(target_s, alone_s)
        by_time = queueing.most_requests(latency, within_s, held_each)
        room = load.kv_tokens * _KV_SHARE
        by_room = max(1.0, room / room_each) if room and room_each else math.inf
        each = min(by_time, by_room, load.most_requests or math.inf)
        step_s = latency.decode_step_s(1, 0)
        if math.isfinite(each):
            step_s = latency.decode_step_s(math.ceil(each), math.ceil(each * held_each))
        return cls(
            num_requests=each,
            by_time=by_time,
            by_room=by_room,
            num_kv_tokens=held_each,
            itl_s=itl_s,
            target_s=target_s,
            within_s=within_s,
            alone_s=alone_s,
            step_s=step_s,
        )

    @property
    def is_limited_by_time(self) -> bool:
        """Whether the step time, not the KV room, limits the number of requests."""
        return self.by_time <= self.num_requests

    def explained(self) -> str:
        number = f"{self.num_requests:.0f}"
        if self.is_limited_by_time and self.alone_s > self.target_s:
            return (
                f"{number} within {self.within_s * 1e3:.0f} ms: none keeps "
                f"{self.itl_s * 1e3:.0f} ms, as one request alone takes {self.alone_s * 1e3:.0f} ms"
            )
        if self.is_limited_by_time:
            return f"{number} within {self.itl_s * 1e3:.0f} ms"
        if self.by_room <= self.num_requests:
            return f"{number} within its KV cache"
        return f"{number} at a time"


class _Demand(NamedTuple):
    """Number of concurrent requests in the pool.

    Attributes:
        num_expected: number expected after a cold start, at the targets' percentile.
        num_surely_present: present requests minus random variation, whose requests end before a
            worker could start.
        num_present: present requests.
        num_without_token: present requests before their first token.
        by_arrivals: mean by Little's law, from the forecast arrivals.
        lasting: lasting mean of the present requests.
        rising: forecast growth factor of the arrivals.
    """

    num_expected: float
    num_surely_present: float
    num_present: int
    num_without_token: int
    by_arrivals: float
    lasting: float
    rising: float

    @classmethod
    def of(
        cls,
        observation: Observation,
        config: ScalingConfig,
        samples: tuple[Sample, ...],
        capacity: _Capacity,
        now: float,
    ) -> _Demand:
        load, lanes = observation.decode, dict(observation.lanes)
        rising = forecast.growth(samples, now, config.cold_start_s)
        tokens = forecast.load(samples, now, lambda one: one.output_tokens)
        # Little's law, with the step time of a worker at its number of requests.
        by_arrivals = tokens * rising * min(capacity.step_s, capacity.within_s)
        # Outputs may be longer than expected, so the lasting number of present requests counts too.
        lasting = forecast.load(samples, now, lambda one: one.present)
        names = lanes_with_targets(config)
        waiting = sum(lanes[name].num_before_decode for name in names if name in lanes)
        present, bursts = load.num_with_targets + waiting, forecast.burstiness(samples)
        percentile = max(
            (one.percentile for _, one in config.targets if one.itl_s is not None), default=50.0
        )
        spread = bursts + _unevenness_of_steps(observation, config, capacity)
        return cls(
            num_expected=_percentile(max(by_arrivals, lasting), spread, percentile),
            num_surely_present=present - _SIGNIFICANCE * math.sqrt(present * bursts),
            num_present=present,
            num_without_token=min(present, load.num_in_prefill + waiting),
            by_arrivals=by_arrivals,
            lasting=lasting,
            rising=rising,
        )

    def explained(self, cold_start_s: float, *, is_present: bool) -> str:
        """Explains the demand; `is_present`: the present requests need more than the forecast."""
        if is_present:
            return (
                f"{self.num_present} requests, {self.num_without_token} of them before their "
                "first token"
            )
        reason = f"{max(self.by_arrivals, self.lasting):.0f} requests at a time"
        if self.rising > 1 and self.by_arrivals > self.lasting:
            reason += f", rising {self.rising:.2f} x in {cold_start_s:g} s"
        return reason


def _kv_tokens_per_request(
    observation: Observation, samples: tuple[Sample, ...], now: float
) -> tuple[float, float]:
    """KV tokens per request: on average during decoding, and at the end of its output."""
    load = observation.decode
    rate = forecast.load(samples, now, lambda one: one.rate)
    tokens = forecast.load(samples, now, lambda one: one.output_tokens)
    held = forecast.load(samples, now, lambda one: one.kv_tokens)
    held_each = held / rate if rate else load.reserved_tokens / max(1, load.num_decodes)
    room_each = (held + tokens / 2) / rate if rate else held_each
    if load.num_decodes:
        room_each = max(room_each, load.reserved_tokens / load.num_decodes)
    return held_each, room_each


def _unevenness_of_steps(
    observation: Observation, config: ScalingConfig, capacity: _Capacity
) -> float:
    """Variance of the step time from uneven prompts, relative to that of the request count.

    Requests hold different numbers of KV tokens, so a few long requests can slow steps as much as
    many short ones. 0 if the step time does not limit the number of requests.
    """
    if not capacity.is_limited_by_time:
        return 0.0
    by_tokens_s = observation.latency.step_per_kv_token_s * capacity.num_kv_tokens
    slope_s = observation.latency.step_per_request_s + by_tokens_s
    share = by_tokens_s / slope_s if slope_s > 0 else 0.0
    return _unevenness(observation, config) * share * share


def _unevenness(observation: Observation, config: ScalingConfig) -> float:
    """Squared coefficient of variation of the prompts' work; at most _MAX_UNEVENNESS."""
    lanes = dict(observation.lanes)
    names = lanes_with_targets(config)
    works = [one.work_s for name in names if name in lanes for one in lanes[name].works]
    mean_s = math.fsum(works) / len(works) if works else 0.0
    if not mean_s > 0:
        return 0.0
    ratios = [work / mean_s for work in works]
    return min(_MAX_UNEVENNESS, max(0.0, math.fsum(one * one for one in ratios) / len(works) - 1))


def _percentile(number: float, burstiness: float, percentile: float) -> float:
    """Percentile of a request count (normal approximation) with this mean; at least the mean."""
    above = max(0.0, NormalDist().inv_cdf(percentile / 100))
    return number + above * math.sqrt(number * burstiness)


def _workers(number: float, each: float) -> int:
    """Number of workers for this many concurrent requests."""
    return max(1, math.ceil(number / each - 1e-9)) if number > 0 else 0
