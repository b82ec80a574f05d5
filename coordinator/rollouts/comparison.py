"""Tests whether the canary's errors or latencies are worse than those of the stable fleet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from baton.coordinator.state.lanes import LANES
from baton.coordinator.telemetry.fleet_stats import FleetStats
from baton.coordinator.telemetry.sketch import Sketch
from baton.runtime.enum_names import lane_name

# Minimum number of requests: per fleet and lane to compare latencies, per fleet to compare errors.
MIN_REQUESTS, MIN_ENDED = 100, 20
# Significance level. The tests run every second, and a level as for a single test would sooner or
# later call any canary worse.
_SIGNIFICANCE = 1e-4
# A canary is worse only if its tail latency exceeds the stable one by this factor. Equal pools with
# unequal load differ by less.
_MIN_RATIO = 1.1
# Percentile that counts as the tail.
_PERCENT = 95.0


class Verdict(Enum):
    """Result of a comparison."""

    TOO_FEW = "too few samples"
    NO_WORSE = "no worse"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason, in words."""

    verdict: Verdict
    reason: str


def judge(stable: FleetStats, canary: FleetStats) -> Judgement:
    """Tests whether the canary is worse than the stable fleet.

    Errors, with requests that moved from the canary to the stable fleet: Fisher's exact test,
    one-sided. TTFT and ITL: whether more than 5 % of the canary's samples exceed the stable fleet's
    95th percentile (Chernoff bound on a binomial share). The gaps of one request count as one
    sample, because they are correlated.
    """
    found, few = list[str](), list[str]()
    _compare_errors(stable, canary, found, few)
    for lane in LANES:
        stable_lane, canary_lane = stable.lanes[lane], canary.lanes[lane]
        if not stable_lane.ttft.num and not canary_lane.ttft.num:
            continue
        name = lane_name(lane)
        num_stable, num = stable_lane.ttft.num, canary_lane.ttft.num
        if min(num_stable, num) < MIN_REQUESTS:
            few.append(
                f"{name} latencies: {num_stable} stable and {num} canary requests, "
                f"at least {MIN_REQUESTS} of each are needed"
            )
            continue
        found += _longer_tail(f"{name} TTFT", stable_lane.ttft, canary_lane.ttft, num)
        found += _longer_tail(f"{name} ITL", stable_lane.itl, canary_lane.itl, num)
    samples = f"{stable.num_ended} stable and {canary.num_ended} canary requests have ended"
    if found:
        return Judgement(Verdict.WORSE, f"the canary is worse: {'; '.join(found)} ({samples})")
    if few:
        return Judgement(Verdict.TOO_FEW, f"too few samples to tell: {'; '.join(few)} ({samples})")
    return Judgement(
        Verdict.NO_WORSE, f"no sign that the canary is worse in errors, TTFT or ITL ({samples})"
    )


def _compare_errors(
    stable: FleetStats, canary: FleetStats, found: list[str], few: list[str]
) -> None:
    ended = stable.num_ended, canary.num_ended + canary.num_moved
    if min(ended) < MIN_ENDED:
        few.append(
            f"errors: {ended[0]} stable and {ended[1]} canary requests, "
            f"at least {MIN_ENDED} of each are needed"
        )
        return
    failed = stable.num_errors, canary.num_errors + canary.num_moved
    shares = [one / total for one, total in zip(failed, ended, strict=True)]
    if shares[1] > shares[0] and fisher(failed[1], ended[1], failed[0], ended[0]) < _SIGNIFICANCE:
        found.append(
            f"{failed[1]} of {ended[1]} requests failed or moved to stable ({shares[1]:.1%}), "
            f"{failed[0]} of {ended[0]} of stable ({shares[0]:.1%})"
        )


def _longer_tail(what: str, stable: Sketch, canary: Sketch, num_requests: int) -> list[str]:
    """Returns the finding if the canary's tail is longer; an empty list if it is not."""
    if not stable.num or not canary.num:
        return []
    (limit_s,), (canary_s,) = (one.percentiles_s((_PERCENT,)) for one in (stable, canary))
    share, usual = canary.num_over(limit_s) / canary.num, stable.num_over(limit_s) / stable.num
    num_independent = min(num_requests, canary.num)
    if (
        canary_s <= limit_s * _MIN_RATIO
        or tail_chance(share, usual, num_independent) >= _SIGNIFICANCE
    ):
        return []
    return [
        f"{what} p95 is {canary_s * 1e3:.3g} ms, stable {limit_s * 1e3:.3g} ms "
        f"({share:.0%} of the canary's samples exceed that, {usual:.0%} of the stable ones)"
    ]


def fisher(failed: int, total: int, other_failed: int, other_total: int) -> float:
    """Returns the p-value of Fisher's exact test: the chance of at least `failed` failures.

    One-sided; the null hypothesis is that both fleets fail equally often.
    """
    all_failed, all_requests = failed + other_failed, total + other_total
    log_all, chance = _log_choose(all_requests, all_failed), 0.0
    for one in range(max(failed, all_failed - other_total), min(total, all_failed) + 1):
        log_here = _log_choose(total, one) + _log_choose(other_total, all_failed - one)
        here = math.exp(log_here - log_all)
        chance += here
        # Beyond the mode each term is smaller than the one before.
        if one * all_requests > total * all_failed and here < chance * 1e-9:
            break
    return chance


def tail_chance(share: float, usual: float, num: int) -> float:
    """Returns an upper bound on the chance that at least this share of `num` samples is over.

    Chernoff bound: exp(-num * KL(share, usual)), where `usual` is the expected share.
    """
    usual = max(usual, 1e-9)
    if share <= usual:
        return 1.0
    divergence = share * math.log(share / usual)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - usual))
    return math.exp(-num * divergence)


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
