"""How a handoff ends at the receiving engine: released after its load, or failed with a reason."""

from types import SimpleNamespace

import pytest

from baton.kvtransfer.connector.handoffs import handoff_scheduler
from baton.kvtransfer.service.receive_state import ReceiveState
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.driven_engine import DrivenEngine, as_scheduled, engine_with
from tests.kvtransfer.small_engine import LAYOUT, SHARDS, SIZE, TOKEN_BYTES


def test_a_loaded_handoff_is_released_even_if_its_request_ends_in_that_step():
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    engine.run_step(num_aborted=1)
    assert not engine.running
    engine.run_step()
    assert engine.service.receiver.num_live == 0
    engine.end_all()


def test_a_loaded_handoff_is_released_by_a_step_that_was_scheduled_before():
    """The request is aborted during its first step, and vLLM schedules one more step for that.

    No later step may follow for a long time, so that step must release the handoff.
    """
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    scheduled = engine.schedule()
    work = engine.half.step(as_scheduled(scheduled))
    engine.end(coming.request)
    last = engine.half.step(as_scheduled([]))
    engine.take_output(scheduled, engine.work(scheduled, work, []))
    assert engine.service.receiver.num_live == 1
    engine.take_output([], engine.work([], last, []))
    assert engine.service.receiver.num_live == 0
    engine.end_all()


@pytest.mark.parametrize("count", [0, 10])
def test_a_handoff_without_a_commit_in_time_fails(monkeypatch, count):
    engine, coming = engine_with(20, 1, 0)
    service = engine.service
    monkeypatch.setattr(handoff_scheduler, "time", SimpleNamespace(monotonic=lambda: service.now))
    engine.deliver(coming, count)
    engine.run_step()
    engine.submit(coming)
    engine.run_step()
    assert engine.waiting == [coming.request]
    service.now = 2e9
    engine.run_step()
    assert engine.running == [coming.request]
    (ended,) = service.receiver.known()
    assert (ended.state, ended.reason) == (ReceiveState.FAILED, pb.REFUSAL_REASON_EXPIRED)
    engine.end_all()


@pytest.mark.parametrize("count", [0, 10, 1000])
def test_a_handoff_whose_request_ends_before_it_is_loaded_is_cancelled(count):
    engine, coming = engine_with(20, 1, 0)
    engine.deliver(coming, count)
    engine.run_step()
    engine.submit(coming)
    engine.end(coming.request)
    engine.run_step()
    (ended,) = engine.service.receiver.known()
    assert (ended.state, ended.reason) == (ReceiveState.FAILED, pb.REFUSAL_REASON_CANCELLED)
    engine.end_all()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("altered", pb.REFUSAL_REASON_CHECKSUM),
        ("another prompt", pb.REFUSAL_REASON_INCOMPLETE),
        ("no answer", pb.REFUSAL_REASON_EXPIRED),
    ],
)
@pytest.mark.parametrize("verifies_late", [True, False])
def test_a_handoff_that_a_rank_does_not_load_fails_with_the_reason(
    monkeypatch, how, reason, verifies_late
):
    engine = DrivenEngine(is_calm=False, verifies_late=verifies_late)
    engine.begin(20, 1, 0)
    (coming,) = engine.coming
    if how == "another prompt":
        coming.messages = engine.sent(coming.handoff_id, [1] * 17, 0, None)
    engine.deliver(coming, 1000)
    engine.submit(coming)
    if how == "altered":
        # The bytes of the last rank; the loads of the other ranks are fine.
        engine.alter_staging(LAYOUT.handoff_bytes(5) // TOKEN_BYTES - SIZE)
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
    engine.end_all()
