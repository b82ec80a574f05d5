"""Early loads in an engine: the real halves of the connector and the real receiver, a small vLLM.

Handoffs arrive, are sent again as another epoch, commit, are cancelled and expire at any point,
also between the schedule of a step and its work in the ranks; steps are made while others run;
requests share prefixes, run short of blocks and are preempted. Whatever runs has the right keys and
values in every block, what the prefix cache names is right, and at the end nothing is held. Where
nobody alters staging and no lease runs out, no load ever fails: a late cancel takes nothing from
under it.
"""

import os

import pytest
from early_engine import FAULTS, EarlyEngine, as_scheduled, engine_with, num_uncommitted
from hypothesis import settings
from small_engine import LAYERS, LAYOUT, SHARDS, SIZE

from baton.kvtransfer.connector.handoff_step import LoadReport
from baton.kvtransfer.connector.scheduler_half import CUT_OFF
from baton.v1 import kv_transfer_pb2 as pb

TestEarlyEngine = EarlyEngine.TestCase
TestEarlyEngine.settings = settings(
    max_examples=int(os.environ.get("BATON_SEEDS", 60)), stateful_step_count=25, deadline=None
)


@pytest.mark.parametrize("length", [3, 20, 23])
def test_only_what_is_missing_is_loaded_when_the_request_runs(length):
    engine, coming = engine_with(length, 1, 0)
    engine.deliver(coming, 1000)
    engine.run_step()
    engine.tell(coming)
    # Others hold nearly everything; these blocks are not among it.
    engine.run_step(num_free=1)
    assert engine.early_tokens == {coming.request.request_id: length}
    assert engine.running == [coming.request]
    engine.teardown()


def test_part_of_a_handoff_is_loaded_early():
    engine, coming = engine_with(20, 1, 0)
    # The first three of its blocks, of every layer and rank.
    engine.run_step()
    engine.deliver(coming, 1 + 2 * 3 * LAYERS * SHARDS // 2)
    engine.run_step()
    engine.tell(coming)
    engine.deliver(coming, 1000)
    engine.run_step()
    (num_tokens,) = engine.early_tokens.values()
    assert 0 < num_tokens < 20
    engine.teardown()


def test_blocks_that_go_to_somebody_else_are_loaded_again():
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.run_step()
    engine.tell(coming)
    # One block too few for the request: those of its early load are anybody's from then on.
    engine.run_step(num_free=0)
    assert engine.waiting == [coming.request]
    engine.run_step(num_free=0)
    engine.run_step()
    assert engine.running == [coming.request]
    assert not engine.early_tokens
    engine.teardown()


def test_who_wants_blocks_gets_those_of_early_loads_also_while_others_run():
    engine, coming = engine_with(26, 1, 0)
    engine.deliver(coming, 1000)
    running = engine.submit_plain([9] * SIZE)
    engine.run_step()
    # More than is free beside what waits for a first token.
    wanting = engine.submit_plain([8] * 13 * SIZE)
    engine.run_step()
    assert engine.running == [running]
    engine.run_step()
    assert engine.running == [running, wanting]
    engine.teardown()


def test_nobody_is_preempted_twice_beside_early_loads():
    engine, coming = engine_with(26, 1, 0)
    engine.deliver(coming, 1000)
    engine.run_step()
    num_free = engine.pool.get_num_free_blocks()
    work = engine.half.step(as_scheduled([], preempted=["r9"]))
    engine.take_output([], *engine.work([], work, []))
    assert engine.pool.get_num_free_blocks() == num_free + LAYOUT.num_blocks(26)
    engine.teardown()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_came_early_of_an_epoch_that_was_not_committed_is_not_used(fault):
    engine, coming = engine_with(20, 1, 0, fault=fault)
    engine.deliver(coming, num_uncommitted(coming))
    engine.run_step()
    engine.deliver(coming, 1000)
    engine.tell(coming)
    engine.run_step()
    assert engine.running == [coming.request]
    assert not engine.early_tokens
    engine.teardown()


@pytest.mark.parametrize("who", ["scheduler", "rank"])
def test_an_engine_that_has_lost_the_service_says_so(who):
    engine = EarlyEngine()
    engine.starts(is_calm=True)
    engine.half.step(as_scheduled([]))
    assert CUT_OFF not in engine.half.finish_step()
    assert all(rank.alive for rank in engine.ranks)
    if who == "scheduler":
        engine.service.alive = False
        assert not any(rank.alive for rank in engine.ranks)
    else:
        engine.half.reported(LoadReport(), is_cut_off=True)
    for _ in range(2):
        engine.half.step(as_scheduled([]))
        assert engine.half.finish_step()[CUT_OFF]


def test_an_idle_engine_waits_for_news_unless_a_request_is_on_its_way():
    engine, _ = engine_with(20, 1, 0)
    waits = []
    engine.service.wait = lambda timeout_s, beside: waits.append(timeout_s)
    engine.notes.notes.append(pb.LocalNote(num_submitted=2))
    for _ in range(3):
        engine.run_step()
    assert not waits
    # It has failed before it came here.
    engine.notes.notes.append(pb.LocalNote(num_submitted=1))
    for _ in range(3):
        engine.run_step()
    assert waits
    engine.teardown()
