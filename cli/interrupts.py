"""Runs a command's coroutine and turns Ctrl-C into exit code 130."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer

T = TypeVar("T")


def run(
    main: Coroutine[Any, Any, T], runner: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
) -> T:
    """Runs a coroutine to its end; Ctrl-C cancels it and exits with code 130."""
    try:
        return runner(main)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
