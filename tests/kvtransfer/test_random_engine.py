"""Loads of handoffs: the real halves of the connector, the real receiver, and a small vLLM.

Handoffs arrive, are sent again as another epoch, commit, are cancelled and expire at any point,
also between the schedule of a step and its work in the ranks. Steps are made while others run;
requests share prefixes, run short of blocks and are preempted. Every running request has the right
keys and values in every block, every block in the prefix cache is right, and at the end nothing is
held.
"""

import os

import pytest
from hypothesis import settings

from baton.kvtransfer.connector.handoffs.handoff_step import LoadReport
from tests.kvtransfer.driven_engine import (
    BLOCK_BYTES,
    FAULTS,
    DrivenEngine,
    as_scheduled,
    engine_with,
    num_uncommitted,
)
from tests.kvtransfer.random_engine import RandomEngine
from tests.kvtransfer.small_engine import LAYERS, LAYOUT, SIZE

TestRandomEngine = RandomEngine.TestCase
TestRandomEngine.settings = settings(
    max_examples=int(os.environ.get("BATON_SEEDS", 60)), stateful_step_count=25, deadline=None
)


@pytest.mark.parametrize("length", [3, 20, 23])
def test_a_request_waits_without_blocks_and_loads_its_handoff_when_it_runs(length):
    engine, coming = engine_with(length, 1, 0)
    engine.submit(coming)
    engine.run_step()
    assert engine.waiting == [coming.request]
    assert not coming.request.blocks
    engine.deliver(coming, 1000)
    engine.run_step()
    assert engine.running == [coming.request]
    engine.end_all()


def test_a_request_without_room_keeps_its_handoff():
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    engine.run_step(num_free=0)
    assert engine.waiting == [coming.request]
    engine.run_step()
    assert engine.running == [coming.request]
    assert coming.request.num_computed >= 20
    engine.end_all()


@pytest.mark.parametrize("fault", FAULTS)
def test_an_epoch_that_was_not_committed_is_not_loaded(fault):
    engine, coming = engine_with(20, 1, 0, fault=fault)
    engine.submit(coming)
    engine.deliver(coming, num_uncommitted(coming))
    engine.run_step()
    assert engine.waiting == [coming.request]
    engine.deliver(coming, 1000)
    engine.run_step()
    assert engine.running == [coming.request]
    engine.end_all()


@pytest.mark.parametrize("who", ["scheduler", "rank"])
def test_an_engine_that_has_lost_the_service_reports_it(who):
    engine = DrivenEngine(is_calm=True)
    engine.half.step(as_scheduled([]))
    assert not engine.half.finish_step().is_cut_off
    assert all(rank.alive for rank in engine.ranks)
    if who == "scheduler":
        engine.service.alive = False
        assert not any(rank.alive for rank in engine.ranks)
    else:
        engine.half.reported(LoadReport(), is_cut_off=True)
    for _ in range(2):
        engine.half.step(as_scheduled([]))
        assert engine.half.finish_step().is_cut_off


def test_a_fetched_prefix_is_loaded_and_the_rest_is_computed():
    engine = DrivenEngine(is_calm=True)
    engine.begin_fetch(4, 3, 0, num_following=1)
    (coming,), (following,) = engine.coming, engine.waiting
    engine.submit(coming)
    engine.run_step()
    assert engine.waiting == [following, coming.request]
    engine.deliver(coming, 1000)
    engine.run_step()
    assert engine.running == [coming.request]
    # The other request waits until the loaded blocks are verified and released.
    assert engine.waiting == [following]
    engine.run_step()
    engine.run_step()
    assert following in engine.running
    assert following.num_computed >= 4 * SIZE
    engine.end_all()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_fetch_without_its_prefix_or_its_bytes_is_computed(is_dropped):
    engine = DrivenEngine(is_calm=True)
    engine.begin_fetch(4, 3, 2, num_following=1)
    (coming,), (following,) = engine.coming, engine.waiting
    engine.submit(coming)
    if is_dropped:
        engine.drop(coming)
    else:
        engine.deliver(coming, 1000)
    engine.run_step()
    assert coming.request in engine.running
    engine.run_step()
    engine.run_step()
    assert following in engine.running
    engine.end_all()


@pytest.mark.parametrize("skip", [0, 1])
def test_a_fetch_that_brings_fewer_blocks_is_loaded_as_far_as_it_goes(skip):
    engine = DrivenEngine(is_calm=True)
    if skip:
        engine.submit_plain([3] * SIZE + [99])
        engine.run_step()
    engine.begin_fetch(4, 3, skip, lacking=2)
    (coming,) = engine.coming
    engine.submit(coming)
    engine.deliver(coming, 1)
    engine.run_step()
    assert coming.request in engine.waiting
    engine.deliver(coming, 1000)
    # Two of the four blocks came. The step computes the others.
    assert engine.half.num_loadable_tokens(coming.request, skip * SIZE) == (2 - skip) * SIZE
    engine.run_step()
    assert coming.request in engine.running
    engine.end_all()


def committed_engine(*, is_calm=True, verifies_late=False):
    """Returns an engine whose requests wait for their loads, and one that can be loaded."""
    engine = DrivenEngine(is_calm=is_calm, verifies_late=verifies_late, requests_wait=True)
    engine.begin(20, 1, 0)
    (coming,) = engine.coming
    engine.deliver(coming, 1000)
    engine.submit(coming)
    return engine, coming.request


def waiting_engine(*, is_calm=True):
    """Returns an engine whose requests wait for their loads, and one that the ranks load now."""
    engine, request = committed_engine(is_calm=is_calm)
    if not is_calm:
        engine.alter_staging(0)
    engine.run_step(slow=True)
    assert engine.loading == [request]
    assert len(request.blocks) == LAYOUT.num_blocks(20)
    assert not engine.pool.cached
    return engine, request


def test_other_requests_run_while_one_waits_for_its_load():
    engine, request = waiting_engine()
    other = engine.submit_plain([7] * 9 + [50])
    # The other ranks end in this step; the request runs in the next.
    engine.run_step()
    assert engine.running == [other]
    assert request in engine.loading
    engine.run_step()
    assert request in engine.running
    assert request.num_computed == 21
    engine.end_all()


def test_a_request_whose_load_fails_ends_and_its_blocks_are_not_cached():
    engine, request = waiting_engine(is_calm=False)
    engine.run_step()
    assert request not in engine.loading + engine.running
    assert not engine.pool.cached
    assert all(block.ref_cnt == 0 for block in engine.pool.blocks)
    engine.end_all()


def test_a_request_that_is_aborted_while_it_waits_keeps_its_blocks_until_the_ranks_have_ended():
    engine, request = waiting_engine()
    engine.end(request)
    assert all(block.ref_cnt == 1 for block in request.blocks)
    engine.run_step()
    assert all(block.ref_cnt == 0 for block in request.blocks)
    engine.end_all()


# A rank loads 10 frames of a prompt of 20 tokens.
NUM_FRAMES = 10


def divided_engine(num_steps, *, is_calm=True):
    """Returns an engine that has copied two frames of a load in each of some steps."""
    engine, request = committed_engine(is_calm=is_calm)
    for _ in range(num_steps):
        engine.run_step(most_bytes=2 * BLOCK_BYTES)
        assert engine.loading == [request]
        assert not engine.pool.cached
    return engine, request


def test_a_load_is_divided_over_steps_in_which_others_run():
    engine, request = divided_engine(1)
    other = engine.submit_plain([7] * 9 + [50])
    for _ in range(NUM_FRAMES // 2 - 1):
        engine.run_step(most_bytes=2 * BLOCK_BYTES)
        assert other.num_outputs > 0
        assert engine.loading == [request]
    engine.run_step()
    assert request in engine.running
    engine.end_all()


def test_a_stream_is_loaded_in_one_step_if_the_step_has_time():
    engine, request = divided_engine(1)
    engine.run_step(most_bytes=2 * BLOCK_BYTES, stream_bytes=NUM_FRAMES * BLOCK_BYTES)
    engine.run_step(most_bytes=2 * BLOCK_BYTES)
    assert request in engine.running
    engine.end_all()


def test_loads_are_copied_one_after_the_other():
    engine, first = divided_engine(2)
    engine.begin(20, 2, 0)
    second = engine.coming[-1]
    engine.deliver(second, 1000)
    engine.submit(second)
    for _ in range(NUM_FRAMES // 2 - 2):
        engine.run_step(most_bytes=2 * BLOCK_BYTES)
        # Its claim is made when its copy can begin, because claims expire.
        assert not engine.service.receiver._table.live[second.handoff_id].shards[0].claimed
    engine.run_step(most_bytes=2 * BLOCK_BYTES)
    assert first in engine.running
    assert engine.loading == [second.request]
    engine.end_all()


@pytest.mark.parametrize("how", ["altered", "expired"])
def test_a_load_that_fails_midway_is_computed(how):
    engine, request = divided_engine(2, is_calm=False)
    if how == "altered":
        # Staging holds a layer of a shard after the other: this is in its last block.
        engine.alter_staging(20 * LAYERS - 1)
    else:
        engine.advance(40.0)
    for _ in range(NUM_FRAMES):
        engine.run_step(most_bytes=2 * BLOCK_BYTES)
        assert not engine.pool.cached
        if request not in engine.loading:
            break
    # The random engine ends a request whose load has failed; vLLM computes it.
    assert request not in engine.loading + engine.running
    assert all(block.ref_cnt == 0 for block in engine.pool.blocks)
    # The freed blocks are cleared before other requests get them.
    for token in range(30, 30 + len(engine.pool.free)):
        engine.submit_plain([token])
    engine.run_step()
    assert not engine.pool.free
    engine.end_all()


def test_a_request_aborted_midway_keeps_its_blocks_until_all_is_copied():
    engine, request = divided_engine(2)
    engine.end(request)
    num_steps = 0
    while any(block.ref_cnt for block in request.blocks):
        assert all(block.ref_cnt == 1 for block in request.blocks)
        engine.run_step(most_bytes=2 * BLOCK_BYTES)
        num_steps += 1
    assert num_steps == NUM_FRAMES // 2 - 2
    assert engine.service.receiver.num_live == 0
    engine.end_all()


@pytest.mark.parametrize("verifies_late", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_other_requests_run_while_the_service_does_not_answer(verifies_late, answers):
    engine, request = committed_engine(is_calm=False, verifies_late=verifies_late)
    engine.stop_or_start_service()
    engine.run_step()
    other = engine.submit_plain([7] * 9 + [50])
    for num_outputs in (1, 2):
        engine.run_step()
        assert other.num_outputs == num_outputs
        assert engine.loading == [request]
    if answers:
        engine.stop_or_start_service()
    else:
        engine.advance(5.0)
    engine.run_step()
    engine.run_step()
    assert request not in engine.loading
    assert (request in engine.running) == answers
    engine.end_all()
