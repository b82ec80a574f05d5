"""Resumed requests that a coordinator refuses."""

import asyncio

import pytest
from google.rpc import code_pb2

from baton.client import BatonClient
from baton.client.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    RemoteError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.client.retry_policy import MAX_LOSSES_WITHOUT_PROGRESS
from baton.runtime import errors
from tests.client.scripted_inference import (
    TIMEOUT_S,
    ScriptedInference,
    accepted,
    advance_clock,
    delta,
    failed,
    finish,
    finished,
    flowing,
    rest,
    retried_until,
    serving,
)

PASSING = [
    errors.AlreadyExists("request r1 is running"),
    errors.Unavailable("no decode worker is attached"),
    errors.ResourceExhausted("queue is full", reason="QUEUE_FULL", retry_after_s=0.05),
]


@pytest.mark.parametrize("refusal", PASSING, ids=lambda error: type(error).__name__)
async def test_a_refusal_that_passes_is_waited_out(client, inference, refusal):
    stream, connection = await flowing(client, inference)
    connection.end()
    connection = await inference.connection()
    for _ in range(2):
        connection.send(failed((await connection.submitted()).stream, refusal))
    await finish(connection, 2, [3], "d")
    await rest(stream)
    assert (stream.token_ids, stream.num_resumes) == ((1, 2, 3), 1)


async def test_a_session_lost_while_a_refusal_is_waited_out(client, inference):
    stream, connection = await flowing(client, inference)
    connection.end()
    connection = await inference.connection()
    connection.send(failed((await connection.submitted()).stream, PASSING[2]))
    connection.end()
    await finish(await inference.connection(), 2, [3], "d")
    await rest(stream)
    assert stream.token_ids == (1, 2, 3)


async def test_cancel_while_a_refusal_is_waited_out(client, inference):
    stream, connection = await flowing(client, inference)
    connection.end()
    connection = await inference.connection()
    busy = errors.ResourceExhausted("busy", reason="QUEUE_FULL", retry_after_s=TIMEOUT_S)
    other = client.generate("other")
    submits = [await connection.submitted() for _ in range(2)]
    numbers = {submit.request.text: submit.stream for submit in submits}
    connection.send(failed(numbers["hello"], busy), accepted(numbers["other"]))
    await anext(other)
    stream.cancel()
    assert [event.reason for event in await rest(stream)] == ["cancelled"]


async def test_cancel_before_a_resubmission_is_answered(client, inference):
    stream, connection = await flowing(client, inference)
    connection.end()
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    stream.cancel()
    assert await connection.cancelled() == number
    connection.send(failed(number, PASSING[0]))
    assert [event.reason for event in await rest(stream)] == ["cancelled"]


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (errors.FailedPrecondition("needs forced tokens"), FailedPreconditionError),
        (errors.InvalidArgument("resume.token_ids", 9, "at most 8"), InvalidArgumentError),
        (
            errors.ResourceExhausted("busy", reason="QUEUE_FULL", retry_after_s=10 * TIMEOUT_S),
            ResourceExhaustedError,
        ),
        (
            errors.ResourceExhausted("too large", reason="X", retry_after_s=None),
            ResourceExhaustedError,
        ),
    ],
)
async def test_a_permanent_refusal_of_a_resume_is_an_error(client, inference, refusal, kind):
    stream, connection = await flowing(client, inference)
    connection.end()
    connection = await inference.connection()
    connection.send(failed((await connection.submitted()).stream, refusal))
    with pytest.raises(kind, match=f"lost its session and could not be resumed: {refusal}") as got:
        await rest(stream)
    assert got.value.details() == refusal.details()
    assert stream.token_ids == (1, 2)


async def test_a_refusal_that_does_not_pass_in_time(server, inference):
    async with BatonClient(server[0], resume_timeout_s=500.0) as client:
        stream, connection = await flowing(client, inference)
        connection.end()
        connection = await inference.connection()
        for _ in range(3):
            connection.send(failed((await connection.submitted()).stream, PASSING[0]))
        # The client has read at least two refusals. The timeout may expire during the backoff or
        # while the client waits for a response.
        advance_clock(500.0)
        why = "could not be resumed( within 500 s)?: request r1 is running"
        with pytest.raises(AlreadyExistsError, match=why):
            await rest(stream)


async def test_first_submissions_are_not_retried(client, inference):
    streams = [client.generate("x") for _ in PASSING]
    connection = await inference.connection()
    for refusal in PASSING:
        connection.send(failed((await connection.submitted()).stream, refusal))
    for stream, refusal in zip(streams, PASSING, strict=True):
        with pytest.raises(RemoteError, match=f"^{refusal}$"):
            await stream.complete()


@pytest.mark.parametrize(("model", "prompt_tokens"), [("other", 3), ("scripted", 4)])
async def test_a_request_is_not_resumed_with_another_model_or_tokenizer(
    client, inference, model, prompt_tokens
):
    stream, connection = await flowing(client, inference)
    connection.end()
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    wrong = accepted(number, "r1", prompt_tokens)
    wrong.accepted.model = model
    connection.send(wrong, delta(number, 2, [3], "d"))
    with pytest.raises(FailedPreconditionError, match="would continue another request"):
        await rest(stream)
    assert await connection.cancelled() == number


async def test_a_permanent_error_of_the_session_is_not_resumed(client, inference):
    stream, connection = await flowing(client, inference)
    connection.end(errors.ResourceExhausted("does not read", reason="SLOW", retry_after_s=None))
    with pytest.raises(ResourceExhaustedError, match="does not read"):
        await rest(stream)


async def test_the_next_coordinator_refuses_the_credential(client, inference):
    stream, connection = await flowing(client, inference)
    connection.end()
    async with inference.refusing(errors.Unauthenticated("expired")):
        with pytest.raises(UnauthenticatedError, match="could not be resumed: expired"):
            await rest(stream)


# gRPC's own error, which the server of the fixture below sends too.
FULL = errors.RemoteError(code_pb2.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", [])


@pytest.fixture
async def full():
    """A coordinator at its limit of one call, its Inference, and a function that ends the call."""
    inference = ScriptedInference()
    async with serving(inference, max_calls=1) as (address, _), BatonClient(address) as holder:
        stream, _ = await flowing(holder, inference)
        yield address, inference, holder.aclose
        await stream.aclose()


@pytest.mark.parametrize("resume_timeout_s", [0, TIMEOUT_S])
async def test_a_request_outlives_a_session_that_ends_for_credentials_of_others(
    server, inference, resume_timeout_s
):
    """As at a gateway: a session with wrong keys only is ended when a valid request arrives."""
    unknown = errors.Unauthenticated("the credential is not valid here")
    async with BatonClient(server[0], resume_timeout_s=resume_timeout_s) as client:
        stranger = client.generate("x", authorization="Bearer wrong")
        connection = await inference.connection()
        connection.send(failed((await connection.submitted()).stream, unknown))
        with pytest.raises(UnauthenticatedError):
            await anext(stranger)
        stream = client.generate("x", authorization="Bearer K")
        await connection.submitted()
        connection.end(errors.Unauthenticated("no valid credential within 10 s"))
        connection = await inference.connection()
        submit = await connection.submitted()
        assert submit.request.authorization == "Bearer K"
        connection.send(accepted(submit.stream), delta(submit.stream, 0, [1], "a"))
        connection.send(finished(submit.stream))
        assert (await stream.complete()).token_ids == (1,)


async def test_a_coordinator_at_its_limit_of_calls_says_when_to_retry(full):
    address, inference, end_call = full
    message = f"^the coordinator at {address} is at its limit of concurrent calls "
    async with BatonClient(address) as client:
        for call in (client.complete("x"), client.model(TIMEOUT_S)):
            with pytest.raises(ResourceExhaustedError, match=message) as caught:
                await call
            assert (caught.value.reason, caught.value.retry_after_s) == ("CALLS", 1.0)
        await retried_until(f"is busy ({message[1:]}", lambda: client.wait_ready(0.5))
        waits = asyncio.create_task(client.complete("y", retry_timeout_s=TIMEOUT_S))
        late = client.generate("z", retry_timeout_s=0.5)
        with pytest.raises(ResourceExhaustedError, match=message):
            await late.complete()
        await end_call()
        request = await finish(await inference.connection(), 0, [5], "e")
        assert request.text == "y"
        assert (await waits).token_ids == (5,)


async def test_resuming_waits_for_room_for_a_call(client, inference):
    """The number of attempts exceeds the limit of consecutive lost sessions."""
    stream, connection = await flowing(client, inference)
    connection.end()
    for _ in range(MAX_LOSSES_WITHOUT_PROGRESS + 2):
        (await inference.connection()).end(FULL)
    await finish(await inference.connection(), 2, [3], "d")
    await rest(stream)
    assert (stream.token_ids, stream.num_resumes) == ((1, 2, 3), 1)


async def test_a_request_that_ends_every_session_fails(client, inference):
    stream = client.generate("poison")

    async def die():
        num_sessions = 0
        while True:
            connection = await inference.connections.get()
            num_sessions += 1
            connection.send(accepted((await connection.submitted()).stream))
            connection.end(errors.Internal(f"death {num_sessions}"))

    dying = asyncio.create_task(die())
    with pytest.raises(UnavailableError, match=r"lost 9 sessions without a new token.*death 9"):
        await stream.complete()
    dying.cancel()
