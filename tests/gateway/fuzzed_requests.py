"""Requests that are valid but for one random change, to find answers of status 500."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

TURNS = [{"role": "user", "content": "What is a flip?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
# A valid body for each route that takes one; short answers keep the test fast.
BODIES: dict[str, Any] = {
    "/v1/completions": {
        "model": "glossary",
        "prompt": ["What is a flip?"],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 1,
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
        "temperature": 0.5,
    },
    "/v1/chat/completions": {
        "model": "glossary",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            *TURNS,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "-3 C"},
        ],
        "max_tokens": 3,
        "stream": True,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"schema": PARAMETERS}},
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "continue_final_message": False,
    },
    "/v1/messages": {
        "model": "glossary",
        "max_tokens": 3,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            *TURNS,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "So.", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "a"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "tool_reference", "tool_name": "weather"}],
                    }
                ],
            },
        ],
        "tools": [{"name": "weather", "input_schema": PARAMETERS, "defer_loading": True}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["END"],
    },
    "/v1/messages/count_tokens": {
        "model": "glossary",
        "messages": [*TURNS, {"role": "assistant", "content": [{"type": "text", "text": "A"}]}],
        "system": "Be brief.",
    },
    "/v1/responses": {
        "model": "glossary",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is a flip?"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "-3 C"},
            {"type": "reasoning", "id": "r1", "summary": [], "content": []},
        ],
        "instructions": "Be brief.",
        "max_output_tokens": 3,
        "stream": True,
        "store": False,
        "tools": [
            {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
        ],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}},
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "s",
    },
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "/tokenize": {
        "model": "glossary",
        "messages": [*TURNS, {"role": "assistant", "content": "A"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "return_token_strs": True,
    },
    "/detokenize": {"model": "glossary", "tokens": [5, 6]},
}
_DEEP: Any = []
for _ in range(60):
    _DEEP = [_DEEP]
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320),
    *("", "a", " ", "\0", "\ud800", "\N{GRINNING FACE}", "ﷺ" * 50, "x" * 3000, "0", "null"),
    *([], {}, [None], [[]], [{}], {"": None}, {"type": "text"}, {"type": None}, _DEEP),
    *(["a"] * 50, [2**40], [-1], {"a": {"b": {"c": 1}}}, {"$ref": "#"}, {"role": "user"}),
)
PATHS = (
    *("/v1/models", "/v1/models/x", "/v1/files", "/v1/files/file-1", "/v1/files/file-1/content"),
    *("/v1/batches", "/v1/batches/batch-1", "/v1/batches/batch-1/cancel", "/v1/responses/resp_1"),
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/completions"),
    *("/tokenizer_info", "/health", "/ping", "/version", "/metrics", "/dashboard/data", "/nowhere"),
    *("/v1/models/%00", "/v1/files/%ff%fe", "/v1/batches/../models", "/v1//models"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/dashboard/requests/x"),
)
QUERIES = (
    "",
    "limit=0",
    "limit=1",
    "limit=x&after=%00",
    "after=file-1",
    "order=up",
    "a=%ff",
    "&&=",
)
HEADERS = (
    *("x-baton-lane", "x-baton-tenant", "x-baton-timeout-s", "x-request-id", "authorization"),
    *("x-api-key", "session-id", "x-claude-code-session-id", "traceparent", "anthropic-version"),
    *("content-type", "content-encoding", "expect", "accept"),
)
HEADER_VALUES = ("", "a", "-1", "nan", "1e400", "x" * 300, "a b", "é", "Bearer ", "batch")


@dataclass
class Fuzzed:
    """One request; `change` says what was changed."""

    method: str
    path: str
    body: bytes
    change: str
    headers: dict[str, str] = field(default_factory=dict)


def fuzzed(random: Random) -> Fuzzed:
    """Makes a random request."""
    kind = random.random()
    if kind < 0.1:
        return _without_body(random)
    if kind < 0.13:
        return _upload(random)
    route = random.choice(list(BODIES))
    if kind < 0.2:
        return _broken(random, route)
    body = copy.deepcopy(BODIES[route])
    changes = [_changed(random, body) for _ in range(random.choice((1, 1, 2)))]
    found = Fuzzed("POST", route, json.dumps(body).encode(), "; ".join(changes))
    if random.random() < 0.1:
        name, value = random.choice(HEADERS), random.choice(HEADER_VALUES)
        found.headers[name] = value
        found.change += f"; header {name}: {value!r}"
    return found


def _without_body(random: Random) -> Fuzzed:
    method = random.choice(("GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"))
    query = random.choice(QUERIES)
    path = random.choice(PATHS) + (f"?{query}" if query else "")
    return Fuzzed(method, path, random.choice((b"", b"", b"{}")), "path")


def _broken(random: Random, route: str) -> Fuzzed:
    """Returns a body that is no JSON, or no object."""
    body = json.dumps(BODIES[route]).encode()
    at = random.randrange(len(body))
    bodies = (
        body[:at],
        body[:at] + b"\xff\xfe" + body[at:],
        body[:at] + b"\0" + body[at + 1 :],
        body.replace(b"3", b"NaN", 1),
        b"\xef\xbb\xbf" + body,
        body + body,
        b"[" * 100_000,
        b'{"model": "glossary", "model": 1}',
        *(b"null", b"[]", b'"a"', b"1", b"", b" "),
    )
    return Fuzzed("POST", route, random.choice(bodies), "broken")


def _upload(random: Random) -> Fuzzed:
    """Returns the upload of a file, cut off or with a random part replaced."""
    part = '--b\r\ncontent-disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    body = part.format("purpose", "", "batch") + part.format("file", '; filename="a"', "{}\n")
    if random.random() < 0.5:
        body += part.format("expires_after[seconds]", "", "3600")
    sent = (body + "--b--\r\n").encode()
    at = random.randrange(len(sent))
    sent = random.choice((sent, sent[:at], sent[:at] + b"\xff\0" + sent[at + 2 :]))
    kinds = ("multipart/form-data; boundary=b", "multipart/form-data", "multipart/form-data; b")
    headers = {"content-type": random.choice((kinds[0], *kinds))}
    return Fuzzed("POST", "/v1/files", sent, "upload", headers)


def _changed(random: Random, body: Any) -> str:
    """Changes one place in a body; returns what."""
    place, key = random.choice(list(_places(body)))
    action = random.choice(("replace", "replace", "replace", "delete", "add", "repeat"))
    value = copy.deepcopy(random.choice(VALUES))
    if action == "replace":
        place[key] = value
    elif action == "delete":
        del place[key]
    elif action == "add" and isinstance(place, dict):
        place[random.choice(("extra", "", "type", "strict", "n", "\0", "x" * 100))] = value
    elif isinstance(place, list):
        place.append(copy.deepcopy(place[key]))
    else:
        place[key] = [place[key]]
    return f"{action} {key!r}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each object or list in a value, with each of its keys."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield value, key
            yield from _places(one)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield value, index
            yield from _places(one)
