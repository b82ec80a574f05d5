"""Tool calls and reasoning that vLLM's parsers find in the output of a scripted model."""

import asyncio
import base64
import contextlib
import json

import httpx2 as httpx
import pytest
import pytest_asyncio
from gateway_command import gateway_command
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient, NotFoundError
from scripted_inference import ScriptedInference, accepted, delta, failed, finished, serving
from thinker import ANSWER, THINK, write_thinker
from tokenizers import Tokenizer

from baton.runtime.config import HttpConfig
from baton.runtime.errors import Unavailable
from baton.v1 import common_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

# Importing vLLM takes a busy machine half a minute.
WAIT_S = 300.0
CONFIG = {
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "http": {"listen": "127.0.0.1:0", "write_timeout_s": 1.0},
}
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
TURNS = [{"role": "user", "content": "How cold is it in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'


def call(arguments):
    """A tool call in the format of the hermes parser."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


class Model(ScriptedInference):
    """A coordinator whose model has its tokenizer in a directory."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    async def GetModel(self, request, context):
        return common_pb2.ModelDescription(name="scripted", tokenizer=str(self.directory))

    def events(self, stream, text, reason):
        """Yields the events of an output, one token per delta."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        yield accepted(stream)
        for offset, one in enumerate(ids):
            said = self.tokenizer.decode([one], skip_special_tokens=False)
            yield delta(stream, offset, [one], said)
        yield finished(stream, reason, len(ids))


class Gateway:
    def __init__(self, url, model):
        self.url, self._model = url, model
        self._connection = None

    async def ask(self, text, *, reason=STOP, think=False, **body):
        """Sends a chat whose output is `text`; returns the submitted request and the response."""
        kwargs = {} if think else {"chat_template_kwargs": {"enable_thinking": False}}
        body = {"messages": TURNS, **kwargs, **body}
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            asked = asyncio.create_task(http.post(f"{self.url}/v1/chat/completions", json=body))
            connection = await self.connection()
            submits = [await connection.submitted() for _ in range(body.get("n", 1))]
            for submit in submits:
                for event in self._model.events(submit.stream, text, reason):
                    connection.send(event)
            answer = await asked
        assert answer.status_code == 200, answer.text
        return submits[0].request, answer

    async def response(self, text, *, reason=STOP, stream=False, key="key", **body):
        """Sends a request of the Responses API; returns the submitted request and the response.

        A stream is added up by OpenAI's client.
        """
        body = {"model": "scripted", "input": "How cold is it in Oslo?", **body}
        async with self.openai(key) as client:

            async def ask():
                if not stream:
                    return await client.responses.create(**body)
                async with client.responses.stream(**body) as events:
                    return await events.get_final_response()

            return await self._answered(ask(), text, reason)

    def openai(self, key="key"):
        http = DefaultAsyncHttpxClient(verify=False)
        options = {"max_retries": 0, "timeout": WAIT_S, "http_client": http}
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    async def _answered(self, asking, text, reason):
        """Answers a request with this text; returns the submitted request and the response."""
        asked = asyncio.create_task(asking)
        submitted = asyncio.create_task(self.answer(text, reason))
        await asyncio.wait({asked, submitted}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done() and not submitted.done():
            # The gateway has refused the request.
            submitted.cancel()
        found = await asked
        return await submitted, found

    async def message(self, text, *, reason=STOP, stream=False, headers=None, **body):
        """Sends a request of the Messages API; returns the submitted request and the message.

        A stream is added up by Anthropic's client.
        """
        body = {"model": "scripted", "max_tokens": 100, "messages": TURNS, **body}
        async with self.anthropic() as client:

            async def ask():
                if not stream:
                    return await client.messages.create(**body, extra_headers=headers)
                async with client.messages.stream(**body, extra_headers=headers) as events:
                    return await events.get_final_message()

            return await self._answered(ask(), text, reason)

    async def answer(self, text, reason):
        """Answers the next request with this text; returns the request."""
        connection = await self.connection()
        submit = await connection.submitted()
        for event in self._model.events(submit.stream, text, reason):
            connection.send(event)
        return submit.request

    async def connection(self):
        """Returns the gateway's session stream."""
        self._connection = self._connection or await self._model.connection()
        return self._connection

    def token_ids(self, text):
        return self._model.tokenizer.encode(text, add_special_tokens=False).ids

    def anthropic(self):
        # Not at the top: every test worker imports this file, and the client's import is slow.
        import anthropic

        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        options = {"max_retries": 0, "timeout": WAIT_S, "http_client": http}
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="key", **options)

    async def said(self, text, **options):
        """Returns the choices and the usage; checks that a stream adds up to the same."""
        _, whole = await self.ask(text, **options)
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        _, streamed = await self.ask(text, **options, **streaming)
        found = whole.json()
        for choice in found["choices"]:
            for one in choice["message"].get("tool_calls", ()):
                assert one.pop("id")
        assert joined(streamed.text) == (
            [plain(choice) for choice in found["choices"]],
            found["usage"],
        )
        return [plain(choice) for choice in found["choices"]], found["usage"]

    async def refused(self, **body):
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            body = {"messages": TURNS, **body}
            answer = await http.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]


def plain(choice):
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls", ())]
    reasoning = message.get("reasoning", "")
    return message["content"] or "", reasoning, calls, choice["finish_reason"]


def joined(text):
    """Joins the chunks of a stream; returns its choices and usage."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices, spoke = {}, set()
    for chunk in chunks[:-1]:
        (one,) = chunk["choices"]
        index, told = one["index"], one["delta"]
        assert (told.get("role") == "assistant") is (index not in spoke)
        spoke.add(index)
        made = choices.setdefault(index, {"content": "", "reasoning": "", "calls": [], "end": None})
        assert made["end"] is None
        made["content"] += told.get("content") or ""
        made["reasoning"] += told.get("reasoning") or ""
        for part in told.get("tool_calls", ()):
            if part["index"] == len(made["calls"]):
                assert part["id"]
                made["calls"].append({"name": "", "arguments": ""})
            for name, value in part["function"].items():
                made["calls"][part["index"]][name] += value
        made["end"] = one["finish_reason"]
    return [tuple(choices[index].values()) for index in sorted(choices)], chunks[-1]["usage"]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The files of a tokenizer with tokens for the begin and end of reasoning."""
    directory = tmp_path_factory.mktemp("thinker")
    write_thinker(directory)
    template = (
        "<|user|>{{ messages[-1].content }}<|assistant|>"
        "{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    return directory


@contextlib.asynccontextmanager
async def served(thinker, directory, **changes):
    """A `baton gateway` process in front of a coordinator whose events the test sends."""
    config, batches = directory / "baton.yaml", {"dir": str(directory / "batches")}
    fields = CONFIG | {"http": CONFIG["http"] | {"batches": batches}} | changes
    config.write_text(json.dumps(fields))
    model = Model(thinker)
    async with (
        serving(model) as (address, _),
        gateway_command(address, config, WAIT_S) as url,
    ):
        yield Gateway(url, model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(thinker, tmp_path_factory):
    async with served(thinker, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def json_gateway(thinker, tmp_path_factory):
    """A gateway whose tool parser takes the whole output as the arguments of a named tool."""
    directory = tmp_path_factory.mktemp("json_gateway")
    async with served(thinker, directory, tool_call_parser="pythonic") as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        ("It is cold.", "It is cold.", [], "stop"),
        (call(OSLO), "", [OSLO], "tool_calls"),
        ("I look. " + call(OSLO) + "\n" + call(ROME), "I look. ", [OSLO, ROME], "tool_calls"),
        ("Is 1 <tool 2?", "Is 1 <tool 2?", [], "stop"),
    ],
)
async def test_tool_calls_are_parsed(gateway, text, content, calls, reason):
    found, _ = await gateway.said(text, tools=[TOOL])
    made = [{"name": "weather", "arguments": one} for one in calls]
    assert found == [(content, "", made, reason)]


async def test_parallel_tool_calls_can_be_disabled(gateway):
    text = call(OSLO) + call(ROME)
    ((_, _, calls, _),), _ = await gateway.said(text, tools=[TOOL], parallel_tool_calls=False)
    assert calls == [{"name": "weather", "arguments": OSLO}]


async def test_the_first_chunk_of_a_streamed_call_has_empty_arguments(gateway):
    """As at OpenAI: clients add the arguments of later chunks to this text."""
    _, answer = await gateway.ask(call(OSLO) + call(ROME), tools=[TOOL], stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    made = [one["function"] for told in deltas for one in told.get("tool_calls", ())]
    begun = [one for one in made if "name" in one]
    assert begun == 2 * [{"name": "weather", "arguments": ""}]
    assert "".join(one["arguments"] for one in made) == OSLO + ROME


async def test_the_arguments_of_a_streamed_call_come_in_parts_with_a_text(gateway):
    """Neither the Messages API nor the Responses API begins a call with an empty part."""
    body = {"model": "scripted", "stream": True}
    async with gateway.anthropic() as client:
        of_messages = {"max_tokens": 99, "messages": TURNS, "tools": [WEATHER]}
        asked = asyncio.create_task(client.messages.create(**body, **of_messages))
        await gateway.answer(f"{THINK}{ANSWER}{call(OSLO)}", STOP)
        parts = [one.delta async for one in await asked if hasattr(one, "delta")]
    parts = [one.partial_json for one in parts if getattr(one, "type", "") == "input_json_delta"]
    assert all(parts)
    assert "".join(parts) == OSLO
    async with gateway.openai() as client:
        of_responses = {"input": "a", "tools": [RESPONSES_TOOL], "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, **of_responses))
        await gateway.answer(call(OSLO), STOP)
        events = [event async for event in await asked]
    kind = "response.function_call_arguments.delta"
    parts = [event.delta for event in events if event.type == kind]
    assert all(parts)
    assert "".join(parts) == OSLO


async def test_an_output_cut_off_in_a_call_has_reason_length(gateway):
    options = {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    _, answer = await gateway.ask(call(OSLO)[:-20], reason=LENGTH, **options)
    (((content, _, calls, reason),), _) = joined(answer.text)
    assert (content, reason) == ("", "length")
    assert [one["name"] for one in calls] == ["weather"]


async def test_reasoning_is_separated_from_the_content(gateway):
    text = f"{THINK}Oslo is north{ANSWER}It is cold."
    found, usage = await gateway.said(text, think=True)
    assert found == [("It is cold.", "Oslo is north", [], "stop")]
    reasoned = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoned < usage["completion_tokens"]
    # Reasoning followed by a call; each choice has its own parser.
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    found, _ = await gateway.said(text, think=True, tools=[TOOL], n=2)
    made = [{"name": "weather", "arguments": OSLO}]
    assert found == 2 * [("", "Oslo is north", made, "tool_calls")]


async def test_the_end_of_the_prompt_decides_whether_the_model_reasons(gateway):
    found, usage = await gateway.said("It is cold.", think=False)
    assert found == [("It is cold.", "", [], "stop")]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def begun(text):
    """The body of a chat whose answer has begun with this text."""
    turns = [*TURNS, {"role": "assistant", "content": text}]
    return {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}


async def test_a_continued_answer_has_no_reasoning(gateway):
    """Although neither the prompt nor the output has an end of reasoning."""
    found, _ = await gateway.said("cold.", think=True, **begun("It is "))
    assert found == [("cold.", "", [], "stop")]
    found, _ = await gateway.said(f"look.{call(OSLO)}", think=True, tools=[TOOL], **begun("I "))
    made = [{"name": "weather", "arguments": OSLO}]
    assert found == [("look.", "", made, "tool_calls")]
    over = begun(f"{THINK}Oslo is north{ANSWER}It is ")
    assert (await gateway.said("cold.", think=True, **over))[0] == [("cold.", "", [], "stop")]
    request, _ = await gateway.ask("cold.", **begun("It is "))
    assert request.chat.continue_final_message
    assert request.chat.messages[-1].content == "It is "


async def test_begun_reasoning_is_continued(gateway):
    found, _ = await gateway.said(
        f" is north{ANSWER}It is cold.", think=True, **begun(f"{THINK}Oslo")
    )
    assert found == [("It is cold.", " is north", [], "stop")]


async def test_reasoning_can_be_hidden(gateway):
    text = f"{THINK}Oslo is north{ANSWER}It is cold."
    hidden = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    for stream in (False, True):
        _, answer = await gateway.ask(text, think=True, stream=stream, **hidden)
        assert "north" not in answer.text
        assert "token_ids" not in answer.text
        assert "cold" in answer.text


async def test_tools_reach_the_coordinator_and_constrain_required_calls(gateway):
    request, _ = await gateway.ask("It is cold.", tools=[TOOL])
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]
    assert not request.sampling.HasField("structured_output")
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        request, answer = await gateway.ask(call(OSLO), tools=[STRICT], tool_choice=choice)
        tag = request.sampling.structured_output.structural_tag
        assert '"Oslo"' in tag
        assert "<tool_call>" in tag
        (found,) = answer.json()["choices"]
        # As in OpenAI's API, a call to a named tool has the finish reason "stop".
        reason = "tool_calls" if choice == "required" else "stop"
        assert plain(found) == ("", "", [{"name": "weather", "arguments": OSLO}], reason)
    request, answer = await gateway.ask(call(OSLO), tools=[TOOL], tool_choice="none")
    assert request.chat.tools
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_earlier_calls_may_lack_what_vllms_class_requires(gateway):
    functions = [
        {"name": "weather", "arguments": {"city": "Oslo"}},
        {"name": "weather"},
        {"name": "weather", "arguments": OSLO},
    ]
    calls = [{"type": "function", "function": one} for one in functions]
    turns = [
        *TURNS,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "-3 C"},
    ]
    request, _ = await gateway.ask("It is cold.", messages=turns, tools=[TOOL])
    # The chat template gets them unchanged.
    sent = json.loads(request.chat.messages[1].fields)["tool_calls"]
    assert [one["function"].get("arguments") for one in sent] == [{"city": "Oslo"}, None, OSLO]
    assert not any("id" in one for one in sent)


async def test_an_empty_list_of_tools_is_no_tools(gateway):
    request, answer = await gateway.ask("It is cold.", tools=[], tool_choice="none")
    assert answer.json()["choices"][0]["message"]["content"] == "It is cold."
    assert not request.chat.tools


async def test_structured_outputs_are_passed_on_unchanged(gateway):
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    request, _ = await gateway.ask("{}", response_format=wanted)
    assert json.loads(request.sampling.structured_output.json_schema) == schema
    for outputs in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"json": "{}"}):
        request, _ = await gateway.ask("a", structured_outputs=outputs)
        (kind,) = outputs
        assert kind in str(request.sampling.structured_output.WhichOneof("constraint"))


async def test_errors_of_the_parsers_name_the_field(gateway):
    error = await gateway.refused(tools=[{"type": "function", "function": {"name": ""}}])
    assert error["param"] == "tools[0].function.name"
    error = await gateway.refused(tools=[TOOL], tool_choice="required", top_logprobs=3)
    assert error["param"] == "top_logprobs"


# ---- Anthropic's Messages API.

TEXT = {"type": "text", "text": "a"}
WEATHER = {"name": "weather", "input_schema": PARAMETERS}


def blocks(message):
    """The content of a message, without generated IDs and signatures."""
    left_out = {"id", "signature", "citations", "caller"}
    return [one.model_dump(exclude_none=True, exclude=left_out) for one in message.content]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_have_text_thinking_and_tool_use(gateway, stream):
    off = {"thinking": {"type": "disabled"}, "stream": stream}
    request, found = await gateway.message("It is cold.", system="Be brief.", **off)
    assert blocks(found) == [{"type": "text", "text": "It is cold."}]
    assert (found.type, found.role, found.stop_reason) == ("message", "assistant", "end_turn")
    assert found.usage.output_tokens > 0
    assert [one.role for one in request.chat.messages] == ["system", "user"]
    assert request.sampling.max_tokens == 100
    assert request.authorization == "Bearer key"
    assert request.route == "/v1/messages"
    assert found.id.startswith("msg-")
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    request, found = await gateway.message(text, tools=[WEATHER], stream=stream)
    assert blocks(found) == [
        {"type": "thinking", "thinking": "Oslo is north"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert found.stop_reason == "tool_use"
    assert found.content[1].id
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]
    _, found = await gateway.message("It is", reason=LENGTH, **off)
    assert found.stop_reason == "max_tokens"


async def named(gateway, text, reason=STOP, **body):
    """The message of a request that must call the tool."""
    choice = {"type": "tool", "name": "weather"}
    off = {"thinking": {"type": "disabled"}}
    body = {"tools": [WEATHER], "tool_choice": choice, **off, **body}
    _, found = await gateway.message(text, reason=reason, **body)
    return found


@pytest.mark.parametrize(
    ("text", "reason", "stop_reason", "made"),
    [
        (OSLO, STOP, "tool_use", {"city": "Oslo"}),
        ('{"city": "Os', LENGTH, "max_tokens", {"city": "Os"}),
        ('{"city', LENGTH, "max_tokens", {}),
        ("[1, 2", LENGTH, "max_tokens", {}),
        ('{"city": "Oslo"}}', LENGTH, "max_tokens", {}),
        ('{"city": "Os', STOP, "tool_use", {}),
        ("cold", STOP, "tool_use", {}),
    ],
)
async def test_a_call_that_is_cut_off_has_an_object_as_input(
    json_gateway, text, reason, stop_reason, made
):
    found = await named(json_gateway, text, reason)
    assert found.stop_reason == stop_reason
    assert blocks(found) == [{"type": "tool_use", "name": "weather", "input": made}]


async def test_arguments_that_are_no_object_become_an_empty_input(gateway):
    for text in ('"cold"', "[1]", "null"):
        found = await named(gateway, call(text))
        assert blocks(found) == [{"type": "tool_use", "name": "weather", "input": {}}]


async def test_an_answer_that_cannot_be_converted_is_an_error_in_anthropics_form(json_gateway):
    from anthropic import InternalServerError

    with pytest.raises(InternalServerError) as failed:
        # Deeper than Python's JSON reads.
        await named(json_gateway, '{"a":' * 2000 + "1" + "}" * 2000)
    assert failed.value.body["type"] == "error"
    assert failed.value.body["error"] == {"type": "api_error", "message": "internal error"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        text = (await http.get(f"{json_gateway.url}/metrics")).text
    assert 'baton_http_requests_total{code="500",route="/v1/messages"} 1.0' in text


async def test_the_events_of_a_streamed_message_are_in_anthropics_order(gateway):
    async with gateway.anthropic() as client:
        body = {"model": "scripted", "max_tokens": 9, "messages": TURNS}
        thinking = {"type": "disabled"}
        asked = asyncio.create_task(client.messages.create(**body, thinking=thinking, stream=True))
        await gateway.answer("It is cold.", STOP)
        events = [event async for event in await asked]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events[2:-3]) == "It is cold."
    assert events[0].message.usage.output_tokens == 0
    assert events[-2].usage.output_tokens == len(events) - 5


PREFILL = {"role": "assistant", "content": "It is"}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
THINKING = {"type": "thinking", "thinking": "Oslo is north", "signature": ""}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_continues_the_last_turn_of_the_assistant(gateway, stream):
    request, found = await gateway.message(" cold.", messages=[*TURNS, PREFILL], stream=stream)
    assert blocks(found) == [{"type": "text", "text": " cold."}]
    assert request.chat.continue_final_message
    assert not request.chat.add_generation_prompt
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert told == [("user", TURNS[0]["content"]), ("assistant", "It is")]
    # A turn in blocks, with the reasoning before it, and a tool that the model may call.
    blocked = {"role": "assistant", "content": [THINKING, {"type": "text", "text": "I"}]}
    options = {"messages": [*TURNS, blocked], "tools": [WEATHER], "stream": stream}
    request, found = await gateway.message(f" look.{call(OSLO)}", **options)
    assert [one["type"] for one in blocks(found)] == ["text", "tool_use"]
    last = request.chat.messages[-1]
    assert (last.content, json.loads(last.fields)["reasoning"]) == ("I", "Oslo is north")
    request, _ = await gateway.message("It is cold.")
    assert not request.chat.continue_final_message
    assert not request.chat.HasField("add_generation_prompt")


def answering(content, **body):
    return {"messages": [*TURNS, {"role": "assistant", "content": content}], **body}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        *(
            ("messages[1].content", answering(content))
            for content in ("It is ", "It is\n", " ", "", [], [TEXT, {**TEXT, "text": "a "}])
        ),
        ("messages[1].content", answering([{**TEXT, "text": ""}])),
        ("messages[1].content", answering([TEXT, THINKING])),
        ("messages[1].content[0].type", answering([TOOL_USE])),
        ("messages[1].content[1].type", answering([TEXT, TOOL_USE])),
        ("messages[1].role", answering("It", thinking={"type": "enabled", "budget_tokens": 1024})),
        ("messages[1].role", answering("It", thinking={"type": "adaptive"})),
    ],
)
async def test_a_last_turn_that_cannot_be_continued_is_refused(gateway, field, body):
    async with gateway.anthropic() as client:
        from anthropic import BadRequestError as Refused

        with pytest.raises(Refused) as refused:
            await client.messages.create(model="scripted", max_tokens=2000, **body)
    told = refused.value.body["error"]
    assert told["type"] == "invalid_request_error"
    assert told["message"].startswith(f"{field} is ")
    content = body["messages"][1]["content"]
    if isinstance(content, str) and content != content.rstrip():
        # Anthropic's words.
        assert "final assistant content cannot end with trailing whitespace" in told["message"]


async def test_tool_results_and_the_session_reach_the_coordinator(gateway):
    turns = [
        *TURNS,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "-3 C"}],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: turn=7"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    stop = ["END", "STOP", "A", "B", "C"]
    options = {"messages": turns, "system": system, "tools": [WEATHER], "stop_sequences": stop}
    options["metadata"] = {"user_id": "user-1"}
    request, _ = await gateway.message("Cold.", **options)
    told = [(one.role, one.content) for one in request.chat.messages]
    # The billing header changes with each turn and would spoil the prefix cache.
    assert told[0] == ("system", "Be brief.")
    assert told[-1] == ("tool", "-3 C")
    assert list(request.sampling.stop) == stop
    assert request.session_id == "user-1"
    headers = {"x-claude-code-session-id": "session-1"}
    request, _ = await gateway.message("Cold.", headers=headers, **options)
    assert request.session_id == "session-1"


async def test_system_texts_of_a_message_are_separate_lines(gateway):
    texts = ["You are an agent.", "x-anthropic-billing-header: turn=7", "Be brief.\n", "Be kind."]
    system = [{"type": "text", "text": one} for one in texts]
    reminder = {"role": "system", "content": [{"type": "text", "text": "It is May."}]}
    turns = [*TURNS, {"role": "assistant", "content": "Yes?"}, reminder, *TURNS]
    request, _ = await gateway.message("Cold.", system=system, messages=turns)
    told = [one.content for one in request.chat.messages if one.role == "system"]
    assert told == ["You are an agent.\nBe brief.\nBe kind.\nIt is May."]


async def test_tools_that_an_agent_loads_later_reach_the_coordinator(gateway):
    """Claude Code defers tools; its tool search answers with references to them."""
    called = {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "weather"}}
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [reference]}
    turns = [
        *TURNS,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "search", "input_schema": {}}, {**WEATHER, "defer_loading": True}]
    request, found = await gateway.message(call(OSLO), messages=turns, tools=tools)
    assert [one.name for one in found.content] == ["weather"]
    told = [one["function"].get("defer_loading") for one in json.loads(request.chat.tools)]
    assert told == [None, True]
    told = [(one.role, one.content) for one in request.chat.messages if one.role == "tool"]
    assert told == [("tool", "<tool_reference>weather</tool_reference>")]


async def test_a_user_id_longer_than_the_id_of_a_session_is_shortened(gateway):
    sessions = []
    for last in ("a", "a", "b"):
        metadata = {"user_id": "u" * 500 + last}
        request, _ = await gateway.message("Cold.", metadata=metadata)
        sessions.append(request.session_id)
    assert sessions[0] == sessions[1] != sessions[2]


RESULT = {"type": "tool_result", "tool_use_id": "t1"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("mcp_servers", {"mcp_servers": [{"type": "url", "name": "a", "url": "https://a"}]}),
        ("container", {"container": "c"}),
        ("tools[1].type", {"tools": [WEATHER, {"type": "web_search_20250305", "name": "s"}]}),
        ("output_config.format", {"output_format": 5}),
        ("thread", {"thread": {"type": "continue", "previous_message_id": "m"}}),
        (
            "messages[0].content[0].content[1].type",
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [TEXT, DOCUMENT]}]}]},
        ),
        (
            "messages[1].content[1].type",
            {"messages": [*TURNS, {"role": "user", "content": [TEXT, DOCUMENT]}]},
        ),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [DOCUMENT]}, PREFILL]},
        ),
    ],
)
async def test_what_messages_cannot_honour_is_refused(gateway, field, body):
    body = {"model": "scripted", "max_tokens": 9, "messages": TURNS, **body}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.post(f"{gateway.url}/v1/messages", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{field} is ")


async def test_the_former_name_of_the_output_format_is_honoured(gateway):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    options = {"extra_body": {"output_format": {"type": "json_schema", "schema": schema}}}
    request, _ = await gateway.message('{"city": "Oslo"}', **options)
    assert json.loads(request.sampling.structured_output.json_schema) == schema


async def test_a_tool_with_a_schema_is_a_function_whatever_its_type(gateway):
    request, _ = await gateway.message("Cold.", tools=[{**WEATHER, "type": "function"}])
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]


async def test_documents_in_earlier_results_are_left_out_with_a_word(gateway):
    called = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result = {**RESULT, "content": [TEXT, DOCUMENT]}
    turns = [
        *TURNS,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It is cold."},
        {"role": "user", "content": "And now?"},
    ]
    request, _ = await gateway.message("Warm.", messages=turns)
    (told,) = (turn.content for turn in request.chat.messages if turn.role == "tool")
    assert "[document left out]" in told


FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "a"}}


async def test_unknown_blocks_in_earlier_turns_are_left_out_with_a_word(gateway):
    """A client cannot take them back, for example when the conversation began with Claude."""
    source = {"type": "search_result", "source": "s", "title": "t", "content": [TEXT]}
    turns = [
        {"role": "user", "content": [DOCUMENT, source, TEXT]},
        {"role": "assistant", "content": [SEARCH, FOUND, {"type": "text", "text": "It is cold."}]},
        {"role": "user", "content": "And now?"},
        # The model has paused its turn.
        {"role": "assistant", "content": [SEARCH, FOUND]},
        {"role": "user", "content": "And?"},
    ]
    request, _ = await gateway.message("Warm.", messages=turns)
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [
        ("user", "[document left out]\n[search_result left out]\na"),
        ("assistant", "It is cold."),
        ("user", "And now?"),
        ("assistant", "[server_tool_use left out]"),
        ("user", "And?"),
    ]
    async with gateway.anthropic() as client:
        counted = await client.messages.count_tokens(model="scripted", messages=turns)
    assert counted.input_tokens > 0


async def test_a_client_with_threads_sends_the_whole_conversation_instead(gateway):
    """The tool runner of Anthropic's client asks the server to keep the conversation."""
    from anthropic import beta_async_tool

    async def weather(city: str) -> str:
        """Tells how cold it is."""
        return f"-3 C in {city}"

    body = {"model": "scripted", "max_tokens": 100, "messages": TURNS}
    async with gateway.anthropic() as client:
        runner = client.beta.messages.tool_runner(
            **body, tools=[beta_async_tool(weather)], thinking={"type": "disabled"}
        )
        asked = asyncio.create_task(runner.until_done())
        await gateway.answer(call(OSLO), STOP)
        request = await gateway.answer("It is cold.", STOP)
        found = await asked
    assert found.content[0].text == "It is cold."
    assert [turn.role for turn in request.chat.messages] == ["user", "assistant", "tool"]
    assert request.chat.messages[-1].content == "-3 C in Oslo"


async def test_errors_of_messages_have_anthropics_form(gateway):
    from anthropic import BadRequestError as Refused

    async with gateway.anthropic() as client:
        body = {"model": "scripted", "max_tokens": 9, "messages": TURNS}
        with pytest.raises(Refused) as refused:
            await client.messages.create(**{**body, "max_tokens": 0})
        assert refused.value.body["type"] == "error"
        told = refused.value.body["error"]
        assert told["type"] == "invalid_request_error"
        assert told["message"] == "max_tokens is 0; max_tokens must be positive"
        with pytest.raises(Refused, match=r"messages\[0\].role is 'robot'"):
            await client.messages.create(
                **{**body, "messages": [{"role": "robot", "content": "a"}]}
            )
        source = {"type": "url", "url": "http://a/b.png"}
        image = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        with pytest.raises(Refused, match="image_url"):
            await client.messages.create(**{**body, "messages": image})
        with pytest.raises(Refused) as refused:
            await client.messages.count_tokens(model="scripted", messages=[])
        assert refused.value.body["error"]["type"] == "invalid_request_error"


PNG = b"\x89PNG\r\n\x1a\n and more"
PNG_BASE64 = base64.b64encode(PNG).decode()
PNG_URL = f"data:image/png;base64,{PNG_BASE64}"


def image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_images_reach_the_coordinator_as_files(gateway, api):
    if api == "chat":
        content = [image_part(PNG_URL), {"type": "text", "text": "What is it?"}]
        request, _ = await gateway.ask(OSLO, messages=[{"role": "user", "content": content}])
    elif api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": PNG_BASE64}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
        turns = [{"role": "user", "content": content}]
        request, _ = await gateway.message(OSLO, messages=turns)
    else:
        content = [
            {"type": "input_image", "image_url": PNG_URL, "detail": "auto"},
            {"type": "input_text", "text": "What is it?"},
        ]
        request, _ = await gateway.response(OSLO, input=[{"role": "user", "content": content}])
    (turn,) = request.chat.messages
    assert (turn.role, turn.content) == ("user", "")
    assert [(one.image, one.text) for one in turn.parts] == [(PNG, ""), (b"", "What is it?")]


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        (image_part("https://a/b.png"), "messages[0].content[1].image_url.url", "not fetched"),
        (image_part("data:image/png,aa"), "messages[0].content[1].image_url.url", "base64"),
        (image_part(f"{PNG_URL}!"), "messages[0].content[1].image_url.url", "is not base64"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content", "'input_audio'"),
    ],
)
async def test_refused_parts_of_a_chat_are_named(gateway, part, field, message):
    content = [{"type": "text", "text": "What?"}, part]
    async with gateway.openai() as client:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": content}]
            )
    assert refused.value.param == field
    assert message in refused.value.message


async def test_models_are_listed_in_anthropics_form_too(gateway):
    async with gateway.anthropic() as client:
        [listed] = [one async for one in client.models.list()]
        found = await client.models.retrieve("scripted")
    assert listed == found
    assert (found.id, found.type, found.display_name) == ("scripted", "model", "scripted")
    assert found.created_at.tzinfo is not None


async def test_tokens_of_messages_are_counted(gateway):
    async with gateway.anthropic() as client:
        counted = await client.messages.count_tokens(model="scripted", messages=TURNS)
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        body = {"model": "scripted", "messages": TURNS}
        answer = await http.post(f"{gateway.url}/tokenize", json=body)
    assert counted.input_tokens == answer.json()["count"] > 0


async def test_the_counted_prompt_is_the_prompt_of_the_message(gateway):
    """Without thinking, the prompt ends with an empty thought."""
    off = {"thinking": {"type": "disabled"}}
    async with gateway.anthropic() as client:
        body = {"model": "scripted", "messages": TURNS}
        plain = await client.messages.count_tokens(**body)
        counted = await client.messages.count_tokens(**body, **off)
    assert counted.input_tokens == plain.input_tokens + len(gateway.token_ids(THINK + ANSWER))


# ---- OpenAI's Responses API.

RESPONSES_TOOL = {"type": "function", "strict": False, **TOOL["function"]}


def items(response):
    """The output of a response, without generated IDs."""
    found = []
    for one in response.output:
        if one.type == "function_call":
            assert one.call_id
            found.append((one.name, json.loads(one.arguments)))
        else:
            found.append((one.type, "".join(part.text for part in one.content)))
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_text_reasoning_and_function_calls(gateway, stream):
    off = {"reasoning": {"effort": "none"}, "stream": stream}
    request, found = await gateway.response("It is cold.", instructions="Be brief.", **off)
    assert items(found) == [("message", "It is cold.")]
    assert (found.status, found.object) == ("completed", "response")
    assert found.usage.output_tokens > 0
    assert [one.role for one in request.chat.messages] == ["system", "user"]
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    options = {"tools": [RESPONSES_TOOL], "max_output_tokens": 50, "stream": stream}
    request, found = await gateway.response(text, **options)
    assert items(found) == [("reasoning", "Oslo is north"), ("weather", {"city": "Oslo"})]
    assert request.sampling.max_tokens == 50
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_was_cut_off_is_incomplete(gateway, stream):
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, stream=stream))
        await gateway.answer("It is", LENGTH)
        found = await asked
        if stream:
            *_, last = [event async for event in found]
            assert last.type == "response.incomplete"
            found = last.response
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert items(found) == [("message", "It is")]
    assert found.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "statuses"),
    [
        ("It is cold.", STOP, {"message": "completed"}),
        ("It is", LENGTH, {"message": "incomplete"}),
        (f"I look. {call(OSLO)}", STOP, {"message": "completed", "function_call": "completed"}),
        (
            f"I look. {call(OSLO)}",
            LENGTH,
            {"message": "completed", "function_call": "incomplete"},
        ),
    ],
)
async def test_the_last_item_of_a_response_that_was_cut_off_is_incomplete(
    gateway, stream, text, reason, statuses
):
    """Items before it are whole."""
    off = {"reasoning": {"effort": "none"}, "tools": [RESPONSES_TOOL]}
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", **off}
        asked = asyncio.create_task(client.responses.create(**body, stream=stream))
        await gateway.answer(text, reason)
        found = await asked
        if stream:
            events = [event async for event in found]
            done = [one.item for one in events if one.type == "response.output_item.done"]
            assert {one.type: one.status for one in done} == statuses
            assert [one.sequence_number for one in events] == list(range(len(events)))
            found = events[-1].response
        assert {one.type: one.status for one in found.output} == statuses
        # The client sends the items back.
        again = [one.model_dump(mode="json") for one in found.output]
        asked = asyncio.create_task(client.responses.create(**body | {"input": again}))
        await gateway.answer("Cold.", STOP)
        await asked


async def test_the_events_of_a_streamed_response_are_in_openais_order(gateway):
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, stream=True))
        await gateway.answer("It is cold.", STOP)
        events = [event async for event in await asked]
    kinds = [event.type.removeprefix("response.") for event in events]
    opened = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[:4] == opened
    assert set(kinds[4:-4]) == {"output_text.delta"}
    closed = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[-4:] == closed
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output[0].id == events[2].item.id


async def test_a_streamed_response_that_fails_ends_with_the_failed_response(gateway):
    """Codex reads only the last event, and OpenAI's client needs its response."""
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, stream=True))
        connection = await gateway.connection()
        number = (await connection.submitted()).stream
        (token,) = gateway.token_ids("a")
        connection.send(accepted(number), delta(number, 0, [token], "It is"))
        stream = await asked
        connection.send(failed(number, Unavailable("no worker is left")))
        events = [event async for event in stream]
    *_, error, last = events
    assert (error.type, error.code, error.message) == ("error", "unavailable", "no worker is left")
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "no worker is left"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_stored_response_is_continued_read_and_deleted_by_its_caller_only(gateway):
    off = {"reasoning": {"effort": "none"}}
    first, one = await gateway.response("It is cold.", **off)
    second, two = await gateway.response("-3 C", previous_response_id=one.id, input="How?", **off)
    told = [(turn.role, turn.content) for turn in second.chat.messages]
    assert told == [
        ("user", "How cold is it in Oslo?"),
        ("assistant", "It is cold."),
        ("user", "How?"),
    ]
    # The conversation's requests find their KV cache again.
    assert first.session_id == second.session_id == one.id
    async with gateway.openai() as client, gateway.openai("another") as other:
        assert (await client.responses.retrieve(two.id)).output_text == "-3 C"
        with pytest.raises(NotFoundError):
            await other.responses.retrieve(two.id)
        body = {"model": "scripted", "input": "a", "previous_response_id": two.id}
        with pytest.raises(BadRequestError, match="is not stored here"):
            await other.responses.create(**body)
        await client.responses.delete(two.id)
        with pytest.raises(NotFoundError, match="is not stored here"):
            await client.responses.retrieve(two.id)
        _, gone = await gateway.response("No.", store=False, **off)
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(gone.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_item_of_a_stored_response_can_be_referred_to(gateway, stream):
    """Vercel's AI SDK sends its earlier answers in this way."""
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    _, one = await gateway.response(text, tools=[RESPONSES_TOOL], stream=stream)
    references = [{"type": "item_reference", "id": item.id} for item in one.output]
    output = {"type": "function_call_output", "call_id": one.output[-1].call_id, "output": "-3 C"}
    turns = [*TURNS, *references, output]
    request, _ = await gateway.response("Cold.", input=turns)
    assert [turn.role for turn in request.chat.messages] == ["user", "assistant", "tool"]
    told = json.loads(request.chat.messages[1].fields)
    assert told["reasoning"] == "Oslo is north"
    assert told["tool_calls"][0]["function"] == {"name": "weather", "arguments": OSLO}
    with pytest.raises(BadRequestError, match="no stored response has this item") as refused:
        await gateway.response("Cold.", input=turns, key="another")
    assert refused.value.param == "input[1].id"


async def test_only_instructions_are_not_carried_over_to_the_next_response(gateway):
    def said(role, text):
        return {"role": role, "content": text}

    off = {"reasoning": {"effort": "none"}}
    turns = [said("developer", "Use the tools."), said("user", "Oslo?")]
    _, one = await gateway.response("Cold.", instructions="Be brief.", input=turns, **off)
    turns = [said("system", "It is May."), said("user", "Rome?")]
    then = {"previous_response_id": one.id, "input": turns, "instructions": "Be polite."}
    request, two = await gateway.response("Warm.", **then, **off)
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    first = [("user", "Oslo?"), ("assistant", "Cold.")]
    second = [("system", "It is May."), ("user", "Rome?")]
    assert told == [("system", "Be polite.\nUse the tools."), *first, *second]
    request, _ = await gateway.response("Bye.", previous_response_id=two.id, input="Thanks.", **off)
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    last = [("assistant", "Warm."), ("user", "Thanks.")]
    assert told == [("system", "Use the tools."), *first, *second, *last]


async def test_callers_with_x_api_key_do_not_see_the_responses_of_others(gateway):
    body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
    mine = {"x-api-key": "mine"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
        asked = asyncio.create_task(http.post("/v1/responses", json=body, headers=mine))
        request = await gateway.answer("It is cold.", STOP)
        assert request.authorization == "Bearer mine"
        found = (await asked).json()["id"]
        for stranger in ({"x-api-key": "another"}, {}):
            for method in ("GET", "DELETE"):
                refused = await http.request(method, f"/v1/responses/{found}", headers=stranger)
                assert refused.status_code == 404
            continued = body | {"previous_response_id": found}
            refused = await http.post("/v1/responses", json=continued, headers=stranger)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "previous_response_not_found"
        for own in (mine, {"authorization": "Bearer mine"}):
            assert (await http.get(f"/v1/responses/{found}", headers=own)).status_code == 200


async def test_an_agents_turns_reach_the_coordinator_as_a_chat(gateway):
    """Codex sends instructions, developer texts, text parts, calls and their outputs."""

    def said(role, kind, text):
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    turns = [
        said("developer", "input_text", "Use the tools."),
        said("user", "input_text", "How cold is it in Oslo?"),
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": OSLO},
        {"type": "function_call_output", "call_id": "c1", "output": "-3 C"},
        said("assistant", "output_text", "It is cold."),
        said("user", "input_text", "Thanks."),
    ]
    options = {"instructions": "Be brief.", "tools": [RESPONSES_TOOL], "store": False}
    options["include"] = ["reasoning.encrypted_content"]
    request, _ = await gateway.response("Bye.", input=turns, prompt_cache_key="s", **options)
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert told == [
        ("system", "Be brief.\nUse the tools."),
        ("user", "How cold is it in Oslo?"),
        ("assistant", ""),
        ("tool", "-3 C"),
        ("assistant", "It is cold."),
        ("user", "Thanks."),
    ]
    assert request.session_id == "s"


async def test_all_parts_of_earlier_answers_reach_the_coordinator(gateway):
    def answered(*parts):
        return {"type": "message", "role": "assistant", "content": list(parts)}

    text, refusal = {"type": "output_text", "text": "Cold."}, {"type": "refusal", "refusal": "No."}
    turns = [*TURNS, answered(text, {**text, "text": " -3 C."}), *TURNS, answered(refusal)]
    request, _ = await gateway.response("Bye.", input=[*turns, *TURNS])
    told = [turn.content for turn in request.chat.messages if turn.role == "assistant"]
    assert told == ["Cold. -3 C.", "No."]


async def test_reasoning_that_only_openai_can_read_is_left_out(gateway):
    """Codex sends it when a conversation goes on with another model."""
    sealed = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    summary = [{"type": "summary_text", "text": "Look north."}]
    call_item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": OSLO}
    result = {"type": "function_call_output", "call_id": "c", "output": "-3 C"}
    turns = [*TURNS, sealed, call_item, result, {**sealed, "summary": summary}, call_item, result]
    request, _ = await gateway.response("Bye.", input=turns)
    told = [turn for turn in request.chat.messages if turn.role == "assistant"]
    assert [json.loads(turn.fields).get("reasoning") for turn in told] == [None, "Look north."]


async def test_developer_texts_within_a_conversation_keep_their_role(gateway):
    """The coordinator knows whether the chat template takes them."""
    later = {"role": "developer", "content": "Ask first."}
    turns = [{"role": "developer", "content": "Use the tools."}, *TURNS, later, *TURNS]
    request, _ = await gateway.response("Bye.", input=turns, instructions="Be brief.")
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert [role for role, _ in told] == ["system", "user", "developer", "user"]
    assert (told[0][1], told[2][1]) == ("Be brief.\nUse the tools.", "Ask first.")


async def test_a_tool_choice_that_chats_do_not_have_is_refused(gateway):
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}
    async with gateway.openai() as client:
        for tool, choice, param in (
            (RESPONSES_TOOL, allowed, "tool_choice.type"),
            ({"type": "web_search"}, "required", "tool_choice"),
        ):
            with pytest.raises(BadRequestError) as refused:
                await client.responses.create(
                    model="scripted", input="a", tools=[tool], tool_choice=choice
                )
            assert refused.value.param == param


async def test_tools_and_details_of_openai_are_left_out(gateway):
    """Also those that are newer than vLLM's class of a request."""
    tools = [RESPONSES_TOOL, {"type": "web_search"}, {"type": "brand_new", "what": 1}]
    include = ["web_search_call.action.sources", "reasoning.encrypted_content"]
    request, found = await gateway.response(call(OSLO), tools=tools, include=include)
    assert items(found) == [("weather", {"city": "Oslo"})]
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]


async def test_null_is_a_field_that_is_not_set(gateway):
    unset = ("tools", "tool_choice", "service_tier", "include", "store", "truncation", "stop")
    reasoning = {"type": "reasoning", "id": None, "summary": [], "content": None, "status": None}
    turns = [*TURNS, reasoning, {"role": "user", "content": "And?", "type": None}]
    request, _ = await gateway.response("Bye.", input=turns, extra_body=dict.fromkeys(unset))
    assert request.chat.messages[-1].content == "And?"
    unset = ("system", "tools", "tool_choice", "thinking", "stop_sequences", "service_tier")
    request, _ = await gateway.message("Bye.", **dict.fromkeys(unset))
    assert not request.chat.tools


async def test_vllms_fields_of_responses_reach_the_coordinator(gateway):
    extra = {
        "structured_outputs": {"choice": ["yes", "no"]},
        "session_id": "s",
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "include_reasoning": False,
    }
    request, found = await gateway.response(f"{THINK}Hm.{ANSWER}yes", extra_body=extra)
    assert items(found) == [("message", "yes")]
    assert request.session_id == "s"
    sampling = request.sampling
    assert list(sampling.structured_output.choice.values) == ["yes", "no"]
    assert (sampling.skip_special_tokens, sampling.include_stop_str_in_output) == (False, True)


async def test_errors_of_responses_have_openais_form(gateway):
    async with gateway.openai() as client:
        with pytest.raises(BadRequestError, match="background is True; must be false") as refused:
            await client.responses.create(model="scripted", input="a", background=True)
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(BadRequestError, match="max_output_tokens") as refused:
            await client.responses.create(model="scripted", input="a", max_output_tokens="x")
        assert refused.value.param == "max_output_tokens"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", 5, "input"),
        ("input", [5], "input[0]"),
        ("input", [{"role": "robot", "content": "a"}], "input[0].role"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_text", "text": 5}]}],
            "input[0].content[0].text",
        ),
        ("input", [{"type": "reasoning", "id": "r", "summary": [1]}], "input[0].summary[0]"),
        ("tools", 5, "tools"),
        ("tools", [{"type": "function"}], "tools[0].name"),
        ("tools", [{"name": "f"}], "tools[0].type"),
        ("tools", [{"type": "custom", "name": "f", "format": {"type": "grammar"}}], "tools"),
        ("text", {"format": {"type": "x"}}, "text.format.type"),
        ("reasoning", {"effort": 5}, "reasoning.effort"),
        ("background", True, "background"),
        ("cache_salt", "salt", "cache_salt"),
        ("conversation", "conv_1", "conversation"),
        ("include", ["message.output_text.logprobs"], "include"),
        ("top_logprobs", 2, "top_logprobs"),
        ("truncation", "auto", "truncation"),
        ("tool_choice", {"type": "web_search_preview"}, "tool_choice"),
    ],
)
async def test_an_error_of_responses_names_the_path_of_the_field(gateway, field, value, param):
    body = {"model": "scripted", "input": "a", field: value}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.post(f"{gateway.url}/v1/responses", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


# ---- Both.


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"messages": TURNS, "max_tokens": 9}), ("/v1/responses", {"input": "a"})],
)
async def test_a_client_that_stops_reading_is_disconnected_and_its_request_cancelled(
    gateway, path, body
):
    sent = json.dumps({"model": "scripted", "stream": True, **body}).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(sent)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + sent)
    connection = await gateway.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number))
    cancelled = asyncio.create_task(connection.cancelled())
    offset, (token, *_) = 0, gateway.token_ids("a")
    while not cancelled.done():
        # More than the buffers hold.
        if offset < 200:
            connection.send(delta(number, offset, [token], "a" * 100_000))
            offset += 1
        await asyncio.sleep(0.005)
    assert cancelled.result() == number
    connection.send(finished(number, common_pb2.FINISH_REASON_CANCELLED, offset))
    writer.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_body_within_the_limit_is_within_it_as_a_chat(gateway, path):
    """A character of this text takes 3 bytes of the body, and 6 where it is escaped."""
    text = "冷" * (HttpConfig().max_body_bytes // 5)
    turn = {"role": "user", "content": text}
    body = {"messages": [turn], "max_tokens": 9} if path == "/v1/messages" else {"input": [turn]}
    sent = json.dumps({"model": "scripted", **body}, ensure_ascii=False).encode()
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        headers = {"content-type": "application/json"}
        asked = asyncio.create_task(
            http.post(f"{gateway.url}{path}", content=sent, headers=headers)
        )
        answering = asyncio.create_task(gateway.answer("It is cold.", STOP))
        await asyncio.wait((asked, answering), return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        assert (await asked).status_code == 200


# ---- Batches of both.


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "none"}}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 9, "thinking": {"type": "disabled"}}),
    ],
)
async def test_a_line_of_a_batch_may_be_a_response_or_a_message(gateway, endpoint, body):
    body = {"model": "scripted", **body}
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    async with gateway.openai() as client:
        file = await client.files.create(file=json.dumps(line).encode(), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        )
        request = await gateway.answer("It is cold.", STOP)
        assert request.lane == common_pb2.LANE_BATCH
        assert request.authorization == "Bearer key"
        async with asyncio.timeout(WAIT_S):
            while batch.output_file_id is None:
                await asyncio.sleep(0.05)
                batch = await client.batches.retrieve(batch.id)
        assert (batch.usage.input_tokens > 0, batch.usage.output_tokens > 0) == (True, True)
        answer = json.loads((await client.files.content(batch.output_file_id)).text)["response"]
        if endpoint == "/v1/messages":
            assert answer["body"]["content"][0]["text"] == "It is cold."
        else:
            assert answer["body"]["output"][0]["content"][0]["text"] == "It is cold."
            # The memory for stored responses is for conversations.
            with pytest.raises(NotFoundError):
                await client.responses.retrieve(answer["body"]["id"])
