"""Inference.Session over gRPC: many independent streams on one call."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from baton.coordinator.server import shell
from baton.coordinator.server.inference import _SessionCall
from baton.coordinator.server.intake import Intake
from baton.coordinator.server.server import Coordinator
from baton.runtime.errors import ResourceExhausted
from baton.runtime.network import rpc
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.coordinator.inference_client import Client, generate
from tests.coordinator.scripted_worker import WAIT_S, answer

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
CANCELLED = common_pb2.FINISH_REASON_CANCELLED


async def test_session_multiplexes_and_batches_each_step(pair, inference):
    async with pair(auto=False) as (p, d):
        client = Client(inference)
        for stream in range(8):
            await client.submit(stream, generate())
        specs = [(await p.command("prefill")).spec for _ in range(8)]
        await p.step(*(answer(spec, 0, 1, 0) for spec in specs))
        decodes = [(await d.command("decode")).spec for _ in range(8)]
        for stream in range(8):
            await client.until(stream, "delta")
        client.batches.clear()
        await d.step(*(answer(spec, 1, 1) for spec in decodes))
        await d.step(*(answer(spec, 2, 2, LENGTH) for spec in decodes))
        for stream in range(8):
            events = await client.until(stream, "finished")
            tokens = [token for one in events for token in one.delta.token_ids]
            assert tokens == [0, 1, 2, 3]
            assert "".join(one.delta.text for one in events) == "xxxx"
        assert len(client.batches) <= 2
        await client.call.done_writing()
        async with asyncio.timeout(WAIT_S):
            assert await client.call.read() is grpc.aio.EOF
            assert await client.call.code() is grpc.StatusCode.OK


async def test_a_batch_is_taken_one_by_one(pair, inference):
    async with pair():
        client = Client(inference)
        await client.submit(1, generate())
        await client.until(1, "finished")
        batch = [
            inference_pb2.SessionRequest(submit=inference_pb2.Submit(stream=stream, request=asked))
            for stream, asked in (
                (2, generate()),
                (3, generate("")),
                *((n, generate()) for n in range(4, 24)),
            )
        ]
        cancel = inference_pb2.SessionRequest(cancel=inference_pb2.Cancel(stream=99))
        await client.call.write(inference_pb2.SessionRequest(batch=[*batch, cancel]))
        await client.until(3, "failed")
        for stream in (2, *range(4, 24)):
            events = await client.until(stream, "finished")
            assert [token for event in events for token in event.delta.token_ids] == [0, 1, 2, 3]
        await client.call.write(inference_pb2.SessionRequest(batch=[cancel] * 65))
        assert await client.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "batch is '65 messages'; at most 64" in await client.call.details()


async def test_bad_submission_fails_alone(pair, inference):
    async with pair():
        client = Client(inference)
        await client.submit(1, generate(sampling={"top_p": 0.0}))
        await client.submit(2, generate())
        assert (await client.until(1, "failed"))[0].failed.code == 3
        await client.until(2, "finished")
        await client.submit(1, generate())
        await client.until(1, "finished")
        client.call.cancel()


class Unread:
    """A call whose client sends messages and reads nothing until the test allows it."""

    def __init__(self, messages) -> None:
        self.messages, self.released = iter(messages), asyncio.Event()

    async def read(self):
        await asyncio.sleep(0)
        return next(self.messages, grpc.aio.EOF)

    async def write(self, message: object) -> None:
        await self.released.wait()


def session_call(coordinator, model_dir, context) -> _SessionCall:
    config = coordinator._config
    intake = Intake(
        coordinator.shell.core,
        coordinator._tokenizer,
        config,
        str(model_dir),
        renders=coordinator.shell.renders,
    )
    return _SessionCall(coordinator.shell, intake, config.coordinator, context)


def submission(stream: int, request) -> inference_pb2.SessionRequest:
    return inference_pb2.SessionRequest(submit=inference_pb2.Submit(stream=stream, request=request))


async def test_unread_refusals_are_bounded(coordinator, model_dir):
    wrong = generate(sampling={"top_p": 0.0})
    context = Unread(submission(stream, wrong) for stream in range(3000))
    call = session_call(coordinator, model_dir, context)
    call._session.outbox._max_bytes = 100_000
    running = asyncio.create_task(call.run())
    async with asyncio.timeout(WAIT_S):
        while not call._session.outbox.overfull:
            await asyncio.sleep(0)
    context.released.set()
    with pytest.raises(ResourceExhausted, match="does not read"):
        await running
    call.close()


async def test_a_session_that_was_given_up_admits_nothing_more(coordinator, model_dir):
    context = Unread([submission(1, generate())])
    call = session_call(coordinator, model_dir, context)
    coordinator.shell.close_session(call._session)
    with pytest.raises(ResourceExhausted):
        await call.run()
    call.close()
    assert coordinator.shell.core.num_requests == 0


async def test_stream_number_in_use_ends_the_session(pair, inference):
    async with pair(auto=False):
        client = Client(inference)
        await client.submit(1, generate())
        await client.submit(1, generate())
        with pytest.raises(grpc.RpcError):
            await client.until(1, "finished")
        assert await client.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "submit.stream is 1" in await client.call.details()


async def test_session_cancel_and_loss(coordinator, pair, inference):
    async with pair(auto=False) as (p, d):
        client = Client(inference)
        await client.submit(1, generate())
        await client.submit(2, generate())
        first = (await p.command("prefill")).spec.request_id
        await p.command("prefill")
        await client.cancel(1)
        await client.cancel(77)
        events = await client.until(1, "finished")
        assert events[-1].finished.reason == common_pb2.FINISH_REASON_CANCELLED
        assert (await p.command("cancel")).request_id == first
        client.call.cancel()
        assert (await p.command("cancel")).request_id != first
        await d.command("cancel")
        await d.command("cancel")
    assert coordinator.shell.core.num_requests == 0


async def test_cancel_while_a_long_prompt_is_tokenized(pair, coordinator, inference):
    cancelled = threading.Event()
    async with pair(auto=False):
        client = Client(inference)
        # The tokenization waits, so that the cancel arrives first.
        threads = coordinator._tokenizer._threads
        for _ in range(threads._max_workers):
            threads.submit(cancelled.wait, WAIT_S)
        await client.submit(1, generate("the fox " * 600))
        await client.cancel(1)
        last = (await client.until(1, "finished"))[-1].finished
        assert last.reason == common_pb2.FINISH_REASON_CANCELLED
        cancelled.set()
        client.call.cancel()


async def test_long_prompts_of_one_tenant_do_not_keep_others_out(coordinator_config):
    """Prompts that wait to be tokenized are bounded like those that wait for workers."""
    release, long = threading.Event(), "the fox " * 600
    config = coordinator_config(lanes={"interactive": {"max_queued": 1}})
    async with Coordinator(config) as coordinator, rpc.channel(coordinator.address) as channel:
        client = Client(inference_pb2_grpc.InferenceStub(channel))
        threads = coordinator._tokenizer._threads
        for _ in range(threads._max_workers):
            threads.submit(release.wait, WAIT_S)
        for stream, tenant in enumerate(("a", "a", "b")):
            await client.submit(stream, generate(long, tenant=tenant))
        failed = (await client.until(1, "failed"))[-1].failed
        assert "1 prompts of the interactive lane wait to be tokenized; at most 1" in failed.message
        # The tokenization finds that the other tenant's prompt is longer than the context.
        release.set()
        failed = (await client.until(2, "failed"))[-1].failed
        assert "1023 maximum, because this model's maximum context length is 1024" in failed.message
        client.call.cancel()


async def test_a_stream_that_is_resumed_takes_its_own_place_of_a_full_coordinator(
    coordinator_config,
):
    config = coordinator_config(max_running_requests=1, lanes={"interactive": {"max_queued": 1}})
    async with Coordinator(config) as coordinator, rpc.channel(coordinator.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        call = inference.Generate(generate(request_id="a"), timeout=WAIT_S)
        assert (await call.read()).HasField("accepted")
        request = generate(request_id="a")
        request.resume.token_ids.extend([0, 7])
        resumed = inference.Generate(request, timeout=WAIT_S)
        assert (await resumed.read()).HasField("accepted")
        assert await call.code() is grpc.StatusCode.ABORTED
        request.request_id = "b"
        other = inference.Generate(request, timeout=WAIT_S)
        assert await other.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        resumed.cancel()


async def test_a_stream_that_another_connection_has_taken_over_ends(coordinator, inference):
    """The old stream gets an error and blocks neither a single call nor a session."""
    client, waiting = Client(inference), generate(request_id="a")
    await client.submit(1, waiting)
    await client.until(1, "accepted")
    call = inference.Generate(generate(request_id="b"), timeout=WAIT_S)
    assert (await call.read()).HasField("accepted")
    resumed = Client(inference)
    for stream, name in enumerate("ab", start=1):
        request = generate(request_id=name)
        request.resume.token_ids.extend([0, 7])
        await resumed.submit(stream, request)
        await resumed.until(stream, "accepted")
    failed = (await client.until(1, "failed"))[-1].failed
    assert failed.code == grpc.StatusCode.ABORTED.value[0]
    assert "request a was resumed over another connection" in failed.message
    assert await call.code() is grpc.StatusCode.ABORTED
    assert "request b was resumed over another connection" in await call.details()
    await client.call.done_writing()
    async with asyncio.timeout(WAIT_S):
        assert await client.call.read() is grpc.aio.EOF
    for stream in (1, 2):
        await resumed.cancel(stream)
        assert (await resumed.until(stream, "finished"))[-1].finished.reason == CANCELLED
    resumed.call.cancel()


async def test_a_lost_session_with_many_requests_is_cancelled_in_parts(
    coordinator, inference, monkeypatch
):
    """Between two parts, the events of other sessions are handled."""
    most, count = shell._MAX_LOST_AT_ONCE, 300
    client = Client(inference)
    for stream in range(count):
        await client.submit(stream, generate())
    for stream in range(count):
        await client.until(stream, "accepted")
    core, cancelled = coordinator.shell.core, []
    handle = core.handle

    def counting(event, now):
        before = core.num_requests
        effects = handle(event, now)
        cancelled.append(before - core.num_requests)
        return effects

    monkeypatch.setattr(core, "handle", counting)
    client.call.cancel()
    async with asyncio.timeout(WAIT_S):
        await coordinator.shell.idle()
    assert [one for one in cancelled if one] == [most, most, count - 2 * most]
