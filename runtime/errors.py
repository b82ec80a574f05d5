"""Errors that cross process borders, and their mapping to gRPC.

BatonError
├── InvalidArgument      a field of the request is wrong: names field, value and what is allowed
│   └── ContextLengthExceeded   the prompt does not fit the model's context
├── NotFound             unknown model, request or worker
├── AlreadyExists        the ID is in use
├── FailedPrecondition   the request is valid, but not for this cluster or in this state
├── PermissionDenied
├── Unauthenticated
├── ResourceExhausted    overload: says when to retry
├── Unavailable          no worker or coordinator can serve the request now
├── DeadlineExceeded
├── Aborted              fenced or superseded
└── Internal             a defect in Baton
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from baton.runtime.durations import to_seconds
from baton.v1 import common_pb2

RESTARTING = "RESTARTING"
"""Reason of Unavailable: another coordinator takes over; resume with the received tokens."""

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
"""Reason of ContextLengthExceeded."""

# Longest quoted value in an error, in characters.
_MAX_SHOWN_CHARS = 80
# Largest trailing metadata of a failed call, in bytes. A client that gets more than 8 KiB (gRPC's
# default) reports RESOURCE_EXHAUSTED instead of the error. The rest is for gRPC's own fields.
_MAX_METADATA_BYTES = 6 * 2**10
# Bytes per byte of a binary field, which is sent in base64.
_BINARY_COST = 4 / 3
# Part of these bytes for google.rpc details; larger details are left out.
_MAX_DETAILS_BYTES = 2 * 2**10
# Longest description of a wrong field in characters; it repeats the error's message.
_MAX_DESCRIPTION_CHARS = 400


def shown(value: object) -> str:
    """Caller's value as quoted in errors: its repr, shortened when long."""
    return _shortened(repr(value), _MAX_SHOWN_CHARS)


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


class BatonError(Exception):
    """Base of all errors that are reported to another process.

    Attributes:
        code: google.rpc.Code number, the same as gRPC's status code.
    """

    code: ClassVar[int] = code_pb2.UNKNOWN

    def details(self) -> list[any_pb2.Any]:
        """google.rpc details that the client can act on."""
        return []


class InvalidArgument(BatonError):
    """A field of a request is wrong.

    Args:
        field: Path of the field as in the proto, such as "sampling.temperature".
        value: Value that was sent; shortened in the message when long.
        allowed: Values that are allowed, in words.
    """

    code = code_pb2.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {shown(value)}; {allowed}")
        self.field = field

    def details(self) -> list[any_pb2.Any]:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=self.field, description=_shortened(str(self), _MAX_DESCRIPTION_CHARS)
        )
        return [_packed(error_details_pb2.BadRequest(field_violations=[violation]))]


class ContextLengthExceeded(InvalidArgument):
    """A prompt does not fit the model's context, which must also hold one token of output.

    Clients that can shorten a conversation recognize this error by words of its message. Claude
    Code, opencode and LiteLLM look for "prompt is too long" or "maximum context length".

    Args:
        field: Path of the prompt's field as in the proto.
        num_tokens: The prompt's tokens, or a lower bound of them.
        context: The model's context length in tokens.
        is_lower_bound: Whether the prompt may have more tokens than `num_tokens`.
    """

    def __init__(
        self, field: str, num_tokens: int, context: int, *, is_lower_bound: bool = False
    ) -> None:
        told = f"at least {num_tokens} tokens" if is_lower_bound else f"{num_tokens} tokens"
        super().__init__(
            field,
            told,
            f"prompt is too long: {told} > {context - 1} maximum, because this model's maximum "
            f"context length is {context} tokens and must leave room for one",
        )

    def details(self) -> list[any_pb2.Any]:
        info = error_details_pb2.ErrorInfo(reason=CONTEXT_LENGTH_EXCEEDED, domain="baton")
        return [*super().details(), _packed(info)]


class NotFound(BatonError):
    code = code_pb2.NOT_FOUND


class AlreadyExists(BatonError):
    code = code_pb2.ALREADY_EXISTS


class FailedPrecondition(BatonError):
    code = code_pb2.FAILED_PRECONDITION


class PermissionDenied(BatonError):
    code = code_pb2.PERMISSION_DENIED


class Unauthenticated(BatonError):
    code = code_pb2.UNAUTHENTICATED


class ResourceExhausted(BatonError):
    """A limit has been reached.

    Args:
        message: Exhausted resource, with its limit.
        reason: Machine-readable upper-case word, such as "QUEUE_FULL".
        retry_after_s: Seconds until a retry makes sense; None when it never does (too large).
    """

    code = code_pb2.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, reason: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s

    def details(self) -> list[any_pb2.Any]:
        found = [_packed(error_details_pb2.ErrorInfo(reason=self.reason, domain="baton"))]
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(math.ceil(self.retry_after_s * 1e9))
            found.append(_packed(retry))
        return found


class Unavailable(BatonError):
    """No worker or coordinator can serve the request now.

    Args:
        message: Cause.
        reason: Machine-readable upper-case word, such as RESTARTING; empty when there is none.
    """

    code = code_pb2.UNAVAILABLE

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def details(self) -> list[any_pb2.Any]:
        if not self.reason:
            return []
        return [_packed(error_details_pb2.ErrorInfo(reason=self.reason, domain="baton"))]


class DeadlineExceeded(BatonError):
    code = code_pb2.DEADLINE_EXCEEDED


class Aborted(BatonError):
    code = code_pb2.ABORTED


class Internal(BatonError):
    code = code_pb2.INTERNAL


class RemoteError(BatonError):
    """An error that another process reported, with its code and details unchanged.

    Attributes:
        code: google.rpc.Code number.
        retry_after_s: Seconds from RetryInfo; None when absent.
    """

    code: int  # type: ignore[misc]  # Set per instance: the code that the other process sent.

    def __init__(self, code: int, message: str, details: list[any_pb2.Any]) -> None:
        super().__init__(message)
        self.code = code
        self._details = details

    def details(self) -> list[any_pb2.Any]:
        return self._details

    @property
    def name(self) -> str:
        """Name of the code, such as "INVALID_ARGUMENT"."""
        return str(code_pb2.Code.Name(self.code))

    @property
    def reason(self) -> str | None:
        """Upper-case word from ErrorInfo, such as "QUEUE_FULL"; None when absent."""
        info = error_details_pb2.ErrorInfo()
        for detail in self._details:
            if detail.Unpack(info):
                return str(info.reason)
        return None

    @property
    def retry_after_s(self) -> float | None:
        retry = error_details_pb2.RetryInfo()
        for detail in self._details:
            if detail.Unpack(retry):
                return to_seconds(retry.retry_delay)
        return None


def _packed(
    message: error_details_pb2.BadRequest
    | error_details_pb2.ErrorInfo
    | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def to_message(error: BatonError) -> common_pb2.RequestError:
    """Converts an error to the message that travels inside a stream."""
    return common_pb2.RequestError(code=error.code, message=str(error), details=error.details())


def from_message(message: common_pb2.RequestError) -> RemoteError:
    """Converts an error message from a stream to an exception."""
    return RemoteError(message.code, message.message, list(message.details))


def status_code(error: BatonError) -> grpc.StatusCode:
    """Member of grpc.StatusCode for an error."""
    return grpc.StatusCode[code_pb2.Code.Name(error.code)]


async def abort(context: grpc.aio.ServicerContext, error: BatonError) -> None:  # type: ignore[type-arg]
    """Ends a call with an error and its details; raises, as gRPC's abort does.

    A message that is too long for the call's trailing metadata is cut.
    """
    status = _fitting_status(error)
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(status_code(error), status.message, metadata)


def _fitting_status(error: BatonError) -> status_pb2.Status:
    """Returns an error as a Status that fits into a call's trailing metadata."""
    details, num_bytes = list[any_pb2.Any](), 0.0
    for detail in error.details():
        cost = _BINARY_COST * detail.ByteSize()
        if num_bytes + cost <= _MAX_DETAILS_BYTES:
            details.append(detail)
            num_bytes += cost
    message = _cut(str(error), _MAX_METADATA_BYTES - num_bytes)
    return status_pb2.Status(code=error.code, message=message, details=details)


def _cut(message: str, room: float) -> str:
    """Returns the beginning of a message that takes at most `room` bytes of a call's metadata.

    The metadata has the message twice: percent-encoded, and as a part of the details.
    """
    if len(message.encode()) * (3 + _BINARY_COST) <= room:
        return message
    used = 0.0
    for index, char in enumerate(message):
        num_bytes = len(char.encode())
        is_plain = " " <= char <= "~" and char != "%"
        used += num_bytes * (_BINARY_COST + (1 if is_plain else 3))
        if used > room:
            # Three characters take at least as many bytes as the three dots.
            return f"{message[: index - 3]}..."
    return message


def connection_failure(words: str) -> str:
    """Cause of a failed connection, extracted from gRPC's text; empty for any other error."""
    if not words.startswith(("failed to connect", "errors resolving")):
        return ""
    if "WRONG_VERSION_NUMBER" in words:
        return "it does not speak TLS"
    if "http1.x server" in words:
        return "it speaks HTTP/1, as a gateway does"
    # A failed certificate check is reported before the result of the next attempt.
    reason = words.removesuffix(": OK").rpartition(": ")[2].rstrip("]")
    if reason == "Socket closed":
        return "Socket closed; it may want TLS, or a certificate of this client"
    return reason


def from_rpc_error(error: grpc.RpcError) -> RemoteError:
    """Converts the error that ended a call, with its details when the server sent any."""
    code, message, details = error.code(), error.details() or "", list[any_pb2.Any]()
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == "grpc-status-details-bin":
            details = list(status_pb2.Status.FromString(value).details)
    return RemoteError(code.value[0], message, details)
