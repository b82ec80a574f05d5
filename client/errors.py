"""Errors of client calls: one class per gRPC code. Only this module maps codes to classes.

RemoteError (runtime/errors.py: code, details(), reason, retry_after_s)
├── InvalidArgumentError     `field` names the wrong field
├── NotFoundError
├── AlreadyExistsError
├── FailedPreconditionError
├── PermissionDeniedError
├── UnauthenticatedError
├── ResourceExhaustedError   overload: `reason` names the limit, `retry_after_s` when to retry
├── UnavailableError         coordinator unreachable, or no worker can serve: retry with backoff
│   ├── UnreachableError     no connection could be opened: nothing was sent
│   └── ConnectionLostError  the connection broke during the call
├── DeadlineExceededError
├── AbortedError
├── RequestCancelledError
├── UnimplementedError
├── DataLossError            tokens are missing from a stream
└── InternalError

Other codes are plain RemoteErrors. Errors that the client itself detects (a deadline, a lost
session, a prompt that cannot be sent) use the same classes.
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


class ConnectionLostError(UnavailableError):
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
# Beginnings of gRPC's messages if the server speaks gRPC but does not have this method, and if the
# server does not speak gRPC.
_METHOD_NOT_FOUND, _HTTP_STATUS = "Method not found!", "Received http2 header with status: "
_PROXY = "PROXY"
# Beginning of gRPC's message if a server is at its limit of concurrent calls, and the delay after
# which the client should retry: gRPC sends none.
_FULL, _FULL_RETRY_S = "Concurrent RPC limit exceeded", 1.0
# Beginnings of gRPC's messages if the connection breaks during a call.
_LOST = ("Stream removed", "Socket closed", "Transport closed", "Connection reset", "recvmsg:")


def make(code: int, message: str, details: Sequence[any_pb2.Any] = ()) -> RemoteError:
    """Makes the error of a code (google.rpc.Code number)."""
    return _BY_CODE.get(code, RemoteError)(code, message, list(details))


def cancelled_elsewhere() -> RemoteError:
    """The error for a request that another client or an operator cancelled."""
    return make(code_pb2.CANCELLED, "another client or an operator cancelled the request")


def from_baton(error: BatonError) -> RemoteError:
    """Converts an error to the class of its code."""
    return make(error.code, str(error), error.details())


def from_message(message: common_pb2.RequestError) -> RemoteError:
    """Converts the error of one request of a session."""
    return from_baton(errors.from_message(message))


def from_rpc_error(error: grpc.RpcError, address: str) -> RemoteError:
    """Converts the error of a call to the coordinator at an address."""
    found = errors.from_rpc_error(error)
    if found.code == code_pb2.UNAVAILABLE and (reason := errors.connection_failure(str(found))):
        return _unreachable(address, reason)
    if found.code == code_pb2.UNAVAILABLE and str(found).startswith(_LOST):
        message = f"the connection to the coordinator at {address} broke: {found}"
        return ConnectionLostError(code_pb2.UNAVAILABLE, message, found.details())
    if found.code == code_pb2.RESOURCE_EXHAUSTED and str(found).startswith(_FULL):
        message = (
            f"the coordinator at {address} is at its limit of concurrent calls (security.max_calls)"
        )
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
        message = f"the server at {address} is not a coordinator: HTTP status {status}"
        return make(found.code, message)
    if str(found).startswith(_METHOD_NOT_FOUND):
        message = f"the server at {address} is not a coordinator, or is an older one: {found}"
        return make(found.code, message)
    return from_baton(found)


def from_call(
    error: grpc.RpcError,
    address: str,
    channel: grpc.aio.Channel | None,
    timeout_s: float,
    *,
    alone: bool = True,
) -> RemoteError:
    """Converts the error of a call with a timeout, naming the missing connection or response.

    Args:
        error: Error of the call.
        address: Address of the coordinator.
        channel: Channel of the call; None: it is closed.
        timeout_s: Timeout of the call.
        alone: No other call through the channel began after this one, so that an unconnected
            channel means that this call was never sent. Otherwise this call may have been sent over
            an earlier connection.
    """
    found = from_rpc_error(error, address)
    if found.code != code_pb2.DEADLINE_EXCEEDED or channel is None:
        return found
    if channel.get_state() in _CONNECTING:
        # A firewall that drops packets does not refuse the connection.
        missing = _unreachable(address, f"no connection within {timeout_s:g} s")
        return missing if alone else make(missing.code, str(missing))
    return make(found.code, f"the coordinator at {address} has not answered within {timeout_s:g} s")


def from_change(error: RemoteError) -> RemoteError:
    """Adds to the error of a changing call that the change may have happened.

    The client cannot know this if the connection broke during the call, or if no response arrived
    in time. Other errors are returned unchanged.
    """
    is_unknown = isinstance(error, UnavailableError | DeadlineExceededError)
    if not is_unknown or isinstance(error, UnreachableError):
        return error
    message = f"{error}; the change may have happened: check the state before you retry"
    return make(error.code, message, error.details())


def _unreachable(address: str, reason: str) -> UnreachableError:
    message = f"cannot reach the coordinator at {address}: {reason}"
    return UnreachableError(code_pb2.UNAVAILABLE, message, [])


def combine(found: Sequence[RemoteError]) -> RemoteError:
    """Combines the errors of several coordinators; an error other than UNAVAILABLE wins."""
    specific = next((error for error in found if error.code != code_pb2.UNAVAILABLE), None)
    if specific is not None or len(found) == 1:
        return specific or found[0]
    message = "; ".join(map(str, found))
    if all(isinstance(error, UnreachableError) for error in found):
        return UnreachableError(code_pb2.UNAVAILABLE, message, [])
    return make(code_pb2.UNAVAILABLE, message)


def has_no_answer(error: RemoteError) -> bool:
    """Whether another coordinator may answer: this one is unavailable, or its answer is late."""
    return isinstance(error, UnavailableError | DeadlineExceededError)


def as_unavailable(error: RemoteError) -> RemoteError:
    """The error of a call without an answer: a coordinator that answers late is unavailable too."""
    if isinstance(error, DeadlineExceededError):
        return make(code_pb2.UNAVAILABLE, str(error))
    return error


def is_restarting(error: RemoteError) -> bool:
    """Whether the coordinator refuses requests because it is restarting."""
    return error.code == code_pb2.UNAVAILABLE and error.reason == RESTARTING


def is_from_proxy(error: RemoteError) -> bool:
    """Whether the error comes from a proxy that does not reach the coordinator."""
    return error.code == code_pb2.UNAVAILABLE and error.reason == _PROXY


def invalid(field: str, value: object, allowed: str) -> RemoteError:
    """The error for an argument that the client itself rejects."""
    return from_baton(errors.InvalidArgument(field, value, allowed))
