"""How a handoff ends at the receiving engine: let go of once loaded, or failed with a reason."""

from types import SimpleNamespace

import pytest
from early_engine import EarlyEngine, as_scheduled, engine_with
from small_engine import LAYOUT, LIMITS, SHARDS, SIZE, TOKEN_BYTES

from baton.kvtransfer.connector import scheduler_half
from baton.kvtransfer.receiving import ReceiveState
from baton.v1 import kv_transfer_pb2 as pb


def test_what_was_loaded_is_let_go_of_also_when_its_request_ends_with_the_same_step():
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.tell(coming)
    engine.run_step(num_aborted=1)
    assert not engine.running
    engine.run_step()
    assert engine.service.receiver.num_live == 0
    engine.teardown()


def test_what_was_loaded_is_let_go_of_by_a_step_that_was_made_before():
    """The request is taken back while its first step runs, and vLLM makes one that says so.

    No other follows: the next request may come in an hour.
    """
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.tell(coming)
    scheduled = engine.schedule()
    work = engine.half.step(as_scheduled(scheduled))
    engine.end(coming.request)
    last = engine.half.step(as_scheduled([]))
    engine.take_output(scheduled, *engine.work(scheduled, work, []))
    assert engine.service.receiver.num_live == 1
    engine.take_output([], *engine.work([], last, []))
    assert engine.service.receiver.num_live == 0
    engine.teardown()


def test_a_load_that_begins_when_the_commit_is_about_to_expire_ends_as_one(monkeypatch):
    engine, coming = engine_with(20, 1, 0)
    service = engine.service
    clock = SimpleNamespace(monotonic=lambda: service.now)
    monkeypatch.setattr(scheduler_half, "time", clock)
    engine.deliver(coming, 1000)
    engine.run_step()
    service.now = LIMITS.commit_ttl_s - 0.5
    engine.tell(coming)
    scheduled = engine.schedule()
    work = engine.half.step(as_scheduled(scheduled))
    service.now += 1
    service.told(service.receiver.expire(service.now))
    engine.take_output(scheduled, *engine.work(scheduled, work, []))
    engine.run_step()
    assert service.receiver.num_live == 0
    assert service.receiver.statistics.num_failed == 0
    engine.teardown()


@pytest.mark.parametrize("count", [0, 10])
def test_a_handoff_that_is_not_committed_in_time_has_failed(monkeypatch, count):
    engine, coming = engine_with(20, 1, 0)
    service = engine.service
    monkeypatch.setattr(scheduler_half, "time", SimpleNamespace(monotonic=lambda: service.now))
    engine.deliver(coming, count)
    engine.run_step()
    engine.tell(coming)
    engine.run_step()
    assert engine.waiting == [coming.request]
    service.now = 2e9
    engine.run_step()
    assert engine.running == [coming.request]
    (ended,) = service.receiver.known()
    assert (ended.state, ended.reason) == (ReceiveState.FAILED, pb.REFUSAL_REASON_EXPIRED)
    engine.teardown()


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("count", [0, 10, 1000])
def test_a_handoff_whose_request_ends_before_it_is_loaded_is_cancelled(count, is_told):
    """Also one that was claimed ahead, when it was committed."""
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, count)
    engine.run_step()
    if is_told:
        engine.tell(coming)
    engine.end(coming.request)
    engine.run_step()
    (ended,) = engine.service.receiver.known()
    assert (ended.state, ended.reason) == (ReceiveState.FAILED, pb.REFUSAL_REASON_CANCELLED)
    engine.teardown()


@pytest.mark.parametrize(
    ("how", "announced", "reason"),
    [
        ("altered", True, pb.REFUSAL_REASON_CHECKSUM),
        ("altered", False, pb.REFUSAL_REASON_CHECKSUM),
        ("another prompt", True, pb.REFUSAL_REASON_INCOMPLETE),
        ("another prompt", False, pb.REFUSAL_REASON_INCOMPLETE),
        # What is claimed ahead is not asked for.
        ("no answer", False, pb.REFUSAL_REASON_EXPIRED),
    ],
)
@pytest.mark.parametrize("verifies_late", [True, False])
def test_a_handoff_that_some_rank_does_not_load_has_failed_and_says_why(
    monkeypatch, how, announced, reason, verifies_late
):
    engine = EarlyEngine()
    engine.starts(is_calm=False, verifies_late=verifies_late)
    engine.submit_one(20, 1, 0, announced=announced)
    (coming,) = engine.coming
    if how == "another prompt":
        coming.messages = engine.sent(coming.handoff_id, [1] * 17, 0, None)
    engine.deliver(coming, 1000)
    if announced:
        engine.tell(coming)
    if how == "altered":
        # The last rank's, behind the others' whose loads are fine.
        engine.staging_is_altered(LAYOUT.handoff_bytes(5) // TOKEN_BYTES - SIZE)
    if how == "no answer":
        claim = engine.service.claim
        last = SHARDS - 1
        monkeypatch.setattr(
            engine.service,
            "claim",
            lambda name, shard: None if shard == last else claim(name, shard),
        )
    engine.run_step()
    engine.run_step()
    assert not engine.running
    (ended,) = engine.service.receiver.known()
    assert (ended.state, ended.reason) == (ReceiveState.FAILED, reason)
    engine.teardown()
