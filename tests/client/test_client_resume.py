"""Requests whose session is lost: the next session resumes them; readers only notice a pause."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from google.rpc import code_pb2

from baton.client import BatonClient, BlockingClient, Finished, Tokens, session_manager
from baton.client.errors import DeadlineExceededError, UnavailableError
from baton.runtime import errors
from tests.client import scripted_inference
from tests.client.scripted_inference import (
    TIMEOUT_S,
    ScriptedInference,
    accepted,
    delta,
    failed,
    finish,
    finished,
    flowing,
    lost,
    rest,
    serving,
    set_serving,
    unused_address,
)


@asynccontextmanager
async def two_coordinators(inference):
    """Yields a client of two coordinators, the second Inference, and both health services."""
    other = ScriptedInference()
    async with (
        serving(inference) as (first, of_first),
        serving(other) as (second, of_second),
        BatonClient([first, second]) as client,
    ):
        yield client, other, (of_first, of_second)


CANCELLED = errors.RemoteError(code_pb2.CANCELLED, "gone", [])
ENDS = [None, errors.Unavailable("restarting"), errors.Internal("bug"), CANCELLED]


@pytest.mark.parametrize("how", ENDS, ids=["ended", "unavailable", "internal", "cancelled"])
async def test_a_stream_is_resumed_after_its_last_token(client, inference, how):
    stream, connection = await flowing(client, inference, max_tokens=4, seed=9)
    connection.end(how)
    request = await finish(await inference.connection(), 2, [3, 4], "de")
    assert list(request.resume.token_ids) == [1, 2]
    assert request.resume.num_text_chars == 3
    assert not request.resume.prompt_token_ids
    assert (request.request_id, request.model, request.text) == ("r1", "scripted", "hello")
    assert (request.sampling.max_tokens, request.sampling.seed) == (4, 9)
    last = await rest(stream)
    assert last[0] == Tokens((3, 4), "de", 2)
    assert isinstance(last[1], Finished)
    assert len(last) == 2
    assert (stream.token_ids, stream.num_resumes) == ((1, 2, 3, 4), 1)


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ({}, ["Bearer 1", "Bearer 2", "Bearer 2"]),
        ({"authorization": "Bearer own"}, ["Bearer own"] * 3),
    ],
)
async def test_a_resubmission_has_a_fresh_credential(server, inference, own, shown):
    given = iter(["1", "2"])
    # There is no third credential: the second one is used again.
    async with BatonClient(server[0], api_key=lambda: next(given)) as client:
        stream = client.generate("hello", **own)
        seen = []
        for offset in range(3):
            connection = await inference.connection()
            submit = await connection.submitted()
            seen.append(submit.request.authorization)
            connection.send(accepted(submit.stream), delta(submit.stream, offset, [offset], "x"))
            if offset == 2:
                connection.send(finished(submit.stream))
            connection.end()
        assert (await stream.complete()).token_ids == (0, 1, 2)
    assert seen == shown


async def test_lost_twice(client, inference):
    answer = asyncio.create_task(client.complete("hello"))
    for offset, known in ((0, []), (1, [10]), (2, [10, 11])):
        connection = await inference.connection()
        submit = await connection.submitted()
        assert list(submit.request.resume.token_ids) == known
        connection.send(accepted(submit.stream), delta(submit.stream, offset, [10 + offset], "x"))
        if offset == 2:
            connection.send(finished(submit.stream))
        connection.end()
    completion = await answer
    assert (completion.token_ids, completion.text) == ((10, 11, 12), "xxx")


async def test_an_unaccepted_request_is_sent_again_unchanged(client, inference):
    stream = client.generate("hello", max_tokens=2)
    connection = await inference.connection()
    first = (await connection.submitted()).request
    connection.end()
    assert await finish(await inference.connection(), 0, [1, 2], "ab") == first
    assert (await stream.complete()).token_ids == (1, 2)
    assert stream.num_resumes == 1


async def test_a_request_that_is_accepted_and_has_no_token(client, inference):
    stream = client.generate("hello")
    connection = await inference.connection()
    connection.send(accepted((await connection.submitted()).stream, "r1"))
    await anext(stream)
    connection.end()
    request = await finish(await inference.connection(), 0, [1], "a")
    assert request.request_id == "r1"
    assert not request.HasField("resume")
    assert [type(event) for event in await rest(stream)] == [Tokens, Finished]


async def test_a_reader_that_lags_reads_everything(server, inference):
    async with BatonClient(server[0], max_buffered_events=4) as client:
        stream = client.generate("x")
        sent = 0
        for part in range(3):
            connection = await inference.connection()
            submit = await connection.submitted()
            assert list(submit.request.resume.token_ids) == list(range(sent))
            connection.send(accepted(submit.stream))
            for _ in range(50):
                connection.send(delta(submit.stream, sent, [sent], "t"))
                sent += 1
            if part == 2:
                connection.send(finished(submit.stream))
            connection.end()
        completion = await stream.complete()
        assert completion.token_ids == tuple(range(150))
        assert completion.text == "t" * 150


async def test_repeated_tokens_are_dropped(client, inference):
    stream, connection = await flowing(client, inference)
    connection.end()
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number, "r1"), delta(number, 0, [1], "a"), delta(number, 1, [2], "bc"))
    connection.send(delta(number, 1, [2, 3]), delta(number, 3, [4], "d"), finished(number))
    assert [event.token_ids for event in await rest(stream) if isinstance(event, Tokens)] == [
        (3,),
        (4,),
    ]


async def test_resumed_requests_are_sent_in_portions(client, inference):
    streams = [client.generate([index], request_id=f"r{index}") for index in range(200)]
    connection = await inference.connection()
    for _ in streams:
        submit = await connection.submitted()
        connection.send(accepted(submit.stream, submit.request.request_id))
    for stream in streams:
        await anext(stream)
    connection.end()

    connection = await inference.connection()
    open_ones = [await connection.submitted() for _ in range(64)]
    # A new request is sent at once, after everything that was queued before.
    late = client.generate("late")
    assert (await connection.submitted()).request.text == "late"
    assert connection.received.empty()
    done = 0
    while done < len(streams):
        submit = open_ones.pop(0)
        connection.send(accepted(submit.stream, submit.request.request_id))
        connection.send(finished(submit.stream))
        done += 1
        if done <= len(streams) - 64:
            open_ones.append(await connection.submitted())
    for stream in streams:
        await rest(stream)
        assert stream.num_resumes == 1
    await late.aclose()


@pytest.mark.parametrize("kind", ["dead", "silent"])
async def test_the_next_address_is_tried(server, inference, kind):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        # This socket accepts connections and never responds.
        accepting = f"127.0.0.1:{silent.getsockname()[1]}"
        other = accepting if kind == "silent" else unused_address()
        async with BatonClient(f"{other}, {server[0]}") as client:
            stream = client.generate("x")
            await finish(await inference.connection(), 0, [1], "a")
            assert (await stream.complete()).token_ids == (1,)
            assert (stream.num_resumes, client.address) == (0, server[0])
            assert (await client.model(TIMEOUT_S)).name == "scripted"


async def test_the_model_is_fetched_from_the_next_address(server, inference):
    """The first address accepts connections and never responds; there is no session yet."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        other = f"127.0.0.1:{silent.getsockname()[1]}"
        async with BatonClient(f"{other}, {server[0]}") as client:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    # The timeout applies to each address: a busy machine may need several calls.
                    with contextlib.suppress(UnavailableError, DeadlineExceededError):
                        assert (await client.model(timeout_s=1.0)).name == "scripted"
                        break


class Hanging(ScriptedInference):
    """A coordinator that answers its health check and no other call."""

    async def GetModel(self, request, context):
        await asyncio.Event().wait()


async def test_the_model_of_a_coordinator_that_hangs_is_fetched_from_the_next(server, inference):
    async with (
        serving(Hanging()) as (hanging, _),
        BatonClient([hanging, server[0]]) as client,
        asyncio.timeout(TIMEOUT_S),
    ):
        while True:
            # The timeout applies to each address: a busy machine may need several calls.
            with contextlib.suppress(UnavailableError, DeadlineExceededError):
                assert (await client.model(timeout_s=1.0)).name == "scripted"
                break


async def test_a_coordinator_that_refuses_the_session_is_passed_over(server, inference):
    strict = ScriptedInference()
    async with (
        serving(strict) as (other, _),
        strict.refusing(errors.Unauthenticated("no credential")),
        BatonClient([other, server[0]]) as client,
    ):
        stream = client.generate("x")
        await finish(await inference.connection(), 0, [1], "a")
        assert (await stream.complete()).token_ids == (1,)


async def test_requests_move_to_another_coordinator_and_back(inference):
    other = ScriptedInference()
    async with serving(other) as (second, _):
        async with serving(inference) as (first, _):
            client = await BatonClient([first, second]).__aenter__()
            stream, _ = await flowing(client, inference)
        connection = await other.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number, "r1"), delta(number, 2, [3], "d"))
        assert await anext(stream) == Tokens((3,), "d", 2)
        async with serving(inference, first):
            connection.end()
            request = await finish(await inference.connection(), 3, [4], "e")
            assert list(request.resume.token_ids) == [1, 2, 3]
            await stream.complete()
        assert (stream.token_ids, stream.num_resumes) == ((1, 2, 3, 4), 2)
        await client.aclose()


async def test_requests_leave_a_coordinator_that_hangs(server, inference, monkeypatch):
    """The stopped process keeps its connections open; only missing ping responses show it."""
    monkeypatch.setattr(session_manager, "_PING_TIMEOUT_S", 3.0)
    process = subprocess.Popen(
        [sys.executable, scripted_inference.__file__], stdout=subprocess.PIPE, text=True
    )
    try:
        first = (await asyncio.to_thread(process.stdout.readline)).strip()
        async with BatonClient([first, server[0]]) as client:
            stream = client.generate("hello")
            assert [(await anext(stream)) for _ in range(2)][1] == Tokens((7,), "a", 0)
            process.send_signal(signal.SIGSTOP)
            connection = await inference.connection()
            request = await finish(connection, 1, [8], "b")
            assert list(request.resume.token_ids) == [7]
            await stream.complete()
            assert stream.token_ids == (7, 8)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_coordinator_restarts_at_its_address(inference):
    async with serving(inference) as (address, _):
        client = await BatonClient(address).__aenter__()
        stream, _ = await flowing(client, inference, timeout_s=TIMEOUT_S)
    await lost(client)
    # A new request fails: its caller may repeat it.
    with pytest.raises(UnavailableError, match=f"cannot reach the coordinator at {address}"):
        await client.complete("new")
    async with serving(inference, address):
        request = await finish(await inference.connection(), 2, [3], "d")
        assert 0 < request.timeout.ToMilliseconds() < TIMEOUT_S * 1e3
        await stream.complete()
    assert stream.token_ids == (1, 2, 3)
    await client.aclose()


async def test_no_coordinator_at_any_address():
    addresses = [unused_address(), unused_address()]
    async with BatonClient(addresses) as client:
        with pytest.raises(UnavailableError) as error:
            await client.complete("x")
        for call in (client.wait_ready(0.2), client.model()):
            with pytest.raises(UnavailableError):
                await call
    assert all(address in str(error.value) for address in addresses)


async def test_wait_ready_finds_the_one_that_serves(server, inference):
    address, health = server
    async with BatonClient([unused_address(), address]) as client:
        await set_serving(health, True)
        await client.wait_ready(TIMEOUT_S)
        stream = client.generate("x")
        await finish(await inference.connection(), 0, [1], "a")
        await stream.complete()


async def test_the_next_session_is_with_the_coordinator_that_serves(inference):
    async with two_coordinators(inference) as (client, other, (of_first, of_second)):
        await set_serving(of_second, True)
        await client.wait_ready(TIMEOUT_S)
        stream, connection = await flowing(client, other)
        assert client.address == client.addresses[1]
        await set_serving(of_second, False)
        await set_serving(of_first, True)
        await client.wait_ready(TIMEOUT_S)
        connection.end()
        request = await finish(await inference.connection(), 2, [3], "d")
        assert list(request.resume.token_ids) == [1, 2]
        await stream.complete()


async def test_a_blocking_client_resumes(server, inference):
    def use():
        with BlockingClient(server[0]) as client, client.generate("hello") as stream:
            return stream.complete(), stream.num_resumes

    using = asyncio.create_task(asyncio.to_thread(use))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number, "r1"), delta(number, 0, [1, 2], "abc"))
    connection.end()
    await finish(await inference.connection(), 2, [3], "d")
    completion, num_resumes = await using
    assert (completion.token_ids, completion.text, num_resumes) == ((1, 2, 3), "abcd", 1)


@pytest.mark.parametrize(
    "arguments", [{"addresses": []}, {"addresses": " , "}, {"resume_timeout_s": -1.0}]
)
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BatonClient(**{"addresses": "127.0.0.1:1"} | arguments)


def test_addresses_are_told_apart():
    assert BatonClient("a:1, b:2,a:1").addresses == ("a:1", "b:2")
    assert BatonClient(["a:1"]).addresses == ("a:1",)


RESTARTING = errors.Unavailable("restarting", reason=errors.RESTARTING)


async def test_new_requests_avoid_a_coordinator_that_is_restarting(inference):
    async with two_coordinators(inference) as (client, other, _):
        old, connection = await flowing(client, inference)
        new = client.generate("new")
        connection.send(failed((await connection.submitted()).stream, RESTARTING))
        elsewhere = await other.connection()
        request = await finish(elsewhere, 0, [5], "e")
        assert request.text == "new"
        assert (await new.complete()).token_ids == (5,)
        assert client.address == client.addresses[1]
        # The old request stays with the restarting coordinator until its session ends.
        connection.send(delta(1, 2, [3], "d"))
        assert (await anext(old)).token_ids == (3,)
        connection.end(RESTARTING)
        request = await finish(elsewhere, 3, [4], "e")
        assert list(request.resume.token_ids) == [1, 2, 3]
        await old.complete()
        assert old.token_ids == (1, 2, 3, 4)


async def test_a_cancelled_request_does_not_move_to_the_next_coordinator(inference):
    async with two_coordinators(inference) as (client, other, _):
        stream, connection = await flowing(client, inference)
        connection.end()
        connection = await other.connection()
        number = (await connection.submitted()).stream
        stream.cancel()
        assert await connection.cancelled() == number
        connection.send(failed(number, RESTARTING))
        assert (await rest(stream))[-1].reason == "cancelled"


async def test_a_new_request_waits_for_the_only_coordinator_to_restart(inference):
    async with serving(inference) as (address, _):
        client = await BatonClient(address).__aenter__()
        stream = client.generate("new")
        connection = await inference.connection()
        connection.send(failed((await connection.submitted()).stream, RESTARTING))
        # The request is submitted again meanwhile.
        connection.send(failed((await connection.submitted()).stream, RESTARTING))
        connection.end(RESTARTING)
    async with serving(inference, address):
        request = await finish(await inference.connection(), 0, [5], "e")
        assert request.text == "new"
        assert (await stream.complete()).token_ids == (5,)
    await client.aclose()


async def test_without_resuming_a_restart_is_an_error(inference):
    async with (
        serving(inference) as (address, _),
        BatonClient(address, resume_timeout_s=0) as client,
    ):
        stream = client.generate("new")
        connection = await inference.connection()
        connection.send(failed((await connection.submitted()).stream, RESTARTING))
        with pytest.raises(UnavailableError) as error:
            await rest(stream)
        assert error.value.reason == errors.RESTARTING


@pytest.fixture
async def two_cells(inference, monkeypatch):
    """A client of a cell, the stack of its server, another cell, and the other cell's models."""
    monkeypatch.setattr(session_manager, "MOVES_AFTER_S", 0.05)
    other, models = ScriptedInference(), {"scripted"}
    async with AsyncExitStack() as stack, AsyncExitStack() as first:
        address, _ = await first.enter_async_context(serving(inference))
        there, _ = await stack.enter_async_context(serving(other))
        second = await stack.enter_async_context(BatonClient(there))
        client = await stack.enter_async_context(
            BatonClient(address, find_other_cell=lambda model: second if model in models else None)
        )
        yield client, first, other, models


async def test_a_stream_moves_to_another_cell_when_its_own_stays_unreachable(two_cells, inference):
    client, cell, other, _ = two_cells
    stream, _ = await flowing(client, inference, max_tokens=4)
    await cell.aclose()
    request = await finish(await other.connection(), 2, [3, 4], "de")
    assert list(request.resume.token_ids) == [1, 2]
    assert (request.request_id, request.model) == ("r1", "scripted")
    assert (await rest(stream))[0] == Tokens((3, 4), "de", 2)
    assert (stream.token_ids, stream.num_resumes) == ((1, 2, 3, 4), 1)


async def test_a_request_that_a_restarting_coordinator_refuses_moves_to_another_cell(
    two_cells, inference, monkeypatch
):
    """At once: it does not wait for MOVES_AFTER_S, nor for the end of the coordinator."""
    monkeypatch.setattr(session_manager, "MOVES_AFTER_S", 10 * TIMEOUT_S)
    client, _, other, _ = two_cells
    old, connection = await flowing(client, inference)
    new = client.generate("new", model="scripted")
    connection.send(failed((await connection.submitted()).stream, RESTARTING))
    request = await finish(await other.connection(), 0, [5], "e")
    assert request.text == "new"
    assert (await new.complete()).token_ids == (5,)
    # Only one coordinator has the request; the old one is not asked again.
    assert connection.received.empty()
    # A stream stays with the restarting coordinator.
    connection.send(delta(1, 2, [3], "d"), finished(1))
    assert [one.token_ids for one in (await rest(old))[:1]] == [(3,)]


async def test_a_refused_request_moves_after_a_while_if_the_second_coordinator_is_down(
    inference, monkeypatch
):
    monkeypatch.setattr(session_manager, "MOVES_AFTER_S", 0.5)
    other = ScriptedInference()
    async with (
        serving(inference) as (address, _),
        serving(other) as (there, _),
        BatonClient(there) as second,
        BatonClient([address, unused_address()], find_other_cell=lambda _: second) as client,
    ):
        new = client.generate("new")
        connection = await inference.connection()
        connection.send(failed((await connection.submitted()).stream, RESTARTING))
        request = await finish(await other.connection(), 0, [5], "e")
        assert request.text == "new"
        assert (await new.complete()).token_ids == (5,)
        assert connection.received.empty()


async def test_a_stream_waits_for_its_cell_if_no_other_cell_has_its_model(two_cells, inference):
    client, cell, other, models = two_cells
    models.clear()
    stream, _ = await flowing(client, inference, max_tokens=4)
    address = client.addresses[0]
    await cell.aclose()
    await lost(client)
    async with serving(inference, address):
        await finish(await inference.connection(), 2, [3, 4], "de")
        assert (await rest(stream))[0] == Tokens((3, 4), "de", 2)
    assert other.connections.empty()


async def test_a_stream_that_moved_to_another_cell_is_cancelled_there(two_cells, inference):
    client, cell, other, _ = two_cells
    stream, _ = await flowing(client, inference, max_tokens=4)
    await cell.aclose()
    connection = await other.connection()
    submit = await connection.submitted()
    # The first client no longer owns the request.
    await client.aclose()
    connection.send(accepted(submit.stream, "r1"), delta(submit.stream, 2, [3], "d"))
    assert await anext(stream) == Tokens((3,), "d", 2)
    await stream.aclose()
    assert await connection.cancelled() == submit.stream
