"""A restarted coordinator restores the rollout, and each output stays in its fleet."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.runtime.prompts.request_digest import request_digest
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.two_fleets import fleet_of_session

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP = common_pb2.FINISH_REASON_STOP
SERVING, DRAINING = cluster_pb2.WORKER_STATE_SERVING, cluster_pb2.WORKER_STATE_DRAINING


def test_known_tokens_are_continued_by_the_fleet_that_generated_them(two_fleets):
    """Without a rollout, the other fleet gets the outputs that it began, and no new requests."""
    cell = two_fleets(None)
    to = cell.world.submit(known_token_ids=[7, 8], revision="r2")
    assert cell.fleet_name(to) == "r2"
    cell.first_token(to)
    cell.token(to, finish=STOP)
    assert cell.world.last(to).reason == STOP
    assert cell.fleet_name(cell.world.submit()) == "1"
    # Later no worker of an unknown fleet is expected to return any more.
    cell.beat(3)
    gone = cell.world.submit(known_token_ids=[7, 8], revision="r0")
    assert cell.world.last(gone).error.reason == "REVISION_GONE"


@pytest.mark.parametrize("was_lost", [False, True])
@pytest.mark.parametrize(("num_prompt", "fleet"), [(20, "1"), (21, "r2")])
def test_an_output_without_its_revision_is_continued_by_the_fleet_that_began_it(
    two_fleets, was_lost, num_prompt, fleet
):
    """A rollout began meanwhile. Tokens of another prompt are not known to belong to a fleet."""
    cell = two_fleets(None)
    to = cell.begin(request_id="r1", session_id="s")
    if was_lost:
        cell.world.handle(ev.SessionLost(to.session))
    cell.start(1.0)
    again = cell.world.submit(
        2, num_prompt, request_id="r1", session_id="s", known_token_ids=[7, 1], known_text_chars=1
    )
    request = cell.core.request("r1")
    assert (request.submission.to, request.fleet.name) == (again, fleet)


def test_a_rollout_outlives_its_coordinator(two_fleets, new_world, say_hello):
    """Each worker keeps the latest record; the next coordinator restores the newest."""
    cell = two_fleets(0.4)
    cell.world.handle(ev.ShareRequested(0.25))
    record = latest_record(cell.world, "d")
    after = new_world()

    def back(name, role, revision, record, incarnation=1):
        hello = say_hello(name, role, incarnation, revision=revision, generation=77)
        hello.rollout.CopyFrom(record)
        after.handle(ev.WorkerAttached(hello, returns=True))

    stale = cluster_pb2.RolloutRecord(version=1, configured="1", stable="1", canary="r0")
    for name, role, revision, told in (
        ("p", PREFILL, "1", stale),
        ("cp", PREFILL, "r2", record),
        ("d", DECODE, "1", record),
        ("cd", DECODE, "r2", record),
    ):
        back(name, role, revision, told)
    rollouts = after.core.rollouts
    assert (rollouts.traffic.canary.name, rollouts.traffic.share) == ("r2", 0.25)
    assert rollouts.traffic.open
    # The canary gets the same sessions as before.
    for number in range(40):
        assert fleet_of_session(cell.world, number) == fleet_of_session(after, number)
    after.handle(ev.PromotionRequested())
    assert after.core.fleets.stable.name == "r2"
    promoted = latest_record(after, "cd")
    # A promotion is restored too, unless the configured revision has changed.
    for configured, stable in (("1", "r2"), ("r9", "r9")):
        third = new_world(revision=configured)
        hello = say_hello("cd", DECODE, revision="r2", generation=78)
        hello.rollout.CopyFrom(promoted)
        third.handle(ev.WorkerAttached(hello, returns=True))
        assert third.core.fleets.stable.name == stable


@pytest.mark.parametrize("missed", [None, "first", "last"])
def test_a_rollback_by_configuration_outlives_the_record_of_the_promotion(
    two_fleets, new_world, say_hello, missed
):
    """A worker that missed the coordinator in between may return first or last."""

    def back(world, name, role, revision, record):
        hello = say_hello(name, role, revision=revision, generation=77)
        hello.rollout.CopyFrom(record)
        world.handle(ev.WorkerAttached(hello, returns=True))

    cell = two_fleets(1.0)
    cell.world.handle(ev.PromotionRequested(2.0))
    promoted = latest_record(cell.world, "cd")
    # The operator puts the promoted revision into the configuration, and restarts.
    second = new_world(revision="r2")
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        back(second, name, role, "r2", promoted)
    for name, role in (("p", PREFILL), ("d", DECODE)):
        second.attach(name, role)
    # Revision r2 turns out to be bad, so the operator goes back to the former configuration.
    third = new_world()
    workers = [("p", PREFILL, "1"), ("d", DECODE, "1"), ("cp", PREFILL, "r2"), ("cd", DECODE, "r2")]
    records = {name: latest_record(second, name) for name, _, _ in workers}
    if missed is not None:
        workers.insert(0 if missed == "first" else 4, ("c", DECODE, "r2"))
        records["c"] = promoted
    for name, role, revision in workers:
        back(third, name, role, revision, records[name])
    assert third.core.fleets.stable.name == "1"
    assert third.core.request(f"r{third.submit().stream}").prefill == ("p", 1)
    # A fourth coordinator learns the same from any worker.
    assert {latest_record(third, name).stable for name in records} == {"1"}


@pytest.mark.parametrize("has_heard", [True, False])
def test_a_leaving_fleet_leaves_although_its_coordinator_died(
    two_fleets, new_world, say_hello, has_heard
):
    cell = two_fleets(0.4)
    before = latest_record(cell.world, "d")
    cell.world.handle(ev.PromotionRequested())
    promoted = latest_record(cell.world, "cd")
    assert list(promoted.retiring) == ["1"]
    after = new_world()
    workers = (("cp", PREFILL, "r2"), ("cd", DECODE, "r2"), ("p", PREFILL, "1"), ("d", DECODE, "1"))
    for name, role, revision in workers:
        hello = say_hello(name, role, revision=revision, generation=77)
        hello.rollout.CopyFrom(promoted if has_heard or revision == "r2" else before)
        after.handle(ev.WorkerAttached(hello, returns=True))
        # The workers return one second apart.
        after.after(1.0)
    # A worker of a third fleet, which an operator has started for a later rollout, stays.
    hello = say_hello("next", DECODE, revision="r3", generation=77)
    hello.rollout.CopyFrom(promoted)
    after.handle(ev.WorkerAttached(hello, returns=True))
    after.wait(4)
    assert after.core.fleets.stable.name == "r2"
    leaving = {worker.id for worker in after.core.workers if worker.state == DRAINING}
    assert leaving == {"p", "d"}


def test_a_request_before_the_first_worker_after_a_promotion_is_served(new_world, say_hello):
    """The coordinator does not know yet which fleet is stable."""
    world = new_world()
    early = world.submit()
    record = cluster_pb2.RolloutRecord(version=3, configured="1", stable="r2")
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        hello = say_hello(name, role, revision="r2", generation=77)
        hello.rollout.CopyFrom(record)
        world.handle(ev.WorkerAttached(hello, returns=True))
    world.wait(3)
    assert world.kinds(early) == ["Accepted"]
    request = world.core.request("r1")
    assert (request.fleet.name, request.prefill[0]) == ("r2", "cp")


def test_a_rollout_that_ended_before_a_restart_leaves_no_share(new_world, say_hello):
    """The worker that returns first has missed the end, and its record is restored first."""
    world = new_world()
    running = cluster_pb2.RolloutRecord(
        version=2, configured="1", stable="1", canary="r2", share=0.5
    )
    ended = cluster_pb2.RolloutRecord(version=3, configured="1", stable="1", retiring=["r2"])
    for name, role, record, share in (("p", PREFILL, running, 0.5), ("d", DECODE, ended, 0.0)):
        hello = say_hello(name, role, generation=77)
        hello.rollout.CopyFrom(record)
        world.handle(ev.WorkerAttached(hello, returns=True))
        assert world.core.rollouts.traffic.share == share
        assert latest_record(world, name).share == share


def latest_record(world, worker):
    records = (one for one in world.commands[worker] if isinstance(one, cluster_pb2.RolloutRecord))
    return list(records)[-1]


def _running():
    """Returns what a worker reports that continues the first submitted request."""
    sampling = common_pb2.SamplingParams(max_tokens=8)
    return cluster_pb2.RunningRequest(
        request_id="r1",
        attempt=3,
        role=DECODE,
        token_ids=[7, 8],
        decoding=True,
        tenant="default",
        digest=request_digest(list(range(20)), sampling),
    )


def test_an_adopted_request_joins_the_fleet_of_its_worker(two_fleets, say_hello):
    cell = two_fleets(None)
    hello = say_hello("cd9", DECODE, revision="r2", generation=77)
    hello.running.append(_running())
    cell.world.handle(ev.WorkerAttached(hello, returns=True))
    to = cell.world.submit(known_token_ids=[7])
    request = cell.request(to)
    assert (request.fleet.name, request.decode[0]) == ("r2", "cd9")
    cell.world.handle(ev.WorkerLost("cd9", "was killed"))
    assert cell.core.workers.get(request.decode).fleet.name == "r2"


def test_a_draining_worker_continues_the_output_of_a_client_that_resumes(two_fleets, say_hello):
    cell = two_fleets(None)
    # The last worker of its fleet, which the previous coordinator has told to leave.
    hello = say_hello("d9", DECODE, revision="r0", generation=77, state=DRAINING)
    hello.running.append(_running())
    cell.world.handle(ev.WorkerAttached(hello, returns=True))
    cell.world.after(1.0)
    to = cell.world.submit(known_token_ids=[7], revision="r0")
    assert cell.request(to).decode[0] == "d9"
    assert cell.world.tokens(to) == [8]
