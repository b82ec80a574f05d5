"""Limits of connections, heads and bodies, tested over plain sockets."""

import asyncio
import contextlib
import json
import socket

import httpx2 as httpx
import pytest

from tests.client.scripted_inference import accepted, advance_clock, delta, finished

BODY = b'{"prompt": "x", "max_tokens": 1}'
WAIT_S = 300.0


def request(body=BODY, *headers, length=None):
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: a",
        "content-type: application/json",
        f"content-length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def answered(gateway, *parts, pause_s=0.0):
    """Sends the parts; returns status, JSON body and headers of the response."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader):
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
    body = await reader.readexactly(int(fields["content-length"]))
    return int(head.split()[1]), json.loads(body), fields


async def test_tokens_do_not_wait_for_acknowledgements(scripted):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        await http.get(f"{scripted.url}/metrics")
        (connection,) = scripted.accepted
        accepted_socket = connection.transport.get_extra_info("socket")
        assert accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_of_http_1_0_get_no_chunks(inference, scripted, stream):
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    reader, writer = await asyncio.open_connection(*scripted.address)
    writer.write(request(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1], "a"))
    head = b""
    if stream:
        # Later parts are written without a task.
        head = await asyncio.wait_for(reader.readuntil(b'"a"'), WAIT_S)
    connection.send(delta(number, 1, [2], "b"))
    connection.send(delta(number, 2, [3], "c"), finished(number))
    answer = head + await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    head, _, said = answer.decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head.lower()
    if stream:
        *events, end = said.split("\n\n")
        assert end == ""
        assert events.pop() == "data: [DONE]"
        found = [json.loads(event.removeprefix("data: ")) for event in events]
        texts = [one["choices"][0]["text"] for one in found]
        assert "".join(texts) == "abc"
    else:
        assert json.loads(said)["choices"][0]["text"] == "abc"


async def test_connections_are_kept(inference, scripted):
    async def answer():
        connection = await inference.connection()
        for _ in range(3):
            number = (await connection.submitted()).stream
            connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))

    answering = asyncio.create_task(answer())
    async with scripted.openai() as openai:
        for _ in range(2):
            await openai.completions.create(model="scripted", prompt="x")
        stream = await openai.completions.create(model="scripted", prompt="x", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a"]
    await answering
    assert len(scripted.accepted) == 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
    ],
    ids=lambda value: repr(value)[:20],
)
async def test_invalid_json_is_400(scripted, body, code):
    status, answer, _ = await answered(scripted, request(body))
    assert (status, answer["error"]["code"]) == (400, code)


async def test_another_content_type_is_415(scripted):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: text/plain\r\n"
    status, answer, _ = await answered(scripted, head + b"content-length: 2\r\n\r\n{}")
    assert (status, answer["error"]["param"]) == (415, "content-type")


async def test_a_body_with_a_too_large_content_length_is_not_read(coordinator, start_gateway):
    async with start_gateway(coordinator, max_body_bytes=1000) as gateway:
        status, answer, headers = await answered(gateway, request(b"{", length=10**12))
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"


async def test_a_chunked_body_is_read_up_to_the_limit_only(coordinator, start_gateway):
    async with start_gateway(coordinator, max_body_bytes=1000) as gateway:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        chunks = [b"190\r\n" + b" " * 400 + b"\r\n"] * 4
        head += b"transfer-encoding: chunked\r\n\r\n"
        status, answer, headers = await answered(gateway, head, *chunks)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"


async def test_an_incomplete_body_is_408(coordinator, start_gateway):
    async with start_gateway(coordinator, read_timeout_s=0.2) as gateway:
        status, answer, _ = await answered(gateway, request(b"{", length=100))
        assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_incomplete_bodies_have_a_common_limit_which_callers_share(
    coordinator, start_gateway
):
    """128 blocks of 64 KiB are free, and each of these bodies holds three."""
    part, num_that_fit = b" " * 2**18, 42
    async with start_gateway(coordinator, max_body_bytes=2**18 + 9) as gateway:
        slow = [
            await asyncio.open_connection(*gateway.address, limit=2**20)
            for _ in range(num_that_fit + 1)
        ]
        for _, writer in slow:
            writer.write(request(part[:-1], length=len(part)))
        answers = [asyncio.create_task(read_answer(reader)) for reader, _ in slow]
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        ((status, answer, headers),) = [one.result() for one in done]
        assert (status, answer["error"]["code"]) == (429, "gateway_full")
        assert answer["error"]["message"].startswith("incomplete request bodies hold 8 MiB")
        assert headers["retry-after"] == "1"
        # The same caller's short bodies are read, and those of a caller with less than its share.
        assert (await answered(gateway, request(b"{}")))[0] == 400
        other = request(part, "authorization: Bearer other", length=len(part) + 2)
        assert (await answered(gateway, other, b"{}"))[0] == 400
        assert len(waiting) == num_that_fit
        assert not any(one.done() for one in waiting)
        for _, writer in slow:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
            while (await answered(gateway, request(part, length=len(part) + 2), b"{}"))[0] == 429:
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"GET"],
        [b"GET /health HTTP/1.1\r\nhost"],
        # One byte at a time.
        [b"GET /health HTTP/1.1\r\n", *(b"x" for _ in range(20))],
        [b"\r\n"] * 20,
    ],
    ids=["nothing", "a word", "half a head", "drops", "empty lines"],
)
async def test_an_incomplete_head_is_408(coordinator, start_gateway, parts):
    async with start_gateway(coordinator, read_timeout_s=0.2) as gateway:
        status, answer, headers = await answered(gateway, *parts, pause_s=0.02)
        assert (status, answer["error"]["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"


async def test_an_incomplete_second_head_is_408(coordinator, start_gateway):
    async with start_gateway(coordinator, read_timeout_s=500.0) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.address)
        for _ in range(2):
            writer.write(b"GET /v1/nothing HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await read_answer(reader))[0] == 404
        writer.write(b"GET /v1/nothing HT")
        (connection,) = gateway.accepted
        async with asyncio.timeout(WAIT_S):
            while connection._head_timer is None:
                await asyncio.sleep(0.01)
        advance_clock(500.0)
        assert (await read_answer(reader))[0] == 408
        writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /health HTTP/1.1\r\nx: " + b"x" * 5000 + b"\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nx: ", *([b"x" * 500] * 10)],
        [b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\n", *([b"x: y\r\n"] * 500)],
    ],
    ids=["long", "long in pieces", "long path", "many"],
)
async def test_a_long_head_is_431(coordinator, start_gateway, parts):
    async with start_gateway(coordinator, max_header_bytes=2000) as gateway:
        status, answer, headers = await answered(gateway, *parts)
        assert (status, answer["error"]["code"]) == (431, "headers_too_large")
        assert headers["connection"] == "close"
        # Regression: the request was refused twice, the second time on the closed connection.
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            counted = (await http.get(f"{gateway.url}/metrics")).text
        refusals = [line for line in counted.splitlines() if "refusals_total{" in line]
        assert refusals == ['baton_http_refusals_total{reason="header_bytes"} 1.0']


UPGRADE = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQ")
UNKNOWN = b'{"prompt": "x", "unheard_of": 1}'


@pytest.mark.parametrize("pause_at", [None, 20, -len(UNKNOWN), -5], ids=str)
async def test_the_body_of_an_upgrade_request_is_read(scripted, pause_at):
    """Java's HttpClient asks for HTTP/2 with its first request. Regression: its body was empty."""
    reader, writer = await asyncio.open_connection(*scripted.address)
    for asked in (UPGRADE, (), UPGRADE):
        whole = request(UNKNOWN, *asked)
        for part in (whole[:pause_at], whole[pause_at:] if pause_at else b""):
            writer.write(part)
            await asyncio.sleep(0.02)
        status, answer, _ = await read_answer(reader)
        assert (status, answer["error"]["param"]) == (400, "unheard_of")
    writer.close()


async def test_pipelined_upgrade_requests_are_answered(scripted):
    reader, writer = await asyncio.open_connection(*scripted.address)
    writer.write(request(UNKNOWN, *UPGRADE) + request(b"{", *UPGRADE) + request(UNKNOWN))
    codes = [(await read_answer(reader))[1]["error"]["code"] for _ in range(3)]
    assert codes == ["unknown_parameter", "invalid_json", "unknown_parameter"]
    writer.close()


async def test_a_thousand_pipelined_upgrade_requests_are_answered(scripted):
    """Regression: each request was parsed recursively within the one before."""
    reader, writer = await asyncio.open_connection(*scripted.address)
    writer.write(1000 * request(UNKNOWN, *UPGRADE))
    for _ in range(1000):
        assert (await read_answer(reader))[0] == 400
    writer.close()


async def test_the_head_of_an_upgrade_request_is_counted_once(
    inference, coordinator, start_gateway
):
    """The head is parsed twice and must be counted once."""
    asked = request(UNKNOWN, f"x-padding: {1500 * 'x'}", *UPGRADE)
    async with start_gateway(coordinator, max_header_bytes=2000) as gateway:
        status, answer, _ = await answered(gateway, asked)
    assert (status, answer["error"]["param"]) == (400, "unheard_of")


async def test_the_chunked_body_of_an_upgrade_request_is_read(scripted):
    head, _, body = request(UNKNOWN, *UPGRADE, "transfer-encoding: chunked").partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    status, answer, _ = await answered(scripted, b"\r\n".join(lines) + b"\r\n\r\n" + chunks)
    assert (status, answer["error"]["param"]) == (400, "unheard_of")


async def test_a_long_body_does_not_count_as_head(inference, coordinator, start_gateway):
    async with start_gateway(coordinator, max_header_bytes=1000) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.address)
        connection = None
        for _ in range(3):
            body = json.dumps({"prompt": "x" * 100_000, "max_tokens": 1}).encode()
            writer.write(request(body))
            connection = connection or await inference.connection()
            number = (await connection.submitted()).stream
            connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
            assert (await read_answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"\x00" * 64]
)
async def test_garbage_is_400(scripted, garbage):
    status, answer, _ = await answered(scripted, garbage)
    assert (status, answer["error"]["code"]) == (400, "invalid_http")


async def test_a_connection_over_the_limit_is_503_and_the_others_continue(
    inference, coordinator, start_gateway
):
    async with start_gateway(coordinator, max_connections=2) as gateway:
        busy = [await asyncio.open_connection(*gateway.address) for _ in range(2)]
        for _, writer in busy:
            writer.write(request())
        connection = await inference.connection()
        numbers = [(await connection.submitted()).stream for _ in busy]
        assert (await answered(gateway))[0] == 503
        for number in numbers:
            connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
        for reader, writer in busy:
            assert (await read_answer(reader))[0] == 200
            writer.close()


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /hea", request(b"{", length=100)],
    ids=["idle", "half a head", "half a body"],
)
async def test_connections_without_a_complete_request_are_closed_for_new_ones(
    inference, coordinator, start_gateway, said
):
    async with start_gateway(coordinator, max_connections=2) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.address)
        writer.write(request())
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        waiting = [await asyncio.open_connection(*gateway.address) for _ in range(3)]
        for other_reader, other in waiting[:-1]:
            other.write(said)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(other_reader.read(), WAIT_S) == b""
        other_reader, other = waiting[-1]
        other.write(b"GET /v1/nothing HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await read_answer(other_reader))[0] == 404
        connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
        assert (await read_answer(reader))[0] == 200
        for each in (writer, *(one for _, one in waiting)):
            each.close()


async def test_a_request_over_the_limit_is_429_and_the_others_continue(
    inference, coordinator, start_gateway
):
    async with start_gateway(coordinator, max_running_requests=1) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.address)
        writer.write(request())
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        status, answer, headers = await answered(gateway, request())
        assert (status, answer["error"]["code"]) == (429, "gateway_full")
        assert headers["retry-after"] == "1"
        connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
        assert (await read_answer(reader))[0] == 200
        writer.write(request())
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
        assert (await read_answer(reader))[0] == 200
        writer.close()


async def test_a_caller_that_takes_all_places_leaves_others_their_share(
    inference, coordinator, start_gateway
):
    def sent_by(name):
        return request(BODY, f"authorization: Bearer {name}")

    async with start_gateway(coordinator, max_running_requests=2) as gateway:
        running = []
        for name in ("one", "one", "other"):
            if name == "other":
                status, answer, _ = await answered(gateway, sent_by("one"))
                assert (status, answer["error"]["code"]) == (429, "gateway_full")
            reader, writer = await asyncio.open_connection(*gateway.address)
            writer.write(sent_by(name))
            if not running:
                connection = await inference.connection()
            running.append((reader, writer, (await connection.submitted()).stream))
        for name in ("other", "one"):
            status, answer, _ = await answered(gateway, sent_by(name))
            assert (status, answer["error"]["code"]) == (429, "gateway_full")
        assert "2 of them of this caller" in answer["error"]["message"]
        for reader, writer, number in running:
            connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
            assert (await read_answer(reader))[0] == 200
            writer.close()


async def test_pipelined_requests_are_answered_in_order(inference, scripted):
    reader, writer = await asyncio.open_connection(*scripted.address)
    writer.write(request() + b"GET /v1/nothing HTTP/1.1\r\nhost: a\r\n\r\n")
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
    assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 404]
    writer.close()
