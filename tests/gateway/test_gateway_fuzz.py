"""Random wrong requests to all routes: none is answered with status 500, all in the right form."""

import asyncio
import json
from http.client import HTTPConnection
from random import Random
from urllib.parse import urlsplit

import pytest

from baton.gateway.pooling_route import POOLING_ROUTES
from tests.gateway.baton_command import Process
from tests.gateway.fuzzed_requests import BODIES, fuzzed

pytestmark = [pytest.mark.vllm]

# Bounds hangs. No test may fail because a busy machine is slow.
WAIT_S = 300.0
NUM_REQUESTS = 300
# The gateway's limits: seconds for a body or a read of the client, bytes of a body.
LIMIT_S, MAX_BYTES = 2.0, 200_000
STATUSES = {200, 307, 400, 401, 404, 405, 408, 409, 413, 415, 431}
CONFIG = {
    "tool_call_parser": "hermes",
    "simulated": {"time_scale": 0, "mean_output_tokens": 4},
    "kv_transfer": {"send_bytes": 8388608, "receive_bytes": 8388608},
}
JSON = {"content-type": "application/json"}
GENERATIONS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """The host and port of the gateway of a `baton up` on the simulated engine."""
    directory = tmp_path_factory.mktemp("up")
    limits = {"read_timeout_s": LIMIT_S, "write_timeout_s": LIMIT_S, "max_body_bytes": MAX_BYTES}
    batches = {"dir": str(directory / "batches")}
    file = directory / "baton.yaml"
    http = {"listen": "127.0.0.1:0", "batches": batches, **limits}
    file.write_text(json.dumps({**CONFIG, "http": http}))
    command = ("up", "--engine", "simulated", "--config", str(file), "--listen", "127.0.0.1:0")
    process = Process(*command, directory=directory)
    try:
        url = urlsplit(process.ready(r"http=(\S+)").group(1))
        yield url.hostname, url.port
        assert process.stop() == (0, []), process.err()[-3000:]
        # A stream that fails after its first byte has status 200.
        assert "Traceback" not in process.err(), process.err()[-6000:]
    finally:
        process.close()


def answered(gateway, method, path, body, headers=JSON):
    """Returns the status, content type and body of the response."""
    connection = HTTPConnection(*gateway, timeout=WAIT_S)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers.get_content_type(), response.read()
    finally:
        connection.close()


def is_anthropic(path):
    return path.partition("?")[0] in ("/v1/messages", "/v1/messages/count_tokens")


def check_error(path, method, body):
    """Checks the form of an error."""
    if method == "HEAD":
        assert body == b""
        return
    found = json.loads(body)
    if is_anthropic(path) and method == "POST":
        assert found["type"] == "error"
        assert set(found) <= {"type", "error", "request_id"}
        assert set(found["error"]) == {"type", "message"}
    else:
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["message"]


@pytest.mark.parametrize("path", GENERATIONS)
def test_the_request_that_is_changed_is_right(gateway, path):
    status, _, body = answered(gateway, "POST", path, json.dumps(BODIES[path]))
    assert status == 200, body


@pytest.mark.seeds(1)
def test_no_request_is_an_internal_error(gateway, seed):
    random = Random(seed)
    seen = set()
    for _ in range(NUM_REQUESTS):
        request = fuzzed(random)
        # http.client cannot send these.
        headers = {name: one.encode("latin-1") for name, one in {**JSON, **request.headers}.items()}
        found = answered(gateway, request.method, request.path, request.body, headers)
        status, kind, body = found
        is_off = status == 501 and request.path.partition("?")[0] in POOLING_ROUTES
        assert status in STATUSES or is_off, (request, found)
        if status >= 400:
            check_error(request.path, request.method, body)
        elif kind == "text/event-stream":
            assert b"internal error" not in body, (request, body)
        seen.add((request.path, status))
    for route in BODIES:
        assert (route, 400) in seen, f"no request to {route} was wrong"


def head(path, length):
    """The head of a request with a JSON body."""
    lines = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {length}", "\r\n"]).encode()


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_is_too_large_is_413_in_the_form_of_its_route(gateway, path):
    reader, writer = await asyncio.open_connection(*gateway)
    writer.write(head(path, MAX_BYTES + 1) + b"{")
    await check_refusal(reader, path, 413)
    writer.close()


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_comes_byte_by_byte_is_408_in_the_form_of_its_route(gateway, path):
    reader, writer = await asyncio.open_connection(*gateway)
    writer.write(head(path, 1000))
    refusal = asyncio.create_task(check_refusal(reader, path, 408))
    while not refusal.done():
        writer.write(b" ")
        await asyncio.sleep(LIMIT_S / 8)
    await refusal
    writer.close()


async def check_refusal(reader, path, status):
    async with asyncio.timeout(WAIT_S):
        told = await reader.readuntil(b"\r\n\r\n")
        assert int(told.split()[1]) == status
        length = told.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        check_error(path, "POST", await reader.readexactly(int(length)))
