"""Comparison of two fleets: no verdict on few samples, and equal fleets are not worse."""

from __future__ import annotations

import math
import random

import pytest

from baton.coordinator.rollouts.comparison import Verdict, fisher, judge, tail_chance
from baton.coordinator.telemetry.fleet_stats import FleetStats
from baton.v1 import common_pb2

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
INTERNAL = 13


def stats_of(num, *, ttft_s=0.1, itl_s=0.02, num_failed=0, lane=INTERACTIVE, seed=1):
    """Statistics of `num` requests with 20 gaps each, whose times are log-normal."""
    found, draw = FleetStats(), random.Random(seed)
    for number in range(num):
        found.num_admitted += 1
        found.ended(INTERNAL if number < num_failed else 0)
        found.lanes[lane].ttft.observe(draw.lognormvariate(math.log(ttft_s), 0.5))
        slow = draw.lognormvariate(0, 0.3)
        for _ in range(20):
            found.lanes[lane].itl.observe(itl_s * slow)
    return found


@pytest.mark.parametrize("num", [0, 1, 5, 19])
def test_a_few_samples_give_no_verdict(num):
    worse = stats_of(num, ttft_s=10.0, itl_s=10.0, num_failed=num)
    judged = judge(stats_of(10_000), worse)
    assert judged.verdict is Verdict.TOO_FEW
    assert f"{num} canary requests" in judged.reason


def test_equal_fleets_are_not_worse():
    for seed in range(20):
        judged = judge(stats_of(2000, num_failed=20), stats_of(300, num_failed=3, seed=seed + 2))
        assert judged.verdict is Verdict.NO_WORSE, (seed, judged.reason)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ttft_s": 0.2}, "interactive TTFT p95"),
        ({"itl_s": 0.04}, "interactive ITL p95"),
        ({"num_failed": 40}, "40 of 400 requests failed"),
    ],
)
def test_the_reason_names_what_is_worse_with_its_numbers(change, words):
    judged = judge(stats_of(4000, num_failed=4), stats_of(400, seed=5, **change))
    assert judged.verdict is Verdict.WORSE
    assert words in judged.reason
    assert "4000 stable and 400 canary requests have ended" in judged.reason


def test_a_canary_that_fails_everything_is_found_early():
    judged = judge(stats_of(500), stats_of(25, num_failed=25))
    assert judged.verdict is Verdict.WORSE


def test_requests_that_moved_to_the_stable_fleet_count_against_the_canary():
    canary = stats_of(150)
    canary.num_moved = 30
    assert judge(stats_of(1000), canary).verdict is Verdict.WORSE


def test_lanes_are_compared_separately():
    """Batch requests wait long in both fleets; only interactive requests differ."""
    stable, canary = (
        stats_of(1000, ttft_s=60.0, lane=BATCH),
        stats_of(300, ttft_s=60.0, lane=BATCH, seed=3),
    )
    stable.lanes[INTERACTIVE] = stats_of(1000).lanes[INTERACTIVE]
    canary.lanes[INTERACTIVE] = stats_of(300, ttft_s=0.3, seed=4).lanes[INTERACTIVE]
    judged = judge(stable, canary)
    assert judged.verdict is Verdict.WORSE
    assert "batch" not in judged.reason


def test_fisher_is_the_exact_sum():
    def exact(failed, total, other_failed, other_total):
        all_requests, all_failed = total + other_total, failed + other_failed
        ways = sum(
            math.comb(total, one) * math.comb(other_total, all_failed - one)
            for one in range(failed, min(total, all_failed) + 1)
            if all_failed - one <= other_total
        )
        return ways / math.comb(all_requests, all_failed)

    for case in [(3, 20, 1, 100), (0, 20, 5, 100), (20, 20, 0, 100), (5, 50, 40, 60)]:
        assert fisher(*case) == pytest.approx(exact(*case), rel=1e-6)


def test_a_tail_bound_is_a_bound():
    for num, count in [(100, 12), (400, 36), (50, 10)]:
        exact = sum(
            math.comb(num, one) * 0.05**one * 0.95 ** (num - one) for one in range(count, num + 1)
        )
        assert exact <= tail_chance(count / num, 0.05, num) <= 1
