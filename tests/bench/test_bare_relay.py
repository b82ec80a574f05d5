"""The benchmark's bare relay: a client gets the same answers as through a coordinator."""

import argparse
import asyncio
import contextlib

from baton.bench import bare_relay, relay_worker, systems
from baton.bench.cost_client import SessionClient, wave

NUM_REQUESTS, NUM_TOKENS, TIMEOUT_S = 5, 4, 120.0


@contextlib.asynccontextmanager
async def relayed(num_tokens):
    """Starts a relay with its workers and yields its address."""
    address, ready = f"127.0.0.1:{systems.free_port()}", asyncio.Event()
    arguments = argparse.Namespace(
        relay=address, requests=NUM_REQUESTS, tokens=num_tokens, step_ms=1.0
    )
    tasks = [
        asyncio.create_task(bare_relay.serve(address)),
        asyncio.create_task(relay_worker.run(arguments, ready.set)),
    ]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await ready.wait()
        yield address
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def seen_through_relay(num_tokens):
    async with relayed(num_tokens) as address:
        client = SessionClient(address, NUM_REQUESTS, 16, num_tokens)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                # In the second wave several submissions are sent as one message.
                await wave(client, NUM_REQUESTS)
                await wave(client, NUM_REQUESTS)
        finally:
            await client.close()
        return client.seen.num_requests, client.seen.num_tokens


async def test_every_request_has_all_of_its_tokens():
    """The client itself checks the order of the tokens."""
    assert await seen_through_relay(NUM_TOKENS) == (
        2 * NUM_REQUESTS,
        2 * NUM_REQUESTS * NUM_TOKENS,
    )


async def test_one_token_needs_no_decode_worker():
    assert await seen_through_relay(1) == (2 * NUM_REQUESTS, 2 * NUM_REQUESTS)
