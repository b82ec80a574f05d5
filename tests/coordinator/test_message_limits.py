"""No request becomes a command that a worker cannot receive, and unknown fields are dropped."""

import contextlib

import grpc
import psutil
import pytest

from baton.coordinator.server import server
from baton.coordinator.server.link import WorkerLink
from baton.coordinator.server.message_limits import decoder, max_command_bytes
from baton.coordinator.server.server import Coordinator
from baton.coordinator.server.validation import ModelLimits, check_request
from baton.runtime.config import CoordinatorConfig, parse
from baton.runtime.errors import InvalidArgument, from_rpc_error
from baton.runtime.network import rpc
from baton.v1 import cluster_pb2, common_pb2, inference_pb2, inference_pb2_grpc
from tests.coordinator.inference_client import Client, generate
from tests.coordinator.scripted_worker import WAIT_S, ScriptedWorker

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
MIB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"
UNKNOWN_FIELD = 1000


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def add_unknown(message, num_bytes: int) -> None:
    """Adds a field that this version does not know."""
    tag = varint(UNKNOWN_FIELD << 3 | 2)
    message.MergeFromString(tag + varint(num_bytes) + bytes(num_bytes))


@pytest.fixture
async def workers(say_hello):
    """Attaches a worker to each pool; the workers answer nothing by themselves."""
    async with contextlib.AsyncExitStack() as stack:

        async def attach(address: str) -> list[ScriptedWorker]:
            hellos = [say_hello("p", PREFILL), say_hello("d", DECODE)]
            found = []
            for hello in hellos:
                hello.model.takes_images, hello.model.max_model_len = True, 10_000_000
                worker = ScriptedWorker(address, hello, auto=False, max_received_bytes=-1)
                found.append(worker)
                stack.push_async_callback(worker.close)
                await worker.connect()
            return found

        yield attach


async def test_unknown_fields_of_a_request_do_not_reach_a_worker(coordinator, channel, workers):
    prefiller, _ = await workers(coordinator.address)
    inference = inference_pb2_grpc.InferenceStub(channel)
    request = generate()
    add_unknown(request.sampling, 15 * MIB)
    call = inference.Generate(request, timeout=WAIT_S)
    assert (await prefiller.command("prefill")).ByteSize() < 1000
    call.cancel()
    await prefiller.command("cancel")
    client = Client(inference)
    await client.submit(1, request)
    assert (await prefiller.command("prefill")).ByteSize() < 1000
    client.call.cancel()
    await prefiller.command("cancel")


def test_dropped_fields_take_no_memory():
    decode = decoder(inference_pb2.SessionRequest)
    request = inference_pb2.SessionRequest()
    for stream in range(2):
        submit = request.batch.add().submit
        submit.stream = stream
        submit.request.CopyFrom(generate())
        add_unknown(submit.request.sampling, 5 * MIB)
    encoded = request.SerializeToString()
    before = psutil.Process().memory_info().rss
    kept = [decode(encoded) for _ in range(20)]
    assert psutil.Process().memory_info().rss - before < 100 * MIB
    for message in kept:
        assert [one.submit.request for one in message.batch] == [generate(), generate()]


async def test_a_long_credential_is_refused_and_not_repeated(inference):
    with pytest.raises(grpc.RpcError) as caught:
        await inference.Generate(generate(authorization="x" * MIB), timeout=WAIT_S).read()
    error = from_rpc_error(caught.value)
    assert error.name == "INVALID_ARGUMENT"
    assert "authorization" in str(error)
    assert "xxx" not in str(error)


def test_a_long_traceparent_is_ignored_and_not_kept():
    request = generate(traceparent="x" * MIB)
    check_request(request, CoordinatorConfig(), ModelLimits("demo", 1024, 512))
    assert not request.traceparent


async def test_the_largest_images_reach_a_worker_with_their_prompt(
    coordinator_config, model_dir, workers
):
    images = {"max_image_bytes": 12 * MIB, "max_bytes": 12 * MIB}
    config = parse(
        {
            "model": str(model_dir),
            "coordinator": {"listen": "127.0.0.1:0", "worker_silent_s": 60, "worker_timeout_s": 60},
            "decode": {"local_prefill": False},
            "images": images,
        },
        "test",
    )
    image = PNG + bytes(12 * MIB - len(PNG))
    request = inference_pb2.GenerateRequest(sampling={"max_tokens": 2})
    message = request.chat.messages.add(role="user")
    message.parts.add(image=image)
    message.parts.add(text="a" * (rpc.MAX_MESSAGE_BYTES - request.ByteSize() - 16))
    async with (
        Coordinator(config) as running,
        rpc.channel(running.address) as channel,
    ):
        attached = await workers(running.address)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=WAIT_S)
        renderer = attached[0]
        command = await renderer.command("render")
        rendered = cluster_pb2.Rendered(render_id=command.render_id, prompt_token_ids=[290] * 500)
        await renderer.say(rendered=rendered)
        prefill = await renderer.command("prefill")
        assert prefill.ByteSize() > rpc.MAX_MESSAGE_BYTES
        assert prefill.spec.chat.messages[0].parts[0].image == image
        call.cancel()
        await renderer.command("cancel")


async def test_a_request_with_a_command_over_the_limit_fails_alone(
    coordinator_config, workers, monkeypatch
):
    monkeypatch.setattr(server, "max_command_bytes", lambda config: 500)
    async with (
        Coordinator(coordinator_config()) as running,
        rpc.channel(running.address) as channel,
    ):
        prefiller, _ = await workers(running.address)
        inference = inference_pb2_grpc.InferenceStub(channel)
        call = inference.Generate(generate("x " * 250), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            [event async for event in call]
        error = from_rpc_error(caught.value)
        assert error.name == "INVALID_ARGUMENT"
        assert "at most 500 bytes" in str(error)
        other = inference.Generate(generate(request_id="other"), timeout=WAIT_S)
        while (message := await prefiller.commands.get()).WhichOneof("message") != "prefill":
            pass
        assert message.prefill.spec.request_id == "other"
        other.cancel()
        await prefiller.command("cancel")


def test_a_link_keeps_no_command_over_the_limit():
    link = WorkerLink(("w", 1), max_command_bytes=1000)
    link.open(object())
    with pytest.raises(InvalidArgument, match="must be at most 1000 bytes"):
        link.send(cluster_pb2.CancelCommand(request_id="x" * 1000))
    assert link.next_to_send() is None
    link.send(cluster_pb2.CancelCommand(request_id="r"))
    sent = cluster_pb2.CoordinatorMessage.FromString(link.next_to_send())
    assert (sent.seq, sent.cancel.request_id) == (1, "r")


async def test_a_prompt_that_would_not_fit_a_command_is_refused(coordinator_config, monkeypatch):
    monkeypatch.setattr("baton.coordinator.server.intake.max_command_bytes", lambda config: 100)
    async with (
        Coordinator(coordinator_config()) as running,
        rpc.channel(running.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await inference.Generate(generate("x " * 50), timeout=WAIT_S).read()
        error = from_rpc_error(caught.value)
        assert error.name == "INVALID_ARGUMENT"
        assert "at most 100 bytes" in str(error)


def test_the_limit_of_commands_follows_the_configuration(model_dir):
    config = {"model": str(model_dir), "coordinator": {"max_prompt_bytes": 64 * MIB}}
    assert max_command_bytes(parse(config, "test")) > 4 * 64 * MIB
    small = {"coordinator": {"max_prompt_bytes": 1000}, "images": {"max_bytes": 1000}}
    assert max_command_bytes(parse({**config, **small}, "test")) == rpc.MAX_MESSAGE_BYTES
