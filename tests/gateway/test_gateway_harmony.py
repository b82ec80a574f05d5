"""gpt-oss, whose chats have the harmony format: prompts and outputs as in a plain vLLM server.

The outputs are token sequences in harmony's vocabulary, which ships with vLLM's parser of it.
"""

import asyncio
import json
import shutil
from pathlib import Path

import httpx2 as httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from openai_harmony import HarmonyEncodingName, load_harmony_encoding

from baton import models
from baton.v1 import common_pb2
from tests.client.scripted_inference import ScriptedInference, accepted, delta, finished, serving
from tests.gateway.gateway_command import gateway_command

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

# Importing vLLM takes a busy machine minutes.
WAIT_S = 600.0
STOP = common_pb2.FINISH_REASON_STOP
QUESTION, RULES = "How cold is it in Oslo?", "Answer in one sentence."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
OSLO = '{"city": "Oslo"}'
THOUGHT = "<|channel|>analysis<|message|>Oslo is north.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>It is cold.<|return|>"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}<|call|>"


@pytest.fixture(scope="module")
def encoding():
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


class Model(ScriptedInference):
    """A coordinator of a gpt-oss model."""

    def __init__(self, directory, encoding):
        super().__init__()
        self._directory, self._encoding = directory, encoding
        self._connection = None

    async def GetModel(self, request, context):
        return common_pb2.ModelDescription(name="gpt-oss", tokenizer=str(self._directory))

    async def answer(self, text):
        """Answers the next request with a harmony text, token by token; returns the request."""
        self._connection = self._connection or await self.connection()
        submit = await self._connection.submitted()
        ids = self._encoding.encode(text, allowed_special="all")
        send, stream = self._connection.send, submit.stream
        send(accepted(stream, prompt_tokens=len(submit.request.tokens.ids)))
        for offset, one in enumerate(ids):
            send(delta(stream, offset, [one], self._encoding.decode([one])))
        send(finished(stream, STOP, len(ids)))
        return submit.request


class Gateway:
    """A gateway in front of the model; the methods send a request that gets `text` as output."""

    def __init__(self, url, model):
        self.url, self._model = url, model

    async def answered(self, asking, text):
        """Returns the submitted request and the client's result."""
        asked, submitted = (
            asyncio.create_task(asking),
            asyncio.create_task(self._model.answer(text)),
        )
        await asyncio.wait({asked, submitted}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done() and not submitted.done():
            # The gateway has refused the request.
            submitted.cancel()
        found = await asked
        return await submitted, found

    async def chat(self, text, **body):
        """Returns the submitted request, and the whole answer: content, reasoning, calls, end."""
        body = {"messages": [{"role": "user", "content": QUESTION}], **body}
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            asking = http.post(f"{self.url}/v1/chat/completions", json=body)
            request, answer = await self.answered(asking, text)
        assert answer.status_code == 200, answer.text
        return request, whole(answer.json()) if not body.get("stream") else joined(answer.text)

    def openai(self):
        http = DefaultAsyncHttpxClient(verify=False)
        options = {"max_retries": 0, "timeout": WAIT_S, "http_client": http}
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", **options)

    def anthropic(self):
        # Not at the top: every test worker imports this file, and the client's import is slow.
        import anthropic

        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        options = {"max_retries": 0, "timeout": WAIT_S, "http_client": http}
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", **options)


def whole(answer):
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls", ())]
    reasoned = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    end = choice["finish_reason"]
    return message["content"] or "", message.get("reasoning", ""), calls, end, reasoned


def joined(text):
    """Joins the chunks of a stream to the same parts."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *chunks, last = map(json.loads, lines)
    content, reasoning, calls, end = "", "", [], None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"name": "", "arguments": ""})
            for name, value in part["function"].items():
                calls[part["index"]][name] += value
        end = choice["finish_reason"]
    return (
        content,
        reasoning,
        calls,
        end,
        last["usage"]["completion_tokens_details"]["reasoning_tokens"],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory, encoding):
    """A gateway with one parser configured: a gpt-oss model gets the others by itself."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    source = Path(models.__file__).parent / "glossary"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    config = directory / "baton.yaml"
    http = {"listen": "127.0.0.1:0"}
    config.write_text(json.dumps({"reasoning_parser": "openai_gptoss", "http": http}))
    model = Model(directory, encoding)
    async with (
        serving(model) as (address, _),
        gateway_command(address, config, WAIT_S) as url,
    ):
        yield Gateway(url, model)


def prompt(encoding, request):
    """The prompt as text, without the line with today's date."""
    lines = encoding.decode(list(request.tokens.ids)).split("\n")
    return "\n".join(line for line in lines if not line.startswith("Current date: "))


USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls", "end"),
    [
        (THOUGHT + ANSWER, "It is cold.", [], "stop"),
        (THOUGHT + CALL, "", [{"name": "weather", "arguments": OSLO}], "tool_calls"),
    ],
)
async def test_chats_have_reasoning_content_and_calls(
    gateway, encoding, text, content, calls, end, stream
):
    body = {"tools": [TOOL], "reasoning_effort": "low"}
    if stream:
        body |= {"stream": True, **USAGE}
    request, (*found, num_reasoned) = await gateway.chat(text, **body)
    assert found == [content, "Oslo is north.", calls, end]
    # As in vLLM, the tokens of a call count as reasoning.
    assert (num_reasoned == len(encoding.encode("Oslo is north."))) is (end == "stop")
    said = prompt(encoding, request)
    assert "Reasoning: low" in said
    assert "type weather = (_: {" in said
    assert said.endswith(f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant")
    # The tools are part of the token IDs.
    assert request.WhichOneof("prompt") == "tokens"


async def test_earlier_turns_are_rendered_as_in_vllm(gateway, encoding):
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
    turns = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "reasoning": "Ask.", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "-20 C"},
    ]
    request, _ = await gateway.chat(ANSWER, messages=turns, tools=[TOOL])
    said = prompt(encoding, request)
    assert f"# Instructions\n\n{RULES}" in said
    assert "<|channel|>analysis<|message|>Ask.<|end|>" in said
    assert (
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{OSLO}"
        in said
    )
    assert "<|start|>functions.weather<|channel|>commentary to=assistant<|message|>-20 C" in said


async def test_an_answer_cannot_be_continued(gateway):
    """In the format each message of the model begins anew."""
    begun = {"role": "assistant", "content": "It is"}
    turns = [{"role": "user", "content": QUESTION}, begun]
    async with gateway.openai() as client:
        extra = {"add_generation_prompt": False, "continue_final_message": True}
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="gpt-oss", messages=turns, extra_body=extra)
    assert refused.value.param == "messages[1].role"
    assert "gpt-oss begins each of its answers anew" in refused.value.message


async def test_responses_and_messages_are_the_same_chats(gateway, encoding):
    tools = [TOOL]
    turns = [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}]
    request, _ = await gateway.chat(THOUGHT + CALL, messages=turns, tools=tools)
    wanted = prompt(encoding, request)
    async with gateway.openai() as client:
        for stream in (False, True):
            body = {
                "model": "gpt-oss",
                "instructions": RULES,
                "input": QUESTION,
                "tools": [{"type": "function", **FUNCTION}],
            }

            async def ask(body=body, stream=stream):
                if not stream:
                    return await client.responses.create(**body)
                async with client.responses.stream(**body) as events:
                    return await events.get_final_response()

            request, response = await gateway.answered(ask(), THOUGHT + CALL)
            assert prompt(encoding, request) == wanted
            thought, call = response.output
            assert thought.content[0].text == "Oslo is north."
            assert (call.name, call.arguments) == ("weather", OSLO)
    async with gateway.anthropic() as client:
        for stream in (False, True):
            body = {
                "model": "gpt-oss",
                "max_tokens": 100,
                "system": RULES,
                "messages": turns[1:],
                "tools": [
                    {
                        "name": "weather",
                        "description": FUNCTION["description"],
                        "input_schema": PARAMETERS,
                    }
                ],
            }

            async def ask(body=body, stream=stream):
                if not stream:
                    return await client.messages.create(**body)
                async with client.messages.stream(**body) as events:
                    return await events.get_final_message()

            request, message = await gateway.answered(ask(), THOUGHT + CALL)
            assert prompt(encoding, request) == wanted
            thought, call = message.content
            assert thought.thinking == "Oslo is north."
            assert (call.name, call.input) == ("weather", json.loads(OSLO))
            assert message.stop_reason == "tool_use"


async def test_an_effort_that_harmony_does_not_have_is_refused(gateway):
    body = {"messages": [{"role": "user", "content": QUESTION}], "reasoning_effort": "none"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reasoning_effort"


async def test_messages_without_thinking_think_little(gateway, encoding):
    """As in vLLM: gpt-oss has no way to turn its reasoning off."""
    body = {"max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}]}
    async with gateway.anthropic() as client:
        asking = client.messages.create(model="gpt-oss", thinking={"type": "disabled"}, **body)
        request, message = await gateway.answered(asking, ANSWER)
    assert "Reasoning: low" in prompt(encoding, request)
    assert message.content[0].text == "It is cold."
