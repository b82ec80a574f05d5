"""The GPU limit while fleets of workers with different numbers of ranks run side by side."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.coordinator.rollouts.canary_sizes import num_without_gpus
from baton.coordinator.server.admin_rollout import RolloutCalls
from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.scaling_config import scaling_config
from baton.runtime.config import parse
from baton.v1 import kv_transfer_pb2
from tests.coordinator.launched_world import CONFIG, ROLES, Launched

DOUBLE = Revision("r2", "", {"tensor_parallel_size": 2})
SINGLE = Revision("r2", "", {"tensor_parallel_size": 1})


@pytest.mark.parametrize(
    ("engine_args", "num_gpus"),
    [
        ({}, 6),
        ({"tensor_parallel_size": 4}, 12),
        ({"pipeline_parallel_size": 1}, 2),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 1}, 4),
        ({"tensor_parallel_size": "four"}, 6),
    ],
)
def test_a_revision_changes_ranks_or_stages(engine_args, num_gpus):
    """A configured worker has three stages of two ranks."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    limits = scaling_config(parse({"engine_args": sizes}, "test")).limits(Pool.DECODE)
    assert (limits.gpus, limits.stages) == (6, 3)
    assert Revision("r2", "", engine_args).num_gpus(limits.gpus, limits.stages) == num_gpus


@pytest.fixture
def launched(new_world):
    """Makes a cluster with one worker of `gpus` GPUs in each pool."""

    def make(max_gpus, gpus=1):
        limits = {pool.value: replace(CONFIG.limits(pool), gpus=gpus) for pool in Pool}
        made = Launched(new_world, limits=limits, max_gpus=max_gpus)
        made.come_up()
        made.wait(11)
        return made

    return make


def promoted(made, revision):
    """Promotes a revision, and waits until the old fleet has left."""
    made.world.handle(ev.RolloutRequested(revision, 0.1, {}))
    made.come_up()
    made.world.handle(ev.PromotionRequested())
    made.wait(5)
    assert [one.name for one in made.core.fleets] == [revision.name]


def test_a_canary_that_is_too_large_is_refused(launched):
    start_error = launched(max_gpus=5).core.rollouts.start_error
    refused = start_error(DOUBLE, 0.1, {})
    assert "max_gpus is 5; 2 are the stable revision's, and the canary needs 4" in str(refused)
    assert start_error(Revision("r2"), 0.1, {}) is None


def test_a_canary_that_is_small_enough_is_accepted(launched):
    rollouts = launched(max_gpus=6, gpus=2).core.rollouts
    assert rollouts.start_error(SINGLE, 0.1, {}) is None
    assert rollouts.start_error(Revision("r2"), 0.1, {}) is not None


def test_a_promotion_needs_gpus_for_the_promoted_sizes(launched):
    made = launched(max_gpus=6)
    made.world.handle(ev.RolloutRequested(DOUBLE, 0.1, {}))
    made.come_up()
    assert made.core.rollouts.promote_error() is None
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 2))
    assert "3 are the stable revision's" in str(made.core.rollouts.promote_error())


def test_a_promotion_does_not_wait_for_gpus_that_a_growing_pool_has_taken(launched):
    made = launched(max_gpus=7)
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 2))
    made.wait(5)
    made.come_up()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    made.come_up()
    made.world.handle(ev.PromotionRequested())
    assert made.started[-1] == "decode-r2-1"
    # The stable fleet grows to 4 GPUs, which leaves none for a third decode worker of the canary.
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 3))
    made.wait(5)
    assert made.started[-1] == "decode-2"
    made.come_up()
    assert made.core.fleets.stable.name == "r2"
    made.wait(10)
    made.come_up()
    assert [one.name for one in made.core.fleets] == ["r2"]
    assert made.ids(Pool.DECODE) == {"decode-r2-0", "decode-r2-1", "decode-r2-2"}


def test_a_canary_follows_a_growing_pool_while_gpus_suffice(launched):
    made = launched(max_gpus=6)
    made.world.handle(ev.RolloutRequested(SINGLE, 0.1, {Pool.PREFILL: 1, Pool.DECODE: 1}))
    made.come_up()
    made.world.handle(ev.WorkerExited("prefill-r2-0", "crashed"))
    made.world.handle(ev.PromotionRequested())
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 2))
    made.wait(5)
    assert {"decode-1", "decode-r2-1"} <= set(made.started)


@pytest.mark.parametrize("sizes", [{Pool.PREFILL: 2, Pool.DECODE: 2}, {Pool.PREFILL: 4}])
def test_an_elastic_canary_needs_no_gpus_for_the_stable_fleets_split(new_world, sizes):
    """In an elastic cell, workers of one pool replace workers of the other."""
    made = Launched(new_world, 1, 3, world={"elastic": True}, max_gpus=8)
    made.come_up()
    made.wait(11)
    sizes = {Pool.DECODE: 0, **sizes}
    assert made.core.rollouts.start_error(SINGLE, 0.1, sizes) is None
    made.world.handle(ev.RolloutRequested(SINGLE, 0.1, sizes))
    made.come_up()
    num_started = len(made.started)
    assert made.core.rollouts.promote_error() is None
    made.world.handle(ev.PromotionRequested())
    assert made.core.fleets.stable.name == "r2"
    assert len(made.started) == num_started == 8


def test_the_pools_do_not_use_the_canarys_gpus(launched):
    made = launched(max_gpus=6)
    made.world.handle(ev.RolloutRequested(DOUBLE, 0.1, {}))
    made.come_up()
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 2))
    made.wait(10)
    assert "decode-1" not in made.started
    # The canary's workers hold their GPUs until their processes have ended.
    made.world.handle(ev.AbortRequested("test"))
    made.world.after(1.0)
    assert "decode-1" not in made.started
    made.wait(10)
    assert "decode-1" in made.started


@pytest.mark.parametrize("how", ["drains", "dies"])
def test_a_canarys_worker_is_replaced_when_its_gpus_are_free(launched, how):
    made = launched(max_gpus=6)
    made.world.handle(ev.RolloutRequested(DOUBLE, 0.1, {}))
    made.come_up()
    if how == "drains":
        made.world.handle(ev.DrainRequested("decode-r2-0", 60.0, "test"))
    else:
        made.world.handle(ev.WorkerExited("decode-r2-0", "crashed"))
    # Its process has not ended yet.
    made.world.after(3.0)
    assert "decode-r2-1" not in made.started
    rollout = made.core.rollouts.rollout
    calls = RolloutCalls(SimpleNamespace(core=made.core, now=lambda: made.world.now), None)
    problem = "no free GPUs (scaling.max_gpus) for 1 decode workers"
    for number in (1, 0):
        found = num_without_gpus(made.core.scaler, rollout.canary, rollout.sizes)
        assert found == {Pool.PREFILL: 0, Pool.DECODE: number}
        assert (problem in calls.status().problem) == bool(number)
        made.wait(10)
    assert "decode-r2-1" in made.started


def elsewhere(made):
    """Attaches two workers of another fleet, with two GPUs each, that an operator has started."""
    for worker_id, role in (("guest-p", ROLES[Pool.PREFILL]), ("guest-d", ROLES[Pool.DECODE])):
        fingerprint = kv_transfer_pb2.KvFingerprint(tp_size=2)
        made.world.attach(worker_id, role, revision="r2", fingerprint=fingerprint)


def test_a_canary_started_elsewhere_counts_with_its_gpus(launched):
    made = launched(max_gpus=7)
    elsewhere(made)
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 3))
    made.wait(10)
    # The stable fleet has 2 GPUs, the canary 4.
    assert made.started[2:] == ["decode-1"]
    assert "0 of 3 GPUs are free" in made.reason(Pool.DECODE)


def test_a_canary_started_elsewhere_needs_gpus_only_for_more_workers(launched):
    made = launched(max_gpus=5)
    elsewhere(made)
    start_error = made.core.rollouts.start_error
    assert start_error(Revision("r2"), 0.1, {}) is None
    refused = str(start_error(Revision("r2"), 0.1, {Pool.DECODE: 2}))
    assert "2 are the stable revision's, and the canary needs 5" in refused


def test_a_promoted_fleet_grows_by_its_own_gpus_per_worker(launched):
    made = launched(max_gpus=7)
    promoted(made, DOUBLE)
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 3))
    made.wait(10)
    assert "decode-r2-1" in made.started
    assert "decode-r2-2" not in made.started
    assert "1 of 7 GPUs are free" in made.reason(Pool.DECODE)


def test_a_promoted_fleet_with_fewer_gpus_per_worker_has_room_for_more_workers(launched):
    made = launched(max_gpus=6, gpus=2)
    promoted(made, SINGLE)
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 4))
    made.wait(10)
    assert "decode-r2-3" in made.started


def test_workers_of_the_old_fleet_count_with_their_gpus_until_they_have_left(launched):
    made = launched(max_gpus=7, gpus=2)
    made.world.submit()
    made.world.handle(ev.RolloutRequested(SINGLE, 0.1, {}))
    made.come_up()
    made.world.handle(ev.PromotionRequested())
    made.world.after(1.0)
    assert {one.name for one in made.core.fleets} == {"1", "r2"}
    # The old fleet has 4 GPUs, the new one 2.
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 3))
    made.world.after(1.0)
    assert "decode-r2-1" in made.started
    assert "decode-r2-2" not in made.started
