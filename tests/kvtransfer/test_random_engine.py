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
from random_engine import FAULTS, RandomEngine, as_scheduled, engine_with, num_uncommitted
from small_engine import LAYOUT, SIZE

from baton.kvtransfer.connector.handoff_step import LoadReport
from baton.kvtransfer.connector.scheduler_half import CUT_OFF

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
    engine.teardown()


def test_a_request_without_room_keeps_its_handoff():
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    engine.run_step(num_free=0)
    assert engine.waiting == [coming.request]
    engine.run_step()
    assert engine.running == [coming.request]
    assert coming.request.num_computed >= 20
    engine.teardown()


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
    engine.teardown()


@pytest.mark.parametrize("who", ["scheduler", "rank"])
def test_an_engine_that_has_lost_the_service_reports_it(who):
    engine = RandomEngine()
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


def test_a_fetched_prefix_is_loaded_and_the_rest_is_computed():
    engine = RandomEngine()
    engine.starts(is_calm=True)
    engine.begin_fetch_one(4, 3, 0, num_following=1)
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
    engine.teardown()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_fetch_without_its_prefix_or_its_bytes_is_computed(is_dropped):
    engine = RandomEngine()
    engine.starts(is_calm=True)
    engine.begin_fetch_one(4, 3, 2, num_following=1)
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
    engine.teardown()


@pytest.mark.parametrize("skip", [0, 1])
def test_a_fetch_that_brings_fewer_blocks_is_loaded_as_far_as_it_goes(skip):
    engine = RandomEngine()
    engine.starts(is_calm=True)
    if skip:
        engine.submit_plain([3] * SIZE + [99])
        engine.run_step()
    engine.begin_fetch_one(4, 3, skip, lacking=2)
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
    engine.teardown()


def waiting_engine(*, is_calm=True):
    """Returns an engine whose requests wait for their loads, and one that the ranks load now."""
    engine = RandomEngine()
    engine.starts(is_calm=is_calm, requests_wait=True)
    engine.begin_one(20, 1, 0)
    (coming,) = engine.coming
    engine.deliver(coming, 1000)
    engine.submit(coming)
    if not is_calm:
        engine.staging_is_altered(0)
    engine.run_step(slow=True)
    assert engine.loading == [coming.request]
    assert len(coming.request.blocks) == LAYOUT.num_blocks(20)
    assert not engine.pool.cached
    return engine, coming.request


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
    engine.teardown()


def test_a_request_whose_load_fails_ends_and_its_blocks_are_not_cached():
    engine, request = waiting_engine(is_calm=False)
    engine.run_step()
    assert request not in engine.loading + engine.running
    assert not engine.pool.cached
    assert all(block.ref_cnt == 0 for block in engine.pool.blocks)
    engine.teardown()


def test_a_request_that_is_aborted_while_it_waits_keeps_its_blocks_until_the_ranks_have_ended():
    engine, request = waiting_engine()
    engine.end(request)
    assert all(block.ref_cnt == 1 for block in request.blocks)
    engine.run_step()
    assert all(block.ref_cnt == 0 for block in request.blocks)
    engine.teardown()
