"""New requests that are refused and submitted again after the delay that the coordinator gave."""

import asyncio

import pytest

from baton.client import BatonClient, BlockingClient
from baton.client.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.runtime import errors
from tests.client.scripted_inference import (
    TIMEOUT_S,
    accepted,
    advance_clock,
    delta,
    failed,
    finished,
    rest,
)


def busy(retry_after_s):
    return errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=retry_after_s)


async def answer(connection):
    """Serves the next submission to its end; returns the submitted request."""
    submit = await connection.submitted()
    number = submit.stream
    connection.send(accepted(number), delta(number, 0, [7], "a"), finished(number))
    return submit.request


async def refuse(connection, error):
    connection.send(failed((await connection.submitted()).stream, error))


async def test_a_refused_request_is_submitted_again_after_the_given_delay(server, inference):
    async with BatonClient(server[0], retry_timeout_s=2 * TIMEOUT_S) as client:
        stream = client.generate("hello", timeout_s=TIMEOUT_S)
        connection = await inference.connection()
        first = await connection.submitted()
        connection.send(failed(first.stream, busy(0.05)))
        await refuse(connection, busy(0.05))
        last = await answer(connection)
        await rest(stream)
    assert stream.token_ids == (7,)
    assert stream.num_resumes == 0
    # The resubmission has the remaining timeout.
    assert last.timeout.ToNanoseconds() < first.request.timeout.ToNanoseconds()
    last.ClearField("timeout")
    first.request.ClearField("timeout")
    assert last == first.request


async def test_by_default_a_refused_request_fails(client, inference):
    stream = client.generate("hello")
    await refuse(await inference.connection(), busy(0.05))
    with pytest.raises(ResourceExhaustedError) as caught:
        await rest(stream)
    assert caught.value.retry_after_s == 0.05


@pytest.mark.parametrize(("of_client", "of_request"), [(TIMEOUT_S, 0.0), (0.0, TIMEOUT_S)])
async def test_the_request_overrides_the_clients_retry_timeout(
    server, inference, of_client, of_request
):
    async with BatonClient(server[0], retry_timeout_s=of_client) as client:
        stream = client.generate("hello", retry_timeout_s=of_request)
        connection = await inference.connection()
        await refuse(connection, busy(0.05))
        if of_request:
            await answer(connection)
            await rest(stream)
        else:
            with pytest.raises(ResourceExhaustedError):
                await rest(stream)


@pytest.mark.parametrize("limit", [{"timeout_s": TIMEOUT_S}, {"retry_timeout_s": TIMEOUT_S}])
async def test_a_retry_after_the_deadline_fails_at_once(server, inference, limit):
    async with BatonClient(server[0], retry_timeout_s=4 * TIMEOUT_S) as client:
        stream = client.generate("hello", **limit)
        await refuse(await inference.connection(), busy(2 * TIMEOUT_S))
        # Long before the deadline, with the coordinator's error.
        with pytest.raises(ResourceExhaustedError, match="full"):
            await rest(stream)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (busy(None), ResourceExhaustedError),
        (errors.Unavailable("no worker"), UnavailableError),
        (errors.InvalidArgument("text", "", "must not be empty"), InvalidArgumentError),
    ],
)
async def test_a_refusal_without_a_retry_delay_fails(server, inference, error, kind):
    async with BatonClient(server[0], retry_timeout_s=2 * TIMEOUT_S) as client:
        stream = client.generate("hello")
        await refuse(await inference.connection(), error)
        with pytest.raises(kind):
            await rest(stream)


async def test_an_admitted_request_is_not_started_over(server, inference):
    async with BatonClient(server[0], retry_timeout_s=2 * TIMEOUT_S) as client:
        stream = client.generate("hello")
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [7], "a"), failed(number, busy(0.01)))
        with pytest.raises(ResourceExhaustedError):
            await rest(stream)
    assert stream.token_ids == (7,)


async def test_cancel_while_it_waits(server, inference):
    async with BatonClient(server[0], retry_timeout_s=2 * TIMEOUT_S) as client:
        stream, other = client.generate("hello"), client.generate("other")
        connection = await inference.connection()
        await refuse(connection, busy(TIMEOUT_S))
        number = (await connection.submitted()).stream
        connection.send(accepted(number))
        await anext(other)
        stream.cancel()
        assert [event.reason for event in await rest(stream)] == ["cancelled"]


async def test_closing_the_client_cancels_pending_retries(server, inference):
    client = await BatonClient(server[0], retry_timeout_s=2 * TIMEOUT_S).__aenter__()
    stream, other = client.generate("hello"), client.generate("other")
    connection = await inference.connection()
    await refuse(connection, busy(TIMEOUT_S))
    connection.send(accepted((await connection.submitted()).stream))
    await anext(other)
    (timer,) = client._sessions._delayed.values()
    closing = asyncio.create_task(client.aclose())
    # While `aclose` waits for the session to end, the timer would open another session.
    await asyncio.sleep(0)
    assert timer.cancelled()
    await closing
    with pytest.raises(RequestCancelledError):
        await rest(stream)


async def test_the_deadline_holds_while_it_waits(server, inference):
    async with BatonClient(server[0], retry_timeout_s=2 * TIMEOUT_S) as client:
        stream = client.generate("hello", timeout_s=500.0)
        connection = await inference.connection()
        for _ in range(3):
            await refuse(connection, busy(0.02))
        advance_clock(500.0)
        with pytest.raises((DeadlineExceededError, ResourceExhaustedError)):
            await rest(stream)


async def test_a_session_lost_while_it_waits(server, inference):
    async with BatonClient(server[0], retry_timeout_s=2 * TIMEOUT_S) as client:
        stream = client.generate("hello")
        connection = await inference.connection()
        await refuse(connection, busy(0.05))
        connection.end()
        await answer(await inference.connection())
        await rest(stream)
    assert stream.token_ids == (7,)


async def test_a_request_that_lost_its_session_unaccepted_has_its_whole_retry_timeout(
    server, inference
):
    client = BatonClient(server[0], resume_timeout_s=TIMEOUT_S, retry_timeout_s=1000.0)
    async with client:
        stream = client.generate("hello")
        reading = asyncio.create_task(rest(stream))
        connection = await inference.connection()
        await connection.submitted()
        connection.end()
        connection = await inference.connection()
        await refuse(connection, busy(2 * TIMEOUT_S))
        # Behind the refusal, so that the client has got that.
        other = client.generate("other")
        await answer(connection)
        await rest(other)
        assert not reading.done()
        advance_clock(2.5 * TIMEOUT_S)
        await answer(connection)
        await reading
    assert stream.token_ids == (7,)


async def test_blocking_clients_too(server, inference):
    def complete():
        with BlockingClient(server[0], retry_timeout_s=2 * TIMEOUT_S) as client:
            return client.complete("hello").text

    asking = asyncio.create_task(asyncio.to_thread(complete))
    connection = await inference.connection()
    await refuse(connection, busy(0.01))
    await answer(connection)
    assert await asking == "a"


async def test_invalid_retry_timeouts_are_refused(client):
    with pytest.raises(InvalidArgumentError, match="retry_timeout_s"):
        client.generate("hello", retry_timeout_s=-1.0)
    with pytest.raises(ValueError, match="retry_timeout_s"):
        BatonClient("127.0.0.1:1", retry_timeout_s=float("inf"))
