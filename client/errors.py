"""Errors of client calls: one class per code, mapped here and nowhere else.

RemoteError (runtime/errors.py: code, details(), reason, retry_after_s)
├── InvalidArgumentError     `field` names what is wrong
├── NotFoundError
├── AlreadyExistsError
├── FailedPreconditionError
├── PermissionDeniedError
├── UnauthenticatedError
├── ResourceExhaustedError   overload: `reason` says of what, `retry_after_s` when to come back
├── UnavailableError         coordinator unreachable, or no worker can serve: retry with backoff
│   └── UnreachableError     no connection came about: nothing has been asked
├── DeadlineExceededError
├── AbortedError
├── RequestCancelledError
├── UnimplementedError
├── DataLossError            tokens are missing from a stream
└── InternalError

A code that is not in the tree stays a plain RemoteError. Errors that the client finds by itself
(a deadline, a lost session, a prompt that cannot be sent) are of the same classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2

from baton.runtime import errors
from baton.runtime.errors import RESTARTING, BatonError, RemoteError
from baton.v1 import common_pb2


class InvalidArgumentError(RemoteError):
    @property
    def field(self) -> str | None:
        """Path of the wrong field, as in the proto: "sampling.temperature"."""
        request = error_details_pb2.BadRequest()
        for detail in self.details():
            if detail.Unpack(request) and request.field_violations:
                return str(request.field_violations[0].field)
        return None


class NotFoundError(RemoteError):
    pass


class AlreadyExistsError(RemoteError):
    pass


class FailedPreconditionError(RemoteError):
    pass


class PermissionDeniedError(RemoteError):
    pass


class UnauthenticatedError(RemoteError):
    pass


class ResourceExhaustedError(RemoteError):
    pass


class UnavailableError(RemoteError):
    pass


class UnreachableError(UnavailableError):
    pass


class DeadlineExceededError(RemoteError):
    pass


class AbortedError(RemoteError):
    pass


class RequestCancelledError(RemoteError):
    pass


class UnimplementedError(RemoteError):
    pass


class DataLossError(RemoteError):
    pass


class InternalError(RemoteError):
    pass


_BY_CODE: dict[int, type[RemoteError]] = {
    code_pb2.INVALID_ARGUMENT: InvalidArgumentError,
    code_pb2.NOT_FOUND: NotFoundError,
    code_pb2.ALREADY_EXISTS: AlreadyExistsError,
    code_pb2.FAILED_PRECONDITION: FailedPreconditionError,
    code_pb2.PERMISSION_DENIED: PermissionDeniedError,
    code_pb2.UNAUTHENTICATED: UnauthenticatedError,
    code_pb2.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    code_pb2.UNAVAILABLE: UnavailableError,
    code_pb2.DEADLINE_EXCEEDED: DeadlineExceededError,
    code_pb2.ABORTED: AbortedError,
    code_pb2.CANCELLED: RequestCancelledError,
    code_pb2.UNIMPLEMENTED: UnimplementedError,
    code_pb2.DATA_LOSS: DataLossError,
    code_pb2.INTERNAL: InternalError,
}


_CONNECTING = (
    grpc.ChannelConnectivity.CONNECTING,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
)
# How gRPC's own words begin where another kind of server answers, and one that is not of gRPC.
_FOREIGN, _HTTP_STATUS = "Method not found!", "Received http2 header with status: "
_PROXY = "PROXY"
# The same of a server that has as many calls as it takes, and does not say when to come back.
_FULL, _FULL_RETRY_S = "Concurrent RPC limit exceeded", 1.0
# The same for a connection that breaks under a call.
_LOST = ("Stream removed", "Socket closed", "Transport closed", "Connection reset", "recvmsg:")


def make(code: int, message: str, details: Sequence[any_pb2.Any] = ()) -> RemoteError:
    """The error of a code (google.rpc.Code number)."""
    return _BY_CODE.get(code, RemoteError)(code, message, list(details))


def cancelled_elsewhere() -> RemoteError:
    """Of a request that ended as cancelled, though whoever reads it has not cancelled it."""
    return make(code_pb2.CANCELLED, "somebody cancelled the request")


def from_baton(error: BatonError) -> RemoteError:
    """The client's form of an error: the class of its code."""
    return make(error.code, str(error), error.details())


def from_message(message: common_pb2.RequestError) -> RemoteError:
    """Of one request of a session."""
    return from_baton(errors.from_message(message))


def from_rpc_error(error: grpc.RpcError, address: str) -> RemoteError:
    """Of a whole call to the coordinator at an address."""
    found = errors.from_rpc_error(error)
    if found.code == code_pb2.UNAVAILABLE and (reason := errors.connection_failure(str(found))):
        return _unreachable(address, reason)
    if found.code == code_pb2.UNAVAILABLE and str(found).startswith(_LOST):
        return make(found.code, f"the coordinator at {address} is lost: {found}")
    if found.code == code_pb2.RESOURCE_EXHAUSTED and str(found).startswith(_FULL):
        message = f"the coordinator at {address} has as many calls as it takes (security.max_calls)"
        return from_baton(
            errors.ResourceExhausted(message, reason="CALLS", retry_after_s=_FULL_RETRY_S)
        )
    if str(found).startswith(_HTTP_STATUS):
        status = str(found).removeprefix(_HTTP_STATUS)
        if found.code == code_pb2.UNAVAILABLE:
            message = (
                f"a proxy answers at {address} that does not reach the coordinator: "
                f"HTTP status {status}"
            )
            return from_baton(errors.Unavailable(message, reason=_PROXY))
        message = f"what answers at {address} is no coordinator: HTTP status {status}"
        return make(found.code, message)
    if str(found).startswith(_FOREIGN):
        message = f"what answers at {address} is no coordinator, or an older one: {found}"
        return make(found.code, message)
    return from_baton(found)


def of_call(
    error: grpc.RpcError,
    address: str,
    channel: grpc.aio.Channel | None,
    timeout_s: float,
    *,
    alone: bool = True,
) -> RemoteError:
    """The same, of a call with a deadline of its own: says what it was that took too long.

    Args:
        error: of the call.
        address: of the coordinator.
        channel: that the call went through; None: it is closed.
        timeout_s: of the call.
        alone: no other call through the channel began after it. Where one did, the connection that
            is missing may be another one than that by which this call was sent.
    """
    found = from_rpc_error(error, address)
    if found.code != code_pb2.DEADLINE_EXCEEDED or channel is None:
        return found
    if channel.get_state() in _CONNECTING:
        # Where packets are dropped nobody refuses a connection.
        missing = _unreachable(address, f"no connection within {timeout_s:g} s")
        return missing if alone else make(missing.code, str(missing))
    return make(found.code, f"the coordinator at {address} has not answered within {timeout_s:g} s")


def of_change(error: RemoteError) -> RemoteError:
    """The error of a call that changes something, which says where that may have happened.

    A connection that breaks under a call, and a call that is not answered, leave it open.
    """
    is_open = isinstance(error, UnavailableError | DeadlineExceededError)
    if not is_open or isinstance(error, UnreachableError):
        return error
    message = f"{error}; what was asked for may have been done: look before you ask again"
    return make(error.code, message, error.details())


def _unreachable(address: str, reason: str) -> UnreachableError:
    message = f"cannot reach the coordinator at {address}: {reason}"
    return UnreachableError(code_pb2.UNAVAILABLE, message, [])


def of_all(found: Sequence[RemoteError]) -> RemoteError:
    """What several coordinators answered, at least one: whatever says more than UNAVAILABLE."""
    telling = next((error for error in found if error.code != code_pb2.UNAVAILABLE), None)
    if telling is not None or len(found) == 1:
        return telling or found[0]
    return make(code_pb2.UNAVAILABLE, "; ".join(map(str, found)))


def restarting(error: RemoteError) -> bool:
    """Whether the coordinator said that it stops, and that another one follows."""
    return error.code == code_pb2.UNAVAILABLE and error.reason == RESTARTING


def by_proxy(error: RemoteError) -> bool:
    """Whether a proxy said it, which does not reach the coordinator."""
    return error.code == code_pb2.UNAVAILABLE and error.reason == _PROXY


def invalid(field: str, value: object, allowed: str) -> RemoteError:
    """An argument that the client itself finds wrong."""
    return from_baton(errors.InvalidArgument(field, value, allowed))
