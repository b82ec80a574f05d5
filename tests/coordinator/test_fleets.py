"""A fleet exists while it has a worker or a request, or while a rollout uses it."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.revision import Revision
from baton.v1 import common_pb2
from tests.coordinator.launched_world import Launched

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


def names(world) -> set[str]:
    return {fleet.name for fleet in world.core.fleets}


def test_a_fleet_is_forgotten_with_its_last_worker(new_world):
    world = new_world()
    world.attach("p", PREFILL, revision="v7")
    world.attach("d", DECODE, revision="v7")
    assert names(world) == {"1", "v7"}
    world.handle(ev.WorkerLost("p", "was killed"))
    assert names(world) == {"1", "v7"}
    world.handle(ev.WorkerLost("d", "was killed"))
    assert names(world) == {"1"}
    assert world.core.placers.of(world.core.fleets.stable)
    assert len(world.core.placers) == 1


def test_a_fleet_is_forgotten_with_its_last_request(new_world):
    world = new_world()
    waiting = [world.submit(known_token_ids=[1], revision="v7") for _ in range(2)]
    assert world.core.fleets.find("v7").num_requests == 2
    world.handle(ev.StreamCancelled(waiting[0]))
    assert world.core.fleets.find("v7").num_requests == 1
    world.handle(ev.StreamCancelled(waiting[1]))
    assert names(world) == {"1"}


def test_a_fleet_without_workers_and_requests_is_kept_while_a_rollout_needs_it(new_world):
    made = Launched(new_world)
    made.come_up()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    canary = made.core.fleets.find("r2")
    assert not len(canary.workers)
    assert canary is made.core.rollouts.traffic.canary
    made.world.handle(ev.AbortRequested("test", 1.0))
    made.wait(2)
    assert names(made.world) == {"1"}


def test_a_request_keeps_its_fleet_and_queue_when_a_worker_of_another_fleet_attaches(new_world):
    world = new_world()
    to = world.submit()
    world.attach("p", PREFILL, revision="v7")
    world.attach("d", DECODE, revision="v7")
    request = world.core.request(f"r{to.stream}")
    assert request.fleet is world.core.fleets.stable
    assert request.waits


@pytest.mark.parametrize("fault", ["request count", "worker", "request", "unused fleet"])
def test_the_integrity_check_finds_a_wrong_fleet(world, fault):
    world.submit()
    core = world.core
    core.check_integrity()
    other = core.fleets.named("v7")
    if fault == "request count":
        core.fleets.stable.num_requests += 1
    elif fault == "worker":
        core.workers.first.fleet = other
    elif fault == "request":
        core.running()[0].fleet = other
    with pytest.raises(AssertionError):
        core.check_integrity()
