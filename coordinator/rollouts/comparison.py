"""Two revisions side by side: what requests found on each, and whether the new one is worse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from baton.coordinator.state.lanes import LANES
from baton.coordinator.telemetry.fleet_stats import FleetStats
from baton.coordinator.telemetry.sketch import Sketch
from baton.runtime.enum_names import lane_name

# Of one revision and lane: what a percentile of latencies rests on at least, and what a share of
# errors does.
MIN_REQUESTS, MIN_ENDED = 100, 20
# How unlikely a difference must be by chance to be called one. It is looked at over and over, so
# this is far stricter than one look would need.
_CHANCE = 1e-4
# A tail that is longer by less than this is not worth a word: it is what two equal pools may show
# that are not equally full.
_MATTERS = 1.1
_PERCENT = 95.0


class Verdict(Enum):
    TOO_FEW = "too few samples"
    NO_WORSE = "no worse"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and why, in words."""

    verdict: Verdict
    reason: str


def judge(stable: FleetStats, canary: FleetStats) -> Judgement:
    """Says whether the canary is worse than the stable revision, as far as the samples carry.

    Errors, and requests that it gave up to the stable one: Fisher's exact test, one-sided. TTFT and
    ITL: more of the canary's than 5 % are over what 5 % of the stable one's are over (a binomial
    bound on the share; the gaps of one request count as one sample, since they go together).
    """
    found, few = list[str](), list[str]()
    _compare_errors(stable, canary, found, few)
    for lane in LANES:
        ours, theirs = stable.lanes[lane], canary.lanes[lane]
        if not ours.ttft.num and not theirs.ttft.num:
            continue
        name = lane_name(lane)
        least = min(ours.ttft.num, theirs.ttft.num)
        if least < MIN_REQUESTS:
            few.append(
                f"{name} latencies: {ours.ttft.num} stable and {theirs.ttft.num} canary requests, "
                f"at least {MIN_REQUESTS} of each are needed"
            )
            continue
        for what, one, other in (
            ("TTFT", ours.ttft, theirs.ttft),
            ("ITL", ours.itl, theirs.itl),
        ):
            found += _longer_tail(f"{name} {what}", one, other, theirs.ttft.num)
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
    if shares[1] > shares[0] and fisher(failed[1], ended[1], failed[0], ended[0]) < _CHANCE:
        found.append(
            f"{failed[1]} of {ended[1]} requests failed or were given up ({shares[1]:.1%}), "
            f"{failed[0]} of {ended[0]} of stable ({shares[0]:.1%})"
        )


def _longer_tail(what: str, stable: Sketch, canary: Sketch, num_requests: int) -> list[str]:
    """What is to be said of the canary's tail; nothing when it is as short."""
    if not stable.num or not canary.num:
        return []
    (limit_s,), (canary_s,) = (one.percentiles_s((_PERCENT,)) for one in (stable, canary))
    share, usual = canary.num_over(limit_s) / canary.num, stable.num_over(limit_s) / stable.num
    num_independent = min(num_requests, canary.num)
    if canary_s <= limit_s * _MATTERS or tail_chance(share, usual, num_independent) >= _CHANCE:
        return []
    return [
        f"{what} p95 is {canary_s * 1e3:.3g} ms, stable {limit_s * 1e3:.3g} ms "
        f"({share:.0%} of the canary's are over that, {usual:.0%} of stable)"
    ]


def fisher(failed: int, total: int, other_failed: int, other_total: int) -> float:
    """How likely so many failures or more would be here, were both sides alike (one-sided)."""
    all_failed, everyone = failed + other_failed, total + other_total
    log_all, chance = _log_choose(everyone, all_failed), 0.0
    for one in range(max(failed, all_failed - other_total), min(total, all_failed) + 1):
        log_here = _log_choose(total, one) + _log_choose(other_total, all_failed - one)
        here = math.exp(log_here - log_all)
        chance += here
        # From the mode on each is less than the one before.
        if one * everyone > total * all_failed and here < chance * 1e-9:
            break
    return chance


def tail_chance(share: float, usual: float, num: int) -> float:
    """A bound on how likely such a share, or more, of `num` samples is where `usual` is the rule.

    Chernoff's: exp(-num * KL(share, usual)).
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
