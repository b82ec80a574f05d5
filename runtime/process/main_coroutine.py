"""Runs the main coroutine of a process or a command."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def run(
    main: Coroutine[Any, Any, T],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> T:
    """Runs a coroutine to its end on a new event loop; Ctrl-C cancels it.

    Raises:
        KeyboardInterrupt: Ctrl-C came.
    """
    with closed_if_unstarted(main), asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def closed_if_unstarted(main: Coroutine[Any, Any, Any]) -> Iterator[None]:
    """Closes a coroutine that Ctrl-C kept from its first step.

    Python would print the warning that this coroutine "was never awaited".
    """
    try:
        yield
    finally:
        if inspect.getcoroutinestate(main) == inspect.CORO_CREATED:
            main.close()
