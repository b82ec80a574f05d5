"""A short run of bench/chaos.py: no token is lost and nothing stays in use."""

import asyncio

import pytest

from baton.bench import chaos
from baton.bench.chaos_report import Kind

PLAN = {
    "num_streams": 60,
    "duration_s": 16.0,
    "every_s": 2.0,
    "stop_s": (0.3, 6.0),
    "prompt_tokens": (20, 400),
    "output_tokens": (30, 120),
    "step_ms": 50.0,
    # These timeouts make the coordinator remove a stopped worker during the test.
    "coordinator": {"worker_silent_s": 1.5, "worker_timeout_s": 4.0},
    "seed": 11,
}


@pytest.mark.parametrize("num_restarts", [0, 2], ids=["workers", "workers and coordinator"])
async def test_every_stream_is_that_of_an_undisturbed_run(tmp_path, model, num_restarts):
    plan = chaos.Plan(**PLAN, num_restarts=num_restarts)
    async with asyncio.timeout(200):
        seen = await chaos.run(plan, tmp_path, model)
    assert len(seen.streams) >= plan.num_streams
    assert [one.error for one in seen.streams if one.error] == []
    assert [one.prompt for one in seen.streams if not one.right] == []
    assert seen.left == []
    assert seen.odd_ends == []
    # The run contained the planned disturbances, and requests recovered from them.
    kinds = [one.kind for one in seen.disturbances]
    assert kinds.count(Kind.COORDINATOR_KILLED) == num_restarts
    assert {Kind.WORKER_KILLED, Kind.WORKER_STOPPED} <= set(kinds)
    assert seen.counters["baton_recoveries"] > 0
    assert any(one.num_resumes for one in seen.streams) == (num_restarts > 0)
    # After a restart, outputs are adopted if their workers come back before the requests are placed
    # again, which depends on how busy the machine is.
    assert num_restarts or not seen.counters["baton_adopted"]
