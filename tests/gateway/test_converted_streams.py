"""Streams of Messages and Responses, with and without the events that skip vLLM's converters."""

import asyncio
import gc
import json

import pytest

from baton.client import Finished, LatencyBudget, Tokens, Usage
from baton.gateway.error_responses import HttpError
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt
from baton.gateway.response_rendering import ResponseHead, usage

pytestmark = pytest.mark.vllm

CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{"}}
MORE = {"index": 0, "function": {"arguments": '"a": "b"}'}}
TEXTS = ["It", ' "is"', "", "\n\\", "é\u2028😀", "}", '","finish_reason":null']
DELTAS = [
    {"reasoning": "Oslo"},
    *({"reasoning": text} for text in TEXTS),
    *({"content": text} for text in TEXTS),
    None,
    {"content": "Now", "tool_calls": [CALL]},
    {"tool_calls": [MORE]},
    *({"content": text} for text in TEXTS),
    {},
]
NUM_DELTAS, LAST = len(DELTAS), {"content": "End."}
NUM_PROMPT = 3
FINISHED = Finished("stop", "", Usage(NUM_PROMPT, 9, 0), LatencyBudget((), 0.0, 0.0, 0.0, 0.0))
REQUEST = ParsedRequest(
    "id", True, "interactive", ["x"], 1, None, True, True, False, None, {"stop": ()}
)
HEAD = ResponseHead(REQUEST, 'm"content":"', 1)


class Parser:
    """A parser of outputs that finds the deltas of the test, one for each token."""

    num_reasoning_tokens = None

    def delta(self, tokens, *, finished):
        return LAST if finished else DELTAS[tokens.offset]

    def finish_reason(self, reason):
        return reason


def messages_stream():
    messages = pytest.importorskip("baton.gateway.anthropic_messages")
    body = {"model": "m", "max_tokens": 9, "stream": True}
    body["messages"] = [{"role": "user", "content": "a"}]
    return messages, messages.MessageConversion(json.dumps(body).encode()).stream(HEAD)


def responses_stream():
    responses = pytest.importorskip("baton.gateway.openai_responses")
    body = json.dumps({"model": "m", "input": "a", "stream": True, "store": False}).encode()
    return responses.ResponseConversion(body, None, None, None).stream(HEAD)


def rendered(stream, num_deltas=NUM_DELTAS, *, ends=True):
    """The events of a stream; all deltas but the first go the way of a connection's writer."""
    choice = stream.choice(0, NUM_PROMPT, RenderedPrompt(), Parser())
    recorded = []
    push = choice.delta_renderer(lambda: recorded.append(1))
    parts = []
    for index in range(num_deltas):
        tokens = Tokens((1,), "unparsed", index)
        parts.append(push(tokens) if index else choice.render(tokens, None))
    if ends:
        parts += [choice.render(None, FINISHED), stream.end([FINISHED.usage], [Parser()])]
    stream.close()
    assert len(recorded) == max(0, num_deltas - 1)
    return parsed(b"".join(parts).decode())


def parsed(events):
    """The events of a stream; IDs and signatures are random."""
    found = [json.loads(event.partition("data: ")[2]) for event in events.split("\n\n") if event]
    for event in found:
        if isinstance(event.get("delta"), dict):
            event["delta"].pop("signature", None)
    return found


def chunk(delta, reason=None, used=None):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    fields = HEAD.fields("chat.completion.chunk")
    return f"data: {json.dumps({**fields, 'choices': [choice], 'usage': used})}"


async def test_messages_have_the_events_of_vllms_converter():
    messages, stream = messages_stream()
    found = rendered(stream)

    async def chunks():
        begun = usage(REQUEST, [Usage(NUM_PROMPT, 0, 0)])
        yield chunk({"role": "assistant"}, used=begun)
        for delta in DELTAS:
            if delta is not None:
                yield chunk(delta)
        yield chunk(LAST, "stop")
        fields, used = HEAD.fields("chat.completion.chunk"), usage(REQUEST, [FINISHED.usage])
        yield f"data: {json.dumps({**fields, 'choices': [], 'usage': used})}"
        yield "data: [DONE]"

    converter = messages._CONVERTER.message_stream_converter(chunks())
    assert found == parsed("".join([event async for event in converter]))
    assert [one["type"] for one in found].count("content_block_delta") > 2 * (len(TEXTS) - 1)


async def test_a_message_without_a_parser_has_its_texts():
    _, stream = messages_stream()
    choice = stream.choice(0, NUM_PROMPT, RenderedPrompt(), None)
    push = choice.delta_renderer(lambda: None)
    first, *texts = TEXTS
    parts = [choice.render(Tokens((1,), first, 0), None)]
    parts += [push(Tokens((1,), text, index)) for index, text in enumerate(texts, 1)]
    parts += [choice.render(Tokens((1,), "", 9), FINISHED), stream.end([FINISHED.usage])]
    stream.close()
    found = parsed(b"".join(parts).decode())
    texts = [one["delta"]["text"] for one in found if one["type"] == "content_block_delta"]
    assert texts == [text for text in TEXTS if text]
    assert [found[0]["type"], found[-1]["type"]] == ["message_start", "message_stop"]


@pytest.mark.parametrize("num_deltas", [0, 1, NUM_DELTAS])
async def test_a_message_that_ends_early_or_late_leaves_nothing(num_deltas):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    _, stream = messages_stream()
    rendered(stream, num_deltas, ends=num_deltas == NUM_DELTAS)
    stream.close()
    del stream
    gc.collect()
    for _ in range(5):
        # Python closes lost generators in tasks, and reports tasks that failed.
        await asyncio.sleep(0)
    gc.collect()
    assert problems == []


async def test_a_message_that_fails_ends_with_an_error_in_anthropics_form():
    _, stream = messages_stream()
    choice = stream.choice(0, NUM_PROMPT, RenderedPrompt(), None)
    begin = choice.render(Tokens((1,), "It", 0), None)
    end = stream.failure(HttpError(503, "no worker", kind="server_error"), "req-1")
    stream.close()
    found = parsed((begin + end).decode())
    error = {"type": "api_error", "message": "no worker"}
    assert found[-1] == {"type": "error", "error": error, "request_id": "req-1"}


def test_a_response_without_a_parser_has_its_texts():
    stream = responses_stream()
    choice = stream.choice(0, NUM_PROMPT, RenderedPrompt(), None)
    push = choice.delta_renderer(lambda: None)
    first, *texts = TEXTS
    parts = [choice.render(Tokens((1,), first, 0), None)]
    parts += [push(Tokens((1,), text, index)) for index, text in enumerate(texts, 1)]
    parts += [choice.render(None, FINISHED), stream.end([FINISHED.usage])]
    found = parsed(b"".join(parts).decode())
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    told = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    assert told == [text for text in TEXTS if text]
    (item,) = found[-1]["response"]["output"]
    assert item["content"][0]["text"] == "".join(TEXTS)


def test_responses_have_all_texts_in_order():
    found = rendered(responses_stream())
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    text = "".join(TEXTS)
    kinds = {
        "response.reasoning_text.delta": [f"Oslo{text}"],
        "response.output_text.delta": [f"{text}Now", f"{text}End."],
        "response.function_call_arguments.delta": ['{"a": "b"}'],
    }
    for kind, wanted in kinds.items():
        deltas = [one for one in found if one["type"] == kind]
        assert len({frozenset(one) for one in deltas}) == 1
        items = dict.fromkeys(one["item_id"] for one in deltas)
        joined = ["".join(one["delta"] for one in deltas if one["item_id"] == i) for i in items]
        assert joined == wanted
    items = found[-1]["response"]["output"]
    assert [one["type"] for one in items] == ["reasoning", "message", "function_call", "message"]
    assert [items[index]["content"][0]["text"] for index in (0, 1, 3)] == [
        f"Oslo{text}",
        f"{text}Now",
        f"{text}End.",
    ]
