"""The blocking client for threads."""

import asyncio
import subprocess
import sys
import threading

import pytest

from baton.client import BlockingClient, Finished, Tokens
from baton.client.errors import InvalidArgumentError, RequestCancelledError
from tests.client.scripted_inference import TIMEOUT_S, accepted, delta, finished, set_serving


def live_threads():
    return {thread for thread in threading.enumerate() if thread.name == "baton client"}


async def test_the_same_events_from_a_plain_iterator(server, inference):
    address, health = server
    await set_serving(health, True)

    def use():
        with BlockingClient(address) as client:
            client.wait_ready(TIMEOUT_S)
            events = list(client.generate("x", max_tokens=2))
            completion = client.complete("y")
            with client.generate("z") as stream:
                next(stream)
            with pytest.raises(InvalidArgumentError):
                client.generate("x", max_tokens=-1)
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("x")
        return events, completion

    using = asyncio.create_task(asyncio.to_thread(use))
    connection = await inference.connection()
    for _ in range(2):
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [1], "a"), delta(number, 1, [2], "b"))
        connection.send(finished(number))
    number = (await connection.submitted()).stream
    connection.send(accepted(number))
    assert await connection.cancelled() == number

    events, completion = await using
    assert [type(event) for event in events[1:]] == [Tokens, Tokens, Finished]
    assert completion.text == "ab"
    assert live_threads() == set()


async def test_many_threads_share_one_session(server, inference):
    address, _ = server

    async def answer():
        connection = await inference.connection()
        for _ in range(8):
            submit = await connection.submitted()
            number, token = submit.stream, submit.request.tokens.ids[0]
            connection.send(accepted(number), delta(number, 0, [token]), finished(number))

    def use():
        with BlockingClient(address) as client:
            results = {}

            def complete(token):
                results[token] = client.complete([token]).token_ids

            threads = [threading.Thread(target=complete, args=(token,)) for token in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results

    answering = asyncio.create_task(answer())
    results = await asyncio.to_thread(use)
    await answering
    assert results == {token: (token,) for token in range(8)}
    assert inference.connections.empty()


async def test_closing_from_another_thread_ends_a_reader(server, inference):
    address, _ = server
    client = await asyncio.to_thread(BlockingClient, address)
    stream = await asyncio.to_thread(client.generate, "x")
    reading = asyncio.create_task(asyncio.to_thread(list, stream))
    connection = await inference.connection()
    await connection.submitted()
    await asyncio.to_thread(client.close)
    with pytest.raises((RequestCancelledError, RuntimeError)):
        await reading
    assert client.closed
    stream.close()
    assert live_threads() == set()


FORKS = """
import os
from baton.client import BlockingClient

client = BlockingClient("127.0.0.1:1")
if os.fork():
    _, status = os.wait()
    client.close()
    raise SystemExit(os.waitstatus_to_exitcode(status))
try:
    client.complete("x")
except RuntimeError as error:
    print(error, flush=True)
client.close()
os._exit(0)
"""


def test_a_forked_process_is_told_to_make_its_own_client():
    """It has no copy of the client's thread, so it would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert done.stdout == (
        "the client was made before this process was forked; make it after the fork\n"
    )
