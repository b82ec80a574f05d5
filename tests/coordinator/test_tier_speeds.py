"""A worker's loads from host memory and from disk are predicted by its loads so far."""

from __future__ import annotations

import pytest

from baton.coordinator.routing.prefixes.prefix_index import Tier
from baton.coordinator.routing.speeds.tier_speeds import TierSpeeds
from baton.coordinator.state import events as ev
from baton.v1 import cluster_pb2, common_pb2

MB = 10**6


def test_an_assumed_speed_applies_until_a_load_shows_the_true_one():
    speeds = TierSpeeds(1e9, 1e8)
    assert speeds.seconds(Tier.HOST, MB, 0.0) == pytest.approx(1e-3)
    speeds.observe(Tier.HOST, MB, 0.1, 0.0)
    assert speeds.seconds(Tier.HOST, MB, 0.0) == pytest.approx(0.1)
    # The other tier is measured by its own loads.
    assert speeds.seconds(Tier.DISK, MB, 0.0) == pytest.approx(1e-2)
    # One load counts little among others; small ones and none do not count.
    speeds.observe(Tier.HOST, MB, 0.2, 1.0)
    latest = speeds.seconds(Tier.HOST, MB, 1.0)
    assert 0.1 < latest < 0.15
    speeds.observe(Tier.HOST, 1000, 1.0, 1.0)
    speeds.observe(Tier.HOST, 0, 0.0, 1.0)
    assert speeds.seconds(Tier.HOST, MB, 1.0) == latest


def test_what_was_slow_is_tried_again_some_time():
    speeds = TierSpeeds(1e9, 1e8)
    speeds.observe(Tier.HOST, MB, 1.0, 0.0)
    waits = [speeds.seconds(Tier.HOST, MB, now) for now in (0.0, 600.0, 6000.0)]
    assert waits == sorted(waits, reverse=True)
    assert waits[1] == pytest.approx(0.5, rel=0.01)
    assert waits[2] == pytest.approx(1e-3, rel=1.0)
    # A measurement after a long time does not mix with what was measured before.
    speeds.observe(Tier.HOST, MB, 0.01, 6000.0)
    assert speeds.seconds(Tier.HOST, MB, 6000.0) == pytest.approx(0.01)


def test_a_load_report_measures_its_worker_alone(two_pairs):
    world = two_pairs
    first, second = [one for one in world.core.workers if one.role == common_pb2.ROLE_PREFILL]
    load = cluster_pb2.LoadReport(
        host_loads=cluster_pb2.TierLoads(num_bytes=8 * MB, duration_us=2 * 10**6),
        disk_loads=cluster_pb2.TierLoads(num_bytes=2 * MB, duration_us=10**6),
    )
    world.handle(ev.LoadReported(first.key, load))
    measured, other = (world.core.placers.load(one).tier_speeds for one in (first, second))
    assert measured.seconds(Tier.HOST, MB, world.now) == pytest.approx(0.25)
    assert measured.seconds(Tier.DISK, MB, world.now) == pytest.approx(0.5)
    assert other.seconds(Tier.HOST, MB, world.now) < 0.01
