"""Client libraries: OpenAI's, Anthropic's, litellm."""

import json
import time
from pathlib import Path

import anthropic
import openai

from tests.clients.client_runs import (
    ANSWER,
    COMMAND,
    ENVIRONMENT,
    MODEL,
    QUESTION,
    RESULT,
    version_of,
)

TURN = {"role": "user", "content": f"{QUESTION} (SDK)"}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
HERE = Path(__file__).parent


def lines(path, *bodies):
    """Writes the file of a batch."""
    with path.open("w", encoding="utf-8") as file:
        for index, body in enumerate(bodies):
            line = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")
    return path


def test_openais_client_holds_a_session_with_tools_and_runs_a_batch(baton, row):
    row("openai", openai.__version__, "chat with a tool, Responses with a tool, a batch")
    http = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{baton.url}/v1", api_key="none", http_client=http) as client:
        tool = {"type": "function", "function": {"name": "shell", "parameters": SCHEMA}}
        ask = {"model": MODEL, "tools": [tool]}
        found = client.chat.completions.create(messages=[TURN], **ask).choices[0].message
        (one,) = found.tool_calls
        assert json.loads(one.function.arguments) == {"command": COMMAND}
        told = {"role": "tool", "tool_call_id": one.id, "content": RESULT}
        turns = [TURN, found.model_dump(exclude_none=True), told]
        with client.chat.completions.stream(messages=turns, **ask) as events:
            assert events.get_final_completion().choices[0].message.content == ANSWER

        tool = {"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False}
        ask = {"model": MODEL, "tools": [tool]}
        first = client.responses.create(input=TURN["content"], **ask)
        (one,) = first.output
        assert json.loads(one.arguments) == {"command": COMMAND}
        told = {"type": "function_call_output", "call_id": one.call_id, "output": RESULT}
        with client.responses.stream(input=[told], previous_response_id=first.id, **ask) as events:
            assert events.get_final_response().output_text == ANSWER

        short = {"model": MODEL, "messages": [TURN], "max_tokens": 3}
        file = client.files.create(
            file=lines(baton.directory / "lines.jsonl", short, short), purpose="batch"
        )
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status in ("validating", "in_progress", "finalizing"):
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        assert len(client.files.content(batch.output_file_id).text.splitlines()) == 2


def test_anthropics_client_holds_a_session_with_tools(baton, row):
    row("anthropic", anthropic.__version__, "messages with a tool, streamed and whole; counting")
    http = anthropic.DefaultHttpxClient(verify=False)
    with anthropic.Anthropic(base_url=baton.url, api_key="none", http_client=http) as client:
        tool = {"name": "shell", "input_schema": SCHEMA}
        ask = {"model": MODEL, "tools": [tool]}
        assert client.messages.count_tokens(messages=[TURN], **ask).input_tokens > 0
        with client.messages.stream(messages=[TURN], max_tokens=200, **ask) as events:
            found = events.get_final_message()
        assert found.stop_reason == "tool_use"
        (one,) = found.content
        assert one.input == {"command": COMMAND}
        told = {"type": "tool_result", "tool_use_id": one.id, "content": RESULT}
        turns = [TURN, {"role": "assistant", "content": [one.model_dump(exclude_none=True)]}]
        turns.append({"role": "user", "content": [told]})
        found = client.messages.create(messages=turns, max_tokens=200, **ask)
        assert (found.content[0].text, found.stop_reason) == (ANSWER, "end_turn")


def test_litellm_gets_the_same_answer_by_every_route(baton, row):
    row(
        "litellm",
        version_of("litellm"),
        "chat (openai, hosted_vllm, anthropic), stream, messages, Responses, a batch",
    )
    turns = [{"role": "user", "content": "What is a KV cache?"}]
    body = {"model": MODEL, "messages": turns, "max_tokens": 16}
    file = lines(baton.directory / "lines.jsonl", body)
    python = ENVIRONMENT / "bin" / "python"
    # Without this, litellm asks a server on the internet for prices.
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    told = baton.run(python, HERE / "litellm_calls.py", baton.url, file, **offline)
    found = json.loads(told.splitlines()[-1])
    assert len(found) == 7
    assert len(set(found.values())) == 1, found
