"""Queries that the gateway sends to the coordinator for HTTP callers, limited and cached.

A caller may be unknown: its credential is only checked by the coordinator.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from starlette.datastructures import Headers, MutableHeaders

from baton.gateway import error_responses
from baton.gateway.error_responses import HttpError
from baton.runtime.errors import RemoteError
from baton.runtime.security.secret_format import fits_header, secret_of

T = TypeVar("T")

# Below the default size limit of gRPC metadata.
_MAX_CREDENTIAL_CHARS = 12 * 2**10
# Number of callers whose results one PerCallerQuery caches.
_MAX_CACHED_CALLERS = 256
# Longest time that an error is cached.
_ERROR_TTL_S = 1.0
_MAX_CONCURRENT_QUERIES = 32
# Longest wait for a free slot; a query itself may take as long (cell.py).
_QUEUE_TIMEOUT_S = 2.0


def request_credential(headers: Mapping[str, str]) -> str:
    """Returns the `authorization` header, or "" if there is none.

    Raises:
        HttpError: gRPC could not carry the value to the coordinator (401).
    """
    shown = headers.get("authorization", "")
    if len(shown) > _MAX_CREDENTIAL_CHARS or not fits_header(shown):
        message = "authorization is too long or has characters that no credential has"
        raise HttpError(401, message, kind="authentication_error", code="invalid_api_key")
    return shown


def with_bearer(headers: Headers) -> MutableHeaders:
    """Returns the headers with the key of `x-api-key` as a bearer token.

    Clients whose token is not set send an empty `authorization`, which counts as none.
    """
    found = MutableHeaders(raw=list(headers.raw))
    key = found.get("x-api-key")
    if key is not None and found.get("authorization", "").strip().lower() in ("", "bearer"):
        found["authorization"] = f"Bearer {key}"
    return found


def caller_digest(credential: str) -> bytes:
    """Identifies a caller by its credential without keeping the secret in memory or on disk.

    All spellings of `authorization` with one key give the same digest, because the limits of one
    caller apply to them together.
    """
    spelled = f"Bearer {secret_of(credential)}" if credential else ""
    return hashlib.sha256(spelled.encode()).digest()


def caller_name(credential: str) -> str:
    """Names a caller for FairPlaces; empty: callers without a credential cannot be told apart."""
    return caller_digest(credential).hex() if credential else ""


class QueryLimiter:
    """Limits how many queries are sent to the coordinators at a time; further queries queue.

    Callers with many invalid keys can thus not cost the coordinator more than
    _MAX_CONCURRENT_QUERIES calls at a time.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_MAX_CONCURRENT_QUERIES)

    async def run(self, fetch: Callable[[], Awaitable[T]]) -> T:
        """Runs a query when a slot is free. Raises HttpError 503 if none is within the timeout."""
        try:
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError:
            message = "too many queries to the coordinator are queued"
            raise HttpError(
                503, message, kind="service_unavailable_error", code="overloaded", retry_after_s=1.0
            ) from None
        try:
            return await fetch()
        finally:
            self._free.release()


class CachedQuery(Generic[T]):
    """Runs one query at most once at a time and caches its result.

    Any number of tasks may call `get`.

    Args:
        fetch: Sends the query.
        ttl_s: Seconds for which a result is cached.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]], ttl_s: float) -> None:
        self._fetch, self._ttl_s = fetch, ttl_s
        self._lock = asyncio.Lock()
        self._fresh_until = 0.0
        self._result: T | RemoteError | HttpError | None = None

    async def get(self) -> T:
        """Returns the result, from the cache if it is fresh.

        Raises:
            HttpError: The query failed, now or within the last _ERROR_TTL_S.
        """
        async with self._lock:
            if time.monotonic() >= self._fresh_until:
                try:
                    self._result = await self._fetch()
                    self._fresh_until = time.monotonic() + self._ttl_s
                except (RemoteError, HttpError) as error:
                    # The tasks that waited for this query get its error and do not send it again.
                    self._result = error
                    self._fresh_until = time.monotonic() + min(_ERROR_TTL_S, self._ttl_s)
            result = self._result
        if isinstance(result, RemoteError):
            raise error_responses.from_remote_error(result)
        if isinstance(result, HttpError):
            raise result.with_traceback(None)
        assert result is not None
        return result


class PerCallerQuery(Generic[T]):
    """Runs a query with each caller's own credential and caches the result per caller.

    The cache is keyed by a hash of the credential.

    Args:
        fetch: Sends the query; its argument is the value of the `authorization` header.
        ttl_s: Seconds for which a result is cached.
        query_limiter: Limits the queries that run at a time.
    """

    def __init__(
        self, fetch: Callable[[str], Awaitable[T]], ttl_s: float, query_limiter: QueryLimiter
    ) -> None:
        self._fetch, self._ttl_s, self._query_limiter = fetch, ttl_s, query_limiter
        self._cached_queries: OrderedDict[bytes, CachedQuery[T]] = OrderedDict()

    async def get(self, authorization: str) -> T:
        """Returns the result for a caller. Raises HttpError if the query failed."""
        key = caller_digest(authorization)
        result = self._cached_queries.get(key)
        if result is None:
            result = self._cached_queries[key] = CachedQuery(
                lambda: self._query_limiter.run(lambda: self._fetch(authorization)), self._ttl_s
            )
            if len(self._cached_queries) > _MAX_CACHED_CALLERS:
                self._cached_queries.popitem(last=False)
        return await result.get()
