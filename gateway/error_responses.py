"""Errors as OpenAI's API has them: a status, and a body that names what is wrong.

Source: https://platform.openai.com/docs/guides/error-codes; the body is
{"error": {"message", "type", "param", "code"}}. gRPC codes become HTTP statuses here and nowhere
else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from google.rpc import code_pb2

from baton.client.errors import InvalidArgumentError, ResourceExhaustedError
from baton.runtime.errors import RemoteError, shown

INVALID_REQUEST = "invalid_request_error"
# What nginx calls a request whose client left; no one reads it, metrics count it.
CLIENT_CLOSED_REQUEST = 499
_RETRY_S = 1.0

# Code: status and type.
_KINDS: dict[int, tuple[int, str]] = {
    code_pb2.INVALID_ARGUMENT: (400, INVALID_REQUEST),
    code_pb2.FAILED_PRECONDITION: (400, INVALID_REQUEST),
    code_pb2.OUT_OF_RANGE: (400, INVALID_REQUEST),
    code_pb2.UNAUTHENTICATED: (401, "authentication_error"),
    code_pb2.PERMISSION_DENIED: (403, "permission_error"),
    code_pb2.NOT_FOUND: (404, "not_found_error"),
    code_pb2.ALREADY_EXISTS: (409, "conflict_error"),
    code_pb2.ABORTED: (409, "conflict_error"),
    code_pb2.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    code_pb2.UNIMPLEMENTED: (501, "server_error"),
    code_pb2.UNAVAILABLE: (503, "service_unavailable_error"),
    # Not by the client's leaving, which nobody is told of: the gateway stopped.
    code_pb2.CANCELLED: (503, "service_unavailable_error"),
    code_pb2.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
# Fields of the contract, by what HTTP calls them.
_NAMES = {
    "request_id": "x-request-id",
    "tenant": "x-baton-tenant",
    "timeout": "x-baton-timeout-s",
    "timeout_s": "x-baton-timeout-s",
    "session_id": "prompt_cache_key",
    "sampling.structured_output": "response_format",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.tools": "tools",
}


class HttpError(Exception):
    """What a client did wrong, or cannot have now.

    Args:
        status: of HTTP.
        message: names field, value and what is allowed.
        kind: OpenAI's "type".
        param: the field.
        code: a word for machines.
        retry_after_s: when trying again makes sense; None where that is not known.
        hopeless: trying again never makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        permanent: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after_s, self.permanent = retry_after_s, permanent

    def body(self) -> bytes:
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = []
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self.retry_after_s is not None:
            found.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            # Whole seconds are coarse; OpenAI's clients read this one first.
            found.append((b"retry-after-ms", b"%d" % math.ceil(self.retry_after_s * 1e3)))
        if self.permanent:
            found.append((b"x-should-retry", b"false"))
        return found


def invalid_value(field: str, value: object, allowed: str) -> HttpError:
    """A field of the body, or a header, is not what it may be."""
    return HttpError(
        400, f"{field} is {shown(value)}; {allowed}", param=field, code="invalid_value"
    )


def tools_unsupported() -> HttpError:
    """Tools may be called, and nobody here would find the calls in what the model writes."""
    message = "tools: this gateway has no tool_call_parser; tool_choice must be 'none' beside them"
    return HttpError(400, message, param="tools", code="unsupported_parameter")


def model_not_found(name: str, served: Iterable[str]) -> HttpError:
    """No cell behind this gateway serves it."""
    message = f"model is {name!r}; this gateway serves {' and '.join(map(repr, served))}"
    kind = "not_found_error"
    return HttpError(404, message, kind=kind, param="model", code="model_not_found")


def from_remote_error(error: RemoteError, names: Mapping[str, str] | None = None) -> HttpError:
    """What the coordinator, or the client library, answered.

    Args:
        error: it.
        names: what this request calls fields of the contract, where not as most do.
    """
    status, kind = _KINDS.get(error.code, (500, "server_error"))
    message, param = str(error), None
    code: str | None = error.name.lower()
    retry_after_s, permanent = error.retry_after_s, False
    if isinstance(error, InvalidArgumentError) and error.field:
        param = _http_name(error.field, {**_NAMES, **(names or {})})
        # A message begins with the field's name, as the contract has it.
        message = (
            param + message.removeprefix(error.field)
            if message.startswith(error.field)
            else message
        )
        # What is allowed may name other fields; what was sent stays as it is.
        told, semicolon, allowed = message.rpartition("; ")
        message = told + semicolon + allowed.replace("sampling.", "")
    elif isinstance(error, ResourceExhaustedError):
        code = (error.reason or "resource_exhausted").lower()
        if code == "client_requests":
            retry_after_s = _RETRY_S
        permanent = retry_after_s is None
    elif error.code == code_pb2.UNAUTHENTICATED:
        # As OpenAI's own.
        code = "invalid_api_key"
    elif error.code == code_pb2.NOT_FOUND:
        param, code = "model", "model_not_found"
    elif status == 503 and retry_after_s is None:
        retry_after_s = _RETRY_S
    return HttpError(
        status,
        message,
        kind=kind,
        param=param,
        code=code,
        retry_after_s=retry_after_s,
        permanent=permanent,
    )


def _http_name(field: str, names: Mapping[str, str]) -> str:
    """The field of the body, or the header, that became a field of the contract."""
    for ours, theirs in names.items():
        if field == ours or field.startswith(f"{ours}."):
            return theirs
    if field == "text" or field.startswith("tokens"):
        return "prompt"
    if field == "chat" or field.startswith("chat.messages"):
        return "messages" + field.removeprefix("chat").removeprefix(".messages")
    return field.removeprefix("sampling.")
