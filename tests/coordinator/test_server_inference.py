"""Inference.Generate over gRPC: streams, refusals, timeouts and resumption."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from baton.coordinator.server.server import Coordinator
from baton.runtime.errors import from_rpc_error
from baton.runtime.names import DEFAULT_TENANT
from baton.runtime.network import rpc
from baton.v1 import cluster_pb2, common_pb2, inference_pb2, inference_pb2_grpc
from tests.coordinator.inference_client import generate
from tests.coordinator.scripted_worker import WAIT_S, ScriptedWorker, add_running, answer, attached

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def test_generate_streams_accepted_tokens_finished(coordinator, pair, inference):
    async with pair():
        events = [event async for event in inference.Generate(generate(), timeout=WAIT_S)]
    assert events[0].accepted.model == "demo"
    assert events[0].accepted.prompt_tokens > 1
    tokens = [token for event in events for token in event.delta.token_ids]
    assert tokens == [0, 1, 2, 3]
    finished = events[-1].finished
    assert finished.reason == LENGTH
    assert finished.usage.completion_tokens == 4
    budget = finished.budget
    assert sum(stage.duration_us for stage in budget.stages) == budget.total_us
    assert 0 < budget.ttft_us <= budget.total_us


BAD = [
    (inference_pb2.GenerateRequest(), "prompt", "None"),
    (generate(""), "text", "''"),
    (generate("x", sampling={"max_tokens": 2000}), "sampling.max_tokens", "2000"),
    (generate("x " * 1024), "text", "tokens"),
    (generate("x", sampling={"temperature": float("nan")}), "sampling.temperature", "nan"),
    (generate("x", sampling={"stop": ["s"] * 10_000}), "sampling.stop", "10000"),
    (generate("x" * (5 * 2**20)), "text", "5242880 bytes"),
    (generate("x" * (2**20)), "text", "at least"),
    (generate("x", tenant="a b"), "tenant", "'a b'"),
    (generate("x", tenant="t" * 65), "tenant", "1 to 64 characters"),
    (
        generate("x", slo=inference_pb2.Slo(ttft_ms_per_1k_tokens=5)),
        "slo.ttft_ms_per_1k_tokens",
        "is 5; must be 0 without slo.ttft_ms",
    ),
    (
        inference_pb2.GenerateRequest(chat={"messages": [{"role": "robot", "content": "x"}]}),
        "chat.messages",
        "unknown role robot",
    ),
]


@pytest.mark.parametrize("num_chars", [300, 3000, 20_000])
@pytest.mark.parametrize("char", ["g", "%", "é", "語"])
async def test_an_error_keeps_its_code_however_long_its_message_is(
    pair, inference, char, num_chars
):
    """gRPC clients refuse calls with more than 8 KiB of metadata."""
    message = char * num_chars
    violation = error_details_pb2.BadRequest.FieldViolation(field="f", description=message)
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    info = error_details_pb2.ErrorInfo(reason="GRAMMAR", domain="baton")
    async with pair(auto=False) as (prefiller, _):
        call = inference.Generate(generate(), timeout=WAIT_S)
        spec = (await prefiller.command("prefill")).spec
        output = cluster_pb2.RequestOutput(request_id=spec.request_id, attempt=spec.attempt)
        output.failed.code, output.failed.message = code_pb2.INVALID_ARGUMENT, message
        for detail in (bad, info):
            output.failed.details.add().Pack(detail)
        await prefiller.step(output)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            [event async for event in call]
    error = from_rpc_error(failed.value)
    assert (error.name, error.reason) == ("INVALID_ARGUMENT", "GRAMMAR")
    if num_chars == 300:
        assert str(error) == message
    else:
        assert message.startswith(str(error).removesuffix("..."))
        assert len(str(error)) > 300


async def test_bad_input_names_field_and_value(inference):
    for request, field, shown in BAD:
        with pytest.raises(grpc.RpcError) as caught:
            await inference.Generate(request, timeout=WAIT_S).read()
        error = from_rpc_error(caught.value)
        assert error.name == "INVALID_ARGUMENT"
        assert shown in str(error)
        bad = error_details_pb2.BadRequest()
        assert error.details()[0].Unpack(bad)
        assert bad.field_violations[0].field == field


async def test_unknown_model_names_the_served_one(inference):
    with pytest.raises(grpc.RpcError) as caught:
        await inference.Generate(generate(model="other"), timeout=WAIT_S).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'demo'" in caught.value.details()


async def test_queue_full_says_when_to_retry(coordinator_config):
    async with (
        Coordinator(coordinator_config(lanes={"interactive": {"max_queued": 1}})) as coordinator,
        rpc.channel(coordinator.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        waiting = inference.Generate(generate())
        assert (await waiting.read()).HasField("accepted")
        with pytest.raises(grpc.RpcError) as caught:
            await inference.Generate(generate(), timeout=WAIT_S).read()
        error = from_rpc_error(caught.value)
        assert error.name == "RESOURCE_EXHAUSTED"
        assert error.retry_after_s > 0
        info = error_details_pb2.ErrorInfo()
        assert error.details()[0].Unpack(info)
        assert info.reason == "QUEUE_FULL"
        waiting.cancel()


async def test_each_lane_bounds_prompt_and_output(coordinator_config, say_hello):
    batch = {"max_prompt_tokens": 8, "max_output_tokens": 3}
    async with (
        Coordinator(coordinator_config(lanes={"batch": batch})) as coordinator,
        rpc.channel(coordinator.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        for wrong, field in (
            (generate("x " * 20), "text"),
            (generate("x", sampling={"max_tokens": 4}), "sampling.max_tokens"),
            (
                inference_pb2.GenerateRequest(text="x", sampling={"min_tokens": 4}),
                "sampling.min_tokens",
            ),
        ):
            wrong.lane = common_pb2.LANE_BATCH
            with pytest.raises(grpc.RpcError) as caught:
                await inference.Generate(wrong, timeout=WAIT_S).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(field)
            assert "in the batch lane" in caught.value.details()
        # A request without max_tokens gets the lane's limit, regardless of the default.
        unnamed = inference_pb2.GenerateRequest(text="x", lane=common_pb2.LANE_BATCH)
        workers = say_hello("p", PREFILL), say_hello("d", DECODE)
        async with attached(coordinator.address, *workers):
            for default in (0, 16):
                unnamed.default_max_tokens = default
                events = [event async for event in inference.Generate(unnamed, timeout=WAIT_S)]
                assert events[-1].finished.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("num_prompt_tokens", "sampling", "num_tokens"),
    [
        (8, {}, 16),
        (8, {"max_tokens": 20}, 20),
        (8, {"min_tokens": 20}, 20),
        # The context of 1,024 tokens leaves only 4 tokens.
        (1020, {}, 4),
        (1020, {"min_tokens": 2}, 4),
    ],
)
async def test_a_default_length_gives_way_to_what_there_is_room_for(
    pair, inference, num_prompt_tokens, sampling, num_tokens
):
    asked = inference_pb2.GenerateRequest(
        tokens={"ids": [7] * num_prompt_tokens}, sampling=sampling, default_max_tokens=16
    )
    async with pair():
        events = [event async for event in inference.Generate(asked, timeout=WAIT_S)]
    assert events[-1].finished.usage.completion_tokens == num_tokens


@pytest.mark.parametrize(
    ("max_tokens", "cut", "num_tokens"), [(1024, True, 4), (1024, False, None), (1025, True, None)]
)
async def test_a_length_may_give_way_to_what_there_is_room_for(
    pair, inference, max_tokens, cut, num_tokens
):
    asked = inference_pb2.GenerateRequest(
        tokens={"ids": [7] * 1020}, sampling={"max_tokens": max_tokens}, cut_max_tokens=cut
    )
    async with pair():
        call = inference.Generate(asked, timeout=WAIT_S)
        if num_tokens is None:
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith("sampling.max_tokens")
        else:
            events = [event async for event in call]
            assert events[-1].finished.usage.completion_tokens == num_tokens


async def test_no_worker_within_the_queue_time(coordinator_config):
    async with (
        Coordinator(coordinator_config(lanes={"interactive": {"max_queue_s": 0.1}})) as coordinator,
        rpc.channel(coordinator.address) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(), timeout=WAIT_S)
        assert (await call.read()).HasField("accepted")
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no prefill and no decode worker is attached" in caught.value.details()


async def test_vanished_generate_client_cancels_both_workers(pair, inference):
    async with pair(auto=False) as (p, d):
        call = inference.Generate(generate())
        await call.read()
        prefill = await p.command("prefill")
        call.cancel()
        for worker in (p, d):
            cancel = await worker.command("cancel")
            assert cancel.handoff_id == prefill.handoff.handoff_id


async def test_request_timeout_and_grpc_deadline(pair, inference):
    async with pair(auto=False) as (p, d):
        request = generate()
        request.timeout.FromMilliseconds(50)
        call = inference.Generate(request)
        await call.read()
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await p.command("prefill")
        await p.command("cancel")
        await d.command("cancel")

        with pytest.raises(grpc.RpcError) as caught:
            async for _ in inference.Generate(generate(), timeout=1.0):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        spec = (await p.command("prefill")).spec
        # gRPC rounds the remaining time of a deadline up by a few ms.
        assert 0 < spec.timeout.ToMilliseconds() <= 1100
        await p.command("cancel")


async def test_resume_continues_after_received_tokens(pair, inference):
    async with pair() as (p, d):
        request = generate()
        request.resume.token_ids.extend([0, 7])
        request.resume.num_text_chars = 2
        request.resume.prompt_token_ids.extend([5, 6, 7])
        events = [event async for event in inference.Generate(request, timeout=WAIT_S)]
        assert [t for event in events for t in event.delta.token_ids] == [2, 3]
        prefill, decode = await p.command("prefill"), await d.command("decode")
        assert list(prefill.spec.known_token_ids) == []
        assert list(decode.spec.prompt_token_ids) == [5, 6, 7]
        assert decode.spec.known_text_chars == 2


async def test_a_resumed_request_is_checked_by_its_own_fleets_model(
    coordinator, inference, say_hello
):
    """The request's revision leaves, and has an adapter that the stable revision lacks."""
    model = say_hello("x", PREFILL).model
    model.adapters.add(name="law")
    hellos = [say_hello("p", PREFILL), say_hello("d", DECODE)]
    hellos += [
        say_hello(name, role, revision="r2", model=model)
        for name, role in (("cp", PREFILL), ("cd", DECODE))
    ]
    async with attached(coordinator.address, *hellos):
        request = generate(model="law")
        with pytest.raises(grpc.RpcError) as caught:
            await inference.Generate(request, timeout=WAIT_S).read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        request.resume.token_ids.extend([0, 7])
        request.resume.revision = "r2"
        events = [event async for event in inference.Generate(request, timeout=WAIT_S)]
        assert events[0].accepted.model == "law"
        assert [t for event in events for t in event.delta.token_ids] == [2, 3]


@pytest.mark.parametrize(("context", "max_tokens"), [(64, 64), (4096, 2000)])
async def test_a_request_resumed_before_the_first_worker_is_adopted(
    coordinator, inference, say_hello, context, max_tokens
):
    """The context of the workers is shorter or longer than that of the model's configuration."""
    prompt = [5, 6, 7]
    request = generate(sampling={"max_tokens": max_tokens}, cut_max_tokens=True, request_id="r1")
    request.resume.token_ids.extend([0, 7])
    request.resume.num_text_chars = 2
    request.resume.prompt_token_ids.extend(prompt)
    events = aiter(inference.Generate(request, timeout=WAIT_S))
    assert (await anext(events)).HasField("accepted")
    hello = say_hello("d", DECODE)
    hello.model.max_model_len = context
    sampling = common_pb2.SamplingParams(max_tokens=min(max_tokens, context - len(prompt)))
    add_running(hello, 3, [0, 7], prompt, sampling, DEFAULT_TENANT)
    worker = ScriptedWorker(coordinator.address, hello, auto=False)
    # The worker has served an earlier coordinator.
    worker.welcome = cluster_pb2.Welcome(generation=77)
    try:
        await worker.connect()
        adopted = [(one.request_id, one.attempt) for one in worker.welcome.adopted]
        assert adopted == [("r1", 3)]
        spec = cluster_pb2.RequestSpec(request_id="r1", attempt=3)
        await worker.step(answer(spec, 2, 2, LENGTH))
        rest = [event async for event in events]
        assert [token for event in rest for token in event.delta.token_ids] == [2, 3]
        assert rest[-1].finished.reason == LENGTH
    finally:
        await worker.close()


async def test_a_resumed_request_that_lacks_only_its_end_gets_it(inference):
    request = generate()
    # The last token is the tokenizer's end-of-sequence token.
    request.resume.token_ids.extend([7, 1])
    events = [event async for event in inference.Generate(request, timeout=WAIT_S)]
    assert [event.WhichOneof("event") for event in events] == ["accepted", "finished"]
    finished = events[-1].finished
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert finished.usage.completion_tokens == 2


async def test_a_stream_survives_its_decode_worker(coordinator, pair, inference, say_hello):
    async with pair(auto=False) as (p, d):
        call = inference.Generate(generate(), timeout=WAIT_S)
        await call.read()
        await p.step(answer((await p.command("prefill")).spec, 0, 1, 0))
        assert list((await call.read()).delta.token_ids) == [0]
        await d.command("decode")
        await d.leave()
        assert await d.ended() == (grpc.StatusCode.OK, "")
        async with attached(coordinator.address, say_hello("d2", DECODE)) as (d2,):
            assert (await p.command("cancel")).attempt == 1
            prefill = (await p.command("prefill")).spec
            assert prefill.attempt == 2
            await p.step(answer(prefill, 0, 1, 0))
            decode = (await d2.command("decode")).spec
            assert list(decode.known_token_ids) == [0]
            await d2.step(answer(decode, 1, 2, LENGTH))
            assert [(await call.read()).delta.token_ids[0] for _ in range(2)] == [1, 2]


async def test_model_is_known_before_any_worker(inference, pair):
    before = await inference.GetModel(inference_pb2.GetModelRequest())
    assert (before.name, before.max_model_len, before.vocab_size) == ("demo", 1024, 512)
    async with pair():
        after = await inference.GetModel(inference_pb2.GetModelRequest())
        assert after.revision == "r1"
