"""Calls into Ray that do not block the event loop, and formatting of Ray's errors."""

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

# Timeout of quick calls into Ray.
CALL_TIMEOUT_S = 15.0
_MAX_ERROR_CHARS = 500
# Ray's errors list class, IDs and addresses of an actor first; the reason follows this text.
_BEFORE_REASON = re.compile(r"The actor (?:is dead|died) because (?:of )?")
# Sequences that colour text in terminals.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A call of a traceback, and the names that Ray gives to calls of actors.
_FRAME = re.compile(r'^\s+File ".*", line \d+', re.MULTILINE)
_ACTOR_CALL = re.compile(r"(?:^|, )ray::.*")


async def result(ref: Any) -> Any:
    """Waits for the result of an actor's method; the caller must set a timeout."""
    return await asyncio.wrap_future(ref.future())


async def in_thread(function: Callable[[], T], timeout_s: float = CALL_TIMEOUT_S) -> T:
    """Runs a blocking call of Ray in a daemon thread, which is abandoned if the call hangs.

    Raises:
        TimeoutError: The call did not return in time; it may still be running.
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


def error_line(error: BaseException) -> str:
    """Formats an error of Ray on one line, without the details that only Ray's developers need."""
    text = _COLOUR.sub("", str(error)).strip()
    if frames := list(_FRAME.finditer(text)):
        text = _without_calls(text, frames[-1].end())
    text = " ".join(text.split()) or type(error).__name__
    found = _BEFORE_REASON.search(text)
    return (text[found.end() :] if found else text)[:_MAX_ERROR_CHARS]


def _without_calls(text: str, last_call: int) -> str:
    """Returns the first line of a text with tracebacks, and the last exception.

    Args:
        text: The text of an error.
        last_call: Position behind the last call of the tracebacks.
    """
    subject = _ACTOR_CALL.sub("", text.partition("\n")[0]).rstrip(".:")
    # The source line of the call is indented.
    exception = [
        line for line in text[last_call:].splitlines()[1:] if not line.startswith((" ", "ray::"))
    ]
    return "\n".join([f"{subject}:", *exception])


def live_nodes() -> list[Node]:
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
