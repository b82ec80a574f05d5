"""Wrong bytes in blocks reach no other request and no other worker."""

import pytest
from driven_engine import as_scheduled, engine_with
from small_engine import SIZE, Request

from baton.kvtransfer.connector.request_params import encode
from baton.kvtransfer.handoff_orders import SendHandoff


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
