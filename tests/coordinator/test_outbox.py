"""What waits for a reader: in order, coalesced, bounded."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio

from baton.coordinator import events as ev
from baton.coordinator.core import Core
from baton.coordinator.core_config import CoreConfig
from baton.coordinator.outbox import Outbox
from baton.coordinator.request import StreamKey, Submission
from baton.coordinator.shell import Shell
from baton.coordinator.stall import StallGuard
from baton.runtime.config import BatonConfig
from baton.runtime.errors import ResourceExhausted
from baton.v1 import cluster_pb2, common_pb2, inference_pb2


def delta(offset: int, count: int = 1) -> common_pb2.TokenDelta:
    return common_pb2.TokenDelta(
        offset=offset,
        token_ids=range(offset, offset + count),
        text="x" * count,
        logprobs=[common_pb2.TokenLogprobs()] * count,
    )


async def test_deltas_of_a_stream_that_wait_become_one():
    outbox = Outbox()
    outbox.push(1, inference_pb2.Accepted(request_id="r"))
    for offset in range(100):
        assert outbox.push_delta(1, delta(offset))
        assert outbox.push_delta(2, delta(offset))
    outbox.push(1, inference_pb2.Finished())
    taken = await outbox.take()
    assert [one.stream for one in taken] == [1, 1, 2, 1]
    merged = taken[1].payload
    assert (merged.offset, list(merged.token_ids)) == (0, list(range(100)))
    assert merged.text == "x" * 100
    assert len(merged.logprobs) == 100
    assert (len(outbox), outbox.num_bytes) == (0, 0)
    outbox.push_delta(2, delta(100))
    assert [one.payload.offset for one in await outbox.take()] == [100]


async def test_a_stream_that_nobody_reads_is_too_slow():
    outbox = Outbox(max_stream_bytes=2000)
    results = [outbox.push_delta(1, delta(16 * i, 16)) for i in range(100)]
    assert results[0]
    assert not results[-1]


async def test_a_batch_stays_within_one_message():
    outbox = Outbox(max_stream_bytes=2**30)
    for stream in range(6):
        outbox.push_delta(stream, common_pb2.TokenDelta(text="x" * 2**20))
    batches = [await outbox.take() for _ in range(6) if len(outbox)]
    assert sum(map(len, batches)) == 6
    assert len(batches) > 1


@pytest_asyncio.fixture
async def shell(say_hello):
    config = replace(CoreConfig.of(BatonConfig()), model_name="demo")
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


async def test_slow_stream_fails_alone(shell):
    session = shell.open_session()
    submit(shell, session, 1)
    submit(shell, session, 2)
    say(shell, "p", "r1-1", common_pb2.TokenDelta(token_ids=[0]))
    say(shell, "d", "r1-1", common_pb2.TokenDelta(offset=1, token_ids=[1], text="x" * 2**21))
    taken = []
    while len(session.outbox):
        taken += await session.outbox.take()
    failed = [one.payload for one in taken if isinstance(one.payload, ResourceExhausted)]
    assert [error.reason for error in failed] == ["SLOW_READER"]
    assert session.live == {2}
    assert shell.core.num_requests == 1


async def test_overfull_session_is_given_up_whole(shell):
    session = shell.open_session()
    session.outbox._max_bytes = 2000
    for stream in (1, 2):
        submit(shell, session, stream)
        say(shell, "p", f"r1-{stream}", common_pb2.TokenDelta(token_ids=[0], text="x" * 600))
    assert session.slow
    assert await session.outbox.take() == []
    assert shell.core.num_requests == 0
    assert shell.num_sessions == 0


async def test_stalled_write_gives_up_what_the_call_holds():
    released, stalled = asyncio.Event(), asyncio.Event()

    class NeverRead:
        async def write(self, message: object) -> None:
            await released.wait()

    guard = StallGuard(NeverRead(), stalled.set, stalled_s=0.05)
    writing = asyncio.create_task(guard.write(object()))
    async with asyncio.timeout(5.0):
        await stalled.wait()
    released.set()
    with pytest.raises(ResourceExhausted):
        await writing
    guard.close()
