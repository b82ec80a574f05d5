"""Who may call which service of a gRPC server: one interceptor, and nothing in the handlers.

`Inference` looks at its callers itself: there each request of a stream has a credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from baton.runtime.access import Access
from baton.runtime.dial import AUTHORIZATION
from baton.runtime.errors import BatonError, abort
from baton.runtime.tls import Handshakes

_ADMIN = "baton.v1.Admin"
_MEMBERS = frozenset({"baton.v1.Cluster", "baton.v1.KvTransfer"})
_TRANSFER = "/baton.v1.KvTransfer/"
_HEAR_TIMEOUT_S = 2.0
_GET_MODEL = "/baton.v1.Inference/GetModel"


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls of Admin, Cluster, KvTransfer and GetModel that may not be made.

    Args:
        access: knows who may.
        handshakes: told of each call's peer; None without TLS.
    """

    def __init__(self, access: Access, handshakes: Handshakes | None = None) -> None:
        self._access, self._handshakes = access, handshakes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        check = self._check_of(details.method)
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            inner = getattr(handler, kind)
            if inner is not None:
                # What transfers push is large, and nobody waits to hear why it is refused.
                hears = kind.startswith("stream") and not details.method.startswith(_TRANSFER)
                return handler._replace(**{kind: self._guarded(inner, check, hears)})
        return handler

    def _check_of(self, method: str) -> Callable[[Any], None] | None:
        """What is asked of a call; None: nothing."""
        access, service = self._access, method.rpartition("/")[0].lstrip("/")
        if service == _ADMIN:
            return lambda context: access.check_admin(
                authorization(context), names(context), peer=context.peer()
            )
        if service in _MEMBERS:
            short = service.rpartition(".")[2]
            return lambda context: access.check_member(
                authorization(context), names(context), short, peer=context.peer()
            )
        if method == _GET_MODEL:
            return lambda context: _discard(
                access.caller(authorization(context), peer=context.peer())
            )
        return None

    def _guarded(self, inner: Any, check: Callable[[Any], None] | None, hears: bool) -> Any:
        """A handler that checks first.

        Args:
            inner: the handler.
            check: raises BatonError.
            hears: whether a refusal comes after the first message. Before it, it would reach a
                client that still writes as an internal error.
        """

        async def guarded(request: Any, context: Any) -> Any:
            if self._handshakes is not None:
                self._handshakes.called(context.peer())
            if check is not None:
                try:
                    check(context)
                except BatonError as error:
                    if hears:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(_HEAR_TIMEOUT_S):
                                await context.read()
                    await abort(context, error)
            if inspect.isasyncgenfunction(inner):
                async for response in inner(request, context):
                    await context.write(response)
                return None
            return await inner(request, context)

        return guarded


def authorization(context: Any) -> str:
    """The call's credential; empty: none."""
    for key, value in context.invocation_metadata() or ():
        if key == AUTHORIZATION and isinstance(value, str):
            return value
    return ""


def names(context: Any) -> set[str]:
    """In the client's certificate, which TLS has verified; none without one."""
    found: dict[str, list[bytes]] = context.auth_context() or {}
    entries = [
        *found.get("x509_common_name", ()),
        *found.get("x509_subject_alternative_name", ()),
    ]
    return {entry.decode("utf-8", "replace") for entry in entries}


def _discard(_: object) -> None:
    pass
