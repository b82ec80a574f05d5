"""Streams of one client over one session."""

import asyncio
import gc

import pytest

from baton.client import Accepted, BatonClient, ChatMessage, Finished, Slo, Tokens, Usage
from baton.client.errors import (
    DataLossError,
    DeadlineExceededError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.runtime import errors
from baton.runtime.network import rpc
from baton.v1 import common_pb2
from tests.client.scripted_inference import (
    TIMEOUT_S,
    accepted,
    advance_clock,
    delta,
    failed,
    finished,
    retried_until,
    serving,
    set_serving,
    unused_address,
)


async def gathered(stream):
    return [event async for event in stream]


async def test_events_arrive_typed_and_in_order(client, inference):
    stream = client.generate("hello", max_tokens=2, request_id="r1", logprobs=0)
    connection = await inference.connection()
    submit = await connection.submitted()
    assert submit.request.text == "hello"
    assert submit.request.sampling.max_tokens == 2
    assert submit.request.lane == common_pb2.LANE_INTERACTIVE
    assert not submit.request.HasField("timeout")
    number = submit.stream
    connection.send(accepted(number))
    connection.send(delta(number, 0, [7], "a", [(7, -0.5)]), delta(number, 1, [8], "b"))
    connection.send(finished(number, completion_tokens=2))

    events = await gathered(stream)
    assert events[0] == Accepted("r1", "scripted", 3)
    assert isinstance(events[1], Tokens)
    assert (events[1].token_ids, events[1].text, events[1].offset) == ((7,), "a", 0)
    assert events[1].logprobs[0][0].logprob == -0.5
    assert events[2] == Tokens((8,), "b", 1)
    last = events[3]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage) == ("length", Usage(3, 2, 0))
    assert [(stage.stage, stage.duration_ms) for stage in last.budget.stages] == [
        ("queue", 1.5),
        ("prefill", 20.0),
    ]
    assert last.budget.ttft_ms == 21.5


async def test_deltas_are_pushed_while_the_reader_waits(client, inference):
    stream, other = (client.generate("x") for _ in range(2))
    connection = await inference.connection()
    number, other_number = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(accepted(number), accepted(other_number))
    assert isinstance(await anext(other), Accepted)
    pushed, takes = asyncio.Queue(), True

    def push(tokens):
        if takes:
            pushed.put_nowait(tokens)
        return takes

    stream.push_to(push)
    assert [type(event) for event in await stream.read()] == [Accepted]

    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    connection.send(delta(number, 0, [5], "a"), delta(number, 1, [6], "b"))
    connection.send(delta(number, 2, [7], "c"))
    found = [await pushed.get() for _ in range(3)]
    assert found == [Tokens((5,), "a", 0), Tokens((6,), "b", 1), Tokens((7,), "c", 2)]
    assert not reading.done()

    # Refused: the reader gets the delta.
    takes = False
    connection.send(delta(number, 3, [8], "d"))
    assert await reading == [Tokens((8,), "d", 3)]

    # No reader waits. The other stream's delta arrives with this one.
    takes = True
    connection.send(delta(number, 4, [9], "e"), delta(other_number, 0, [1], "x"))
    assert await anext(other) == Tokens((1,), "x", 0)
    assert await stream.read() == [Tokens((9,), "e", 4)]

    # The last delta stays with the end.
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    connection.send(delta(number, 5, [2], "f"), finished(number))
    last, end = await reading
    assert last == Tokens((2,), "f", 5)
    assert isinstance(end, Finished)
    assert pushed.empty()
    assert stream.token_ids == (5, 6, 7, 8, 9, 2)
    await other.aclose()


async def test_a_failed_push_harms_no_other_stream(client, inference):
    stream, other = (client.generate("x") for _ in range(2))
    connection = await inference.connection()
    number, other_number = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(accepted(number), accepted(other_number))
    for one in (stream, other):
        assert isinstance(await anext(one), Accepted)

    def push(tokens):
        raise RuntimeError("closed")

    stream.push_to(push)
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    connection.send(delta(number, 0, [5], "a"), delta(other_number, 0, [6], "b"))
    assert await reading == [Tokens((5,), "a", 0)]
    assert await anext(other) == Tokens((6,), "b", 0)
    for one in (stream, other):
        assert one.num_resumes == 0
        await one.aclose()


@pytest.mark.parametrize("max_buffered_events", [1, 2])
async def test_pushed_deltas_of_a_large_message_keep_their_order(
    server, inference, max_buffered_events
):
    async with BatonClient(server[0], max_buffered_events=max_buffered_events) as client:
        stream = client.generate("x")
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        texts = []

        def push(tokens):
            texts.append(tokens.text)
            return True

        stream.push_to(push)
        connection.send(accepted(number), *(delta(number, at, [at], f"{at} ") for at in range(9)))
        connection.send(*(delta(number, at, [at], f"{at} ") for at in range(9, 18)))
        connection.send(finished(number))
        while events := await stream.read():
            texts += [event.text for event in events if isinstance(event, Tokens)]
        assert "".join(texts).split() == [str(at) for at in range(18)]


async def test_all_options_are_sent(client, inference):
    stream = client.generate(
        [
            ChatMessage("system", "be brief"),
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},
            ChatMessage("tool", "hi", {"tool_call_id": "c"}),
        ],
        lane="batch",
        slo=Slo(ttft_ms=500, itl_ms=50, ttft_ms_per_1k_tokens=7),
        timeout_s=302.5,
        session_id="s",
        model="m",
        tenant="t",
        temperature=0.0,
        seed=3,
        stop=["x", "y"],
        logit_bias={5: -1.0},
        json_schema={"type": "object"},
        add_generation_prompt=False,
        continue_final_message=True,
        template_kwargs={"enable_thinking": False},
        tools=[{"type": "function"}],
    )
    request = (await (await inference.connection()).submitted()).request
    assert [(turn.role, turn.content, turn.fields) for turn in request.chat.messages] == [
        ("system", "be brief", ""),
        ("assistant", "", '{"tool_calls": [{"id": "c"}]}'),
        ("tool", "hi", '{"tool_call_id": "c"}'),
    ]
    assert request.chat.tools == '[{"type": "function"}]'
    assert request.chat.add_generation_prompt is False
    assert request.chat.continue_final_message is True
    assert request.chat.template_kwargs == '{"enable_thinking": false}'
    assert request.lane == common_pb2.LANE_BATCH
    assert (request.slo.ttft_ms, request.slo.itl_ms) == (500, 50)
    assert request.slo.ttft_ms_per_1k_tokens == 7
    assert request.timeout.ToMilliseconds() == 302_500
    assert (request.session_id, request.model, request.tenant) == ("s", "m", "t")
    sampling = request.sampling
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0
    assert sampling.seed == 3
    assert list(sampling.stop) == ["x", "y"]
    assert dict(sampling.logit_bias) == {5: -1.0}
    assert sampling.structured_output.json_schema == '{"type": "object"}'
    assert not sampling.HasField("top_p")
    await stream.aclose()


async def test_a_client_has_a_tenant_that_a_request_may_override(server, inference):
    async with BatonClient(server[0], tenant="acme") as client:
        streams = [client.generate("x"), client.generate("x", tenant="other")]
        connection = await inference.connection()
        tenants = [(await connection.submitted()).request.tenant for _ in streams]
        assert tenants == ["acme", "other"]


async def test_requests_share_one_session_and_do_not_mix(client, inference):
    streams = [client.generate([index]) for index in range(20)]
    connection = await inference.connection()
    submits = [await connection.submitted() for _ in streams]
    assert len({submit.stream for submit in submits}) == len(streams)
    ids = {submit.stream: submit.request.tokens.ids[0] for submit in submits}
    connection.send(*(accepted(number, f"r{ids[number]}") for number in ids))
    for offset in range(5):
        connection.send(*(delta(number, offset, [100 * ids[number] + offset]) for number in ids))
    connection.send(*(finished(number) for number in reversed(ids)))
    results = await asyncio.gather(*(stream.complete() for stream in streams))
    for index, result in enumerate(results):
        assert result.request_id == f"r{index}"
        assert result.token_ids == tuple(100 * index + offset for offset in range(5))
    assert inference.connections.empty()


async def test_requests_submitted_together_are_sent_as_one_message(client, inference):
    first = client.generate("0", max_tokens=1)
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    more = [client.generate(f"{index}", max_tokens=1) for index in range(1, 4)]
    numbers = [number] + [(await connection.submitted()).stream for _ in more]
    assert sum(connection.sizes) == 4
    num_messages = len(connection.sizes)
    for number in numbers:
        connection.send(accepted(number), delta(number, 0, [7], "a"))
        connection.send(finished(number, completion_tokens=1))
    for stream in (first, *more):
        await gathered(stream)
    streams = [client.generate(f"{index}", max_tokens=1) for index in range(100)]
    submitted = [await connection.submitted() for _ in streams]
    assert [one.request.text for one in submitted] == [f"{index}" for index in range(100)]
    assert connection.sizes[num_messages:] == [64, 36]
    for stream in streams:
        stream.cancel()
    cancelled = [await connection.cancelled() for _ in streams]
    assert cancelled == [one.stream for one in submitted]
    assert connection.sizes[num_messages + 2 :] == [64, 36]


async def test_a_cancel_waits_behind_no_submissions(client, inference):
    first = client.generate("first")
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number))
    await anext(first)
    more = [client.generate(f"{index}") for index in range(200)]
    first.cancel()
    assert await connection.cancelled() == number
    for index in range(200):
        assert (await connection.submitted()).request.text == f"{index}"
    for stream in more:
        await stream.aclose()


async def test_complete_joins_the_text(client, inference):
    answer = asyncio.create_task(client.complete("x"))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1, 2], "ab"), delta(number, 2, [], "c"))
    connection.send(finished(number, common_pb2.FINISH_REASON_STOP, 2))
    completion = await answer
    assert (completion.text, completion.token_ids) == ("abc", (1, 2))
    assert (completion.finish_reason, completion.usage.completion_tokens) == ("stop", 2)


async def test_break_cancels_at_the_server(client, inference):
    async def first_token():
        async for event in client.generate("x"):
            if isinstance(event, Tokens):
                return event
        return None

    task = asyncio.create_task(first_token())
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1]))
    assert (await task).token_ids == (1,)
    del task
    gc.collect()
    assert await connection.cancelled() == number


async def test_a_pending_read_keeps_its_stream_alive(client, inference):
    reading = asyncio.create_task(client.generate("x").read())
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    gc.collect()
    connection.send(accepted(number), delta(number, 0, [1]))
    events = await asyncio.wait_for(reading, TIMEOUT_S)
    assert isinstance(events[0], Accepted)
    # The last reference to the stream is dropped.
    del reading
    gc.collect()
    assert await connection.cancelled() == number


async def test_aclose_and_context_cancel_at_the_server(client, inference):
    async with client.generate("x") as stream:
        connection = await inference.connection()
        number = (await connection.submitted()).stream
    assert await connection.cancelled() == number
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    await stream.aclose()
    assert connection.received.empty()


async def test_a_cancelled_reader_cancels_at_the_server(client, inference):
    stream = client.generate("x")
    reader = asyncio.create_task(gathered(stream))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await connection.cancelled() == number


async def test_cancel_reads_on_to_the_last_event(client, inference):
    stream = client.generate("x")
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number))
    stream.cancel()
    assert await connection.cancelled() == number
    connection.send(finished(number, common_pb2.FINISH_REASON_CANCELLED))
    assert (await gathered(stream))[-1].reason == "cancelled"


async def test_a_request_is_cancelled_before_it_is_accepted(client, inference):
    stream = client.generate("x", request_id="mine")
    stream.cancel()
    completion = await stream.complete()
    assert (completion.finish_reason, completion.text) == ("cancelled", "")
    assert (completion.request_id, completion.model) == ("mine", "")


async def test_a_request_abandoned_before_it_is_sent_is_never_sent(client, inference):
    first = client.generate("first")
    await first.aclose()
    second = client.generate("second")
    connection = await inference.connection()
    assert (await connection.submitted()).request.text == "second"
    assert second.request_id == ""


async def test_errors_keep_code_details_and_retry(client, inference):
    shed, wrong = client.generate("a"), client.generate("b")
    connection = await inference.connection()
    numbers = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(
        failed(
            numbers[0],
            errors.ResourceExhausted("queue is full", reason="QUEUE_FULL", retry_after_s=1.5),
        ),
        failed(numbers[1], errors.InvalidArgument("sampling.top_p", 0.0, "must be in (0, 1]")),
    )
    with pytest.raises(ResourceExhaustedError, match="queue is full") as exhausted:
        await shed.complete()
    assert (exhausted.value.retry_after_s, exhausted.value.reason) == (1.5, "QUEUE_FULL")
    with pytest.raises(InvalidArgumentError) as invalid:
        await wrong.complete()
    assert (invalid.value.field, invalid.value.name) == ("sampling.top_p", "INVALID_ARGUMENT")
    # The session continues.
    after = client.generate("c")
    number = (await connection.submitted()).stream
    connection.send(accepted(number), finished(number))
    await after.complete()


async def test_tokens_before_a_failure_are_read_first(client, inference):
    stream = client.generate("x")
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [4, 5], "hi"))
    connection.send(failed(number, errors.Unavailable("worker lost")))
    events = []

    async def read():
        async for event in stream:
            events.append(event)

    with pytest.raises(UnavailableError, match="worker lost"):
        await read()
    assert events[1] == Tokens((4, 5), "hi", 0)
    assert stream.token_ids == (4, 5)


async def test_the_deadline_holds_when_the_server_says_nothing(client, inference):
    stream = client.generate("x", timeout_s=500.0)
    connection = await inference.connection()
    submit = await connection.submitted()
    assert submit.request.timeout.ToMilliseconds() == 500_000
    advance_clock(500.0)
    with pytest.raises(DeadlineExceededError, match=r"500 s: no coordinator had accepted it"):
        await stream.complete()
    assert await connection.cancelled() == submit.stream
    # Late events of the request are ignored.
    connection.send(delta(submit.stream, 0, [1]))
    after = client.generate("y")
    number = (await connection.submitted()).stream
    connection.send(accepted(number), finished(number))
    await after.complete()


async def test_overlap_is_dropped(client, inference):
    stream = client.generate("x")
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1, 2], "ab"))
    connection.send(delta(number, 0, [1, 2], "ab"), delta(number, 1, [2, 3]))
    connection.send(delta(number, 3, [4], "d"), finished(number))
    completion = await stream.complete()
    assert (completion.token_ids, completion.text) == ((1, 2, 3, 4), "abd")


@pytest.mark.parametrize("broken", [(3, [4], ""), (1, [2, 3], "bc")], ids=["gap", "mixed text"])
async def test_lost_or_ambiguous_tokens_are_an_error(client, inference, broken):
    stream = client.generate("x")
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1, 2], "ab"), delta(number, *broken))
    with pytest.raises(DataLossError):
        await stream.complete()
    assert await connection.cancelled() == number


async def test_a_slow_reader_is_bounded_and_loses_nothing(server, inference):
    async with BatonClient(server[0], max_buffered_events=8) as client:
        slow, quick = client.generate("slow"), client.generate("quick")
        connection = await inference.connection()
        numbers = [(await connection.submitted()).stream for _ in range(2)]
        connection.send(*(accepted(number) for number in numbers))
        for offset in range(1000):
            connection.send(*(delta(number, offset, [offset], "t") for number in numbers))
        connection.send(finished(numbers[1]))
        assert len((await quick.complete()).token_ids) == 1000
        assert slow.num_buffered == 8
        assert len(slow.token_ids) == 1000
        connection.send(finished(numbers[0]))
        completion = await slow.complete()
        assert completion.token_ids == tuple(range(1000))
        assert completion.text == "t" * 1000


@pytest.mark.parametrize("how", [None, errors.Unavailable("restarting"), errors.Internal("bug")])
async def test_without_resuming_a_lost_session_fails_its_requests(server, inference, how):
    async with BatonClient(server[0], resume_timeout_s=0) as client:
        streams = [client.generate("a"), client.generate("b")]
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [9]))
        assert await anext(streams[0]) == Accepted("r1", "scripted", 3)
        connection.end(how)
        for stream in streams:
            with pytest.raises(UnavailableError, match=r"session .* lost"):
                await stream.complete()
        assert streams[0].token_ids == (9,)

        again = client.generate("c")
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number), finished(number))
        await again.complete()


async def test_a_refused_session_says_why(client, inference):
    async with inference.refusing(errors.Unauthenticated("no credential")):
        with pytest.raises(UnauthenticatedError, match="no credential"):
            await client.generate("a").complete()


async def test_an_unreachable_coordinator_is_unavailable():
    address = unused_address()
    async with BatonClient(address) as client:
        with pytest.raises(UnavailableError):
            await client.complete("x")
        with pytest.raises(UnavailableError, match="unreachable"):
            await client.wait_ready(0.2)


async def test_closing_the_client_ends_requests_and_the_session(server, inference):
    async with BatonClient(server[0]) as client:
        stream = client.generate("x")
        connection = await inference.connection()
        await connection.submitted()
    await asyncio.wait_for(connection.closed.wait(), TIMEOUT_S)
    with pytest.raises(RequestCancelledError):
        await stream.complete()
    with pytest.raises(RuntimeError, match="not open"):
        client.generate("y")


async def test_closing_that_is_cancelled_ends_the_session_all_the_same(
    server, inference, monkeypatch
):
    async with BatonClient(server[0]) as client:
        stream = client.generate("x")
        connection = await inference.connection()
        await connection.submitted()
        monkeypatch.setattr(client._channels, "aclose", asyncio.Event().wait)
        closing = asyncio.create_task(client.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await asyncio.wait_for(connection.closed.wait(), TIMEOUT_S)
        with pytest.raises(RequestCancelledError):
            await stream.complete()
        monkeypatch.undo()


async def test_a_cancelled_close_ends_the_streams_of_other_tasks(server, inference):
    client = await BatonClient(server[0]).__aenter__()
    stream = client.generate("x")
    await (await inference.connection()).submitted()
    reading = asyncio.create_task(gathered(stream))
    closing = asyncio.create_task(client.aclose())
    # Now `aclose` waits for its tasks.
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    with pytest.raises(RequestCancelledError, match="the client was closed"):
        await asyncio.wait_for(reading, TIMEOUT_S)


async def test_too_many_live_requests(server, inference):
    async with BatonClient(server[0], max_requests=1) as client:
        first = client.generate("x")
        with pytest.raises(ResourceExhaustedError, match="limit"):
            client.generate("y")
        await first.aclose()
        client.generate("z")


async def test_wait_ready_returns_when_serving_begins(client, server):
    _, health = server
    await set_serving(health, False)
    waiting = asyncio.create_task(client.wait_ready(TIMEOUT_S))
    await retried_until("NOT_SERVING", lambda: client.wait_ready(0.5))
    assert not waiting.done()
    await set_serving(health, True)
    await waiting


async def test_wait_ready_before_the_coordinator_exists(inference):
    address = unused_address()
    async with BatonClient(address) as client:
        waiting = asyncio.create_task(client.wait_ready(TIMEOUT_S))
        late = rpc.server()
        health = rpc.add_health_and_reflection(late, [])
        rpc.bind(late, address, "listen")
        await late.start()
        await set_serving(health, True)
        await waiting
        await late.stop(None)


async def test_model(client):
    assert (await client.model(TIMEOUT_S)).name == "scripted"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "x", "max_tokens": -1}, "sampling.max_tokens"),
        ({"prompt": "x", "temperature": "hot"}, "sampling.temperature"),
        ({"prompt": "x", "lane": "fast"}, "lane"),
        ({"prompt": "x", "timeout_s": 0}, "timeout_s"),
        ({"prompt": "x", "timeout_s": 1e300}, "timeout_s"),
        ({"prompt": "x", "slo": {"ttft_ms": 5}}, "slo"),
        ({"prompt": "x", "slo": Slo(ttft_ms=5, ttft_ms_per_1k_tokens=-1)}, "slo"),
        ({"prompt": "x", "slo": Slo(ttft_ms=5, ttft_ms_per_1k_tokens=2**32)}, "slo"),
        ({"prompt": "x", "choice": "yes"}, "sampling.choice"),
        ({"prompt": "x", "bad_words": "no"}, "sampling.bad_words"),
        ({"prompt": b"x"}, "prompt"),
        ({"prompt": b"\xff".decode(errors="surrogateescape")}, "text"),
        ({"prompt": "x", "timeout_s": float("nan")}, "timeout_s"),
        ({"prompt": [1, -2]}, "tokens.ids"),
        ({"prompt": [{"role": "user"}]}, "chat.messages[0]"),
        ({"prompt": "x", "regex": "a", "grammar": "b"}, "sampling.structured_output"),
        ({"prompt": "x" * 17 * 2**20}, "request"),
    ],
)
async def test_a_value_that_cannot_be_sent_names_the_field(client, arguments, field):
    with pytest.raises(InvalidArgumentError) as error:
        client.generate(**arguments)
    assert error.value.field == field


async def test_an_unknown_option_names_the_nearest(client):
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        client.generate("x", temprature=1.0)


async def test_serving_helper_leaves_no_task(inference):
    before = asyncio.all_tasks()
    async with serving(inference) as (address, _), BatonClient(address) as client:
        stream = client.generate("x")
        await (await inference.connection()).submitted()
    assert stream.token_ids == ()
    # Only the client's tasks: tasks of the server may be about to end.
    left = asyncio.all_tasks() - before
    assert {task for task in left if task.get_name().startswith("baton")} == set()
