"""Runs a function on several values in processes, all of which end with the caller."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from baton.runtime.process.orphans import EndsWithParent

Value = TypeVar("Value")
Result = TypeVar("Result")

# The function of a pool's process. It is sent once, because it may hold a large trace.
_function: Callable[[Any], Any] | None = None


def results(
    function: Callable[[Value], Result], values: Sequence[Value], num_processes: int
) -> Iterator[tuple[int, Result]]:
    """Calls `function` with each value, in up to `num_processes` processes at a time.

    The processes are killed at once when the caller stops iterating, for example because of
    Ctrl-C, which only the caller receives. The kernel kills them when the caller's process dies.

    Yields:
        Index of a value and its result, as soon as there is one.
    """
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        max(1, min(num_processes, len(values))),
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(EndsWithParent(), function),
    )
    try:
        with _without_sigint():
            futures = {executor.submit(_call, one): index for index, one in enumerate(values)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(_: EndsWithParent, function: Callable[[Any], Any]) -> None:
    global _function
    _function = function


def _call(value: Any) -> Any:
    assert _function is not None
    return _function(value)


@contextlib.contextmanager
def _without_sigint() -> Iterator[None]:
    """Delays SIGINT; processes that are started meanwhile never receive it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
