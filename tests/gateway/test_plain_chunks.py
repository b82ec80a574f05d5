"""Events of Messages and Responses that are rendered without vLLM's converters."""

import asyncio
import gc
import json

import pytest

from baton.gateway.plain_chunks import PlainChunks

pytestmark = pytest.mark.vllm

HEAD = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": 'm"content":"'}
CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{"}}
MORE = {"index": 0, "function": {"arguments": '"a": "b"}'}}
USAGE = {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
TEXTS = ["It", ' "is"', "", "\n\\", "é\u2028😀", "}", '","finish_reason":null']
DELTAS = [
    {"role": "assistant", "reasoning": "Oslo"},
    *({"reasoning": text} for text in TEXTS),
    *({"content": text} for text in TEXTS),
    {"content": "Now", "tool_calls": [CALL]},
    {"tool_calls": [MORE]},
    *({"content": text} for text in TEXTS),
    {},
]


def chunk(delta, reason=None, usage=None):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    fields = {**HEAD, "choices": [choice], "usage": usage}
    return f"data: {json.dumps(fields, separators=(',', ':'))}"


def stream():
    """The chunks of a stream with everything that a chat may have."""
    first, *deltas = DELTAS
    yield chunk(first, usage={**USAGE, "completion_tokens": 0})
    yield from map(chunk, deltas)
    yield chunk({"content": "End."}, "stop")
    yield f"data: {json.dumps({**HEAD, 'choices': [], 'usage': USAGE})}"
    yield "data: [DONE]"


def parsed(events):
    """The events of a stream; IDs and signatures are random."""
    found = [json.loads(event.partition("data: ")[2]) for event in events.split("\n\n") if event]
    for event in found:
        if isinstance(event.get("delta"), dict):
            event["delta"].pop("signature", None)
    return found


async def test_messages_have_the_events_of_vllms_converter():
    messages = pytest.importorskip("baton.gateway.anthropic_messages")
    body = {"model": "m", "max_tokens": 9, "stream": True}
    body["messages"] = [{"role": "user", "content": "a"}]
    conversion = messages.MessageConversion(json.dumps(body).encode())
    found = parsed("".join(map(conversion.events, stream())))

    async def chunks():
        start, *rest = stream()
        yield chunk({"role": "assistant"}, usage={**USAGE, "completion_tokens": 0})
        for one in (start, *rest):
            yield one

    converter = messages._CONVERTER.message_stream_converter(chunks())
    assert found == parsed("".join([event async for event in converter]))
    assert [one["type"] for one in found].count("content_block_delta") > 2 * (len(TEXTS) - 1)


@pytest.mark.parametrize("num_chunks", [0, 1, 100])
async def test_a_message_that_ends_early_or_late_leaves_nothing(num_chunks):
    messages = pytest.importorskip("baton.gateway.anthropic_messages")
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    conversion = messages.MessageConversion(json.dumps(body).encode())
    for one in list(stream())[:num_chunks]:
        conversion.events(one)
    conversion.close()
    conversion.close()
    del conversion
    gc.collect()
    for _ in range(5):
        # Python closes lost generators in tasks, and reports tasks that failed.
        await asyncio.sleep(0)
    gc.collect()
    assert problems == []


def test_responses_have_all_texts_in_order():
    responses = pytest.importorskip("baton.gateway.openai_responses")
    body = json.dumps({"model": "m", "input": "a", "stream": True, "store": False}).encode()
    conversion = responses.ResponseConversion(body, None, None, None)
    found = parsed("".join(map(conversion.events, stream())))
    conversion.close()
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


@pytest.mark.parametrize(
    "other",
    [
        chunk({"role": "assistant", "content": "a"}),
        chunk({"content": "a", "tool_calls": [CALL]}),
        chunk({"content": None}),
        chunk({"tool_calls": [MORE]}),
        chunk({"content": "a"}, "stop"),
        chunk({}),
        "data: [DONE]",
    ],
)
def test_a_chunk_with_more_than_a_text_is_not_plain(other):
    plain = PlainChunks.like(chunk({"content": "a"}))
    assert plain.text(chunk({"content": 'b"'})) == 'b"'
    assert plain.text(chunk({"content": "b"}, usage=USAGE)) == "b"
    assert plain.text(chunk({"reasoning": "b"})) is None
    assert plain.text(other) is None
    assert PlainChunks.like(other) is None
