"""Suspects: a request whose worker crashed runs alone, so that it kills no other request."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.runtime import errors
from baton.runtime.config import BatchLaneConfig, InteractiveLaneConfig, LanesConfig
from baton.v1 import common_pb2
from tests.coordinator.two_pairs import crash, hear_all_but, latest, pairs, prefills

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def test_a_request_that_kills_two_workers_fails(two_pairs, out):
    innocent = two_pairs.submit(num_prompt=20)
    poison = two_pairs.submit(num_prompt=30)
    (first,) = {name for name, one in prefills(two_pairs) if one.spec.request_id == "r2"}
    crash(two_pairs, first, 1)
    two_pairs.attach(first, PREFILL, incarnation=2)
    name, again = latest([one for one in prefills(two_pairs) if one[1].spec.request_id == "r2"])
    assert again.spec.attempt == 2
    # Its worker gets no other request until the suspect has produced output.
    for _ in range(2):
        two_pairs.submit()
    assert {n for n, one in prefills(two_pairs) if one.spec.request_id in ("r3", "r4")} == {
        "p" if name == "p2" else "p2"
    }
    crash(two_pairs, name, two_pairs.core.workers.by_id(name).hello.incarnation)
    assert isinstance(two_pairs.last(poison).error, errors.Internal)
    assert "two workers" in str(two_pairs.last(poison).error)
    assert two_pairs.kinds(innocent) == ["Accepted"]


def test_the_replacement_of_a_draining_worker_is_no_crash(two_pairs):
    """Another incarnation attaches under the worker's ID before its end was reported."""
    to = two_pairs.submit()
    ((first, _),) = prefills(two_pairs)
    crash(two_pairs, first, 1)
    ((name, _),) = [one for one in prefills(two_pairs) if one[1].spec.attempt == 2]
    two_pairs.handle(ev.DrainRequested(name, 30.0, "test"))
    two_pairs.attach(name, PREFILL, incarnation=9)
    assert two_pairs.kinds(to) == ["Accepted"]
    assert max(one.spec.attempt for _, one in prefills(two_pairs)) == 3


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_the_worker_of_a_suspect_gets_other_requests_once_the_suspect_has_ended(two_pairs, how):
    poison = two_pairs.submit(timeout_s=5.0)
    ((first, _),) = prefills(two_pairs)
    crash(two_pairs, first, 1)
    ((alone, _),) = [one for one in prefills(two_pairs) if one[1].spec.attempt == 2]
    to = two_pairs.submit()
    assert two_pairs.core.request("r2").state is RequestState.QUEUED
    if how == "cancelled":
        two_pairs.handle(ev.StreamCancelled(poison))
    else:
        for _ in range(10):
            two_pairs.after(0.5)
            hear_all_but(two_pairs)
    hear_all_but(two_pairs)
    assert two_pairs.core.request("r2").prefill[0] == alone
    assert two_pairs.kinds(to) == ["Accepted"]


@pytest.mark.parametrize("lane", [common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH])
def test_a_suspect_is_dispatched_despite_a_long_queue_in_the_other_lane(new_world, out, lane):
    """A suspect waits for an idle worker; a stream of other requests must not keep workers busy."""
    lanes = LanesConfig(
        interactive=InteractiveLaneConfig(max_queued=99),
        batch=BatchLaneConfig(max_queued=99, share=0.5),
    )
    world = pairs(new_world(lanes=lanes, max_running_requests=99))
    other = common_pb2.LANE_INTERACTIVE
    if lane == other:
        other = common_pb2.LANE_BATCH

    def submit():
        world.submit(lane=other, sampling={"max_tokens": 1})

    def answer(worker, key):
        request = world.core.request(key)
        ended = out(key, [7], finish=LENGTH, attempt=request.attempt_number)
        world.step(worker.id, ended, incarnation=worker.hello.incarnation)

    world.submit(lane=lane)
    suspect = world.core.request("r1")
    first = world.core.workers.get(suspect.prefill)
    for _ in range(4):
        submit()
    for key in [one for one in first.ledger.unanswered if one != "r1"]:
        answer(first, key)
    crash(world, first.id, 1)
    assert suspect.suspect
    assert suspect.state is RequestState.RECOVERING
    for _ in range(30):
        submit()
    for _ in range(15):
        if suspect.state is RequestState.PREFILLING:
            break
        worker = next(one for one in world.core.workers if one.ledger.unanswered)
        answer(worker, next(iter(worker.ledger.unanswered)))
    assert suspect.state is RequestState.PREFILLING
    assert world.core.num_queued(other) > 0


def test_a_request_with_new_tokens_in_each_attempt_is_no_suspect(two_pairs, out):
    to = two_pairs.submit()
    for attempt in range(1, 4):
        name, prefill = latest(prefills(two_pairs))
        two_pairs.step(name, out("r1", [7], finish=0, attempt=attempt))
        decoder = prefill.handoff.target.split(".")[0]
        incarnation = two_pairs.core.workers.by_id(decoder).hello.incarnation
        token = out("r1", [10 + attempt], offset=attempt, attempt=attempt)
        two_pairs.step(decoder, token, incarnation=incarnation)
        crash(two_pairs, decoder, incarnation)
        two_pairs.attach(decoder, DECODE, incarnation=incarnation + 1)
    assert two_pairs.tokens(to) == [7, 11, 12, 13]
    assert two_pairs.core.request("r1").state is RequestState.PREFILLING
