"""Adds the credential to unary calls and to calls with one response stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from baton.runtime.security.dial import Dial


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, dial: Dial) -> None:
        self._dial = dial

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_metadata(self._dial, client_call_details), request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, dial: Dial) -> None:
        self._dial = dial

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_metadata(self._dial, client_call_details), request)


def interceptors(dial: Dial) -> list[grpc.aio.ClientInterceptor]:
    """Returns interceptors that add a dial's metadata to each unary call and each response stream.

    Bidirectional streams get no interceptor, because it would add a cost to every message.
    """
    return [_UnaryUnary(dial), _UnaryStream(dial)]


def _with_metadata(dial: Dial, details: Any) -> Any:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *dial.metadata())
    return details._replace(metadata=metadata)
