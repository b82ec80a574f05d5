"""Outputs that only their own worker can go on with: nobody takes them off it while it lives."""

from __future__ import annotations

import pytest

from baton.coordinator.core import events as ev
from baton.coordinator.core.request import RequestState
from baton.runtime.config import InteractiveLaneConfig, LanesConfig
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LENGTH = common_pb2.FINISH_REASON_LENGTH
# Batch outputs make room for the first interactive one.
LANES = LanesConfig(interactive=InteractiveLaneConfig(itl_ms=1))


@pytest.fixture
def cell(new_world):
    """Workers p, d and d2, whose engine takes no forced tokens."""
    world = new_world(lanes=LANES)
    capacity = cluster_pb2.Capacity(
        kv_tokens=65536, block_size_tokens=16, max_send_bytes=2**20, max_receive_bytes=2**20
    )
    for name, role in (("p", PREFILL), ("d", DECODE)):
        world.attach(name, role, capacity=capacity)
    world.attach("d2", DECODE, capacity=capacity)
    return world


@pytest.fixture
def seeded(cell, out):
    """A long batch output with a seed, which has begun."""
    return begin(cell, out)


def begin(cell, out):
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 900}
    to = cell.submit(sampling=sampling, lane=common_pb2.LANE_BATCH)
    request = cell.core.request(f"r{to.stream}")
    cell.step(request.decode[0], out(request.id, [1]))
    return request


def goes_on(cell, out, request):
    """To its end, where it began."""
    assert request.state is RequestState.DECODING
    cell.step(request.decode[0], out(request.id, [2], offset=1, finish=LENGTH))
    return cell.kinds(request.submission.to)[-1] == "Finished"


def test_a_worker_that_changes_its_role_ends_it_first(cell, out, seeded):
    worker_id = seeded.decode[0]
    cell.handle(ev.FlipAsked(worker_id, PREFILL))
    for _ in range(400):
        cell.after(1.0)
        for worker in cell.core.workers:
            cell.handle(ev.WorkerLoad(worker.key, cluster_pb2.LoadReport()))
    assert goes_on(cell, out, seeded)
    assert isinstance(cell.commands[worker_id][-1], cluster_pb2.SetRoleCommand)


def test_it_makes_no_room_for_interactive_work(cell, out, seeded):
    cell.handle(ev.WorkerLost("d2" if seeded.decode[0] == "d" else "d", "was killed"))
    others = [begin(cell, out) for _ in range(2)]
    cell.submit()
    interactive = cell.core.request("r4")
    cell.step(interactive.prefill[0], out("r4", [1], finish=0))
    assert interactive.decode == seeded.decode
    assert all(goes_on(cell, out, one) for one in [seeded, *others])


def test_a_silent_worker_may_still_go_on_with_it(cell, out, seeded):
    cell.wait(5, silent=[seeded.decode[0]])
    assert cell.core.workers.get(seeded.decode).unresponsive
    assert goes_on(cell, out, seeded)
