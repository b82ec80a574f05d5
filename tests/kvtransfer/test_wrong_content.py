"""What is wrong in blocks is found by nobody: not by later requests, nor at other workers."""

import pytest
from early_engine import NUM_OUTPUTS, as_scheduled, engine_with, num_uncommitted
from small_engine import SIZE, Request


@pytest.mark.parametrize("how", ["is sent again", "is cancelled", "waits for blocks"])
def test_what_came_early_and_was_wrong_is_not_left_behind_in_blocks(how):
    """Attention on CPUs multiplies what is in a block behind its last token by nothing."""
    engine, coming = engine_with(20, 1, 0, fault="foreign bytes")
    engine.deliver(coming, num_uncommitted(coming))
    engine.run_step()
    if how == "is sent again":
        engine.deliver(coming, 1000)
        engine.tell(coming)
    elif how == "is cancelled":
        engine.abort(coming)
    else:
        engine.run_step(num_free=0)
    # It gets the blocks that went back last, and fills a part of each.
    other = engine.submit_plain([9])
    for _ in range(NUM_OUTPUTS):
        engine.run_step()
    assert other.num_outputs == NUM_OUTPUTS
    engine.teardown()


@pytest.mark.parametrize("verifies_late", [False, True])
def test_what_was_computed_on_a_load_that_failed_is_not_found(verifies_late):
    engine, coming = engine_with(20, 1, 0, is_calm=False, verifies_late=verifies_late)
    engine.deliver(coming, 1000)
    engine.tell(coming)
    engine.staging_is_altered(0)
    # Finds its first blocks, which this very step loads, and is gone when they turn out wrong.
    other = engine.submit_plain([1] * 14 + [9] * 8)
    engine.run_step(num_aborted=1)
    assert other.num_computed == 3 * SIZE
    assert not engine.running
    # Nor in what is left in its blocks: each of these gets one.
    for token in range(30, 30 + len(engine.pool.free)):
        engine.submit_plain([token])
    engine.run_step()
    assert not engine.pool.free
    engine.teardown()


@pytest.mark.parametrize("verifies_late", [False, True])
def test_what_was_computed_ahead_on_a_load_that_failed_is_not_found(verifies_late):
    engine, coming = engine_with(20, 1, 0, is_calm=False, verifies_late=verifies_late)
    engine.deliver(coming, 1000)
    engine.tell(coming)
    engine.staging_is_altered(0)
    scheduled = engine.schedule()
    loading = engine.half.step(as_scheduled(scheduled))
    other = engine.submit_plain([1] * 14 + [9] * 8)
    scheduled_next = engine.schedule(only_waiting=True)
    assert scheduled_next == [other]
    assert other.num_computed == 3 * SIZE
    following = engine.half.step(as_scheduled(scheduled_next))
    done = [engine.work(scheduled, loading, []), engine.work(scheduled_next, following, [])]
    engine.end(other)
    engine.take_output(scheduled, *done[0])
    engine.take_output(scheduled_next, *done[1])
    assert not engine.running
    engine.teardown()


def test_what_is_wrong_and_was_kept_for_a_handoff_is_cleared_when_it_goes_to_somebody_else():
    engine, coming = engine_with(20, 1, 0, is_calm=False, verifies_late=True)
    engine.deliver(coming, 1000)
    engine.tell(coming)
    engine.staging_is_altered(0)
    # Computes a block from what is loaded, and a prompt that comes next has it in common.
    engine.submit_plain([1] * 18 + [2] * 4)
    scheduled = engine.schedule()
    loading = engine.half.step(as_scheduled(scheduled))
    engine.submit_one(26, 1, 0, announced=True)
    engine.deliver(engine.coming[-1], 10)
    assert not engine.schedule(only_waiting=True)
    following = engine.half.step(as_scheduled([]))
    assert following.early.begun
    done = [engine.work(scheduled, loading, []), engine.work([], following, [])]
    engine.take_output(scheduled, *done[0])
    engine.take_output([], *done[1])
    assert not engine.running
    engine.abort(engine.coming[-1])
    for token in range(30, 30 + len(engine.pool.free)):
        engine.submit_plain([token])
    engine.run_step()
    assert not engine.pool.free
    engine.teardown()


@pytest.mark.parametrize("when", ["with it", "before its output", "after it"])
def test_what_a_load_brings_is_handed_on_once_it_is_known_to_be_right(when):
    """Whoever gets it would find no fault: its checksums are those of what was sent."""
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.tell(coming)
    handoff_id, tokens = bytes(16), [1] * 14 + [9] * 8
    send = {"handoff_id": handoff_id.hex(), "offset": 0, "num_tokens": 22, "skip_tokens": 0}
    sending = Request("sends", tokens, {"baton_send": send})
    scheduled, steps = [], []
    if when != "with it":
        scheduled = engine.schedule()
        steps.append(engine.half.step(as_scheduled(scheduled)))
    if when == "after it":
        engine.take_output(scheduled, *engine.work(scheduled, steps[0], []))
    engine.waiting.append(sending)
    engine.half.add(sending)
    steps.append(engine.half.step(as_scheduled(engine.schedule(), most_tokens=1)))
    assert sending.num_computed == 3 * SIZE
    pushed = [block for push in steps[-1].pushes for block in push.block_ids]
    if when == "after it":
        assert pushed == [block.block_id for block in sending.blocks[:3]]
        assert not engine.service.given_up
    else:
        assert not pushed
        assert steps[-1].ended == engine.service.given_up == [handoff_id]
    engine.end(sending)
    assert len(engine.service.given_up) == 1


def test_what_a_step_made_ahead_has_loaded_wrong_is_found_with_its_output():
    engine, coming = engine_with(20, 1, 0, is_calm=False)
    engine.deliver(coming, 1000)
    engine.staging_is_altered(0)
    engine.submit_plain([9] * SIZE)
    engine.run_step([("tell", coming)], ahead=True)
    assert coming.request not in engine.running
    engine.teardown()
