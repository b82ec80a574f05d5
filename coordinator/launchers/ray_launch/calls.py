"""Calls into Ray that do not hold up an event loop, and what they say when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from baton.coordinator.launchers.ray_launch.placement import Node

T = TypeVar("T")

# Any call of Ray's that should be quick.
CALL_TIMEOUT_S = 15.0
_MAX_WORDS = 500
# What comes before the reason: the actor's class, ids and addresses.
_WHY = re.compile(r"The actor (?:is dead|died) because ")


async def result(ref: Any) -> Any:
    """What an actor's method returns, or raises. Its own deadline is the caller's."""
    return await asyncio.wrap_future(ref.future())


async def in_thread(function: Callable[[], T], timeout_s: float = CALL_TIMEOUT_S) -> T:
    """A blocking call of Ray's, in a thread that nobody waits for when it hangs.

    Raises:
        TimeoutError: no answer in time; the call may go on.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def call() -> None:
        value: T | None = None
        failed: Exception | None = None
        try:
            value = function()
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=call, daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise TimeoutError(f"Ray did not answer within {timeout_s:g} s") from None


def words(error: BaseException) -> str:
    """An error of Ray's on one line, without what only Ray's developers need."""
    text = " ".join(str(error).split()) or type(error).__name__
    found = _WHY.search(text)
    return (text[found.end() :] if found else text)[:_MAX_WORDS]


def live_nodes() -> list[Node]:
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
