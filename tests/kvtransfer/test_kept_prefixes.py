"""Blocks that a fetch leaves out stay on the device until the fetch comes or its time is over."""

from types import SimpleNamespace

import pytest

from baton.kvtransfer.connector.handoffs import handoff_scheduler
from baton.kvtransfer.service.receive_state import ReceiveState
from baton.runtime.kv.fetches import MAX_KEPT_SHARE
from tests.kvtransfer.driven_engine import DrivenEngine, as_scheduled
from tests.kvtransfer.small_engine import NUM_BLOCKS, SIZE


def num_held(engine):
    return sum(1 for block in engine.pool.blocks if block.ref_cnt)


def waiting_engine(num_cached, *skips):
    """An engine that has cached blocks, and requests whose fetches leave out some of them."""
    engine = DrivenEngine(is_calm=True)
    request = engine.submit_plain([3] * (num_cached * SIZE) + [9])
    while request in [*engine.waiting, *engine.running]:
        engine.run_step()
    assert not num_held(engine)
    for skip in skips:
        engine.begin_fetch(4, 3, skip)
        engine.submit(engine.coming[-1])
    return engine


def evict(engine):
    """Gives every free block to another request for a moment."""
    engine.pool.free_blocks(engine.pool.get_new_blocks(len(engine.pool.free)))


def test_a_fetch_is_loaded_behind_blocks_that_would_have_been_evicted():
    engine = waiting_engine(2, 2)
    (coming,) = engine.coming
    assert num_held(engine) == 2
    engine.run_step()
    evict(engine)
    engine.deliver(coming, 1000)
    engine.run_step()
    assert coming.request in engine.running
    # Two blocks were kept, and two were loaded; the step computed the rest.
    assert coming.request.num_computed >= 4 * SIZE
    engine.run_step()
    (ended,) = engine.service.receiver.known()
    assert ended.state is ReceiveState.RELEASED
    engine.end_all()


@pytest.mark.parametrize("way", ["aborted", "dropped", "too late"])
def test_blocks_are_let_go_when_the_fetch_does_not_come(monkeypatch, way):
    engine = waiting_engine(2, 2)
    (coming,) = engine.coming
    assert num_held(engine) == 2
    if way == "aborted":
        engine.abort(coming)
    elif way == "dropped":
        engine.drop(coming)
        assert engine.half.num_loadable_tokens(coming.request, 2 * SIZE) == 0
    else:
        # A request that is ahead may need the room: the one behind it is not asked.
        monkeypatch.setattr(handoff_scheduler, "time", SimpleNamespace(monotonic=lambda: 2e9))
        monkeypatch.setattr(engine, "schedule_waiting", lambda scheduled: None)
        engine.run_step()
    assert not num_held(engine)
    monkeypatch.undo()
    engine.end_all()


def test_only_a_part_of_the_cache_is_kept():
    engine = waiting_engine(3, 3, 3)
    # The second request's blocks are those of the first one, but count as if they were others.
    assert num_held(engine) == 3 <= MAX_KEPT_SHARE * NUM_BLOCKS < 6
    assert [block.ref_cnt for block in engine.pool.blocks if block.ref_cnt] == [1, 1, 1]
    engine.half.step(as_scheduled([]))
    assert num_held(engine) == 3
    engine.half.finish_step()
    engine.end_all()


def test_nothing_is_kept_of_a_prefix_with_a_missing_block():
    engine = waiting_engine(1, 2)
    assert not num_held(engine)
    engine.end_all()
