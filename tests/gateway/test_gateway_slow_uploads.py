"""Clients that send a body one byte at a time, or only a part of it, to every POST route."""

import asyncio
import contextlib
import json

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from baton.gateway import body_reader, connections
from baton.gateway.batches import BATCHES, FILES, upload
from baton.gateway.pooling_route import POOLING_ROUTES

# Bounds hangs. No test may fail because a busy machine is slow.
WAIT_S = 300.0
# The limits that the tests exceed, in seconds.
READ_S, LINGER_S, PAUSE_S = 0.5, 0.2, 0.02
JSON, FORM = "application/json", "multipart/form-data; boundary=b"
FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
WITH_BODY = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    *POOLING_ROUTES,
    BATCHES,
    FILES,
)
# These routes answer without reading a body.
WITHOUT_BODY = (f"{BATCHES}/b/cancel", "/v1/none")


@pytest.fixture
async def gateway(coordinator, start_gateway, monkeypatch, tmp_path):
    limits = {"read_timeout_s": READ_S, "write_timeout_s": READ_S, "keep_alive_s": 1}
    async with start_gateway(coordinator, batches={"dir": str(tmp_path)}, **limits) as gateway:
        for module in (body_reader, connections):
            monkeypatch.setattr(module, "LINGER_S", LINGER_S)
        monkeypatch.setattr(upload, "_TIMEOUT_S", READ_S)
        yield gateway


async def uploaded(gateway, path, *, drips):
    """Returns status and body of the answer to an upload that does not end.

    Args:
        gateway: The gateway.
        path: The route.
        drips: Send a byte every PAUSE_S until the gateway closes the connection; otherwise send
            nothing after the first part.
    """
    kind = FORM if path == FILES else JSON
    reader, writer = await asyncio.open_connection(*gateway.address)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: {kind}\r\ncontent-length: 100000\r\n"
    writer.write(head.encode() + b"\r\n" + (FILE if path == FILES else b"{"))

    async def drip():
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(PAUSE_S)

    sending = asyncio.create_task(drip() if drips else asyncio.sleep(WAIT_S))
    answer = b""
    try:
        async with asyncio.timeout(WAIT_S):
            # The gateway may reset a connection whose client has not read the answer.
            with contextlib.suppress(ConnectionResetError):
                while data := await reader.read(2**16):
                    answer += data
            if gateway.accepted:
                while not gateway.accepted[-1].transport.is_closing():
                    await asyncio.sleep(PAUSE_S)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def serves_a_request(task):
    return task.get_coro().__qualname__ == RequestResponseCycle.run_asgi.__qualname__


def message(path, body):
    # The body may be chunked.
    found = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])
    assert found.get("type") == ("error" if path.startswith("/v1/messages") else None)
    return found["error"]["message"]


@pytest.mark.parametrize("drips", [True, False], ids=["a byte at a time", "half a body"])
@pytest.mark.parametrize("path", WITH_BODY)
async def test_an_upload_that_takes_too_long_is_408_and_leaves_nothing(gateway, path, drips):
    status, body = await uploaded(gateway, path, drips=drips)
    assert status == 408
    assert f"within {READ_S:g} s" in message(path, body)
    async with asyncio.timeout(WAIT_S):
        while any(map(serves_a_request, asyncio.all_tasks())):
            await asyncio.sleep(PAUSE_S)


@pytest.mark.parametrize("drips", [True, False], ids=["a byte at a time", "half a body"])
@pytest.mark.parametrize("path", WITHOUT_BODY)
async def test_an_upload_that_no_one_reads_does_not_keep_its_connection(gateway, path, drips):
    status, _ = await uploaded(gateway, path, drips=drips)
    assert status in (200, 404)
