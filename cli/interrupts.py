"""Runs a command's coroutine and turns Ctrl-C into exit code 130."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer

from baton.runtime.process import main_coroutine

T = TypeVar("T")


def run(
    main: Coroutine[Any, Any, T],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> T:
    """Runs a coroutine to its end; Ctrl-C cancels it and exits with code 130."""
    try:
        return main_coroutine.run(main, new_loop)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
