"""A client that stops reading: its buffered tokens are bounded and other clients do not wait."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from baton.coordinator.server.outbox import MAX_SESSION_BYTES
from baton.coordinator.server.shell import Shell
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import StreamKey, Submission
from baton.runtime.errors import ResourceExhausted, from_rpc_error
from baton.runtime.network import rpc
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.coordinator.scripted_worker import WAIT_S, answer, attached

LENGTH = common_pb2.FINISH_REASON_LENGTH
# The tests' model has a context of 1,024 tokens.
NUM_TOKENS = 900
TEXT = "x" * 2**16


def request(name: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=name, text="fox", sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS)
    )


async def submitted(stub, name: str):
    """Opens a session and submits one request as stream 1."""
    call = stub.Session()
    submit = inference_pb2.Submit(stream=1, request=request(name))
    await call.write(inference_pb2.SessionRequest(submit=submit))
    return call


async def read_all(call) -> list[int]:
    tokens: list[int] = []
    while True:
        for event in (await call.read()).events:
            assert not event.HasField("failed")
            tokens += event.delta.token_ids
            if event.HasField("finished"):
                return tokens


@pytest.mark.parametrize("kind", ["session", "generate"])
async def test_only_the_client_that_stops_reading_is_cancelled(coordinator, say_hello, kind):
    prefill, decode = (
        say_hello("p", common_pb2.ROLE_PREFILL),
        say_hello("d", common_pb2.ROLE_DECODE),
    )
    async with (
        rpc.channel(coordinator.address) as slow_channel,
        rpc.channel(coordinator.address) as channel,
        attached(coordinator.address, prefill, decode, auto=False) as (p, d),
        asyncio.timeout(6 * WAIT_S),
    ):
        slow_stub = inference_pb2_grpc.InferenceStub(slow_channel)
        if kind == "session":
            slow = await submitted(slow_stub, "slow")
        else:
            slow = slow_stub.Generate(request("slow"))
        specs = {"slow": (await p.command("prefill")).spec}
        quick = await submitted(inference_pb2_grpc.InferenceStub(channel), "quick")
        specs["quick"] = (await p.command("prefill")).spec
        reading = asyncio.create_task(read_all(quick))
        await p.step(*(answer(spec, 0, 1) for spec in specs.values()))
        for _ in specs:
            assert (await d.command("decode")).spec.request_id in specs
        given_up_at = None
        for offset in range(1, NUM_TOKENS):
            outputs = [
                answer(specs["quick"], offset, 1, LENGTH if offset == NUM_TOKENS - 1 else None)
            ]
            if given_up_at is None:
                outputs.append(answer(specs["slow"], offset, 1))
                outputs[1].delta.text = TEXT
            await d.step(*outputs)
            if given_up_at is None and not d.commands.empty():
                assert (await d.command("cancel")).request_id == "slow"
                given_up_at = offset
        assert await reading == list(range(NUM_TOKENS))
        assert given_up_at is not None
        if kind == "generate":
            with pytest.raises(grpc.RpcError) as raised:
                async for _ in slow:
                    pass
            assert from_rpc_error(raised.value).code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        else:
            events = []
            while not events or not events[-1].HasField("failed"):
                events += (await slow.read()).events
            tokens = [token for event in events for token in event.delta.token_ids]
            assert tokens == list(range(len(tokens)))
            assert events[-1].failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        for call in (slow, quick):
            call.cancel()


@pytest.mark.parametrize("how", ["stalled", "overfull"])
async def test_a_closed_sessions_request_slots_are_free_while_its_call_goes_on(new_world, how):
    shell, released = Shell(new_world().core), []
    session = shell.open_session()
    session.live.add(1)
    session.on_stream_end(1, lambda: released.append(1))
    if how == "stalled":
        shell.close_session(session)
    else:
        slow = ResourceExhausted("x" * MAX_SESSION_BYTES, reason="TEST", retry_after_s=None)
        session.outbox.push(1, slow)
        to = StreamKey(session.number, 2)
        shell.post(ev.Submitted(submission(to)))
    assert not shell.is_open(session)
    assert released == [1]
    session.release()
    assert released == [1]
    shell.close()


def submission(to: StreamKey) -> Submission:
    return Submission(
        to=to,
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling=common_pb2.SamplingParams(max_tokens=2),
        lane=common_pb2.LANE_INTERACTIVE,
        arrived_at=Shell.now(),
    )
