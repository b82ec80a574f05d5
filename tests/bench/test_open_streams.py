"""Hundreds of open streams through two gateways, of which one is killed: a small run of the bench.

Streams of the killed gateway end with a connection error, all others are complete and exact, and
nothing is held at the end. The coordinator checks that every resource has one owner.
"""

from __future__ import annotations

from baton.bench import open_streams
from baton.bench.open_streams import Plan
from baton.runtime import demo_model

PLAN = Plan(
    num_streams=300,
    num_probes=8,
    num_tokens=60,
    step_ms=80.0,
    num_decode=1,
    num_opening=64,
    steady_s=0.2,
)


async def test_a_killed_gateway_takes_only_its_own_streams(short_path):
    model = demo_model.ensure("demo", weights=False, root=short_path)
    directory = short_path / "cell"
    directory.mkdir()
    found = await open_streams.run(PLAN, directory, model)
    assert found.problems == []
    assert found.num_wrong == 0
    # At least one stream of the killed gateway was open, however slow this machine is.
    assert 0 < found.num_cut <= PLAN.num_streams / open_streams.NUM_GATEWAYS
    assert found.num_cut + found.num_complete == PLAN.num_streams + PLAN.num_probes
