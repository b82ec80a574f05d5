"""Converts Anthropic's Messages API to and from chat completions, with vLLM's converters.

Source: vllm/entrypoints/anthropic/serving.py; https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from itertools import zip_longest
from typing import Any

from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from baton.gateway.body_parser import parse_as
from baton.gateway.error_responses import HttpError

# The conversions use no attribute of the instance, whose constructor needs an engine.
_CONVERTER: Any = object.__new__(AnthropicServingMessages)
# Fields of the converted request that the chat route does not have. A thinking budget is a hint:
# models end their reasoning themselves.
_LEFT_OUT = ("thinking_token_budget", "max_completion_tokens")


class MessageConversion:
    """A request of /v1/messages.

    Args:
        body: The request's body.

    Attributes:
        chat: The body of the chat completion.

    Raises:
        HttpError: The body is not a request of the Messages API.
    """

    def __init__(self, body: bytes) -> None:
        request = parse_as(body, AnthropicMessagesRequest)
        self.chat = _converted(request)
        user = (request.metadata or {}).get("user_id")
        if isinstance(user, str) and user:
            # Claude Code names its session there. Its requests share a prefix.
            self.chat["prompt_cache_key"] = user

    def whole(self, response: bytes) -> bytes:
        """Converts a chat completion to a message."""
        completion = ChatCompletionResponse.model_validate_json(response)
        converted = _CONVERTER.messages_full_converter(completion)
        found: dict[str, Any] = converted.model_dump(exclude_none=True)
        # Clients expect these fields, also if they are null.
        found |= {name: getattr(converted, name) for name in ("stop_reason", "stop_sequence")}
        return json.dumps(found).encode()

    async def events(self, chunks: AsyncIterator[str]) -> AsyncIterator[bytes]:
        """Converts the chunks of a streamed chat completion to the events of a message."""
        async for event in _CONVERTER.message_stream_converter(_with_role_first(chunks)):
            yield event.encode()


def tokenize_body(body: bytes) -> dict[str, Any]:
    """Converts the body of /v1/messages/count_tokens to that of /tokenize.

    Raises:
        HttpError: The body is not a request of the Messages API.
    """
    chat = _converted(parse_as(body, AnthropicCountTokensRequest))
    wanted = ("model", "messages", "tools", "chat_template_kwargs")
    return {name: chat[name] for name in wanted if name in chat}


async def _with_role_first(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """Puts a chunk without content first: the converter makes the message's start from it."""
    first = True
    async for chunk in chunks:
        if first:
            first = False
            start = json.loads(chunk.removeprefix("data: "))
            for choice in start["choices"]:
                choice["delta"], choice["finish_reason"] = {"role": "assistant"}, None
            if start.get("usage"):
                start["usage"] |= {"completion_tokens": 0}
            yield f"data: {json.dumps(start)}\n\n"
        yield chunk


def _converted(request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> dict[str, Any]:
    try:
        # Most chat templates refuse a system turn after the first one.
        chat = AnthropicServingMessages.to_chat_completion_request(
            request, merge_inline_system=True
        )
    except ValueError as error:
        raise HttpError(400, str(error), code="invalid_value") from None
    found: dict[str, Any] = chat.model_dump(
        mode="json", exclude_unset=True, exclude_none=True, by_alias=True
    )
    found["messages"] = list(_with_references_as_text(found["messages"]))
    return {name: value for name, value in found.items() if name not in _LEFT_OUT}


def _with_references_as_text(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Renders references to tools, which chat templates do not know, as text.

    vLLM's converter puts them into a second turn for the same result. The tools themselves are in
    the prompt, also those that the agent loads later.
    """
    nothing: dict[str, Any] = {}
    for turn, after in zip_longest(turns, turns[1:], fillvalue=nothing):
        content = turn.get("content")
        if turn["role"] == "tool" and isinstance(content, list):
            names = [part["name"] for part in content if part.get("type") == "tool_reference"]
            text = "\n".join(f"<tool_reference>{name}</tool_reference>" for name in names)
            yield {**turn, "content": text}
        elif not (_is_empty_result(turn) and after.get("tool_call_id") == turn["tool_call_id"]):
            yield turn


def _is_empty_result(turn: dict[str, Any]) -> bool:
    return turn["role"] == "tool" and not turn.get("content")
