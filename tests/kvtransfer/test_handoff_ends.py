"""How a handoff ends at the receiving engine: released after its load, or failed with a reason."""

from types import SimpleNamespace

import pytest
from early_engine import EarlyEngine, as_scheduled, engine_with
from small_engine import LAYOUT, LIMITS, SHARDS, SIZE, TOKEN_BYTES

from baton.kvtransfer.connector import scheduler_half
from baton.kvtransfer.receiving import ReceiveState
from baton.v1 import kv_transfer_pb2 as pb


def test_a_loaded_handoff_is_released_even_if_its_request_ends_in_that_step():
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.tell(coming)
    engine.run_step(num_aborted=1)
    assert not engine.running
    engine.run_step()
    assert engine.service.receiver.num_live == 0
    engine.teardown()


def test_a_loaded_handoff_is_released_by_a_step_that_was_scheduled_before():
    """The request is aborted during its first step, and vLLM schedules one more step for that.

    No later step may follow for a long time, so that step must release the handoff.
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


def test_a_load_that_begins_shortly_before_the_commit_expires_succeeds(monkeypatch):
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
def test_a_handoff_without_a_commit_in_time_fails(monkeypatch, count):
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
    """Also a committed handoff that was claimed ahead."""
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
        # A handoff that was claimed ahead needs no claim, so this case has no early load.
        ("no answer", False, pb.REFUSAL_REASON_EXPIRED),
    ],
)
@pytest.mark.parametrize("verifies_late", [True, False])
def test_a_handoff_that_one_rank_cannot_load_fails_with_the_reason(
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
        # Only the last rank's bytes are altered; the loads of the others succeed.
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
