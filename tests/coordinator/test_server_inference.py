"""Clients against a real coordinator server, with scripted workers on real attach streams."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from google.rpc import error_details_pb2
from prometheus_client import generate_latest
from scripted_worker import WAIT_S, answer, attached

from baton.coordinator.server.inference import _SessionCall
from baton.coordinator.server.intake import Intake
from baton.coordinator.server.metrics import registry
from baton.coordinator.server.server import Coordinator
from baton.runtime import rpc
from baton.runtime.config import BatonConfig
from baton.runtime.errors import ResourceExhausted, from_rpc_error
from baton.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cluster_pb2,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    kv_transfer_pb2,
)

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
CANCELLED = common_pb2.FINISH_REASON_CANCELLED


def generate(text="the quick fox", **fields) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": 4, **fields.pop("sampling", {})}
    return inference_pb2.GenerateRequest(
        text=text, sampling=common_pb2.SamplingParams(**sampling), **fields
    )


@pytest.fixture
def inference(channel):
    return inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture
def admin(channel):
    return admin_pb2_grpc.AdminStub(channel)


@pytest.fixture
def pair(coordinator, say_hello):
    def attach(**options):
        hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
        return attached(coordinator.address, *hellos, **options)

    return attach


class Client:
    """A session whose events are sorted by stream."""

    def __init__(self, inference) -> None:
        self.call = inference.Session()
        self.batches: list = []
        self._seen: dict[int, list] = {}

    async def submit(self, stream: int, request: inference_pb2.GenerateRequest) -> None:
        submit = inference_pb2.Submit(stream=stream, request=request)
        await self.call.write(inference_pb2.SessionRequest(submit=submit))

    async def cancel(self, stream: int) -> None:
        cancel = inference_pb2.Cancel(stream=stream)
        await self.call.write(inference_pb2.SessionRequest(cancel=cancel))

    async def until(self, stream: int, kind: str) -> list:
        """Reads until the stream has had an event of a kind; all of the stream's events."""
        async with asyncio.timeout(WAIT_S):
            while not any(one.WhichOneof("event") == kind for one in self.of(stream)):
                batch = await self.call.read()
                assert batch is not grpc.aio.EOF
                self.batches.append(batch)
                for event in batch.events:
                    self._seen.setdefault(event.stream, []).append(event)
        return self.of(stream)

    def of(self, stream: int) -> list:
        return self._seen.get(stream, [])


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
        inference_pb2.GenerateRequest(chat={"messages": [{"role": "robot", "content": "x"}]}),
        "chat.messages",
        "unknown role robot",
    ),
]


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
        # One that names no max_tokens gets what the lane allows, whatever its default is.
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
        # The context of 1,024 tokens leaves less.
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
        # gRPC rounds what is left of a deadline up, by a few ms.
        assert 0 < spec.timeout.ToMilliseconds() <= 1100
        await p.command("cancel")


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
        assert client.batches[0].takes_batches
        assert not any(batch.takes_batches for batch in client.batches[1:])
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
    """A call whose client sends what it likes and reads nothing until it is let."""

    def __init__(self, messages) -> None:
        self.messages, self.released = iter(messages), asyncio.Event()

    async def read(self):
        await asyncio.sleep(0)
        return next(self.messages, grpc.aio.EOF)

    async def write(self, message: object) -> None:
        await self.released.wait()


def session_call(coordinator, model_dir, context) -> _SessionCall:
    config = coordinator._config.coordinator
    intake = Intake(coordinator.shell.core, coordinator._tokenizer, config, str(model_dir))
    return _SessionCall(coordinator.shell, intake, config, context)


def submission(stream: int, request) -> inference_pb2.SessionRequest:
    return inference_pb2.SessionRequest(submit=inference_pb2.Submit(stream=stream, request=request))


async def test_refusals_that_nobody_reads_are_bounded(coordinator, model_dir):
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
        # It is not done before the cancel is here.
        threads = coordinator._tokenizer._threads
        for _ in range(threads._max_workers):
            threads.submit(cancelled.wait, WAIT_S)
        await client.submit(1, generate("the fox " * 600))
        await client.cancel(1)
        last = (await client.until(1, "finished"))[-1].finished
        assert last.reason == common_pb2.FINISH_REASON_CANCELLED
        cancelled.set()
        client.call.cancel()


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
    """It is told of, and holds nothing up: neither a single call nor a session."""
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
    assert "request a goes on over another connection" in failed.message
    assert await call.code() is grpc.StatusCode.ABORTED
    assert "request b goes on over another connection" in await call.details()
    await client.call.done_writing()
    async with asyncio.timeout(WAIT_S):
        assert await client.call.read() is grpc.aio.EOF
    for stream in (1, 2):
        await resumed.cancel(stream)
        assert (await resumed.until(stream, "finished"))[-1].finished.reason == CANCELLED
    resumed.call.cancel()


async def test_who_lacks_nothing_but_the_end_gets_it(inference):
    request = generate()
    # The last one is the tokenizer's end of sequence.
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


async def test_admin_shows_pools_workers_and_requests(pair, inference, admin):
    async with pair(auto=False) as (p, d):
        await d.load(num_steps=3, num_running=1)
        call = inference.Generate(generate(request_id="mine", tenant="acme"), timeout=WAIT_S)
        await call.read()
        spec = (await p.command("prefill")).spec
        listed = await admin.ListRequests(admin_pb2.ListRequestsRequest())
        assert [(one.request_id, one.tenant) for one in listed.requests] == [("mine", "acme")]
        assert listed.requests[0].state == admin_pb2.REQUEST_STATE_PREFILLING
        pools = await admin.ListPools(admin_pb2.ListPoolsRequest())
        assert [pool.num_serving for pool in pools.pools] == [1, 1]
        assert pools.model.vocab_size == 512
        assert pools.lanes[0].num_running == 1
        workers = await admin.ListWorkers(admin_pb2.ListWorkersRequest(role=DECODE))
        assert [(one.worker_id, one.num_requests) for one in workers.workers] == [("d", 1)]
        await p.step(answer(spec, 0, 1, STOP))
        assert list((await call.read()).delta.token_ids) == [0]
        assert (await call.read()).finished.reason == STOP
        info = await admin.GetRequest(admin_pb2.GetRequestRequest(request_id="mine"))
        assert info.state == admin_pb2.REQUEST_STATE_FINISHED
        assert info.tenant == "acme"
        assert info.budget.total_us > 0
        assert (info.prefill_worker_id, info.decode_worker_id) == ("p", "d")


async def test_admin_cancels_and_refuses(pair, inference, admin):
    async with pair(auto=False):
        call = inference.Generate(generate(request_id="mine"), timeout=WAIT_S)
        await call.read()
        await admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id="mine"))
        assert (await call.read()).finished.reason == common_pb2.FINISH_REASON_CANCELLED
        for method, request in (
            (admin.CancelRequest, admin_pb2.CancelRequestRequest(request_id="mine")),
            (admin.GetRequest, admin_pb2.GetRequestRequest(request_id="other")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await method(request)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            await admin.ScalePool(admin_pb2.ScalePoolRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_model_is_known_before_any_worker(inference, pair):
    before = await inference.GetModel(inference_pb2.GetModelRequest())
    assert (before.name, before.max_model_len, before.vocab_size) == ("demo", 1024, 512)
    async with pair():
        after = await inference.GetModel(inference_pb2.GetModelRequest())
        assert after.revision == "r1"


async def test_handoff_reports_are_counted(coordinator, pair, inference):
    async with pair(auto=False) as (p, _):
        call = inference.Generate(generate(), timeout=WAIT_S)
        await call.read()
        command = await p.command("prefill")
        report = cluster_pb2.HandoffReport(
            request_id=command.spec.request_id,
            attempt=1,
            handoff_id=command.handoff.handoff_id,
            state=3,
            num_bytes=512,
            exposed_us=100,
            transport="nccl",
            num_fallbacks=1,
        )
        await p.say(handoff=report)
        await p.step(answer(command.spec, 0, 1, STOP))
        await call.read()
        assert (await call.read()).HasField("finished")
    shown = generate_latest(registry(coordinator.shell.core, BatonConfig())).decode()
    for line in (
        'baton_handoffs_total{transport="nccl"} 1.0',
        'baton_handoff_bytes_total{transport="nccl"} 512.0',
        "baton_handoff_fallbacks_total 1.0",
        'baton_handoff_exposed_seconds_bucket{le="0.0001"} 1.0',
        "baton_handoff_exposed_seconds_sum 0.0001",
    ):
        assert line in shown


async def test_a_worker_s_peers_are_named(pair, admin):
    async with pair(auto=False) as (p, d):
        peers = [
            kv_transfer_pb2.PeerTransport(target=d.hello.kv_address, transport="shm"),
            kv_transfer_pb2.PeerTransport(
                target="gone.test:1", transport="grpc", reason="shm: no shared memory"
            ),
        ]
        await p.load(kv_tokens_total=64, peers=peers)
        async with asyncio.timeout(WAIT_S):
            while not (found := await workers_of(admin, PREFILL))[0].load.kv_tokens_total:
                await asyncio.sleep(0.01)
    (worker,) = found
    assert [(one.worker_id, one.target, one.transport, one.reason) for one in worker.peers] == [
        ("d", d.hello.kv_address, "shm", ""),
        ("", "gone.test:1", "grpc", "shm: no shared memory"),
    ]
    assert not worker.load.peers


async def workers_of(admin, role):
    return (await admin.ListWorkers(admin_pb2.ListWorkersRequest(role=role))).workers
