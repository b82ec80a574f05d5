"""A real gRPC server whose Inference service is scripted by the test."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from grpc_health.v1 import health_pb2

from baton.client import Accepted, Tokens
from baton.client.errors import UnavailableError
from baton.runtime import errors
from baton.runtime.network import rpc
from baton.runtime.security.access import Access
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

# Bounds hangs. No test may fail because a busy machine is slow.
TIMEOUT_S = 300.0


@dataclass
class Connection:
    """One Session stream, as the server sees it."""

    received: asyncio.Queue = field(default_factory=asyncio.Queue)
    outgoing: asyncio.Queue = field(default_factory=asyncio.Queue)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    # Number of submissions and cancels in each received message.
    sizes: list[int] = field(default_factory=list)

    async def submitted(self) -> inference_pb2.Submit:
        message = await asyncio.wait_for(self.received.get(), TIMEOUT_S)
        assert message.WhichOneof("message") == "submit", message
        return message.submit

    async def cancelled(self) -> int:
        message = await asyncio.wait_for(self.received.get(), TIMEOUT_S)
        assert message.WhichOneof("message") == "cancel", message
        return message.cancel.stream

    def send(self, *events: inference_pb2.SessionEvent) -> None:
        self.outgoing.put_nowait(inference_pb2.SessionEvents(events=events))

    def end(self, error: errors.BatonError | None = None) -> None:
        self.outgoing.put_nowait(error)


class ScriptedInference(inference_pb2_grpc.InferenceServicer):
    """Gives each Session stream to the test as a Connection."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()

    async def connection(self) -> Connection:
        return await asyncio.wait_for(self.connections.get(), TIMEOUT_S)

    @asynccontextmanager
    async def refusing(self, error: errors.BatonError):
        """Refuses every session with an error, as a coordinator does.

        gRPC hides the error of a stream that ends during a write; the client then tries again.
        """

        async def refuse():
            while True:
                (await self.connections.get()).end(error)

        task = asyncio.create_task(refuse())
        try:
            yield
        finally:
            task.cancel()

    async def Session(self, request_iterator, context):
        connection = Connection()
        self.connections.put_nowait(connection)

        async def read():
            async for message in request_iterator:
                found = message.batch or [message]
                connection.sizes.append(len(found))
                for one in found:
                    connection.received.put_nowait(one)

        reader = asyncio.create_task(read())
        try:
            while isinstance(batch := await connection.outgoing.get(), inference_pb2.SessionEvents):
                yield batch
            if batch is not None:
                await errors.abort(context, batch)
        finally:
            reader.cancel()
            connection.closed.set()

    async def GetModel(self, request, context):
        return common_pb2.ModelDescription(name="scripted", max_model_len=8192)


def unused_address() -> str:
    """An address of this host on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def serving(
    servicer: ScriptedInference, listen: str = "127.0.0.1:0", max_calls: int | None = None
):
    """Yields the server's address and its health service."""
    protection = None
    if max_calls is not None:
        config = SecurityConfig(max_calls=max_calls)
        protection = rpc.Protection(config, Access(config, Refusals()), None, None)
    server = rpc.server(protection=protection)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    health = rpc.add_health_and_reflection(server, ["baton.v1.Inference"])
    address = rpc.bind(server, listen, "listen")
    await server.start()
    try:
        yield address, health
    finally:
        await server.stop(None)


async def set_serving(health, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse
    await health.set("baton.v1.Inference", status.SERVING if serving else status.NOT_SERVING)


def accepted(stream: int, request_id: str = "r1", prompt_tokens: int = 3):
    message = inference_pb2.Accepted(
        request_id=request_id, model="scripted", prompt_tokens=prompt_tokens
    )
    return inference_pb2.SessionEvent(stream=stream, accepted=message)


def delta(stream: int, offset: int, token_ids, text: str = "", logprobs=()):
    message = common_pb2.TokenDelta(offset=offset, token_ids=token_ids, text=text)
    for token_id, logprob in logprobs:
        message.logprobs.add().entries.add(token_id=token_id, logprob=logprob, rank=1, text="x")
    return inference_pb2.SessionEvent(stream=stream, delta=message)


def finished(stream: int, reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens: int = 0):
    message = inference_pb2.Finished(
        reason=reason,
        usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=completion_tokens),
        budget=common_pb2.LatencyBudget(
            stages=[
                common_pb2.StageTime(stage=common_pb2.STAGE_QUEUE, duration_us=1500),
                common_pb2.StageTime(
                    stage=common_pb2.STAGE_PREFILL,
                    start_us=1500,
                    duration_us=20_000,
                    worker_id="prefill-0",
                ),
            ],
            ttft_us=21_500,
            total_us=30_000,
        ),
    )
    return inference_pb2.SessionEvent(stream=stream, finished=message)


def failed(stream: int, error: errors.BatonError):
    return inference_pb2.SessionEvent(stream=stream, failed=errors.to_message(error))


async def flowing(client, inference, **options):
    """Starts a request; returns it after two tokens (three characters) have arrived."""
    stream = client.generate("hello", **options)
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number, "r1"), delta(number, 0, [1, 2], "abc"))
    assert [await anext(stream) for _ in range(2)] == [
        Accepted("r1", "scripted", 3),
        Tokens((1, 2), "abc", 0),
    ]
    return stream, connection


async def finish(connection, offset, tokens, text):
    """Serves the next submission to its end; returns the submitted request."""
    submit = await connection.submitted()
    number = submit.stream
    connection.send(accepted(number, "r1"), delta(number, offset, tokens, text), finished(number))
    return submit.request


async def rest(stream):
    """Reads the remaining events of a stream."""
    return [event async for event in stream]


async def lost(client):
    """Waits until the client has noticed the loss of its session."""
    async with asyncio.timeout(TIMEOUT_S):
        while client.address is not None:
            await asyncio.sleep(0.005)


def advance_clock(seconds):
    """Moves the running event loop's clock forward; timers that are due then fire at once."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


async def retried_until(match, call):
    """Repeats a call that raises UnavailableError until the error's message contains `match`."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await call()
            except UnavailableError as error:
                if match in str(error):
                    return


async def _one_token_each(connection: Connection) -> None:
    while True:
        number = (await connection.received.get()).submit.stream
        connection.send(accepted(number), delta(number, 0, [7], "a"))


async def _main() -> None:
    inference = ScriptedInference()
    async with serving(inference) as (address, _), asyncio.TaskGroup() as answering:
        print(address, flush=True)
        while True:
            answering.create_task(_one_token_each(await inference.connections.get()))


if __name__ == "__main__":
    # A coordinator in its own process: it prints its address and gives each request one token.
    asyncio.run(_main())
