"""Requests while no coordinator can be reached."""

import asyncio
import contextlib
import queue
import threading
import time
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.client import BatonClient, BlockingClient
from baton.client.errors import (
    DeadlineExceededError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from baton.client.retry_policy import MAX_LOSSES_WITHOUT_PROGRESS
from baton.client.session import Session
from baton.runtime import errors
from baton.runtime.network import rpc
from tests.client.scripted_inference import (
    TIMEOUT_S,
    ScriptedInference,
    advance_clock,
    finish,
    flowing,
    lost,
    rest,
    serving,
)


async def outage(timeout_s=None, **arguments):
    """Returns a client whose coordinator has stopped, and its request with two tokens."""
    inference = ScriptedInference()
    async with serving(inference) as (address, _):
        client = await BatonClient(address, **arguments).__aenter__()
        stream, _ = await flowing(client, inference, timeout_s=timeout_s)
    await lost(client)
    return client, stream


async def test_the_deadline_holds_in_an_outage():
    client, stream = await outage(timeout_s=500.0)
    advance_clock(500.0)
    with pytest.raises(DeadlineExceededError, match=r"500 s"):
        await rest(stream)
    await client.aclose()


async def test_a_request_fails_after_the_resume_timeout():
    client, stream = await outage(resume_timeout_s=500.0)
    advance_clock(500.0)
    with pytest.raises(UnavailableError, match=r"could not be resumed within 500 s: "):
        await rest(stream)
    assert stream.token_ids == (1, 2)
    await client.aclose()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_cancel_and_an_outage(inference, when):
    async with serving(inference) as (address, _):
        client = await BatonClient(address).__aenter__()
        stream, connection = await flowing(client, inference)
        if when == "before":
            stream.cancel()
            await connection.cancelled()
    await lost(client)
    stream.cancel()
    (last,) = await rest(stream)
    assert last.reason == "cancelled"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 2)
    async with serving(inference, address):
        # The cancelled request is not sent to the next coordinator.
        after = client.generate("after")
        request = await finish(await inference.connection(), 0, [5], "e")
        assert request.text == "after"
        await after.complete()
    await client.aclose()


async def test_closing_a_stream_in_an_outage():
    client, stream = await outage()
    await stream.aclose()
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    await client.aclose()


async def test_closing_the_client_in_an_outage():
    before = asyncio.all_tasks()
    client, stream = await outage()
    reading = asyncio.create_task(rest(stream))
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(RequestCancelledError, match="the client was closed"):
        await reading
    assert {task for task in asyncio.all_tasks() - before if "baton" in task.get_name()} == set()


async def test_waiting_requests_count_towards_the_limit():
    client, stream = await outage(max_requests=1)
    with pytest.raises(ResourceExhaustedError, match="limit"):
        client.generate("y")
    await stream.aclose()
    await client.aclose()


@asynccontextmanager
async def proxy(status, listen="127.0.0.1:0"):
    """An HTTP/2 proxy that responds to every call with an HTTP status and no gRPC status.

    Yields its address and a queue of the responses that the client has read.
    """
    connections, answered, closing = {}, asyncio.Queue(), asyncio.Event()

    async def serve(reader, writer):
        connections[writer] = asyncio.current_task()

        def write(data):
            if not closing.is_set():
                writer.write(data)

        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
            write(frame(SETTINGS))
            while True:
                head = await reader.readexactly(9)
                body = await reader.readexactly(int.from_bytes(head[:3]))
                kind, flags, stream = head[3], head[4], head[5:]
                if kind == PING and flags:
                    # The client answers frames in their order: it has read the response.
                    answered.put_nowait(status)
                elif kind in (SETTINGS, PING) and not flags:
                    write(frame(kind, 1, body=body if kind == PING else b""))
                elif kind == HEADERS:
                    # One header, entry 8 of HPACK's static table (:status); ends the stream.
                    write(frame(HEADERS, 5, stream, b"\x48\x03%d" % status))
                    write(frame(PING, body=bytes(8)))

    host, port = listen.split(":")
    server = await asyncio.start_server(serve, host, int(port))
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}", answered
    finally:
        server.close()
        closing.set()
        for writer in connections:
            # Clients close in turn. If this side closed first, with bytes unread, the connection
            # would be reset, and the client could lose the response.
            with contextlib.suppress(OSError):
                writer.write_eof()
        await asyncio.gather(*connections.values())
        for writer in connections:
            writer.close()
        await server.wait_closed()


HEADERS, SETTINGS, PING = 1, 4, 6


def frame(kind, flags=0, stream=bytes(4), body=b""):
    return len(body).to_bytes(3) + bytes((kind, flags)) + stream + body


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (502, UnavailableError, "a proxy answers at {} that does not reach the coordinator"),
        (404, UnimplementedError, "the server at {} is not a coordinator"),
    ],
)
async def test_a_server_that_is_no_coordinator_is_named_in_the_error(status, kind, said):
    async with proxy(status) as (address, _), BatonClient(address) as client:
        match = f"^{said.format(address)}: HTTP status {status}$"
        for call in (client.complete("x"), client.model(TIMEOUT_S)):
            with pytest.raises(kind, match=match):
                await call


async def test_an_outage_behind_a_proxy_is_waited_out(inference):
    """The number of attempts exceeds the limit of consecutive lost sessions."""
    async with serving(inference) as (address, _):
        client = await BatonClient(address, resume_timeout_s=10 * TIMEOUT_S).__aenter__()
        stream, _ = await flowing(client, inference)
    async with proxy(503, address) as (_, answered):
        for _ in range(MAX_LOSSES_WITHOUT_PROGRESS + 2):
            await asyncio.wait_for(answered.get(), TIMEOUT_S)
    async with serving(inference, address):
        await finish(await inference.connection(), 2, [3], "d")
        await rest(stream)
    assert (stream.token_ids, stream.num_resumes) == ((1, 2, 3), 1)
    await client.aclose()


async def test_a_connection_that_closes_before_the_client_sees_it_open():
    """The client's event loop stands still while the proxy accepts, responds and closes."""
    opened = queue.Queue()

    async def respond_once():
        async with proxy(503) as (address, answered):
            opened.put(address)
            await answered.get()

    responding = threading.Thread(target=asyncio.run, args=(respond_once(),))
    responding.start()
    address = await asyncio.to_thread(opened.get, timeout=TIMEOUT_S)
    async with rpc.channel(address, ping_interval_s=TIMEOUT_S, ping_timeout_s=TIMEOUT_S) as channel:
        session = Session(channel, address, on_open=print, on_refused=print)
        running = asyncio.create_task(session.run())
        idle = grpc.ChannelConnectivity.IDLE
        # The connection may open and close before this task sees it. The proxy's thread ends then.
        while channel.get_state() is idle and responding.is_alive():
            await asyncio.sleep(0)
        responding.join()
        while channel.get_state() is not idle:
            time.sleep(0.001)
        end = await asyncio.wait_for(running, TIMEOUT_S)
    assert (end.refused, end.served) == (True, False)


async def test_an_outage_that_a_proxy_reports_by_a_grpc_status_is_waited_out(client, inference):
    stream, connection = await flowing(client, inference)
    connection.end()
    for _ in range(MAX_LOSSES_WITHOUT_PROGRESS + 2):
        (await inference.connection()).end(errors.Unavailable("no healthy upstream"))
    await finish(await inference.connection(), 2, [3], "d")
    await rest(stream)
    assert stream.token_ids == (1, 2, 3)


async def test_closing_a_blocking_client_in_an_outage(inference):
    async with serving(inference) as (address, _):
        client = await asyncio.to_thread(BlockingClient, address)
        stream = await asyncio.to_thread(client.generate, "hello")
        await (await inference.connection()).submitted()
    reading = asyncio.create_task(asyncio.to_thread(list, stream))
    await asyncio.to_thread(client.close)
    with pytest.raises((RequestCancelledError, RuntimeError)):
        await reading
