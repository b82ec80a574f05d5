"""Callers with invalid keys cost the coordinator only a few queries of the gateway."""

import asyncio

import httpx
import pytest

from baton.client import AdminClient, BatonClient
from baton.client.errors import UnauthenticatedError
from baton.gateway import cell, coordinator_queries
from baton.gateway.coordinator_queries import QueryLimiter
from baton.gateway.error_responses import HttpError
from tests.security.http_gateway import gateway
from tests.security.tcp_relay import Relay

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0
NUM_STRANGERS = 60


@pytest.fixture
async def front(start_coordinator, keys):
    """A client of a gateway, the relay behind it, and keys of a user and an operator."""
    user = keys.add("one", tenant="a")
    operator = keys.add("ops", admin=True)
    async with (
        start_coordinator({"api_keys_file": keys.path}) as running,
        Relay(running.address) as relay,
        gateway(relay.address) as http,
        httpx.AsyncClient(base_url=f"http://{http}", timeout=WAIT_S) as client,
    ):
        yield client, relay, user, operator


async def test_invalid_keys_open_no_connections(front, monkeypatch):
    # With these timeouts every query gets its turn and its answer, even on a slow machine.
    monkeypatch.setattr(coordinator_queries, "_QUEUE_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(cell, "_QUERY_TIMEOUT_S", WAIT_S)
    client, relay, user, operator = front

    async def status(path, key):
        return (await client.get(path, headers={"authorization": f"Bearer {key}"})).status_code

    paths = ("/v1/models", "/dashboard/data", "/dashboard/requests/r1")
    found = await asyncio.gather(
        *(status(path, f"guess-{number}") for path in paths for number in range(NUM_STRANGERS))
    )
    assert set(found) == {401}
    assert await status("/v1/models", user) == 200
    assert await status("/dashboard/data", operator) == 200
    # One connection of each kind, for all callers.
    assert relay.num_connections <= 3


async def test_a_credential_that_no_header_may_contain_is_refused(front):
    client, *_ = front
    headers = [(b"authorization", "Bearer schlüssel".encode("latin-1"))]
    body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 1}
    answers = [await client.get("/v1/models", headers=headers)]
    answers.append(await client.get("/dashboard/data", headers=headers))
    answers.append(await client.post("/v1/completions", headers=headers, json=body))
    for answer in answers:
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "schl" not in answer.text


async def test_queries_wait_for_their_turn_up_to_a_timeout(monkeypatch):
    monkeypatch.setattr(coordinator_queries, "_QUEUE_TIMEOUT_S", 0.05)
    query_limiter, answered = QueryLimiter(), asyncio.Event()
    num_asked = 0

    async def ask():
        nonlocal num_asked
        num_asked += 1
        await answered.wait()
        return "answer"

    asking = [asyncio.create_task(query_limiter.run(ask)) for _ in range(NUM_STRANGERS)]
    await asyncio.wait(asking, timeout=WAIT_S, return_when="FIRST_EXCEPTION")
    refused = await asyncio.gather(*asking[num_asked:], return_exceptions=True)
    assert num_asked < NUM_STRANGERS
    assert {(type(error), error.status) for error in refused} == {(HttpError, 503)}
    answered.set()
    assert set(await asyncio.gather(*asking[:num_asked])) == {"answer"}
    assert await query_limiter.run(ask) == "answer"


@pytest.mark.parametrize("key", ["schlüssel", "key\n", "a\x00b"])
async def test_a_key_that_cannot_be_sent_is_a_clear_error(start_coordinator, keys, key):
    keys.add("one", tenant="a")
    async with (
        start_coordinator({"api_keys_file": keys.path}) as running,
        BatonClient(running.address, api_key=key) as client,
        AdminClient(running.address, api_key=lambda: key) as admin,
    ):

        async def watch():
            async for _ in admin.watch():
                pass

        for ask in (
            client.model,
            lambda: client.complete([1], max_tokens=1),
            lambda: client.model(authorization=f"Bearer {key}"),
            admin.list_workers,
            watch,
        ):
            with pytest.raises(UnauthenticatedError, match=r"must be .*printable ASCII") as caught:
                await ask()
            assert key not in str(caught.value)


async def test_a_key_must_be_one_word():
    async with BatonClient("127.0.0.1:1", api_key="two words") as client:
        with pytest.raises(UnauthenticatedError, match=r"^api_key .* must be one word") as caught:
            await client.model()
        assert "two words" not in str(caught.value)
