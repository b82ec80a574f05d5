"""Tail sampling: requests whose traces are kept although the caller did not sample them."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.v1 import common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP = common_pb2.FINISH_REASON_STOP


@pytest.fixture
def kept(new_world, out):
    """Runs requests with these durations in seconds; returns the reason for each kept trace."""

    def run(share, *seconds, traceparent=""):
        world = new_world(tail_share=share, max_running_requests=1000).pair()
        reasons = []
        for number, lasts_s in enumerate(seconds, start=1):
            world.submit(traceparent=traceparent)
            world.now += lasts_s
            name = f"r{number}"
            told = world.step("p", out(name, [7], finish=STOP))
            reasons.append([(one.kept, one.traceparent) for one in told if is_trace(one)])
        return reasons

    def is_trace(effect):
        return isinstance(effect, ev.ExportTrace)

    return run


def test_nothing_is_kept_unless_it_is_wanted(kept):
    assert kept(None, 0.1, 0.1) == [[], []]
    assert kept(0.0, 0.1, 0.1) == [[], []]
    # A trace that the caller sampled is exported in any case.
    assert kept(None, 0.1, traceparent="00-ab-cd-01") == [[("", "00-ab-cd-01")]]


def test_a_share_of_all_and_every_slow_one(kept):
    assert kept(1.0, 0.01) == [[("share", "")]]
    few = kept(0.0, *[0.01] * 20, 0.5)
    assert few[-1] == [], "with twenty requests there is no 99th percentile"
    # The percentiles are looked up every few seconds.
    many = kept(0.0, *[0.05] * 220, 0.5)
    assert many[-1] == [("slow", "")]
    assert many.count([]) == 220


def test_about_the_share_that_was_asked_for(kept):
    found = kept(0.25, *[0.01] * 200)
    assert 30 <= sum(map(len, found)) <= 70


def test_failed_requests_are_kept(new_world):
    world = new_world(tail_share=0.0).pair()
    world.submit(timeout_s=1.0)
    effects = world.after(2.0) or []
    del effects
    told = [one for one in world.membership if isinstance(one, ev.ExportTrace)]
    assert [one.kept for one in told] == ["error"]
