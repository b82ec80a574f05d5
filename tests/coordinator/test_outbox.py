"""The outbox of a session: events stay in order, are merged, and are bounded."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.core.core import Core
from baton.coordinator.server.outbox import Outbox
from baton.coordinator.server.session_events import coalesced, encoded_deltas
from baton.coordinator.server.shell import Shell
from baton.coordinator.server.stall import StallGuard
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import StreamKey, Submission
from baton.runtime.config import BatonConfig
from baton.runtime.errors import ResourceExhausted, to_message
from baton.v1 import cluster_pb2, common_pb2, inference_pb2


def delta(offset: int, count: int = 1) -> common_pb2.TokenDelta:
    return common_pb2.TokenDelta(
        offset=offset,
        token_ids=range(offset, offset + count),
        text="x" * count,
        logprobs=[common_pb2.TokenLogprobs()] * count,
    )


def batch(taken: bytes) -> list[inference_pb2.SessionEvent]:
    return list(inference_pb2.SessionEvents.FromString(taken).events)


def push_delta(outbox: Outbox, stream: int, said: common_pb2.TokenDelta) -> bool:
    (pushed,) = encoded_deltas([(StreamKey(1, stream), said.SerializeToString())]).values()
    return outbox.push_deltas(pushed)


EVENTS = {
    "accepted": inference_pb2.Accepted(request_id="r", prompt_tokens=3),
    "finished": inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, stop="x"),
    "failed": ResourceExhausted("later", reason="QUEUE_FULL", retry_after_s=1.0),
}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**32 - 1),
            st.one_of(
                st.sampled_from(list(EVENTS.values())), st.builds(delta, st.integers(0, 300))
            ),
        )
    )
)
async def test_all_pushed_events_are_taken(pushed):
    outbox, wanted = Outbox(), []
    for stream, payload in pushed:
        if isinstance(payload, common_pb2.TokenDelta):
            push_delta(outbox, stream, payload)
            wanted.append(inference_pb2.SessionEvent(stream=stream, delta=payload))
        else:
            outbox.push(stream, payload)
            kind = next(name for name, one in EVENTS.items() if one is payload)
            what = to_message(payload) if kind == "failed" else payload
            wanted.append(inference_pb2.SessionEvent(stream=stream, **{kind: what}))
    assert not pushed or batch(await outbox.take()) == wanted
    assert outbox.empty
    assert outbox.num_bytes == 0


async def test_deltas_of_streams_that_lag_become_one():
    outbox = Outbox()
    outbox.push(1, EVENTS["accepted"])
    counts = [0, 0]
    for stream in itertools.cycle((0, 1)):
        counts[stream] += 1
        if push_delta(outbox, stream + 1, delta(counts[stream] - 1)):
            break
    outbox.push(1, EVENTS["finished"])
    first, *events, last = batch(await outbox.take())
    assert first.HasField("accepted")
    assert last.HasField("finished")
    assert [one.stream for one in events] == [1, 2]
    for event, num_tokens in zip(events, counts, strict=True):
        assert event.delta.offset == 0
        assert list(event.delta.token_ids) == list(range(num_tokens))
        assert event.delta.text == "x" * num_tokens
        assert len(event.delta.logprobs) == num_tokens
    assert outbox.num_bytes == 0
    push_delta(outbox, 2, delta(7))
    assert [one.delta.offset for one in batch(await outbox.take())] == [7]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_coalescing_keeps_every_streams_order(steps):
    offsets, events = Counter(), []
    for stream, is_delta in steps:
        events.append(inference_pb2.SessionEvent(stream=stream))
        if is_delta:
            events[-1].delta.CopyFrom(delta(offsets[stream]))
            offsets[stream] += 1

    def told(events, stream):
        found = []
        for event in events:
            if event.stream == stream and event.HasField("delta"):
                assert event.delta.offset == event.delta.token_ids[0]
                found += event.delta.token_ids
            elif event.stream == stream:
                found.append("event")
        return found

    pushed = inference_pb2.SessionEvents(events=events).SerializeToString()
    for stream in range(4):
        assert told(coalesced(pushed).events, stream) == told(events, stream)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 300]), st.sampled_from([1, 2, 200])),
        max_size=40,
    )
)
def test_each_session_gets_its_own_in_order(said):
    deltas = [
        (StreamKey(session, stream), delta(offset, num_tokens).SerializeToString())
        for offset, (session, stream, num_tokens) in enumerate(said)
    ]
    found = encoded_deltas(deltas)
    assert set(found) == {session for session, _, _ in said}
    for session, pushed in found.items():
        told = [(one.stream, one.delta.SerializeToString()) for one in batch(pushed)]
        assert told == [(to.stream, one) for to, one in deltas if to.session == session]


async def test_an_accepted_event_is_sent_with_the_first_tokens():
    outbox = Outbox()
    outbox.push(1, EVENTS["accepted"])
    push_delta(outbox, 1, delta(0))
    assert [one.WhichOneof("event") for one in batch(await outbox.take())] == ["accepted", "delta"]
    # Without tokens, the Accepted event is sent alone.
    outbox.push(2, EVENTS["accepted"])
    async with asyncio.timeout(60.0):
        assert [one.stream for one in batch(await outbox.take())] == [2]
    assert outbox.empty


async def test_an_unread_stream_is_reported_as_slow():
    outbox = Outbox(max_stream_bytes=200_000)
    found = set()
    for index in range(40_000):
        if push_delta(outbox, 1, delta(16 * index, 16)):
            found.update(outbox.take_slow_streams())
        if index == 1000:
            assert not found
            push_delta(outbox, 2, delta(0))
    assert found == {1}


async def test_a_batch_stays_within_one_message():
    outbox = Outbox(max_stream_bytes=2**30)
    for stream in range(6):
        push_delta(outbox, stream, common_pb2.TokenDelta(text="x" * 2**20))
    batches = [batch(await outbox.take()) for _ in range(6) if not outbox.empty]
    assert [one.stream for events in batches for one in events] == list(range(6))
    assert all(len(events) <= 2 for events in batches)


async def test_tokens_of_one_worker_message_may_fill_several_messages():
    outbox, text = Outbox(max_stream_bytes=2**30), "x" * 2**19
    said = common_pb2.TokenDelta(text=text).SerializeToString()
    deltas = [(StreamKey(1, stream), said) for stream in range(12)]
    outbox.push_deltas(encoded_deltas(deltas)[1])
    batches = [batch(await outbox.take()) for _ in range(12) if not outbox.empty]
    assert [one.stream for events in batches for one in events] == list(range(12))
    assert all(len(events) <= 4 for events in batches)


def large_answer() -> inference_pb2.Finished:
    """An answer with as many prompt logprobs as are allowed: 200,000 entries."""
    entry = common_pb2.TokenLogprob(token_id=100_000, logprob=-1.5, rank=3, text=" word")
    row = common_pb2.TokenLogprobs(entries=[entry] * 20)
    return inference_pb2.Finished(prompt_logprobs=[row] * 10_000)


async def test_large_answers_fill_several_messages():
    outbox, answer = Outbox(), large_answer()
    assert answer.ByteSize() > 4 * 10**6
    push_delta(outbox, 0, delta(0))
    for stream in range(6):
        outbox.push(stream, answer)
    outbox.push(6, EVENTS["finished"])
    messages = [await outbox.take() for _ in range(8) if not outbox.empty]
    assert outbox.num_bytes == 0
    assert max(map(len, messages)) < 8 * 2**20
    events = [event for message in messages for event in batch(message)]
    assert [one.stream for one in events] == [0, *range(7)]
    assert all(one.finished == answer for one in events[1:-1])


@pytest_asyncio.fixture
async def shell(say_hello):
    config = replace(CoreConfig.of(BatonConfig(elastic=False)), model_name="demo")
    shell = Shell(Core(config))
    shell.attach(say_hello("p", common_pb2.ROLE_PREFILL), object())
    shell.attach(say_hello("d", common_pb2.ROLE_DECODE), object())
    yield shell
    shell.close()


def submit(shell, session, stream: int) -> None:
    session.live.add(stream)
    submission = Submission(
        to=StreamKey(session.number, stream),
        request_id=f"r{session.number}-{stream}",
        prompt_token_ids=[1, 2],
        sampling=common_pb2.SamplingParams(),
        lane=common_pb2.LANE_INTERACTIVE,
        arrived_at=shell.now(),
    )
    shell.post(ev.Submitted(submission))


def say(shell, worker: str, request_id: str, said: common_pb2.TokenDelta) -> None:
    output = cluster_pb2.RequestOutput(request_id=request_id, attempt=1, delta=said)
    step = cluster_pb2.StepOutputs(outputs=[output])
    shell.post(ev.WorkerStep((worker, 1), step))


def reason(error: common_pb2.RequestError) -> str:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in error.details)
    return info.reason


async def test_slow_stream_fails_alone(shell):
    session = shell.open_session()
    submit(shell, session, 1)
    submit(shell, session, 2)
    say(shell, "p", "r1-1", common_pb2.TokenDelta(token_ids=[0]))
    say(shell, "d", "r1-1", common_pb2.TokenDelta(offset=1, token_ids=[1], text="x" * 2**21))
    taken = []
    while not session.outbox.empty:
        taken += batch(await session.outbox.take())
    failed = [one.failed for one in taken if one.HasField("failed")]
    assert [reason(error) for error in failed] == ["SLOW_READER"]
    assert session.live == {2}
    assert shell.core.num_requests == 1


async def test_overfull_session_is_given_up_whole(shell):
    session = shell.open_session()
    session.outbox._max_bytes = 1_000_000
    for stream in (1, 2):
        submit(shell, session, stream)
        say(shell, "p", f"r1-{stream}", common_pb2.TokenDelta(token_ids=[0], text="x" * 600_000))
    assert session.slow
    assert await session.outbox.take() == b""
    assert shell.core.num_requests == 0
    assert shell.num_sessions == 0


async def test_answers_that_fill_a_session_fail_alone(shell):
    session, rows = shell.open_session(), large_answer().prompt_logprobs
    for stream in range(24):
        submit(shell, session, stream)
        finished = cluster_pb2.WorkerFinished(
            reason=common_pb2.FINISH_REASON_LENGTH, prompt_logprobs=rows
        )
        output = cluster_pb2.RequestOutput(
            request_id=f"r1-{stream}",
            attempt=1,
            delta=common_pb2.TokenDelta(token_ids=[0]),
            finished=finished,
        )
        shell.post(ev.WorkerStep(("p", 1), cluster_pb2.StepOutputs(outputs=[output])))
    submit(shell, session, 24)
    assert not session.slow
    assert session.live == {24}
    ends = {}
    while not session.outbox.empty:
        for one in batch(await session.outbox.take()):
            if one.WhichOneof("event") in ("finished", "failed"):
                ends[one.stream] = one
    delivered = [stream for stream, one in ends.items() if one.HasField("finished")]
    assert delivered == list(range(len(delivered)))
    assert 0 < len(delivered) < 24
    failed = [reason(ends[stream].failed) for stream in range(len(delivered), 24)]
    assert set(failed) == {"SLOW_READER"}


async def test_a_stalled_write_frees_the_resources_of_the_call():
    released, stalled = asyncio.Event(), asyncio.Event()

    class NeverRead:
        async def write(self, message: object) -> None:
            await released.wait()

    guard = StallGuard(NeverRead(), stalled.set, stalled_s=0.05)
    writing = asyncio.create_task(guard.write(object()))
    async with asyncio.timeout(60.0):
        await stalled.wait()
    released.set()
    with pytest.raises(ResourceExhausted):
        await writing
    guard.close()
