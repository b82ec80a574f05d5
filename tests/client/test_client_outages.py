"""What happens to requests while no coordinator is there."""

import asyncio

import pytest
from scripted_inference import ScriptedInference, finish, flowing, lost, rest, serving

from baton.client import BatonClient, BlockingClient
from baton.client.errors import (
    DeadlineExceededError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)


async def outage(timeout_s=None, **arguments):
    """A client in an outage, and its request with two tokens; nobody comes back."""
    inference = ScriptedInference()
    async with serving(inference) as (address, _):
        client = await BatonClient(address, **arguments).__aenter__()
        stream, _ = await flowing(client, inference, timeout_s=timeout_s)
    await lost(client)
    return client, stream


async def test_the_deadline_holds_in_an_outage():
    client, stream = await outage(timeout_s=1.5)
    with pytest.raises(DeadlineExceededError, match=r"1\.5 s"):
        await rest(stream)
    await client.aclose()


async def test_an_outage_is_waited_out_for_so_long():
    client, stream = await outage(resume_timeout_s=0.3)
    with pytest.raises(UnavailableError, match=r"could not be resumed within 0\.3 s: "):
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
        # It is not sent to the next coordinator.
        after = client.generate("after")
        request = await finish(await inference.connection(), 0, [5], "e")
        assert request.text == "after"
        await after.complete()
    await client.aclose()


async def test_leaving_in_an_outage():
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


async def test_the_limit_of_requests_counts_those_that_wait():
    client, stream = await outage(max_requests=1)
    with pytest.raises(ResourceExhaustedError, match="limit"):
        client.generate("y")
    await stream.aclose()
    await client.aclose()


async def test_closing_a_blocking_client_in_an_outage(inference):
    async with serving(inference) as (address, _):
        client = await asyncio.to_thread(BlockingClient, address)
        stream = await asyncio.to_thread(client.generate, "hello")
        await (await inference.connection()).submitted()
    reading = asyncio.create_task(asyncio.to_thread(list, stream))
    await asyncio.to_thread(client.close)
    with pytest.raises((RequestCancelledError, RuntimeError)):
        await reading
