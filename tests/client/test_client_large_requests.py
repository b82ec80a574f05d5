"""Requests that take longer to send than a coordinator may take to answer a ping."""

import asyncio
import contextlib
import socket

import pytest
from scripted_inference import (
    TIMEOUT_S,
    ScriptedInference,
    accepted,
    delta,
    failed,
    finish,
    finished,
    serving,
)

from baton.client import BatonClient, connector
from baton.client.errors import UnavailableError
from baton.runtime import errors

LARGE = "x" * (4 * 2**20)
# How long the slow connection stands still; longer than the client and gRPC's servers by default
# wait for the answer to a ping.
PAUSE_S = 7.0


@contextlib.asynccontextmanager
async def slow_upload(address: str):
    """Yields the address of a relay that pauses each connection that sends a large request."""
    host, _, port = address.rpartition(":")

    async def copy(reader, writer, num_bytes_before_pause=None):
        num_bytes = 0
        while data := await reader.read(2**14):
            num_bytes += len(data)
            if num_bytes_before_pause is not None and num_bytes > num_bytes_before_pause:
                num_bytes_before_pause = None
                await asyncio.sleep(PAUSE_S)
            writer.write(data)
            await writer.drain()

    tasks = set()

    async def relay(reader, writer):
        tasks.add(asyncio.current_task())
        there, back = await asyncio.open_connection(host, int(port))
        both = asyncio.gather(copy(reader, back, 2**18), copy(there, writer))
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await both
        for one in (writer, back):
            one.close()

    listener = socket.socket()
    # The smaller its buffer, the more bytes wait at the client, before its pings.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(relay, sock=listener, limit=2**14)
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_large_request_is_submitted_over_a_slow_connection(server, inference, monkeypatch):
    monkeypatch.setattr(connector, "_PING_INTERVAL_S", 1.0)
    monkeypatch.setattr(connector, "_PING_TIMEOUT_S", 2.0)
    async with (
        slow_upload(server[0]) as address,
        BatonClient(address) as client,
        asyncio.timeout(TIMEOUT_S),
    ):
        large = asyncio.create_task(client.complete(LARGE))
        connections = [await inference.connection() for _ in range(2)]
        small = asyncio.create_task(client.complete("y"))
        assert (await finish(connections[0], 0, [1], "a")).text == "y"
        assert (await small).token_ids == (1,)
        assert (await finish(connections[1], 0, [2], "b")).text == LARGE
        assert (await large).token_ids == (2,)


async def two_streams(client, inference):
    """Starts a small and a large request; returns their streams and connections."""
    small = client.generate("x")
    connection = await inference.connection()
    streams, connections = [small, client.generate(LARGE)], [connection]
    connections.append(await inference.connection())
    for one, stream in zip(connections, streams, strict=True):
        number = (await one.submitted()).stream
        one.send(accepted(number, "r1"), delta(number, 0, [1, 2], "abc"))
        for _ in range(2):
            await anext(stream)
    return streams, connections


@pytest.mark.parametrize("ends", [[0], [1], [0, 1]], ids=["main", "bulk", "both"])
async def test_both_sessions_survive_the_loss_of_either(client, inference, ends):
    streams, connections = await two_streams(client, inference)
    for index in ends:
        connections[index].end()

    async def serve(connection):
        while True:
            submit = await connection.submitted()
            number, known = submit.stream, len(submit.request.resume.token_ids)
            connection.send(accepted(number, "r1"), delta(number, known, [3], "d"))
            connection.send(finished(number))

    async def serve_all():
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(serve(await inference.connection()))

    if 0 not in ends:
        connections[0].send(delta(1, 2, [3], "d"), finished(1))
    serving_all = asyncio.create_task(serve_all())
    async with asyncio.timeout(TIMEOUT_S):
        for stream in streams:
            await stream.complete()
    serving_all.cancel()
    await asyncio.gather(serving_all, return_exceptions=True)
    assert [stream.token_ids for stream in streams] == [(1, 2, 3)] * 2


async def test_a_large_request_is_cancelled_and_refused(client, inference):
    streams, connections = await two_streams(client, inference)
    await streams[1].aclose()
    assert await connections[1].cancelled() == 1
    refused = client.generate(LARGE)
    number = (await connections[1].submitted()).stream
    connections[1].send(failed(number, errors.Unavailable("no worker")))
    with pytest.raises(UnavailableError, match="no worker"):
        await anext(refused)
    await streams[0].aclose()


async def test_closing_the_client_ends_large_requests():
    inference = ScriptedInference()
    async with serving(inference) as (address, _):
        client = await BatonClient(address).__aenter__()
        streams, connections = await two_streams(client, inference)
        await client.aclose()
        for stream, connection in zip(streams, connections, strict=True):
            with pytest.raises(errors.RemoteError, match="the client was closed"):
                await anext(stream)
            async with asyncio.timeout(TIMEOUT_S):
                await connection.closed.wait()
