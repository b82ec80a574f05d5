"""Anthropic's Messages API: its dialect, and counting tokens."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

from starlette.datastructures import Headers

from baton.gateway.body_reader import BodyReader
from baton.gateway.converted_chat import Conversion, ConvertedDialect, vllm_module
from baton.gateway.coordinator_queries import with_bearer
from baton.gateway.error_responses import HttpError
from baton.gateway.parsed_request import session_in
from baton.gateway.route_table import CountedRoute, RouteTable, json_endpoint

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
_MODULE = "anthropic_messages"
# Fields of the Messages API by the fields of the chat that they become.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "messages": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt_cache_key": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
# Anthropic's error types by HTTP status; https://docs.anthropic.com/en/api/errors.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Messages(ConvertedDialect):
    """The dialect of /v1/messages."""

    path, id_prefix = MESSAGES, "msg"
    module, names = _MODULE, _NAMES
    # It stands for thinking that is disabled, which is no effort.
    lowers_effort = True

    def convert(self, module: ModuleType, body: bytes, headers: Headers) -> Conversion:
        conversion: Conversion = module.MessageConversion(body)
        if session_in(headers) is not None:
            # Agents put the user into the metadata, and the session into a header.
            conversion.chat.pop("prompt_cache_key", None)
        return conversion

    def error_body(self, error: HttpError, request_id: str) -> bytes:
        return error_body(error.status, error, request_id)


def error_body(status: int, error: HttpError, request_id: str) -> bytes:
    """Returns an error as JSON in Anthropic's form.

    Args:
        status: HTTP status that determines the error's type.
        error: The error.
        request_id: ID of the request; may be empty.
    """
    default = "invalid_request_error" if status < 500 else "api_error"
    told: dict[str, Any] = {"type": _ERROR_TYPES.get(status, default), "message": str(error)}
    if error.param == "thread":
        # Anthropic's clients then send the whole conversation instead, without a thread.
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    body = {"type": "error", "error": told}
    return json.dumps(body | ({"request_id": request_id} if request_id else {})).encode()


class TokenCounts:
    """The route /v1/messages/count_tokens.

    Args:
        bodies: Reads the requests' bodies.
        tokenize: The answer of /tokenize.
    """

    def __init__(
        self,
        bodies: BodyReader,
        tokenize: Callable[[bytes, Mapping[str, str]], Awaitable[dict[str, object]]],
    ) -> None:
        self._bodies, self._tokenize = bodies, tokenize

    def table(self) -> RouteTable:
        """Returns the route."""
        endpoint = json_endpoint(self._bodies, self._count)
        return [CountedRoute(COUNT_TOKENS, endpoint, ("POST",), error_body=_error_body)]

    async def _count(self, body: bytes, headers: Mapping[str, str]) -> dict[str, object]:
        module = await vllm_module(_MODULE)
        sent = json.dumps(module.tokenize_body(body)).encode()
        found = await self._tokenize(sent, with_bearer(Headers(headers)))
        return {"input_tokens": found["count"]}


def _error_body(error: HttpError) -> bytes:
    return error_body(error.status, error, "")
