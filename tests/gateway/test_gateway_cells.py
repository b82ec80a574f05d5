"""A gateway in front of several cells: routing, and failover when a cell is unreachable."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2 as httpx
import pytest

from baton.client import session_manager
from baton.gateway import cell as cell_module
from baton.runtime.errors import RESTARTING, ResourceExhausted, Unavailable
from tests.client.scripted_inference import (
    serving,
    set_serving,
    unused_address,
)
from tests.gateway.scripted_cell import CellOf, serve

WAIT_S = 300.0
GONE = Unavailable("no decode worker is attached")


@asynccontextmanager
async def gateway_to(start_gateway, *cells):
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serve(cell)) for cell in cells]
        gateway = await stack.enter_async_context(start_gateway(*addresses))
        http = httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S)
        yield await stack.enter_async_context(http)


async def ask(http, headers=None, **body):
    body = {"prompt": "a", **body}
    return await http.post("/v1/completions", json=body, headers=headers)


async def said(http, **body):
    answer = await ask(http, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def failovers(http):
    """Returns the number of failovers by the address of the unreachable cell."""
    text = (await http.get("/metrics")).text
    lines = [one for one in text.splitlines() if one.startswith("baton_http_failovers_total{")]
    return {one.split('"')[1]: float(one.split()[-1]) for one in lines}


async def test_a_request_goes_to_a_cell_that_serves_its_model(start_gateway):
    large, small = CellOf("large", "llama-70b", "legal"), CellOf("small", "llama-8b", "support")
    async with gateway_to(start_gateway, large, small) as http:
        names = ("llama-8b", "llama-70b", "legal", "support")
        answers = {model: await said(http, model=model) for model in names}
        assert answers == {
            "llama-8b": "small",
            "llama-70b": "large",
            "legal": "large",
            "support": "small",
        }
        assert await said(http) == "large"
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [
            ("llama-70b", None),
            ("legal", "llama-70b"),
            ("llama-8b", None),
            ("support", "llama-8b"),
        ]
        assert (await http.get("/v1/models/support")).json()["id"] == "support"
        for answer in (await ask(http, model="gpt"), await http.get("/v1/models/gpt")):
            assert answer.status_code == 404
            error = answer.json()["error"]
            served = "'llama-70b' and 'legal' and 'llama-8b' and 'support'"
            assert error["message"] == f"model is 'gpt'; this gateway serves {served}"
            assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_a_chat_goes_to_the_cell_of_its_model(start_gateway):
    async with gateway_to(start_gateway, CellOf("large", "l"), CellOf("small", "s")) as http:
        turns = [{"role": "user", "content": "hello"}]
        body = {"model": "s", "messages": turns, "stream": True}
        answer = await http.post("/v1/chat/completions", json=body)
    chunks = [one.removeprefix("data: ") for one in answer.text.split("\n\n") if one]
    deltas = [json.loads(one)["choices"][0]["delta"] for one in chunks if one != "[DONE]"]
    assert "".join(one.get("content") or "" for one in deltas) == "small"


async def test_a_session_stays_with_its_cell_and_sessions_are_spread(start_gateway):
    cells = [CellOf("one", "m"), CellOf("two", "m"), CellOf("three", "m")]
    async with gateway_to(start_gateway, *cells) as http:
        for turn in range(3):
            for number in range(64):
                key = f"session {number}"
                await said(http, model="m", prompt_cache_key=key, request_id=f"{number}-{turn}")
    found = {cell.name: {one.session_id for one in cell.requests} for cell in cells}
    assert sum(map(len, found.values())) == 64
    assert all(found.values())


async def test_requests_without_a_session_are_spread(start_gateway):
    cells = [CellOf("one", "m"), CellOf("two", "m")]
    async with gateway_to(start_gateway, *cells) as http:
        for number in range(64):
            await said(http, request_id=f"r{number}")
    assert all(len(cell.requests) >= 4 for cell in cells)


async def test_another_cell_serves_the_sessions_of_an_unreachable_cell_until_it_returns(
    start_gateway,
):
    one, two = CellOf("one", "m"), CellOf("two", "m")
    sessions = [f"session {number}" for number in range(32)]
    async with serve(two) as there, AsyncExitStack() as stack:
        first = AsyncExitStack()
        here = await first.enter_async_context(serve(one))
        gateway = await stack.enter_async_context(start_gateway(here, there))
        http = httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S)
        await stack.enter_async_context(http)

        async def answers():
            return [await said(http, model="m", prompt_cache_key=key) for key in sessions]

        before = await answers()
        assert set(before) == {"one", "two"}
        await first.aclose()
        assert set(await answers()) == {"two"}
        # Only the first request met the unreachable cell.
        assert await failovers(http) == {here: 1.0}
        assert (await http.get("/health")).status_code == 200
        async with serve(one, here):
            async with asyncio.timeout(WAIT_S):
                while await answers() != before:
                    await asyncio.sleep(0.05)


async def test_all_choices_of_a_request_are_served_by_the_same_cell(start_gateway):
    one, two = CellOf("one", "m"), CellOf("two", "m")
    async with gateway_to(start_gateway, one, two) as http:
        one.refuses = GONE
        for number in range(32):
            answer = await ask(http, n=3, request_id=f"r{number}")
            assert [choice["text"] for choice in answer.json()["choices"]] == ["two"] * 3
    assert one.requests


async def test_a_rate_limited_request_is_not_sent_to_another_cell(start_gateway):
    one, two = CellOf("one", "m"), CellOf("two", "m")
    async with gateway_to(start_gateway, one, two) as http:
        full = ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_s=3.0)
        one.refuses = two.refuses = full
        answer = await ask(http)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert len(one.requests) + len(two.requests) == 1
        assert await failovers(http) == {}


async def test_a_response_that_has_begun_is_not_restarted_in_another_cell(start_gateway):
    one, two = CellOf("one", "m"), CellOf("two", "m")
    async with gateway_to(start_gateway, one, two) as http:
        one.fails = two.fails = GONE
        answer = await ask(http, stream=True)
        assert answer.status_code == 200
        assert "no decode worker" in answer.text
        assert len(one.requests) + len(two.requests) == 1


async def test_a_response_that_was_not_sent_yet_is_restarted_in_another_cell(start_gateway):
    one, two = CellOf("one", "m"), CellOf("two", "m")
    async with gateway_to(start_gateway, one, two) as http:
        one.fails = GONE
        texts = {await said(http, request_id=f"r{number}") for number in range(32)}
    assert texts == {"two"}
    assert one.requests


@asynccontextmanager
async def gateway_to_each(start_gateway, cells):
    """Yields an HTTP client of a gateway, and per cell the stack of its server and its address."""
    async with AsyncExitStack() as stack:
        stacks = [await stack.enter_async_context(AsyncExitStack()) for _ in cells]
        addresses = [
            await own.enter_async_context(serve(cell))
            for own, cell in zip(stacks, cells, strict=True)
        ]
        gateway = await stack.enter_async_context(start_gateway(*addresses))
        async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
            yield http, stacks, addresses


async def test_a_stream_is_resumed_in_another_cell_when_its_cell_is_lost(
    start_gateway, monkeypatch
):
    monkeypatch.setattr(session_manager, "MOVES_AFTER_S", 0.05)
    cells = [CellOf("one", "scripted"), CellOf("two", "scripted")]
    for cell in cells:
        cell.hangs = True
    async with gateway_to_each(start_gateway, cells) as (http, stacks, addresses):
        body = {"prompt": "a", "stream": True, "max_tokens": 2}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            lost, left = (0, 1) if cells[0].requests else (1, 0)
            assert cells[lost].name in first
            cells[left].hangs = False
            await stacks[lost].aclose()
            rest = [line async for line in lines if line]
        assert await failovers(http) == {addresses[lost]: 1.0}
    (request,) = cells[left].requests
    assert list(request.resume.token_ids) == [1]
    assert cells[left].name in rest[0]
    assert rest[-1] == "data: [DONE]"
    assert not any("error" in line for line in rest)


async def test_a_request_without_tokens_does_not_wait_for_its_lost_cell(start_gateway, monkeypatch):
    """A stream with tokens would wait for MOVES_AFTER_S."""
    monkeypatch.setattr(session_manager, "MOVES_AFTER_S", 10 * WAIT_S)
    cells = [CellOf("one", "scripted"), CellOf("two", "scripted")]
    async with gateway_to_each(start_gateway, cells) as (http, stacks, addresses):
        for cell in cells:
            cell.silent = True
        asking = asyncio.create_task(said(http))
        async with asyncio.timeout(WAIT_S):
            while not any(cell.requests for cell in cells):
                await asyncio.sleep(0.01)
        lost, left = (0, 1) if cells[0].requests else (1, 0)
        cells[left].silent = False
        await stacks[lost].aclose()
        assert await asking == cells[left].name
        assert await failovers(http) == {addresses[lost]: 1.0}


async def test_a_cell_whose_coordinator_restarts_gets_no_requests(start_gateway, monkeypatch):
    """Its requests move at once: they do not wait for MOVES_AFTER_S."""
    monkeypatch.setattr(session_manager, "MOVES_AFTER_S", 10 * WAIT_S)
    one, two = CellOf("one", "m"), CellOf("two", "m")
    one.refuses = Unavailable("restarting", reason=RESTARTING)
    async with (
        serving(one) as (here, health),
        serve(two) as there,
        asyncio.TaskGroup() as group,
        start_gateway(here, there) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        answering = group.create_task(one.answer())
        await set_serving(health, False)
        texts = {await said(http, model="m", request_id=f"r{number}") for number in range(32)}
        assert texts == {"two"}
        # The first refusal told the gateway that the coordinator is restarting.
        assert len(one.requests) == 1
        assert await failovers(http) == {here: 1.0}
        answering.cancel()


async def test_a_request_that_the_other_cell_refuses_is_no_failover(start_gateway):
    one, two = CellOf("one", "m"), CellOf("two", "m")
    async with gateway_to(start_gateway, one, two) as http:
        one.refuses = GONE
        two.refuses = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=3.0)
        for number in range(32):
            assert (await ask(http, request_id=f"r{number}")).status_code == 429
        assert one.requests
        assert await failovers(http) == {}


async def test_the_next_cell_gets_the_remaining_timeout(start_gateway):
    cells = [CellOf("one", "m"), CellOf("two", "m")]
    async with gateway_to(start_gateway, *cells) as http:
        for cell in cells:
            cell.refuses = GONE
        answer = await ask(http, headers={"x-baton-timeout-s": "200"})
        assert answer.status_code == 503
    (one,), (two,) = (cell.requests for cell in cells)
    times = sorted(one.timeout.ToMicroseconds() for one in (one, two))
    assert 0 < times[0] < times[1] <= 200e6


async def test_if_all_cells_are_unreachable_the_error_names_the_first(start_gateway):
    addresses = unused_address(), unused_address()
    async with (
        start_gateway(*addresses, query_timeout_s=2.0) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        for answer in (await ask(http, model="m"), await ask(http), await http.get("/v1/models")):
            assert answer.status_code == 503
            assert addresses[0] in answer.json()["error"]["message"]
            assert "retry-after" in answer.headers
        assert (await http.get("/health")).status_code == 503


async def test_the_models_of_a_cell_that_never_responded_are_unknown(start_gateway):
    away = unused_address()
    async with (
        serve(CellOf("one", "m")) as there,
        start_gateway(away, there) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        assert await said(http, model="m") == "one"
        assert await said(http) == "one"
        answer = await ask(http, model="other")
        # The unreachable cell may serve this model.
        assert answer.status_code == 503
        assert away in answer.json()["error"]["message"]
        async with serve(CellOf("two", "other"), away), asyncio.timeout(WAIT_S):
            while (answer := await ask(http, model="other")).status_code == 503:
                await asyncio.sleep(0.05)
            assert answer.json()["choices"][0]["text"] == "two"


async def test_a_caller_is_routed_to_a_cell_that_admits_it(start_gateway):
    one, two = CellOf("one", "m"), CellOf("two", "m")
    one.keyholder, two.keyholder = "Bearer first", "Bearer second"
    async with gateway_to(start_gateway, one, two) as http:
        for number in range(6):
            for key, name in (("first", "one"), ("second", "two")):
                headers = {"authorization": f"Bearer {key}"}
                answer = await ask(http, headers, request_id=f"{key}-{number}")
                assert answer.json()["choices"][0]["text"] == name
        answer = await ask(http, {"authorization": "Bearer third"})
        assert answer.status_code == 401
        for key, status in (("first", 200), ("third", 401)):
            # Anthropic's clients send the key in this header.
            listed = await http.get("/v1/models", headers={"x-api-key": key})
            assert listed.status_code == status


async def test_a_caller_of_an_unreachable_cell_is_not_refused_for_its_key(
    start_gateway, monkeypatch
):
    monkeypatch.setattr(cell_module, "_MODEL_TTL_S", 0.0)
    one, two = CellOf("one", "m"), CellOf("two", "n")
    one.keyholder, two.keyholder = "Bearer first", "Bearer second"
    async with gateway_to_each(start_gateway, [one, two]) as (http, stacks, _):
        monkeypatch.setattr(cell_module, "_QUERY_TIMEOUT_S", 2.0)
        first = {"authorization": "Bearer first"}
        assert (await http.get("/v1/models", headers=first)).status_code == 200
        await stacks[0].aclose()
        # The first query finds that the cell is away, the next ones leave it out.
        for _ in range(3):
            assert (await http.get("/v1/models", headers=first)).status_code == 503


async def test_the_dashboard_shows_one_cell(start_gateway):
    async with gateway_to(start_gateway, CellOf("one", "m"), CellOf("two", "m")) as http:
        for path in ("/dashboard/data", "/dashboard/requests/r1"):
            answer = await http.get(path, params={"cell": "nowhere:1"})
            assert answer.status_code == 404
            assert "cell is 'nowhere:1'; must be '127.0.0.1:" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "configured", "error"),
    [
        ([], [], "--coordinator: is missing; must be HOST:PORT, or set http.cells"),
        (["a:1,b:2", "a:1,b:2"], [], "--coordinator: is 'a:1,b:2', as for another cell"),
        (["nowhere"], [], "--coordinator: is 'nowhere'; must be host:port"),
        ([], ["a:1", "b"], r"http.cells\[1\].coordinators: is 'b'; must be host:port"),
    ],
)
def test_invalid_cells_are_refused(given, configured, error):
    from baton.cli.cells import configured_cells
    from baton.runtime.config import parse
    from baton.runtime.config_error import ConfigError

    cells = [{"coordinators": one} for one in configured]
    config = parse({"http": {"cells": cells}}, "test")
    with pytest.raises(ConfigError, match=error):
        configured_cells(config, given)


def test_each_cell_has_its_own_parsers():
    from baton.cli.cells import configured_cells
    from baton.runtime.config import parse

    config = parse(
        {
            "tool_call_parser": "hermes",
            "http": {
                "cells": [
                    {"coordinators": "a:1, b:2", "tool_call_parser": "llama3_json"},
                    {"coordinators": "c:3", "reasoning_parser": "qwen3"},
                ]
            },
        },
        "test",
    )
    found = [tuple(cell.model_dump().values()) for cell in configured_cells(config, [])]
    assert found == [("a:1,b:2", "llama3_json", ""), ("c:3", "", "qwen3")]
    given = configured_cells(config, ["d:4"])
    assert [tuple(cell.model_dump().values()) for cell in given] == [("d:4", "hermes", "")]
