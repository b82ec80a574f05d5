"""Wrong bytes in blocks reach no other request and no other worker."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from baton.kvtransfer.connector.handoffs import handoff_scheduler
from baton.kvtransfer.connector.handoffs.handoff_scheduler import HandoffScheduler
from baton.kvtransfer.connector.handoffs.rank_handoffs import RankHandoffs
from baton.kvtransfer.connector.request_params import encode
from baton.kvtransfer.handoff_orders import SendHandoff
from baton.runtime.kv.kv_groups import KvGroup
from tests.kvtransfer.driven_engine import as_scheduled, engine_with
from tests.kvtransfer.small_engine import (
    LAYOUT,
    NUM_BLOCKS,
    SIZE,
    TOKEN_BYTES,
    Pool,
    Request,
    Service,
)

BLOCK_BYTES = SIZE * TOKEN_BYTES
# Layers that keep every token, and layers with a recurrent state.
WITH_STATES = dataclasses.replace(LAYOUT, tp_size=1, num_replicas=1).with_groups(
    [
        KvGroup("full", 1, 1, SIZE, BLOCK_BYTES),
        KvGroup("state", 1, 1, SIZE, BLOCK_BYTES, table=1),
    ]
)


@pytest.mark.parametrize("verifies_late", [False, True])
def test_blocks_computed_from_a_failed_load_leave_the_prefix_cache(verifies_late):
    engine, coming = engine_with(20, 1, 0, is_calm=False, verifies_late=verifies_late)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    engine.alter_staging(0)
    # This request shares the blocks that this step loads, and ends before they prove wrong.
    other = engine.submit_plain([1] * 14 + [9] * 8)
    engine.run_step(num_aborted=1)
    assert other.num_computed == 3 * SIZE
    assert not engine.running
    # Each of these requests gets one of the freed blocks, and must not read old bytes.
    for token in range(30, 30 + len(engine.pool.free)):
        engine.submit_plain([token])
    engine.run_step()
    assert not engine.pool.free
    engine.end_all()


@pytest.mark.parametrize("verifies_late", [False, True])
def test_blocks_computed_ahead_from_a_failed_load_leave_the_prefix_cache(verifies_late):
    engine, coming = engine_with(20, 1, 0, is_calm=False, verifies_late=verifies_late)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    engine.alter_staging(0)
    scheduled = engine.schedule()
    loading = engine.half.step(as_scheduled(scheduled))
    other = engine.submit_plain([1] * 14 + [9] * 8)
    scheduled_next = engine.schedule(only_waiting=True)
    assert scheduled_next == [other]
    assert other.num_computed == 3 * SIZE
    following = engine.half.step(as_scheduled(scheduled_next))
    done = [engine.work(scheduled, loading, []), engine.work(scheduled_next, following, [])]
    engine.end(other)
    engine.take_output(scheduled, done[0])
    engine.take_output(scheduled_next, done[1])
    assert not engine.running
    engine.end_all()


@pytest.mark.parametrize("when", ["with it", "before its output", "after it"])
def test_loaded_blocks_are_handed_on_only_after_they_are_verified(when):
    """The next receiver could not find the fault: its checksums would match the wrong bytes."""
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    handoff_id, tokens = bytes(16), [1] * 14 + [9] * 8
    sending = Request("sends", tokens, encode(send=SendHandoff(handoff_id, 0, 22)))
    scheduled, steps = [], []
    if when != "with it":
        scheduled = engine.schedule()
        steps.append(engine.half.step(as_scheduled(scheduled)))
    if when == "after it":
        engine.take_output(scheduled, engine.work(scheduled, steps[0], []))
    engine.waiting.append(sending)
    engine.half.add(sending)
    steps.append(engine.half.step(as_scheduled(engine.schedule(), most_tokens=1)))
    assert sending.num_computed == 3 * SIZE
    parts = [part for save in steps[-1].saves for part in save.parts]
    saved = [block for part in parts for block in part.block_ids]
    if when == "after it":
        assert saved == [block.block_id for block in sending.blocks[:3]]
    else:
        assert not saved
    # A later step saves the blocks that were not verified; there is none here.
    assert not engine.service.given_up
    engine.end(sending)
    assert engine.service.given_up == [handoff_id]


def test_a_wrong_load_in_a_step_scheduled_ahead_is_found_with_its_output():
    engine, coming = engine_with(20, 1, 0, is_calm=False)
    engine.deliver(coming, 1000)
    engine.alter_staging(0)
    engine.submit_plain([9] * SIZE)
    engine.run_step([("submit", coming)], ahead=True)
    assert coming.request not in engine.running
    engine.end_all()


class StatesEngine:
    """The scheduler and one rank of an engine whose model has states.

    Attributes:
        caches: The rank's caches of the layer with attention and of the one with states.
    """

    def __init__(self):
        service, self.pool = Service(), Pool()
        self.half = HandoffScheduler(service, WITH_STATES)
        self.half.bind(self.pool)
        self.rank = RankHandoffs("", service, 0, WITH_STATES)
        self.caches = [
            torch.full((NUM_BLOCKS, 1, tokens, BLOCK_BYTES // tokens), 7, dtype=torch.uint8)
            for tokens in (SIZE, 1)
        ]
        self.rank.register({str(layer): cache for layer, cache in enumerate(self.caches)})

    def step(self, running=(), early=()):
        """Makes a step.

        Args:
            running: Its requests, each with its attention blocks and its states.
            early: Blocks that vLLM fills with ones before the connector gets its orders.
        """
        output = as_scheduled([request for request, _ in running])
        output.kv_cache_block_copies = [
            SimpleNamespace(dst_block_id=block.block_id)
            for block in early
            if not any(block in states for _, (_, states) in running)
        ]
        tables = {
            request.request_id: tuple([block.block_id for block in ids] for ids in blocks)
            for request, blocks in running
        }
        output.kv_connector_block_state = SimpleNamespace(get_block_ids=tables.__getitem__)
        orders = self.half.step(output)
        for block in early:
            for cache in self.caches:
                cache[block.block_id] = 1
        self.rank.begin_step(orders)
        self.half.finish_step()

    def values(self, block):
        """Returns the values in a block."""
        return {one for cache in self.caches for one in cache[block.block_id].unique().tolist()}

    def free_wrong(self, count):
        """Returns free blocks of wrong content, and those of them that are not cleared yet."""
        blocks = self.pool.get_new_blocks(count)
        self.pool.free_blocks(blocks)
        return blocks, self.half.clear([block.block_id for block in blocks])


@pytest.mark.parametrize("kind", ["state", "copy of a shared block"])
def test_a_wrong_block_that_vllm_fills_before_the_connector_is_cleared_when_it_is_free(kind):
    engine = StatesEngine()
    blocks, uncleared = engine.free_wrong(3)
    filled, other = engine.pool.get_new_blocks(2)
    [free] = set(blocks) - {filled, other}
    tables = ([other], [filled]) if kind == "state" else ([other, filled], [])
    engine.step([(Request("runs", [1, 2], {}, num_computed=1), tables)], early=[filled])
    assert [engine.values(block) for block in (filled, other, free)] == [{1}, {0}, {0}]
    # The request still holds the block.
    engine.step([(Request("runs", [1, 2, 3], {}, num_computed=2), tables)])
    assert engine.values(filled) == {1}
    engine.pool.free_blocks([filled, other])
    # The engine frees blocks after a step, whose end finds them.
    engine.step()
    assert uncleared == {filled.block_id}
    assert engine.half.has_work
    engine.step()
    assert engine.values(filled) == {0}
    assert not uncleared
    assert not engine.half.has_work


def test_a_wrong_block_is_cleared_for_a_request_without_a_state():
    engine = StatesEngine()
    _, uncleared = engine.free_wrong(2)
    state, other = engine.pool.get_new_blocks(2)
    engine.step([(Request("begins", [1, 2], {}), ([other], [state]))])
    assert engine.values(state) == engine.values(other) == {0}
    assert not uncleared


def test_a_step_clears_a_bounded_number_of_free_blocks(monkeypatch):
    """Otherwise all streams would wait until the whole cache is overwritten."""
    monkeypatch.setattr(handoff_scheduler, "_CLEARED_BYTES", 3 * 2 * BLOCK_BYTES)
    engine = StatesEngine()
    blocks, uncleared = engine.free_wrong(10)
    counts = []
    while uncleared:
        assert engine.half.has_work
        engine.step()
        counts.append([engine.values(block) for block in blocks].count({0}))
    assert counts == [3, 6, 9, 10]
    assert not engine.half.has_work


def test_a_step_clears_all_wrong_blocks_that_its_requests_get(monkeypatch):
    monkeypatch.setattr(handoff_scheduler, "_CLEARED_BYTES", 3 * 2 * BLOCK_BYTES)
    engine = StatesEngine()
    blocks, uncleared = engine.free_wrong(NUM_BLOCKS - 1)
    # Not the blocks whose turn it is.
    got = blocks[9:14]
    for block in got:
        del engine.pool.free[block]
        block.ref_cnt = 1
    tables = (got[:-1], got[-1:])
    engine.step([(Request("begins", [1, 2], {}), tables)])
    assert all(engine.values(block) == {0} for block in got)
    assert uncleared == {block.block_id for block in blocks if block not in got}


def test_a_deletion_does_not_wait_for_blocks_of_later_ones(monkeypatch):
    monkeypatch.setattr(handoff_scheduler, "_CLEARED_BYTES", 3 * 2 * BLOCK_BYTES)
    engine = StatesEngine()
    last = engine.pool.get_new_blocks(NUM_BLOCKS - 1)[-6:]
    engine.pool.free_blocks(last)
    first = engine.half.clear([block.block_id for block in last])
    others = engine.pool.blocks[1:-6]
    engine.step()
    engine.pool.free_blocks(others)
    everything = [block.block_id for block in engine.pool.blocks[1:]]
    second = engine.half.clear(everything)
    assert (len(first), len(second)) == (3, NUM_BLOCKS - 1)
    engine.step()
    assert not first
    assert second == set(everything) - {block.block_id for block in last[3:]}


def test_a_large_cache_is_cleared_in_a_bounded_number_of_steps(monkeypatch):
    monkeypatch.setattr(handoff_scheduler, "_CLEARED_BYTES", 1)
    monkeypatch.setattr(handoff_scheduler, "_MOST_CLEARING_STEPS", NUM_BLOCKS / 5)
    engine = StatesEngine()
    _, uncleared = engine.free_wrong(11)
    counts = []
    while uncleared:
        engine.step()
        counts.append(len(uncleared))
    assert counts == [6, 1, 0]
