"""A decode worker hears of a request together with its prefill worker, where that is of use."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.runtime.block_hashes import block_hashes
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP = common_pb2.FINISH_REASON_STOP
EARLY = cluster_pb2.Capacity(
    kv_tokens=65536,
    block_size_tokens=16,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_receive_bytes=2**20,
    supports_forced_tokens=True,
    loads_early=True,
)


@pytest.fixture
def world(new_world):
    """One worker in each pool, of an engine that loads early."""
    world = new_world()
    world.attach("p", PREFILL)
    world.attach("d", DECODE, capacity=EARLY)
    return world


def sent(world, worker, kind):
    return [command for command in world.commands[worker] if isinstance(command, kind)]


def test_the_decode_worker_gets_the_prompt_once(world, out):
    world.submit()
    (prefill,) = sent(world, "p", cluster_pb2.PrefillCommand)
    (expect,) = sent(world, "d", cluster_pb2.ExpectCommand)
    assert expect.spec == prefill.spec
    assert expect.handoff == prefill.handoff
    assert expect.num_coming_tokens == 1
    world.step("p", out("r1", [7], text="a", finish=0))
    (decode,) = sent(world, "d", cluster_pb2.DecodeCommand)
    assert decode.expected
    assert not decode.HasField("handoff")
    assert (list(decode.spec.prompt_token_ids), list(decode.spec.known_token_ids)) == ([], [7])
    assert decode.spec.known_text_chars == 1
    assert decode.spec.sampling == prefill.spec.sampling


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 1},
        {"max_tokens": 9, "temperature": 1.0, "seed": 3},
    ],
    ids=["nothing follows", "state is replayed from the prompt"],
)
def test_what_is_of_no_use_is_not_announced(world, out, sampling):
    world.submit(sampling=sampling)
    assert not sent(world, "d", cluster_pb2.ExpectCommand)
    if sampling["max_tokens"] > 1:
        world.step("p", out("r1", [7], finish=0))
        (decode,) = sent(world, "d", cluster_pb2.DecodeCommand)
        assert not decode.expected
        assert decode.spec.prompt_token_ids
        assert decode.HasField("handoff")


def test_a_request_that_ends_with_its_first_token_is_taken_back(world, out):
    world.submit()
    (expect,) = sent(world, "d", cluster_pb2.ExpectCommand)
    world.step("p", out("r1", [7], finish=STOP))
    (cancel,) = sent(world, "d", cluster_pb2.CancelCommand)
    assert (cancel.attempt, cancel.handoff_id) == (expect.spec.attempt, expect.handoff.handoff_id)


def test_a_cancelled_request_is_taken_back(world):
    to = world.submit()
    world.handle(ev.StreamCancelled(to))
    assert sent(world, "d", cluster_pb2.CancelCommand)


def test_a_recovered_request_is_announced_with_the_tokens_it_has(world, out):
    """Its prefill brings no token: what is announced is all there will be."""
    world.submit()
    world.step("p", out("r1", [7], text="a", finish=0))
    world.step("d", out("r1", [8], offset=1, text="b"))
    world.attach("d2", DECODE, capacity=EARLY)
    world.handle(ev.WorkerLost("d", "was killed"))
    (expect,) = sent(world, "d2", cluster_pb2.ExpectCommand)
    assert list(expect.spec.known_token_ids) == [7, 8]
    assert expect.num_coming_tokens == 0
    world.step("p", out("r1", [5], finish=0, attempt=2))
    (decode,) = sent(world, "d2", cluster_pb2.DecodeCommand)
    assert decode.expected
    assert list(decode.spec.known_token_ids) == [7, 8]


@pytest.mark.parametrize("first_token", [False, True], ids=["before", "after"])
def test_a_handoff_that_failed_at_its_sender_is_not_waited_for(world, out, first_token):
    world.submit()
    (expect,) = sent(world, "d", cluster_pb2.ExpectCommand)
    if first_token:
        world.step("p", out("r1", [7], text="a", finish=0))
    report = cluster_pb2.HandoffReport(
        request_id="r1",
        attempt=1,
        handoff_id=expect.handoff.handoff_id,
        state=kv_transfer_pb2.HANDOFF_STATE_FAILED,
        detail="no room",
    )
    world.handle(ev.WorkerHandoff(("p", 1), report))
    (cancel,) = sent(world, "d", cluster_pb2.CancelCommand)
    assert (cancel.attempt, cancel.handoff_id) == (0, expect.handoff.handoff_id)
    # It goes on all the same.
    if not first_token:
        world.step("p", out("r1", [7], text="a", finish=0))
    assert sent(world, "d", cluster_pb2.DecodeCommand)


def test_how_a_receiver_saw_it_end_changes_nothing(world, out):
    world.submit()
    (expect,) = sent(world, "d", cluster_pb2.ExpectCommand)
    report = cluster_pb2.HandoffReport(
        request_id="r1",
        attempt=1,
        handoff_id=expect.handoff.handoff_id,
        state=kv_transfer_pb2.HANDOFF_STATE_FAILED,
    )
    world.handle(ev.WorkerHandoff(("d", 1), report))
    assert not sent(world, "d", cluster_pb2.CancelCommand)


def test_what_the_decode_worker_has_is_left_out_of_the_handoff(world, out):
    world.attach("d", DECODE, incarnation=2, capacity=EARLY)
    first = world.submit(num_prompt=40)
    (sent_first,) = sent(world, "p", cluster_pb2.PrefillCommand)
    assert sent_first.handoff.skip_tokens == 0
    hashes = block_hashes(sent_first.spec.prompt_token_ids, 16)
    world.step("p", out("r1", [7], finish=STOP))
    assert world.last(first).reason == STOP
    held = cluster_pb2.CacheEvents(stored=hashes)
    world.handle(ev.WorkerCache(("d", 2), held))
    world.submit(num_prompt=40)
    second = sent(world, "p", cluster_pb2.PrefillCommand)[-1]
    expected = sent(world, "d", cluster_pb2.ExpectCommand)[-1]
    assert second.spec.prompt_token_ids == sent_first.spec.prompt_token_ids
    assert (second.handoff.num_tokens, second.handoff.skip_tokens) == (40, 32)
    assert expected.handoff == second.handoff


def test_something_is_left_to_be_handed_over(world, out):
    """The decode worker computes at least one token, which needs what was before it."""
    world.submit(num_prompt=32)
    (first,) = sent(world, "p", cluster_pb2.PrefillCommand)
    world.step("p", out("r1", [7], finish=STOP))
    held = cluster_pb2.CacheEvents(stored=block_hashes(first.spec.prompt_token_ids, 16))
    world.handle(ev.WorkerCache(("d", 1), held))
    world.submit(num_prompt=32)
    second = sent(world, "p", cluster_pb2.PrefillCommand)[-1]
    assert (second.handoff.num_tokens, second.handoff.skip_tokens) == (32, 16)


def prefix_gone(world, attempt):
    gone = cluster_pb2.RequestOutput(request_id="r2", attempt=attempt)
    gone.prefix_gone.SetInParent()
    world.step("d", gone)


def with_a_stale_hint(world, out):
    """A second request whose handoff left out what its decode worker says it has dropped."""
    world.submit(num_prompt=40)
    (first,) = sent(world, "p", cluster_pb2.PrefillCommand)
    hashes = block_hashes(first.spec.prompt_token_ids, 16)
    world.step("p", out("r1", [7], finish=STOP))
    world.handle(ev.WorkerCache(("d", 1), cluster_pb2.CacheEvents(stored=hashes)))
    to = world.submit(num_prompt=40)
    assert sent(world, "p", cluster_pb2.PrefillCommand)[-1].handoff.skip_tokens == 32
    world.step("p", out("r2", [7], text="a", finish=0))
    world.handle(ev.WorkerCache(("d", 1), cluster_pb2.CacheEvents(removed=hashes)))
    return to


def test_a_request_whose_prefix_is_gone_is_handed_over_again_whole(world, out):
    to = with_a_stale_hint(world, out)
    stale = sent(world, "d", cluster_pb2.ExpectCommand)[-1]
    prefix_gone(world, attempt=1)
    again = sent(world, "p", cluster_pb2.PrefillCommand)[-1]
    assert again.spec.attempt == 2
    assert again.handoff.handoff_id != stale.handoff.handoff_id
    # The first token is known to the caller, and is handed over with the prompt.
    assert (again.handoff.num_tokens, again.handoff.skip_tokens) == (40, 0)
    world.step("p", out("r2", [], attempt=2, finish=0))
    world.step("d", out("r2", [8], text="b", offset=1, attempt=2, finish=STOP))
    assert world.tokens(to) == [7, 8]
    assert world.core.stats.num_prefixes_gone == 1
    # Nobody failed.
    assert world.core.stats.num_recoveries == 0


def test_a_prefix_is_left_out_at_most_once(world, out):
    with_a_stale_hint(world, out)
    first = sent(world, "p", cluster_pb2.PrefillCommand)[0]
    # Somebody has brought it back meanwhile: it may go again.
    hashes = block_hashes(first.spec.prompt_token_ids, 16)
    world.handle(ev.WorkerCache(("d", 1), cluster_pb2.CacheEvents(stored=hashes)))
    prefix_gone(world, attempt=1)
    assert sent(world, "p", cluster_pb2.PrefillCommand)[-1].handoff.skip_tokens == 0
