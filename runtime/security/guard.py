"""Interceptor of a gRPC server that checks callers before a handler runs.

The `Inference` service checks its callers itself, because each request of a stream has its own
credential.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from baton.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    abort,
)
from baton.runtime.security.dial import AUTHORIZATION
from baton.runtime.security.tls import Handshakes
from baton.runtime.security.unchecked_calls import (
    CURRENT,
    UncheckedCall,
    UncheckedCalls,
    evicted_error,
)

if TYPE_CHECKING:
    from baton.runtime.security.access import Access

_ADMIN = "baton.v1.Admin"
_CELL_SERVICES = frozenset({"baton.v1.Cluster", "baton.v1.KvTransfer"})
_TRANSFER = "/baton.v1.KvTransfer/"
# Longest wait for the first message of a call that is refused.
_FIRST_MESSAGE_TIMEOUT_S = 2.0
# Longest wait for the request message of a unary call; gRPC itself would wait without limit.
_MESSAGE_TIMEOUT_S = 30.0
# Package of the health and reflection services, which need no credential.
_OPEN_PACKAGE = "/grpc."
_GET_MODEL = "/baton.v1.Inference/GetModel"
# The service ends the count of its unchecked calls itself.
_SESSION = "/baton.v1.Inference/Session"


class Guard(grpc.aio.ServerInterceptor):
    """Refuses unauthorized calls of Admin, Cluster, KvTransfer and GetModel.

    It also limits how many of the server's calls unauthenticated peers can hold, and for how long.

    Args:
        access: Checks credentials and certificates.
        max_open_streams: Limit of concurrent streams that need no credential.
        max_unchecked_calls: Limit of other concurrent calls without an accepted credential.
        handshakes: Notified of each call's peer; None without TLS.
    """

    def __init__(
        self,
        access: Access,
        max_open_streams: int,
        max_unchecked_calls: int,
        handshakes: Handshakes | None = None,
    ) -> None:
        self._access, self._handshakes = access, handshakes
        self._max_open_streams, self._num_open_streams = max_open_streams, 0
        self._unchecked = UncheckedCalls(max_unchecked_calls)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method, check = details.method, self._check_of(details.method)
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            inner = getattr(handler, kind)
            if inner is not None:
                # Transfer frames are large, so a refused stream of frames is not read at all.
                reads_before_refusal = not method.startswith(_TRANSFER)
                guarded = self._guarded(
                    inner,
                    method,
                    check,
                    takes_one_message=kind.startswith("unary"),
                    reads_before_refusal=reads_before_refusal,
                )
                if method.startswith(_OPEN_PACKAGE) and kind.endswith("stream"):
                    guarded = self._counted(guarded)
                streaming = {kind: None, kind.replace("unary_", "stream_"): guarded}
                return handler._replace(request_streaming=True, **streaming)
        return handler

    def _check_of(self, method: str) -> Callable[[Any], None] | None:
        """Returns the check for calls of a method; None if the method needs no check here."""
        access, service = self._access, method.rpartition("/")[0].lstrip("/")
        if service == _ADMIN:
            return lambda context: access.check_admin(
                authorization(context), names(context), peer=context.peer()
            )
        if service in _CELL_SERVICES:
            short = service.rpartition(".")[2]
            return lambda context: access.check_worker(
                authorization(context), names(context), short, peer=context.peer()
            )
        if method == _GET_MODEL:
            return lambda context: _discard(
                access.caller(authorization(context), peer=context.peer())
            )
        return None

    def _guarded(
        self,
        inner: Any,
        method: str,
        check: Callable[[Any], None] | None,
        *,
        takes_one_message: bool,
        reads_before_refusal: bool,
    ) -> Any:
        """Wraps a handler so that the check runs first.

        Args:
            inner: Handler.
            method: Full name of the method.
            check: Raises BatonError to refuse the call; None means no check.
            takes_one_message: Whether `inner` takes one request message, which this wrapper reads
                with a timeout, instead of a stream of messages.
            reads_before_refusal: Whether to read the first message of a call before refusing the
                call. A client that is still writing this message would report an earlier refusal
                as an internal error.
        """
        has_own_limit = method.startswith(_OPEN_PACKAGE) and not takes_one_message

        async def guarded(request: Any, context: Any) -> Any:
            if self._handshakes is not None:
                self._handshakes.on_call(context.peer())
            call: UncheckedCall | None = None
            try:
                # Before the message is read: a stranger's call must not hold one for long.
                try:
                    if check is not None:
                        check(context)
                except BatonError as error:
                    if reads_before_refusal:
                        call = self._unchecked.add()
                        await _read(context, call, _FIRST_MESSAGE_TIMEOUT_S)
                    await abort(context, error)
                if check is None and not has_own_limit and not self._is_accepted(method, context):
                    call = self._unchecked.add()
                if takes_one_message:
                    try:
                        request = await _message(context, call)
                    except BatonError as error:
                        await abort(context, error)
                if method == _SESSION:
                    CURRENT.set(call)
                elif call is not None:
                    # The handler checks the credential of the request at once.
                    call.leave()
                return await handled(request, context)
            finally:
                if call is not None:
                    call.leave()

        async def handled(request: Any, context: Any) -> Any:
            if inspect.isasyncgenfunction(inner):
                async for response in inner(request, context):
                    await context.write(response)
                return None
            return await inner(request, context)

        return guarded

    def _is_accepted(self, method: str, context: Any) -> bool:
        """Whether a call without a check here needs no credential, or has a valid one.

        A session is accepted with its first request, because only requests count for a tenant.
        """
        if not self._access.needs_credentials:
            return True
        return method != _SESSION and self._access.knows(authorization(context))

    def _counted(self, inner: Any) -> Any:
        """Limits the number of concurrent streams that need no credential."""

        async def counted(request: Any, context: Any) -> None:
            if self._num_open_streams >= self._max_open_streams:
                what = f"{self._max_open_streams} streams of health and reflection are open"
                reason = "OPEN_STREAMS"
                await abort(context, ResourceExhausted(what, reason=reason, retry_after_s=1.0))
            self._num_open_streams += 1
            try:
                await inner(request, context)
            finally:
                self._num_open_streams -= 1

        return counted


async def _read(context: Any, call: UncheckedCall | None, timeout_s: float) -> Any:
    """Reads a message; None if none arrives in time or the call was evicted."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if call is not None:
                call.on_evict = lambda: _expire(limit)
            return await context.read()
    except TimeoutError:
        return None
    finally:
        if call is not None:
            call.on_evict = None


def _expire(limit: asyncio.Timeout) -> None:
    """Ends a wait now, unless its time is over already."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


async def _message(context: Any, call: UncheckedCall | None) -> Any:
    """Reads the request message of a unary call. Raises BatonError if none arrives in time."""
    found = await _read(context, call, _MESSAGE_TIMEOUT_S)
    if call is not None and call.evicted:
        raise evicted_error()
    if found is None:
        late = f"the request message did not arrive within {_MESSAGE_TIMEOUT_S:g} s"
        raise DeadlineExceeded(late)
    if found is grpc.aio.EOF:
        raise InvalidArgument("request", None, "must be one message")
    return found


def authorization(context: Any) -> str:
    """Returns the credential of a call; empty if the call has none."""
    for key, value in context.invocation_metadata() or ():
        if key == AUTHORIZATION and isinstance(value, str):
            return value
    return ""


def names(context: Any) -> set[str]:
    """Names in the client's certificate, which TLS has verified; empty without a certificate."""
    found: dict[str, list[bytes]] = context.auth_context() or {}
    entries = [
        *found.get("x509_common_name", ()),
        *found.get("x509_subject_alternative_name", ()),
    ]
    return {entry.decode("utf-8", "replace") for entry in entries}


def _discard(_: object) -> None:
    pass
