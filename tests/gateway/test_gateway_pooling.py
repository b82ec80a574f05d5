"""Routes of pooling models: without a server, with a broken one, and with plain vLLM."""

import asyncio
import contextlib
import time

import httpx2 as httpx
import pytest
from openai import APIStatusError, BadRequestError

from baton.gateway import pooling_servers
from baton.gateway.pooling_route import POOLING_ROUTES
from baton.runtime import errors
from baton.runtime.process import long_tasks
from tests.client.scripted_inference import ScriptedInference, serving, unused_address
from tests.gateway import pooling_server, tiny_bert
from tests.vllm.vllm_programs import fork

# Bounds hangs. No test may fail because a busy machine is slow.
WAIT_S = 300.0
# Longest start of a vLLM server, on a busy machine.
START_S = 600.0
BODY = {"model": "tiny", "input": "what is a flip"}


async def post(gateway, path, body=BODY, **headers):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return await http.post(f"{gateway.url}{path}", json=body, headers=headers)


async def metric(gateway, line):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return line in (await http.get(f"{gateway.url}/metrics")).text.splitlines()


def servers(*urls, **options):
    return [{"model": "tiny", "url": url, **options} for url in urls]


@contextlib.asynccontextmanager
async def tcp_server(answer):
    """Runs a server that gives each request for an answer to `answer`; yields its URL."""
    writers = []

    async def serve(reader, writer):
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await answer(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("path", POOLING_ROUTES)
async def test_without_a_server_the_error_says_how_to_add_one(scripted, path):
    answer = await post(scripted, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (501, "pooling_off")
    assert "vllm serve MODEL --runner pooling" in error["message"]
    assert "http.pooling" in error["message"]
    # OpenAI's client does not retry.
    assert answer.headers["x-should-retry"] == "false"
    assert await metric(scripted, f'baton_http_requests_total{{code="501",route="{path}"}} 1.0')


async def test_wrong_requests_are_refused_before_a_server_gets_them(coordinator, start_gateway):
    async with start_gateway(coordinator, pooling=servers("http://127.0.0.1:9")) as gateway:
        answer = await post(gateway, "/v1/score", {"model": "other"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        assert "'tiny'" in answer.json()["error"]["message"]
        for body in ({"model": 5}, [1]):
            answer = await post(gateway, "/v1/score", body)
            assert answer.status_code == 400
        answer = await post(gateway, "/v1/score", **{"x-baton-timeout-s": "soon"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-baton-timeout-s")
        async with gateway.openai() as client:
            assert [one.id async for one in client.models.list()] == ["scripted", "tiny"]


async def test_a_server_that_cannot_be_reached_is_503(coordinator, start_gateway):
    url = f"http://{unused_address()}"
    async with start_gateway(coordinator, pooling=servers(url)) as gateway:
        async with gateway.openai() as client:
            with pytest.raises(APIStatusError) as caught:
                await client.embeddings.create(**BODY)
        assert caught.value.status_code == 503
        assert url in str(caught.value)
        assert caught.value.response.headers["retry-after"] == "1"
        assert await metric(gateway, f'baton_http_pooling_up{{model="tiny",url="{url}"}} 0.0')


async def test_health_checks_go_on_after_an_answer_that_cannot_be_read(
    coordinator, start_gateway, monkeypatch
):
    monkeypatch.setattr(pooling_servers, "_HEALTH_PAUSE_S", 0.01)
    num_checks = 0
    # Repeating a check that has failed would hide the error.
    monkeypatch.setattr(long_tasks, "_FIRST_PAUSE_S", WAIT_S)

    async def answer(reader, writer):
        nonlocal num_checks
        await reader.readuntil(b"\r\n\r\n")
        num_checks += 1
        encoding = b"content-encoding: gzip\r\n" if num_checks == 1 else b""
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n"
        writer.write(head + encoding + b"\r\nok")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    url = f"http://{host}:{port}"
    async with server, start_gateway(coordinator, pooling=servers(url)):
        async with asyncio.timeout(WAIT_S):
            while num_checks < 3:
                await asyncio.sleep(0.01)


async def test_a_server_that_does_not_answer_is_504_and_one_that_answers_nonsense_502(
    coordinator, start_gateway
):
    async def wait(reader, writer):
        await reader.read()

    async def fail(reader, writer):
        writer.write(b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    async with tcp_server(wait) as silent, tcp_server(fail) as broken:
        quick = {"pooling": servers(silent, timeout_s=0.2)}
        async with start_gateway(coordinator, **quick) as gateway:
            answer = await post(gateway, "/v1/embeddings")
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        async with start_gateway(coordinator, pooling=servers(broken)) as gateway:
            answer = await post(gateway, "/v1/embeddings")
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_gateway")


async def test_a_route_that_the_model_does_not_support_is_400(coordinator, start_gateway):
    async def refuse(reader, writer):
        body = b'{"detail":"Not Found"}'
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await reader.read()

    async with (
        tcp_server(refuse) as url,
        start_gateway(coordinator, pooling=servers(url)) as gateway,
    ):
        answer = await post(gateway, "/v1/embeddings", **{"x-request-id": b"caf\xe9"})
        assert answer.headers["x-request-id"] == "caf\xe9"
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_route")
        assert error["message"] == "model 'tiny' does not support /v1/embeddings"


async def test_vectors_as_bytes_come_with_their_description(coordinator, start_gateway):
    metadata = b'{"data": [{"index": 0, "start": 0, "end": 4, "shape": [1]}]}'

    async def answer(reader, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
            b"metadata: " + metadata + b"\r\ncontent-length: 4\r\n\r\n\0\0\x80?"
        )
        await reader.read()

    async with (
        tcp_server(answer) as url,
        start_gateway(coordinator, pooling=servers(url)) as gateway,
    ):
        found = await post(gateway, "/v1/embeddings", {**BODY, "encoding_format": "bytes"})
        assert found.content == b"\0\0\x80?"
        assert found.headers["content-type"] == "application/octet-stream"
        assert found.headers["metadata"] == metadata.decode()


async def test_when_the_client_leaves_the_server_is_told(coordinator, start_gateway):
    asked, left = asyncio.Event(), asyncio.Event()

    async def wait(reader, writer):
        asked.set()
        await reader.read()
        left.set()

    async with (
        tcp_server(wait) as url,
        start_gateway(coordinator, pooling=servers(url)) as gateway,
    ):
        request = asyncio.create_task(post(gateway, "/v1/embeddings"))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        request.cancel()
        await asyncio.wait_for(left.wait(), WAIT_S)
        line = 'baton_http_requests_total{code="499",route="/v1/embeddings"} 1.0'
        async with asyncio.timeout(WAIT_S):
            while not await metric(gateway, line):
                await asyncio.sleep(0.01)


class Closed(ScriptedInference):
    """A coordinator that refuses every client."""

    async def GetModel(self, request, context):
        await errors.abort(context, errors.Unauthenticated("no such key"))


async def test_a_caller_without_a_valid_credential_is_refused(start_gateway):
    async with (
        serving(Closed()) as (address, _),
        start_gateway(address, pooling=servers("http://127.0.0.1:9")) as gateway,
    ):
        answer = await post(gateway, "/v1/embeddings", authorization="Bearer wrong")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """The URL of a plain vLLM server with a small random model."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_bert.write(directory)
    address = unused_address()
    port = address.partition(":")[2]
    arguments = ["--model", str(directory), "--served-model-name", "tiny", "--runner", "pooling"]
    arguments += ["--enforce-eager", "--host", "127.0.0.1", "--port", port]
    log, environment = directory / "log", {"VLLM_CPU_KVCACHE_SPACE": "1"}
    process = fork(pooling_server.main, *arguments, log=log, environment=environment)
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"http://{address}"):
            is_starting = process.is_alive() and time.monotonic() < deadline
            assert is_starting, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.join(WAIT_S)


def answers(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.vllm
async def test_plain_vllm_embeds_scores_and_ranks(coordinator, start_gateway, vllm):
    async with start_gateway(coordinator, pooling=servers(vllm)) as gateway:
        async with gateway.openai() as client:
            one = await client.embeddings.create(**BODY)
            two = await client.embeddings.create(
                model="tiny", input=[BODY["input"], "a kv cache"], encoding_format="float"
            )
            assert len(one.data[0].embedding) == tiny_bert.HIDDEN_SIZE
            assert one.data[0].embedding == pytest.approx(two.data[0].embedding, abs=1e-3)
            assert one.data[0].embedding != pytest.approx(two.data[1].embedding, abs=1e-3)
            assert two.usage.prompt_tokens > one.usage.prompt_tokens > 0
            with pytest.raises(BadRequestError, match="input") as caught:
                await client.embeddings.create(model="tiny", input={"a": 1})
            assert caught.value.type == "invalid_request_error"
        texts = ["a kv cache", BODY["input"]]
        body = {"model": "tiny", "text_1": BODY["input"], "text_2": texts}
        answer = await post(gateway, "/v1/score", body, **{"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        scores = [one["score"] for one in answer.json()["data"]]
        assert scores[1] > scores[0]
        body = {"model": "tiny", "query": BODY["input"], "documents": texts}
        ranked = (await post(gateway, "/v1/rerank", body)).json()["results"]
        assert [one["index"] for one in ranked] == [1, 0]
        assert await metric(gateway, f'baton_http_pooling_up{{model="tiny",url="{vllm}"}} 1.0')
