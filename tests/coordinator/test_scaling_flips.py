"""Flips: a worker gets no new requests, its requests end or move, and no token is lost."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import RequestState
from baton.coordinator.state.scaling_config import PoolLimits
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.launched_world import Launched

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LENGTH = common_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def launched(new_world):
    def make(prefill=2, decode=2, decode_limits=(0, 4)) -> Launched:
        limits = PoolLimits(*decode_limits)
        made = Launched(new_world, prefill, decode, limits={"decode": limits})
        made.come_up()
        made.wait(1)
        return made

    return make


def flip(made, worker_id, role):
    made.world.handle(ev.FlipRequested(worker_id, role))


def set_role(made, worker_id):
    return [
        command.role
        for command in made.world.commands[worker_id]
        if isinstance(command, cluster_pb2.SetRoleCommand)
    ]


def loaded(made, worker_id, **fields):
    """Sends the worker's next load report."""
    worker = made.core.workers.by_id(worker_id)
    load = cluster_pb2.LoadReport(num_steps=worker.num_steps + 1, **fields)
    made.world.handle(ev.LoadReported(worker.key, load))


def decoding(made, out, num_known, *, max_tokens, **options):
    """Starts a decoding request with output tokens; returns its stream and decode worker's ID."""
    to = made.world.submit(sampling={"max_tokens": max_tokens}, **options)
    request = made.core.request(f"r{to.stream}")
    made.world.step(request.prefill[0], out(request.id, [0], finish=0))
    tokens = list(range(1, num_known))
    made.world.step(request.decode[0], out(request.id, tokens, offset=1))
    assert request.state is RequestState.DECODING
    return to, request.decode[0]


def test_a_worker_that_was_started_elsewhere_flips_and_configured_sizes_stay(launched):
    made = launched(prefill=1, decode=1, decode_limits=(1, 1))
    made.world.attach("guest", common_pb2.ROLE_PREFILL)
    made.wait(1)
    guest, ours = (made.core.workers.by_id(one) for one in ("guest", "prefill-0"))
    assert made.core.flip_error(guest, DECODE) is None
    # The decode pool's limit is one worker.
    refused = made.core.flip_error(ours, DECODE)
    assert "decode would have more than its 1 worker" in str(refused)
    flip(made, "guest", DECODE)
    made.answer_flips()
    assert made.ids(Pool.DECODE) == {"decode-0", "guest"}
    made.wait(120)
    assert made.ids(Pool.DECODE) == {"decode-0", "guest"}
    assert (len(made.started), made.ended) == (2, [])
    flip(made, "guest", PREFILL)
    made.world.commands["guest"].pop(0)
    made.answer_flips()
    assert made.ids(Pool.PREFILL) == {"prefill-0", "guest"}
    assert {pool: made.core.scaler.desired(pool) for pool in Pool} == dict.fromkeys(Pool, 1)


def test_an_idle_worker_changes_pools_at_once_and_sizes_by_hand_move_with_it(launched):
    made = launched()
    flip(made, "prefill-1", DECODE)
    assert set_role(made, "prefill-1") == [DECODE]
    assert made.core.scaler.desired(Pool.DECODE) == 3
    made.answer_flips()
    assert made.ids(Pool.DECODE) == {"decode-0", "decode-1", "prefill-1"}
    made.wait(120)
    assert made.ids(Pool.PREFILL) == {"prefill-0"}
    assert len(made.started) == 4
    assert made.ended == []


def test_a_prefill_worker_finishes_its_prompts_and_gets_no_other(launched, out):
    made = launched()
    made.world.submit()
    request = made.core.request("r1")
    worker_id = request.prefill[0]
    flip(made, worker_id, DECODE)
    made.world.submit()
    made.world.submit()
    assert set_role(made, worker_id) == []
    assert {made.core.request(one).prefill[0] for one in ("r2", "r3")} != {worker_id}
    made.world.step(worker_id, out("r1", [0], finish=0))
    assert set_role(made, worker_id) == [DECODE]
    assert made.core.stats.num_moved == 0
    made.answer_flips()
    assert worker_id in made.ids(Pool.DECODE)


def test_a_flip_may_take_longer_than_a_start(launched, out):
    made = launched()
    made.world.submit()
    worker_id = made.core.request("r1").prefill[0]
    flip(made, worker_id, DECODE)
    # A worker that starts may take 30 s.
    made.wait(100)
    assert made.core.request("r1").state is RequestState.PREFILLING
    assert (len(made.started), made.ended) == (4, [])
    made.world.step(worker_id, out("r1", [0], finish=0))
    made.answer_flips()
    assert worker_id in made.ids(Pool.DECODE)


@pytest.mark.parametrize("by_handoff", [True, False])
def test_a_long_output_moves_and_no_token_is_lost_or_repeated(launched, out, by_handoff):
    made = launched()
    to, worker_id = decoding(made, out, 3, max_tokens=900, num_prompt=400)
    # Without a prefix cache a worker keeps no KV blocks of requests that have left it.
    worker = made.core.workers.by_id(worker_id)
    worker.hello.capacity.keeps_prefixes = by_handoff
    flip(made, worker_id, PREFILL)
    assert made.core.stats.num_moved == 1
    request = made.core.request("r1")
    assert (request.prefill == worker.key) == by_handoff
    assert request.decode[0] != worker_id
    assert len(request.handoff_id) == 16
    # A worker that hands over changes its role only after the computation for the handoff.
    assert set_role(made, worker_id) == ([] if by_handoff else [PREFILL])
    # Later outputs of the worker's old attempt are dropped.
    made.world.step(worker_id, out("r1", [3], offset=3))
    made.world.step(request.prefill[0], out("r1", [9], finish=0, attempt=2))
    assert set_role(made, worker_id) == [PREFILL]
    made.world.step(request.decode[0], out("r1", [3, 4], offset=3, finish=LENGTH, attempt=2))
    assert made.world.tokens(to) == [0, 1, 2, 3, 4]
    assert made.world.kinds(to)[-1] == "Finished"
    assert request.losses == []
    made.core.check_integrity()


def test_all_that_a_worker_decodes_is_handed_over_by_it(launched, out):
    """All requests are handed over, even if the prefill workers are busy."""
    made = launched(prefill=1, decode=3)
    decodes = [decoding(made, out, 60, max_tokens=700, num_prompt=200) for _ in range(6)]
    worker_id = decodes[0][1]
    there = [f"r{to.stream}" for to, where in decodes if where == worker_id]
    assert len(there) > 1
    for token_id in range(20):
        made.world.submit(prompt_token_ids=[token_id] * 1000, sampling={"max_tokens": 1})
    flip(made, worker_id, PREFILL)
    requests = [made.core.request(one) for one in there]
    assert {one.prefill[0] for one in requests} == {worker_id}
    assert worker_id not in {one.decode[0] for one in requests}
    for one in there:
        assert set_role(made, worker_id) == []
        made.world.step(worker_id, out(one, [60], finish=0, attempt=2))
    assert set_role(made, worker_id) == [PREFILL]
    made.core.check_integrity()


def test_an_output_stays_while_no_other_worker_has_room(launched, out):
    made = launched()
    _, worker_id = decoding(made, out, 3, max_tokens=900)
    _, other = decoding(made, out, 3, max_tokens=900)
    assert other != worker_id
    loaded(made, other, kv_tokens_used=10**6)
    flip(made, worker_id, PREFILL)
    assert made.core.request("r1").decode[0] == worker_id
    loaded(made, other)
    loaded(made, worker_id)
    assert made.core.stats.num_moved == 1
    assert made.core.request("r1").decode[0] == other


def test_an_output_whose_worker_dies_while_it_hands_over_is_computed_again(launched, out):
    made = launched()
    to, worker_id = decoding(made, out, 3, max_tokens=900, num_prompt=400)
    flip(made, worker_id, PREFILL)
    request = made.core.request("r1")
    assert request.prefill[0] == worker_id
    made.world.handle(ev.WorkerLost(worker_id, "was killed"))
    assert worker_id not in (request.prefill[0], request.decode[0])
    made.world.step(request.prefill[0], out("r1", [9], finish=0, attempt=3))
    made.world.step(request.decode[0], out("r1", [3], offset=3, finish=LENGTH, attempt=3))
    assert made.world.tokens(to) == [0, 1, 2, 3]


def test_requests_not_handed_over_in_time_are_recomputed(launched, out):
    made = launched()
    _, worker_id = decoding(made, out, 3, max_tokens=900, num_prompt=400)
    flip(made, worker_id, PREFILL)
    assert made.core.request("r1").prefill[0] == worker_id
    made.wait(31)
    loaded(made, worker_id)
    assert made.core.request("r1").prefill[0] != worker_id
    assert set_role(made, worker_id) == [PREFILL]


def test_an_output_that_is_nearly_done_ends_where_it_is(launched, out):
    made = launched()
    to, worker_id = decoding(made, out, 7, max_tokens=8, num_prompt=900)
    flip(made, worker_id, PREFILL)
    loaded(made, worker_id)
    assert made.core.stats.num_moved == 0
    assert set_role(made, worker_id) == []
    made.world.step(worker_id, out("r1", [7], offset=7, finish=LENGTH))
    assert made.world.tokens(to) == list(range(8))
    assert set_role(made, worker_id) == [PREFILL]


def test_requests_that_do_not_end_in_time_are_moved(launched, out):
    made = launched()
    _, worker_id = decoding(made, out, 7, max_tokens=8, num_prompt=900)
    flip(made, worker_id, PREFILL)
    made.wait(31)
    loaded(made, worker_id)
    assert made.core.stats.num_moved == 1
    assert set_role(made, worker_id) == [PREFILL]


def test_a_worker_keeps_its_role_if_no_worker_can_take_its_requests(launched, out):
    made = launched()
    _, worker_id = decoding(made, out, 7, max_tokens=8, num_prompt=900)
    flip(made, worker_id, PREFILL)
    (other,) = made.ids(Pool.DECODE) - {worker_id}
    made.world.handle(ev.DrainRequested(other, 600.0, "test"))
    made.wait(31)
    loaded(made, worker_id)
    assert set_role(made, worker_id) == []
    assert made.core.scaler.desired(Pool.DECODE) == 2
    assert made.core.request("r1").decode[0] == worker_id


def test_a_worker_keeps_its_role_when_the_last_one_beside_it_is_lost(launched, out):
    """Otherwise requests that lost the other worker would have no worker."""
    made = launched()
    _, worker_id = decoding(made, out, 7, max_tokens=8, num_prompt=900)
    (other,) = made.ids(Pool.DECODE) - {worker_id}
    flip(made, worker_id, PREFILL)
    made.world.handle(ev.WorkerExited(other, "was killed by SIGKILL"))
    assert made.core.scaler.desired(Pool.DECODE) == 2
    made.world.step(worker_id, out("r1", [7], offset=7, finish=LENGTH))
    assert set_role(made, worker_id) == []


def test_a_worker_that_was_told_to_change_is_told_to_come_back_when_it_is_the_last(launched, out):
    made = launched()
    flip(made, "decode-1", PREFILL)
    assert set_role(made, "decode-1") == [PREFILL]
    made.world.submit(sampling={"max_tokens": 8})
    request = made.core.request("r1")
    made.world.step(request.prefill[0], out("r1", [0], finish=0))
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    assert set_role(made, "decode-1") == [PREFILL, DECODE]
    made.answer_flips()
    assert "decode-1" in made.ids(Pool.DECODE)
    assert made.core.scaler.desired(Pool.DECODE) == 2
    made.world.step(request.prefill[0], out("r1", [9], finish=0, attempt=2))
    assert request.decode == ("decode-1", 1)
    made.world.step("decode-1", out("r1", [1], offset=1, finish=LENGTH, attempt=2))
    assert made.world.tokens(request.submission.to) == [0, 1]


def test_the_last_serving_worker_does_not_leave_its_pool(launched, out):
    made = launched()
    _, worker_id = decoding(made, out, 7, max_tokens=8, num_prompt=900)
    (other,) = made.ids(Pool.DECODE) - {worker_id}
    flip(made, worker_id, PREFILL)
    made.world.handle(ev.WorkerDetached((other, 1)))
    made.world.step(worker_id, out("r1", [7], offset=7, finish=LENGTH))
    assert set_role(made, worker_id) == []
    made.world.attach(other, DECODE)
    assert set_role(made, worker_id) == [PREFILL]


def test_a_flip_that_cannot_be_is_refused(launched):
    made = launched(2, 1, decode_limits=(0, 1))
    for worker_id, role, why in (
        ("decode-0", PREFILL, "decode-0 is the only serving decode worker"),
        ("prefill-0", DECODE, "decode would have more than its 1 worker"),
    ):
        refused = made.core.flip_error(made.core.workers.by_id(worker_id), role)
        assert isinstance(refused, errors.FailedPrecondition)
        assert why in str(refused)
        flip(made, worker_id, role)
        assert made.core.workers.by_id(worker_id).flip is None


def test_a_flip_under_way_cannot_be_taken_back(launched):
    """An operator who asks for it learns so; asking for the same flip again is no error."""
    made = launched()
    made.world.submit()
    worker_id = made.core.request("r1").prefill[0]
    flip(made, worker_id, DECODE)
    worker = made.core.workers.by_id(worker_id)
    assert "is changing its role" in str(made.core.flip_error(worker, PREFILL))
    assert made.core.flip_error(worker, DECODE) is None


def test_a_worker_that_has_flipped_when_it_hears_that_it_drains_gets_nothing_new(launched):
    made = launched()
    flip(made, "prefill-0", DECODE)
    made.world.handle(ev.DrainRequested("prefill-0", 5.0, "test"))
    made.answer_flips()
    worker = made.core.workers.by_id("prefill-0")
    assert worker.role == DECODE
    assert not worker.serving


def test_a_worker_that_drains_does_not_flip(launched):
    made = launched()
    made.world.submit()
    worker_id = made.core.request("r1").prefill[0]
    flip(made, worker_id, DECODE)
    made.world.handle(ev.DrainRequested(worker_id, 60.0, "test"))
    worker = made.core.workers.by_id(worker_id)
    assert worker.flip is None
    assert isinstance(made.core.flip_error(worker, DECODE), errors.FailedPrecondition)


def test_a_lost_worker_that_flips_is_forgotten(launched):
    made = launched()
    made.world.submit()
    worker_id = made.core.request("r1").prefill[0]
    flip(made, worker_id, DECODE)
    made.world.handle(ev.WorkerExited(worker_id, "was killed by SIGKILL"))
    assert made.core.request("r1").attempt == 2
    made.wait(30)
    assert made.core.workers.by_id(worker_id) is None


def test_the_last_worker_of_a_sleepy_pool_is_not_waited_for(new_world):
    """The worker stays in its pool, and another worker is started for the short pool."""
    limits = {"prefill": PoolLimits(0, 4), "decode": PoolLimits(1, 4)}
    made = Launched(new_world, autoscale=True, limits=limits, idle_s=30.0)
    made.come_up()
    made.wait(20)
    assert (made.ids(Pool.PREFILL), made.ids(Pool.DECODE)) == ({"prefill-0"}, {"decode-0"})
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    made.wait(10)
    assert made.started[2:] == ["decode-1"]
    made.come_up()
    made.wait(100)
    assert (made.ids(Pool.PREFILL), made.ids(Pool.DECODE)) == (set(), {"decode-1"})


def test_a_size_set_while_a_worker_flips_holds_also_when_it_stays(launched):
    made = launched(decode=1)
    made.world.submit()
    flip(made, made.core.request("r1").prefill[0], DECODE)
    made.world.after(0.5)
    made.world.handle(ev.ScaleRequested(Pool.PREFILL, 0))
    made.world.handle(ev.ScaleRequested(Pool.DECODE, 2))
    # The other prefill worker leaves, so this worker must stay for its requests.
    made.wait(5)
    assert {pool: made.core.scaler.desired(pool) for pool in Pool} == {
        Pool.PREFILL: 0,
        Pool.DECODE: 2,
    }
