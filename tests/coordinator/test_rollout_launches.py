"""Rollouts whose workers the coordinator starts: canary, promotion and abort."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.revision import Revision
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.launched_world import Launched

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


@pytest.fixture
def launched(new_world):
    def make(prefill=2, decode=2, **options):
        made = Launched(new_world, prefill, decode, **options)
        made.come_up()
        made.wait(11)
        return made

    return make


def ids_of_fleet(made, name):
    return {one.id for one in made.core.workers if one.fleet.name == name}


def test_a_rollout_starts_its_workers_and_a_promotion_starts_the_rest(launched):
    made = launched()
    change = Revision("r2", "/models/new", {"max_num_seqs": 8})
    made.world.handle(ev.RolloutRequested(change, 0.1, {}))
    assert made.started[4:] == ["prefill-r2-0", "decode-r2-0"]
    (event,) = [
        one
        for one in made.world.membership
        if isinstance(one, ev.StartWorker) and one.worker_id == "decode-r2-0"
    ]
    assert event.revision == change
    assert not made.core.rollouts.traffic.open
    assert "no prefill worker that serves" in str(made.core.rollouts.promote_error())
    made.come_up()
    assert made.core.rollouts.traffic.open
    # The canary's workers do not count for the sizes of the pools.
    made.wait(20)
    assert len(made.started) == 6
    assert made.ids(Pool.PREFILL) == {"prefill-0", "prefill-1", "prefill-r2-0"}
    made.world.handle(ev.PromotionRequested())
    assert made.started[6:] == ["prefill-r2-1", "decode-r2-1"]
    assert made.core.fleets.stable.name == "1"
    made.come_up()
    assert made.core.fleets.stable.name == "r2"
    made.wait(10)
    assert ids_of_fleet(made, "1") == set()
    assert len(ids_of_fleet(made, "r2")) == 4
    assert len(made.started) == 8
    # A worker that dies is replaced by a worker of the promoted fleet.
    made.world.handle(ev.WorkerExited("decode-r2-0", "was killed by SIGKILL"))
    made.world.after(0.5)
    assert made.revision_of(made.started[-1]) == "r2"


def test_an_elastic_canary_may_have_one_pool_and_replaces_a_stable_fleet_of_one_pool(launched):
    made = launched(2, 0, world={"elastic": True})
    rollouts = made.core.rollouts
    refused = rollouts.start_error(Revision("r2"), 0.1, {Pool.PREFILL: 0, Pool.DECODE: 0})
    assert "no worker of revision 'r2' is attached" in str(refused)
    sizes = {Pool.PREFILL: 1, Pool.DECODE: 0}
    assert rollouts.start_error(Revision("r2"), 0.1, sizes) is None
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, sizes))
    assert made.started[2:] == ["prefill-r2-0"]
    made.come_up()
    assert rollouts.traffic.open
    made.world.handle(ev.PromotionRequested())
    assert made.started[3:] == ["prefill-r2-1"]
    assert made.core.fleets.stable.name == "1"
    made.come_up()
    assert made.core.fleets.stable.name == "r2"


def test_a_coordinator_that_starts_workers_ignores_a_recorded_rollout(new_world, say_hello):
    world = new_world()
    hello = say_hello("p9", PREFILL, revision="r2", generation=77)
    hello.rollout.MergeFrom(
        cluster_pb2.RolloutRecord(version=3, configured="1", stable="r2", retiring=["1"])
    )
    world.handle(ev.WorkerAttached(hello, returns=True))
    assert world.core.fleets.stable.name == "r2"
    world.handle(ev.LauncherReady({Pool.PREFILL: 1, Pool.DECODE: 1}))
    started = [one for one in world.membership if isinstance(one, ev.StartWorker)]
    assert {one.revision.name for one in started} == {world.core.fleets.stable.name} == {"1"}
    assert world.commands["p9"][-1].stable == "1"


def test_an_aborted_rollout_leaves_no_workers(launched):
    made = launched()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {Pool.DECODE: 3}))
    assert len(made.started) == 4 + 4
    made.world.handle(ev.AbortRequested("test"))
    assert set(made.ended) == set(made.started[4:])
    made.wait(5)
    assert len(made.started) == 8
    assert len(made.core.workers) == 4
    assert made.core.rollouts.start_error(Revision("r2"), 0.1, {}) is None


def test_a_rollout_knows_nothing_of_failed_starts_under_its_name(launched):
    made = launched()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    for _ in range(4):
        made.world.handle(ev.WorkerExited(made.started[-1], "exited with code 1", "no such model"))
        made.wait(10)
    made.world.handle(ev.AbortRequested("test"))
    made.wait(5)
    num_started = len(made.started)
    sizes = {Pool.PREFILL: 1, Pool.DECODE: 2}
    assert made.core.rollouts.start_error(Revision("r2"), 0.1, sizes) is None
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, sizes))
    launches, canary = made.core.scaler.launches, made.core.fleets.find("r2")
    assert [launches.problem(pool, canary) for pool in Pool] == ["", ""]
    assert len(made.started) == num_started + 3


def test_a_canary_that_does_not_start_is_reported_and_delays_no_other_start(launched):
    made = launched()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    for _ in range(4):
        made.world.handle(ev.WorkerExited(made.started[-1], "exited with code 1", "no such model"))
        made.wait(3)
    assert "no such model" in made.core.scaler.launches.problem(
        Pool.DECODE, made.core.fleets.find("r2")
    )
    assert made.core.scaler.launches.problem(Pool.DECODE) == ""
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    made.world.after(0.5)
    assert made.revision_of(made.started[-1]) == "1"
    # A start that hangs is given up after the start timeout.
    hangs = [one for one in made.started if one.startswith("prefill-r2")]
    made.wait(35)
    assert set(hangs) <= set(made.ended)


def test_a_canary_that_waits_for_gpus_is_reported_as_the_canarys(launched):
    made = launched()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    made.world.handle(ev.WorkerWaits("prefill-r2-0", "waits for 1 GPU"))
    launches, told = made.core.scaler.launches, "worker prefill-r2-0 waits for 1 GPU"
    assert launches.waiting(Pool.PREFILL, made.core.fleets.find("r2")) == told
    assert launches.waiting(Pool.PREFILL) == ""
    assert told in str(made.core.rollouts.promote_error())


def test_a_rollout_without_enough_gpus_is_refused(launched):
    made = launched(max_gpus=5)
    refused = made.core.rollouts.start_error(Revision("r2"), 0.1, {})
    assert "scaling.max_gpus is 5; 4 are the stable revision's" in str(refused)


def test_gpus_of_a_leaving_fleet_are_free_once_it_has_left(launched):
    made = launched(1, 1, max_gpus=4)
    to = made.world.submit()
    request = made.core.request("r1")
    output = cluster_pb2.RequestOutput(request_id="r1", attempt=1)
    output.delta.token_ids.append(7)
    output.finished.SetInParent()
    made.world.step(request.prefill[0], output)
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    made.come_up()
    made.world.handle(ev.PromotionRequested())
    assert made.core.fleets.stable.name == "r2"
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 2))
    made.wait(5)
    # A worker of each pool stays until the request has ended.
    assert ids_of_fleet(made, "1") == {"prefill-0", "decode-0"}
    assert "decode-r2-1" not in made.started
    refused = made.core.rollouts.start_error(Revision("r3"), 0.1, {})
    assert "2 belong to revisions that leave" in str(refused)
    made.world.handle(ev.StreamCancelled(to))
    made.wait(10)
    assert ids_of_fleet(made, "1") == set()
    assert "decode-r2-1" in made.started


def test_a_promotion_waits_for_a_starting_decode_worker_that_an_output_needs(launched):
    """A start that an output needs must not be given up with its fleet."""
    made = launched(1, 1)
    to = made.world.submit()
    output = cluster_pb2.RequestOutput(request_id="r1", attempt=1)
    output.delta.token_ids.append(7)
    output.finished.SetInParent()
    made.world.step(made.core.request("r1").prefill[0], output)
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    made.come_up()
    made.world.handle(ev.DrainRequested("decode-0", 20.0, "test"))
    made.wait(2)
    assert made.started[-1] == "decode-1"
    made.world.handle(ev.PromotionRequested())
    made.wait(5)
    assert made.core.fleets.stable.name == "1"
    assert made.core.request("r1").decode[0] == "decode-0"
    made.come_up()
    made.wait(2)
    assert made.core.fleets.stable.name == "r2"
    assert "decode-1" not in made.ended
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    made.world.after(0.5)
    assert made.core.request("r1").fleet.name == "1"
    assert made.core.request("r1").decode[0] == "decode-1"
    # Without a request the old fleet leaves at once.
    made.world.handle(ev.StreamCancelled(to))
    made.wait(10)
    assert ids_of_fleet(made, "1") == set()


def aborted(launched, drain_s):
    """An aborted canary whose decode worker drains with an output while another one starts.

    Returns:
        The world and the output's stream.
    """
    made = launched(1, 1, max_gpus=6)
    made.world.handle(ev.RolloutRequested(Revision("r2"), 1.0, {}))
    made.come_up()
    to = made.world.submit()
    output = cluster_pb2.RequestOutput(request_id="r1", attempt=1)
    output.delta.token_ids.append(7)
    output.finished.SetInParent()
    made.world.step(made.core.request("r1").prefill[0], output)
    assert made.core.request("r1").decode[0] == "decode-r2-0"
    made.world.handle(ev.DrainRequested("decode-r2-0", drain_s, "test"))
    made.wait(2)
    assert made.started[-1] == "decode-r2-1"
    made.world.handle(ev.AbortRequested("test"))
    assert made.core.rollouts.traffic.canary is None
    return made, to


@pytest.mark.parametrize("comes", [True, False])
def test_an_abort_keeps_a_starting_decode_worker_that_an_output_needs(launched, comes):
    """A start that an output needs must not be given up with its fleet."""
    made, to = aborted(launched, 20.0)
    made.wait(5)
    assert "decode-r2-1" not in made.ended
    # The canary has 3 of 6 GPUs. The pools count the draining worker's GPU themselves.
    assert made.core.scaler._policy_config().max_gpus == 6 - 3 + 1
    if comes:
        made.come_up()
        made.wait(2)
        assert "decode-r2-1" not in made.ended
    made.world.handle(ev.WorkerExited("decode-r2-0", "was killed by SIGKILL"))
    made.world.after(0.5)
    request = made.core.request("r1")
    assert request.fleet.name == "r2"
    assert request.decode == (("decode-r2-1", 1) if comes else None)
    # Without the request the starting worker is given up.
    made.world.handle(ev.StreamCancelled(to))
    made.wait(10)
    assert ids_of_fleet(made, "r2") == set()
    assert "decode-r2-1" in made.ended
    assert len(made.started) == 5


def test_a_start_for_an_aborted_canary_is_given_up_after_the_start_timeout(launched):
    made, _ = aborted(launched, 100.0)
    made.wait(27)
    assert "decode-r2-1" not in made.ended
    made.wait(5)
    assert "decode-r2-1" in made.ended
    assert made.core.request("r1").decode[0] == "decode-r2-0"


def test_a_canary_larger_than_max_workers_is_refused(launched):
    made = launched()
    refused = made.core.rollouts.start_error(Revision("r2"), 0.1, {Pool.DECODE: 10**9})
    assert isinstance(refused, errors.InvalidArgument)
    assert "at most 4, which is scaling.decode.max_workers" in str(refused)


def test_only_stable_workers_change_their_role(launched):
    made = launched()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {Pool.DECODE: 2}))
    made.come_up()
    refused = made.core.flip_error(made.core.workers.by_id("decode-r2-0"), PREFILL)
    assert "only workers of the stable revision '1'" in str(refused)
