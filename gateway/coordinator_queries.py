"""Questions that the gateway asks the coordinator for whoever comes, known or not."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from baton.gateway import error_responses
from baton.gateway.error_responses import HttpError
from baton.runtime.errors import RemoteError
from baton.runtime.secret_words import fits_header

T = TypeVar("T")

# Less than gRPC's metadata may have by default.
_MAX_CREDENTIAL_CHARS = 12 * 2**10
_MAX_ANSWERS = 256
_ERROR_HOLDS_S = 1.0
# At a time, and the longest wait for a turn: as long as an answer may take.
_MAX_CONCURRENT_QUERIES, _QUEUE_TIMEOUT_S = 32, 2.0


def request_credential(headers: Mapping[str, str]) -> str:
    """Returns the `authorization` header; empty: none. Raises HttpError if it is malformed."""
    shown = headers.get("authorization", "")
    if len(shown) > _MAX_CREDENTIAL_CHARS or not fits_header(shown):
        message = "the credential is not valid here"
        raise HttpError(401, message, kind="authentication_error", code="invalid_api_key")
    return shown


class QueryLimiter:
    """So many questions at a time. The others wait, but not for ever.

    Strangers with a thousand keys are as many connections to the gateway, and no more than this to
    the coordinator.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_MAX_CONCURRENT_QUERIES)

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks in its turn. Raises HttpError when that does not come."""
        try:
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError:
            message = "too many questions to the coordinator wait"
            raise HttpError(
                503, message, kind="service_unavailable_error", code="overloaded", retry_after_s=1.0
            ) from None
        try:
            return await ask()
        finally:
            self._free.release()


class CachedQuery(Generic[T]):
    """A question asked at most once at a time, and not again for a while: anyone may ask it."""

    def __init__(self, ask: Callable[[], Awaitable[T]], holds_s: float) -> None:
        self._ask, self._holds_s = ask, holds_s
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._answer: T | RemoteError | HttpError | None = None

    async def get(self) -> T:
        """Raises HttpError as the question did, or of its RemoteError."""
        async with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._answer = await self._ask()
                    self._until = time.monotonic() + self._holds_s
                except (RemoteError, HttpError) as error:
                    # All who wait for it have waited: none of them begins anew.
                    self._answer = error
                    self._until = time.monotonic() + min(_ERROR_HOLDS_S, self._holds_s)
            answer = self._answer
        if isinstance(answer, RemoteError):
            raise error_responses.from_remote_error(answer)
        if isinstance(answer, HttpError):
            raise answer.with_traceback(None)
        assert answer is not None
        return answer


class PerCallerQuery(Generic[T]):
    """A question asked with each caller's own credential.

    The latest callers' answers are kept for a while, by a hash of what they showed.

    Args:
        ask: gets the credential, as in `authorization`.
        holds_s: how long an answer does.
        turns: of the questions.
    """

    def __init__(
        self, ask: Callable[[str], Awaitable[T]], holds_s: float, query_limiter: QueryLimiter
    ) -> None:
        self._ask, self._holds_s, self._query_limiter = ask, holds_s, query_limiter
        self._answers: OrderedDict[bytes, CachedQuery[T]] = OrderedDict()

    async def get(self, authorization: str) -> T:
        """Raises HttpError."""
        key = hashlib.sha256(authorization.encode()).digest()
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = CachedQuery(
                lambda: self._query_limiter.run(lambda: self._ask(authorization)), self._holds_s
            )
            if len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)
        return await answer.get()
