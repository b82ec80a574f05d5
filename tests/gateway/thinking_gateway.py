"""A gateway with vLLM's parsers in front of a scripted model that reasons and calls tools."""

import asyncio
import contextlib
import json

import httpx2 as httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tokenizers import Tokenizer

from baton.v1 import common_pb2
from tests.client.scripted_inference import ScriptedInference, accepted, delta, finished, serving
from tests.gateway.gateway_command import gateway_command
from tests.gateway.thinker import write_thinker

# Marks of the files whose tests share one gateway.
MARKS = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
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
# The same tool in the Messages API and in the Responses API.
WEATHER = {"name": "weather", "input_schema": PARAMETERS}
RESPONSES_TOOL = {"type": "function", "strict": False, **TOOL["function"]}
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


def _thinker(directory):
    """Writes the files of a tokenizer with tokens for the begin and end of reasoning."""
    directory.mkdir()
    write_thinker(directory)
    template = (
        "<|user|>{{ messages[-1].content }}<|assistant|>"
        "{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    return directory


@contextlib.asynccontextmanager
async def served(directory, **changes):
    """A `baton gateway` process in front of a coordinator whose events the test sends."""
    config, batches = directory / "baton.yaml", {"dir": str(directory / "batches")}
    fields = CONFIG | {"http": CONFIG["http"] | {"batches": batches}} | changes
    config.write_text(json.dumps(fields))
    model = Model(_thinker(directory / "model"))
    async with (
        serving(model) as (address, _),
        gateway_command(address, config, WAIT_S) as url,
    ):
        yield Gateway(url, model)


def gateway_fixture(**changes):
    """Returns a fixture: one gateway for all tests of a file.

    Args:
        changes: Changes of the gateway's configuration.
    """

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def gateway(tmp_path_factory):
        async with served(tmp_path_factory.mktemp("gateway"), **changes) as gateway:
            yield gateway

    return gateway
