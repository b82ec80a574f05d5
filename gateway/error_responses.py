"""Error responses in the form of OpenAI's API: an HTTP status and a JSON body.

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
from baton.runtime.errors import CONTEXT_LENGTH_EXCEEDED, RemoteError, shown

INVALID_REQUEST = "invalid_request_error"
# nginx's status for a request whose client disconnected. It is never sent, only counted in metrics.
CLIENT_CLOSED_REQUEST = 499
_RETRY_S = 1.0

# HTTP status and OpenAI error type, by gRPC code.
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
    # The gateway stopped. (If the client disconnects, no response is sent.)
    code_pb2.CANCELLED: (503, "service_unavailable_error"),
    code_pb2.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
# HTTP names (body fields or headers) of fields of the gRPC request.
_NAMES = {
    "request_id": "x-request-id",
    "tenant": "x-baton-tenant",
    "timeout": "x-baton-timeout-s",
    "timeout_s": "x-baton-timeout-s",
    "session_id": "prompt_cache_key",
    "sampling.structured_output": "response_format",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.continue_final_message": "continue_final_message",
    "chat.tools": "tools",
}


class HttpError(Exception):
    """An error that is sent as the HTTP response.

    Args:
        status: HTTP status.
        message: Names the field, its value and the allowed values.
        kind: OpenAI's error "type".
        param: Name of the wrong field or header.
        code: Machine-readable error code.
        retry_after_s: Seconds after which the client should retry; None: unknown.
        permanent: A retry can never succeed.
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

    def renamed(self, param: str, message: str) -> HttpError:
        """Returns the same error about a field with another name."""
        return HttpError(
            self.status,
            message,
            kind=self.kind,
            param=param,
            code=self.code,
            retry_after_s=self.retry_after_s,
            permanent=self.permanent,
        )

    def fields(self) -> dict[str, str | None]:
        """The error in OpenAI's form."""
        return {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }

    def body(self) -> bytes:
        return json.dumps({"error": self.fields()}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = []
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self.retry_after_s is not None:
            found.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            # `retry-after` has a resolution of 1 s; OpenAI's clients prefer this header.
            found.append((b"retry-after-ms", b"%d" % math.ceil(self.retry_after_s * 1e3)))
        if self.permanent:
            found.append((b"x-should-retry", b"false"))
        return found


def invalid_value(field: str, value: object, allowed: str) -> HttpError:
    """The error for a body field or header with a value that is not allowed."""
    return HttpError(
        400, f"{field} is {shown(value)}; {allowed}", param=field, code="invalid_value"
    )


def tools_unsupported() -> HttpError:
    """The error for a request with tools when the gateway has no parser for tool calls."""
    message = "tools: this gateway has no tool_call_parser; tool_choice must be 'none'"
    return HttpError(400, message, param="tools", code="unsupported_parameter")


def model_not_found(name: str, served: Iterable[str]) -> HttpError:
    """The error for a model that no cell behind this gateway serves."""
    message = f"model is {name!r}; this gateway serves {' and '.join(map(repr, served))}"
    kind = "not_found_error"
    return HttpError(404, message, kind=kind, param="model", code="model_not_found")


def internal_error() -> HttpError:
    """The error for a defect of this gateway, which the gateway's log describes."""
    return HttpError(500, "internal error", kind="server_error", code="internal")


def from_remote_error(error: RemoteError, names: Mapping[str, str] | None = None) -> HttpError:
    """Converts an error of the coordinator or of the client library.

    Args:
        error: The error.
        names: HTTP names of gRPC fields that differ from the default for this request.
    """
    status, kind = _KINDS.get(error.code, (500, "server_error"))
    message, param = str(error), None
    code: str | None = error.name.lower()
    retry_after_s, permanent = error.retry_after_s, False
    if isinstance(error, InvalidArgumentError) and error.field:
        param = _http_name(error.field, {**_NAMES, **(names or {})})
        # The message begins with the field's gRPC name.
        message = (
            param + message.removeprefix(error.field)
            if message.startswith(error.field)
            else message
        )
        # The part after "; " says what is allowed and may name other gRPC fields. The part before
        # quotes the client's value and must not be changed.
        told, semicolon, allowed = message.rpartition("; ")
        message = told + semicolon + allowed.replace("sampling.", "")
        if error.reason == CONTEXT_LENGTH_EXCEEDED:
            # OpenAI's code, by which clients know that a shorter conversation would fit.
            code = CONTEXT_LENGTH_EXCEEDED.lower()
    elif isinstance(error, ResourceExhaustedError):
        code = (error.reason or "resource_exhausted").lower()
        if code == "client_requests":
            retry_after_s = _RETRY_S
        permanent = retry_after_s is None
    elif error.code == code_pb2.UNAUTHENTICATED:
        # OpenAI's code for this error.
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
    """Returns the name of the body field or header that became a gRPC field."""
    for ours, theirs in names.items():
        if field == ours or field.startswith(f"{ours}."):
            return theirs
    if field == "text" or field.startswith("tokens"):
        return "prompt"
    if field == "chat" or field.startswith("chat.messages"):
        of_messages = field.removeprefix("chat").removeprefix(".messages")
        of_messages = of_messages.replace("].parts", "].content")
        if of_messages.endswith("].image"):
            of_messages += "_url"
        return "messages" + of_messages
    return field.removeprefix("sampling.")
