"""Submits the choices of one HTTP request, also more of them than its caller may run at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from google.rpc import code_pb2

from baton.client import Accepted, TokenStream, errors
from baton.client.errors import ResourceExhaustedError
from baton.runtime.errors import RemoteError

T = TypeVar("T")

# Reasons of refusals by a limit of the caller itself, which the request's own choices may have
# used up.
_CALLER_LIMITS = ("CREDENTIAL_CONCURRENCY", "TENANT_RATE")
# How often a choice is refused, while no other choice of its request runs, before its request
# fails: other requests of the caller then use the limit.
_MAX_REFUSALS = 30


class Choices:
    """The choices of one HTTP request. Each choice is a request for the coordinator.

    A limit of the caller (its key's `max_concurrent`, its tenant's rate) may admit only some of the
    choices. The others wait and are submitted again, one at a time and in order: when an admitted
    choice ends, and after the time that the refusal names.

    Args:
        num_choices: Number of choices.
        submit: Submits a choice, by its index and its timeout in seconds (None: no timeout).
        timeout_s: The remaining timeout of the request in seconds; None: it has none.

    Attributes:
        streams: The latest stream of each choice.
    """

    def __init__(
        self,
        num_choices: int,
        submit: Callable[[int, float | None], TokenStream],
        timeout_s: float | None,
    ) -> None:
        self._submit, self._loop, self._timeout_s = submit, asyncio.get_running_loop(), timeout_s
        self._deadline = self._loop.time() + timeout_s if timeout_s is not None else None
        self.streams = [submit(index, timeout_s) for index in range(num_choices)]
        self._accepted: list[Accepted | None] = [None] * num_choices
        self._refusals: dict[int, ResourceExhaustedError] = {}
        self._num_running = 0
        # The choice that is submitted again holds the lock. The event: the next try may succeed.
        self._turn, self._may_fit = asyncio.Lock(), asyncio.Event()
        self._is_closed = False

    async def admit(self) -> Accepted:
        """Waits until each choice is admitted or waits for a limit of the caller.

        Returns:
            The admission of one of the choices.

        Raises:
            RemoteError: A choice was refused for another reason, or no choice was admitted.
        """
        await gather([self._admit(index) for index in range(len(self.streams))])
        found = next((one for one in self._accepted if one is not None), None)
        if found is None:
            raise self._refusals[0]
        return found

    async def admitted(self, index: int) -> Accepted:
        """Waits until a choice is admitted, after `admit`.

        Raises:
            RemoteError: The choice was refused.
        """
        found = self._accepted[index]
        if found is not None:
            return found
        async with self._turn:
            num_refusals = 0
            while (found := self._accepted[index]) is None:
                if not self._num_running:
                    num_refusals += 1
                    if num_refusals > _MAX_REFUSALS:
                        raise self._refusals[index]
                left_s = await self._wait(self._refusals[index])
                self.streams[index] = self._submit(index, left_s)
                await self._admit(index)
            # There may be room for the next choice too.
            self._may_fit.set()
        return found

    def ended(self) -> None:
        """An admitted choice has ended."""
        self._num_running -= 1
        self._may_fit.set()

    async def aclose(self) -> None:
        """Cancels all choices; idempotent."""
        self._is_closed = True
        self._may_fit.set()
        for stream in self.streams:
            await stream.aclose()

    async def _admit(self, index: int) -> None:
        """Waits for the admission of a submitted choice, or its refusal by a caller's limit."""
        try:
            event = await anext(self.streams[index])
        except ResourceExhaustedError as error:
            if error.reason not in _CALLER_LIMITS or error.retry_after_s is None:
                raise
            self._refusals[index] = error
        except StopAsyncIteration:
            raise incomplete_stream() from None
        else:
            assert isinstance(event, Accepted)
            self._accepted[index] = event
            self._num_running += 1

    async def _wait(self, refusal: ResourceExhaustedError) -> float | None:
        """Waits until a refused choice may be submitted again.

        Returns:
            The remaining timeout of the request in seconds; None: it has none.

        Raises:
            RemoteError: The choices have been cancelled, or the request's timeout has passed.
        """
        assert refusal.retry_after_s is not None, "other refusals end the request"
        until = self._loop.time() + refusal.retry_after_s
        if self._deadline is not None:
            until = min(until, self._deadline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._may_fit.wait()
        self._may_fit.clear()
        if self._is_closed:
            raise errors.make(code_pb2.CANCELLED, "the request was cancelled")
        if self._deadline is None:
            return None
        left_s = self._deadline - self._loop.time()
        if left_s <= 0:
            message = f"not all choices ended within the request's timeout of {self._timeout_s:g} s"
            raise errors.make(code_pb2.DEADLINE_EXCEEDED, f"{message}: {refusal}")
        return left_s


def incomplete_stream() -> RemoteError:
    """The error of a stream without its last event."""
    return errors.make(code_pb2.DATA_LOSS, "the stream ended without its last event")


async def gather(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Returns all results in order. The first failure cancels the rest."""
    if len(awaitables) == 1:
        return [await awaitables[0]]
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
