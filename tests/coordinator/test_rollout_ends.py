"""Requests of a fleet that loses its workers, leaves or is promoted."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.coordinator.state.revision import Revision
from baton.runtime import errors
from baton.runtime.config import InteractiveLaneConfig, LanesConfig
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP = common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("leg", ["cp", "cd"])
def test_a_request_with_output_stays_in_its_fleet(two_fleets, leg):
    cell = two_fleets(1.0)
    to = cell.begin()
    request = cell.request(to)
    assert request.fleet.name == "r2"
    lost = (request.prefill if leg == "cp" else request.decode)[0]
    cell.world.handle(ev.WorkerLost(lost, "was killed"))
    if leg == "cd":
        assert request.attempt == 2
        assert cell.core.workers.get(request.prefill).fleet.name == "r2"
        assert cell.core.workers.get(request.decode).fleet.name == "r2"
        cell.first_token(to)
    cell.token(to, finish=STOP)
    assert cell.world.last(to).reason == STOP


def test_a_request_with_output_waits_for_its_fleet_and_fails_once_that_is_gone(two_fleets):
    cell = two_fleets(1.0)
    to = cell.begin()
    for name in ("cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    assert cell.request(to).waits
    # A worker of its fleet attaches: the request continues.
    cell.world.attach("cd3", DECODE, revision="r2")
    assert cell.request(to).decode[0] == "cd3"
    for name in ("cd3", "cp", "cp2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    assert cell.request(to).waits
    cell.world.handle(ev.AbortRequested("test"))
    error = cell.world.last(to).error
    assert isinstance(error, errors.Unavailable)
    assert error.reason == "REVISION_GONE"
    assert "'r2'" in str(error)


@pytest.mark.parametrize("comes", [True, False])
def test_a_request_parked_on_a_dead_canary_waits_no_longer_than_others(two_fleets, comes):
    """A parked batch request has no worker whose loss would be noticed."""
    lanes = LanesConfig(interactive=InteractiveLaneConfig(itl_ms=1))
    cell = two_fleets(1.0, lanes=lanes)
    cell.world.handle(ev.WorkerLost("cd2", "was killed"))
    batch = [cell.begin(lane=common_pb2.LANE_BATCH) for _ in range(3)]
    person = cell.begin()
    parked = [to for to in batch if cell.request(to).state is RequestState.PARKED]
    assert len(parked) == 2
    cell.world.handle(ev.WorkerLost("cd", "was killed"))
    cell.beat(10)
    assert not any(cell.request(to).ended for to in (*batch, person))
    if comes:
        cell.world.attach("cd3", DECODE, revision="r2")
        for _ in batch:
            for to in (person, *batch):
                if cell.request(to).state is RequestState.PREFILLING:
                    cell.first_token(to)
                    cell.token(to, finish=STOP)
        assert {cell.world.last(to).reason for to in (*batch, person)} == {STOP}
        return
    cell.beat(21)
    for to in (*batch, person):
        error = cell.world.last(to).error
        assert isinstance(error, errors.Unavailable)
        assert "no decode worker is attached" in str(error)
        assert "waited 30 s" in str(error)


def test_a_request_without_output_moves_to_the_stable_fleet(two_fleets):
    cell = two_fleets(1.0)
    running = cell.world.submit()
    for name in ("cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    assert cell.fleet_name(running) == "1"
    cell.first_token(running)
    cell.token(running, finish=STOP)
    assert cell.world.last(running).reason == STOP
    assert cell.core.rollouts.rollout.stats[cell.core.fleets.find("r2")].num_moved == 1


def test_a_request_that_both_fleets_refuse_does_not_count_against_the_canary(two_fleets):
    cell = two_fleets()
    to = cell.world.submit(slo_ttft=TtftTarget(1e-9))
    assert cell.world.last(to).error.reason == "TOO_LATE"
    assert cell.core.rollouts.rollout.stats[cell.core.fleets.find("r2")].num_moved == 0


def test_a_silent_worker_does_not_move_its_requests_with_output(two_fleets):
    """Without a peer, its requests with output stay; the others move to the stable fleet."""
    cell = two_fleets(1.0)
    to = cell.begin()
    fresh = cell.world.submit()
    decoder = cell.request(to).decode[0]
    other = "cd2" if decoder == "cd" else "cd"
    cell.world.handle(ev.WorkerLost(other, "was killed"))
    cell.world.wait(6, silent=[decoder])
    assert cell.request(to).decode[0] == decoder
    assert [cell.fleet_name(one) for one in (fresh, cell.world.submit())] == ["1", "1"]
    cell.token(to)
    assert cell.fleet_name(cell.world.submit()) == "r2"


@pytest.mark.parametrize("how", ["promote", "abort"])
def test_no_request_is_lost_when_a_rollout_ends(two_fleets, how):
    cell = two_fleets(0.5)
    running = [cell.begin(session_id=f"s{number}") for number in range(12)]
    fresh = [cell.world.submit(session_id=f"s{number}") for number in range(12)]
    assert {cell.fleet_name(to) for to in running} == {"1", "r2"}
    before = {to: cell.fleet_name(to) for to in running}
    event = ev.PromotionRequested() if how == "promote" else ev.AbortRequested("test")
    cell.world.handle(event)
    stays, leaves = ("r2", "1") if how == "promote" else ("1", "r2")
    assert cell.fleet_name(cell.world.submit()) == stays
    # A request with output loses its worker while its fleet leaves: another worker takes it.
    victim = next(to for to in running if before[to] == leaves)
    lost = cell.request(victim).decode[0]
    cell.world.handle(ev.WorkerLost(lost, "was killed"))
    cell.beat(3)
    for to in fresh:
        cell.first_token(to)
    for to in running:
        assert cell.fleet_name(to) == before[to]
        if cell.request(to).prefill is not None and not cell.request(to).prefill_done:
            cell.first_token(to)
    for to in [*running, *fresh]:
        cell.token(to, finish=STOP)
        assert cell.world.last(to).reason == STOP
    cell.beat(6)
    assert {worker.fleet.name for worker in cell.core.workers} == {stays}
    assert not len(cell.core.rollouts.retiring)
    assert cell.core.fleets.stable.name == stays
    assert cell.core.can_serve


@pytest.fixture
def with_law(two_fleets, say_hello):
    """Two fleets: the stable fleet has an adapter and a longer context, which the canary lacks."""
    cell = two_fleets(None)
    for name in ("p", "p2", "d", "d2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    model = say_hello("x", PREFILL).model
    model.max_model_len = 2048
    model.adapters.add(name="law")
    for name, role in (("lp", PREFILL), ("ld", DECODE)):
        cell.world.attach(name, role, model=model)
    cell.start(0.0)
    return cell


@pytest.mark.parametrize(
    "wanted", [{"adapter": "law"}, {"num_prompt": 1500}], ids=["adapter", "context"]
)
def test_a_request_that_the_promoted_fleet_cannot_compute_ends_in_the_old_one(with_law, wanted):
    """An accepted request must not move to workers that refuse it."""
    cell = with_law
    cell.world.handle(ev.DrainRequested("lp", 60.0, "test"))
    waiting, other = cell.world.submit(**wanted), cell.world.submit()
    assert cell.request(waiting).waits
    cell.world.attach("p3", PREFILL, model=cell.core.workers.by_id("ld").hello.model)
    # It is computed, and loses its prefill worker just as its fleet leaves.
    assert not cell.request(waiting).waits
    cell.world.handle(ev.PromotionRequested())
    assert cell.core.fleets.stable.name == "r2"
    cell.world.handle(ev.WorkerLost("p3", "was killed"))
    cell.beat(3)
    assert [cell.fleet_name(to) for to in (waiting, other)] == ["1", "r2"]
    assert cell.request(waiting).waits
    cell.world.attach("p4", PREFILL, model=cell.core.workers.by_id("ld").hello.model)
    cell.beat(3)
    cell.first_token(waiting)
    cell.token(waiting, finish=STOP)
    assert cell.world.last(waiting).reason == STOP
    cell.beat(5)
    assert {worker.fleet.name for worker in cell.core.workers} == {"r2"}


@pytest.mark.parametrize("how", ["dies", "is late"])
def test_a_request_does_not_wait_for_a_fleet_that_can_no_longer_compute_it(with_law, how):
    cell = with_law
    cell.world.handle(ev.WorkerLost("lp", "was killed"))
    waiting = cell.world.submit(adapter="law")
    cell.world.handle(ev.PromotionRequested(20.0))
    cell.beat(2)
    assert cell.fleet_name(waiting) == "1"
    if how == "dies":
        cell.world.handle(ev.WorkerLost("ld", "was killed"))
    else:
        cell.beat(20)
    # The workers there will report that they do not have the adapter.
    assert cell.fleet_name(waiting) == "r2"


def test_a_leaving_fleet_keeps_a_worker_in_each_pool_while_it_is_needed(two_fleets):
    cell = two_fleets(1.0)
    to = cell.begin()
    cell.world.handle(ev.AbortRequested("test"))
    cell.beat(3)
    left = {one.role for one in cell.core.workers if one.fleet.name == "r2"}
    assert left == {PREFILL, DECODE}
    assert len(cell.ids()) == 6
    cell.token(to, finish=STOP)
    cell.beat(5)
    assert cell.ids() == {"p", "p2", "d", "d2"}


@pytest.mark.parametrize("lost_role", [PREFILL, DECODE])
def test_in_an_elastic_cell_the_other_role_continues_an_output_of_a_leaving_fleet(
    two_fleets, lost_role
):
    cell = two_fleets(1.0, elastic=True)
    others = [one for one in cell.core.fleets.find("r2").workers if one.role != lost_role]
    for worker in others:
        cell.world.handle(ev.WorkerDetached(worker.key))
    # The output begins on a worker of the role that is lost.
    to = cell.world.submit(known_token_ids=[0], revision="r2")
    for worker in others:
        cell.world.attach(worker.id, worker.role, revision="r2")
    cell.token(to)
    cell.world.handle(ev.AbortRequested("test"))
    cell.beat(3)
    kept = {one.role: one for one in cell.core.fleets.find("r2").workers}
    lost, other = kept.pop(lost_role), *kept.values()
    assert cell.request(to).decode == lost.key
    cell.world.handle(ev.WorkerLost(lost.id, "was killed"))
    cell.beat()
    assert cell.request(to).decode == other.key
    cell.token(to, finish=STOP)
    assert cell.world.last(to).reason == STOP
    cell.beat(5)
    assert cell.ids() == {"p", "p2", "d", "d2"}


def test_a_resumed_request_finds_the_fleet_that_began_it(two_fleets):
    """A client loses its connection while its fleet leaves, and resumes a moment later."""
    cell = two_fleets(1.0)
    to = cell.begin()
    known = list(cell.request(to).token_ids)
    cell.world.handle(ev.AbortRequested("test"))
    cell.world.handle(ev.SessionLost(to.session))
    cell.beat()
    again = cell.world.submit(session=2, known_token_ids=known, revision="r2")
    cell.first_token(again)
    cell.token(again, finish=STOP)
    assert cell.world.last(again).reason == STOP
    cell.beat(5)
    assert cell.ids() == {"p", "p2", "d", "d2"}


def test_a_request_that_does_not_end_in_time_fails_with_a_reason(two_fleets):
    cell = two_fleets(1.0)
    to = cell.begin()
    cell.world.handle(ev.AbortRequested("test", drain_s=20.0))
    cell.beat(18)
    assert not cell.request(to).ended
    cell.beat(5)
    assert cell.world.last(to).error.reason == "REVISION_GONE"
    cell.beat(3)
    assert cell.ids() == {"p", "p2", "d", "d2"}


def test_a_request_still_without_output_at_the_deadline_moves_to_the_stable_fleet(two_fleets):
    cell = two_fleets(1.0)
    to = cell.world.submit()
    cell.world.handle(ev.AbortRequested("test", drain_s=20.0))
    cell.beat(23)
    assert cell.fleet_name(to) == "1"
    cell.first_token(to)
    cell.token(to, finish=STOP)
    assert cell.world.last(to).reason == STOP
    assert cell.ids() == {"p", "p2", "d", "d2"}


@pytest.mark.parametrize("fails", [True, False])
def test_a_worse_canary_is_aborted_automatically_if_requested(two_fleets, fails):
    cell = two_fleets(None)
    cell.world.handle(ev.RolloutRequested(Revision("r2"), 0.5, {}, abort_if_worse=True))
    for number in range(120):
        to = cell.world.submit(session_id=f"s{number}", num_prompt=8)
        request = cell.request(to)
        if fails and request.fleet.name == "r2":
            wrong = cluster_pb2.RequestOutput(request_id=request.id, attempt=1)
            wrong.failed.code, wrong.failed.message = 3, "no such argument"
            cell.world.step(request.prefill[0], wrong)
        else:
            cell.first_token(to)
            cell.token(to, finish=STOP)
    cell.beat(2)
    rollouts = cell.core.rollouts
    assert (rollouts.rollout is None) == fails
    if fails:
        assert "the canary is worse" in rollouts.outcome
        assert "requests failed" in rollouts.outcome
        cell.beat(3)
        assert cell.ids() == {"p", "p2", "d", "d2"}


@pytest.fixture
def attach_decoders(new_world):
    """Factory of a world with two decode workers of "1" and two of "r2"; takes elastic."""

    def make(*, elastic):
        world = new_world(elastic=elastic)
        for name, revision in (("d", ""), ("d2", ""), ("cd", "r2"), ("cd2", "r2")):
            world.attach(name, DECODE, revision=revision)
        return world

    return make


def test_in_an_elastic_cell_a_canary_of_one_role_is_tried_and_promoted(attach_decoders):
    world = attach_decoders(elastic=True)
    rollouts = world.core.rollouts
    refused = rollouts.start_error(Revision("r9"), 1.0, {})
    assert "no worker of revision 'r9' is attached" in str(refused)
    assert rollouts.start_error(Revision("r2"), 1.0, {}) is None
    world.handle(ev.RolloutRequested(Revision("r2"), 1.0, {}))
    to = world.submit()
    assert world.core.request(f"r{to.stream}").fleet.name == "r2"
    assert rollouts.promote_error() is None
    world.handle(ev.PromotionRequested())
    assert world.core.fleets.stable.name == "r2"


def test_with_strict_roles_a_canary_of_one_role_is_refused(attach_decoders):
    rollouts = attach_decoders(elastic=False).core.rollouts
    refused = rollouts.start_error(Revision("r2"), 1.0, {})
    assert "no prefill worker of revision 'r2' is attached" in str(refused)


@pytest.mark.parametrize("lost", ["cp", "cd"])
def test_in_an_elastic_cell_a_canary_that_loses_a_pool_serves_and_is_promoted(two_fleets, lost):
    """Both fleets shrink to two workers; the canary's have one role, the stable fleet's both."""
    cell = two_fleets(1.0, elastic=True)
    for name in (lost, f"{lost}2", "p2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    rollouts = cell.core.rollouts
    assert cell.fleet_name(cell.world.submit()) == "r2"
    refused = rollouts.promote_error()
    assert "has 2 serving workers and needs 3, as many as revision '1'" in str(refused)
    cell.world.handle(ev.WorkerLost("d2", "was killed"))
    assert rollouts.promote_error() is None
    cell.world.handle(ev.PromotionRequested())
    assert cell.core.fleets.stable.name == "r2"


def test_an_elastic_canary_without_a_serving_worker_cannot_be_promoted(two_fleets):
    cell = two_fleets(1.0, elastic=True)
    for name in ("cp", "cp2", "cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    assert cell.fleet_name(cell.world.submit()) == "1"
    assert "revision 'r2' has no worker that serves" in str(cell.core.rollouts.promote_error())


def test_wrong_calls_are_refused_with_the_field_name(two_fleets):
    cell = two_fleets(None)
    rollouts = cell.core.rollouts

    def refusal(name="r2", share=0.1, sizes=None, **fields):
        return rollouts.start_error(Revision(name, **fields), share, sizes or {})

    assert "stable" in str(refusal("1"))
    assert isinstance(refusal("a b"), errors.InvalidArgument)
    assert "share is 1.5" in str(refusal(share=1.5))
    assert "starts no workers" in str(refusal(model="/models/new"))
    assert "no prefill and no decode worker of revision 'r9'" in str(refusal("r9"))
    for refused in (rollouts.promote_error(), rollouts.abort_error(), rollouts.share_error(0.5)):
        assert isinstance(refused, errors.FailedPrecondition)
    cell.start(0.1)
    assert "a rollout of 'r2' runs" in str(refusal("r3"))
    for name in ("cp2", "cd"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    # The coordinator starts no workers: the canary needs as many as the stable fleet has.
    assert "has 1 serving prefill workers and needs 2, as many as revision '1'" in str(
        rollouts.promote_error()
    )
    cell.world.handle(ev.WorkerLost("cd2", "was killed"))
    cell.world.attach("cp2", PREFILL, incarnation=2, revision="r2")
    assert "no decode worker that serves" in str(rollouts.promote_error())
