"""`baton top`: shows the state of a cell, live in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from baton.cli import credentials, interrupts, options
from baton.cli.top_view import draw
from baton.client.watcher import View, Watcher
from baton.runtime.errors import RemoteError

_WIDTH = 80


def top(
    address: options.Address = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.2, max=60, help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Watch the state of a cell live; q quits.

    The screen shows pools, lanes, latencies with their targets, workers and scale events. If
    standard input or output is not a terminal, or cannot move its cursor, the state is printed
    once.
    """
    addresses = options.resolve_addresses(address)
    # Standard input is None if the parent process has closed it.
    has_keys = sys.stdin is not None and sys.stdin.isatty()
    if once or not has_keys or not sys.stdout.isatty():
        interrupts.run(_once(addresses))
    else:
        interrupts.run(_live(addresses, interval_s))


async def _once(addresses: list[str]) -> None:
    """Prints the state once; raises RemoteError if no coordinator answers."""
    async with _watcher(addresses) as watcher:
        view = await watcher.look()
    console = Console(highlight=False)
    width = console.width if console.is_terminal else max(_WIDTH, console.width)
    Console(highlight=False, width=width).print(
        draw(view, addresses="", problem="", age_s=0.0, width=width, height=0)
    )


async def _live(addresses: list[str], interval_s: float) -> None:

    console = Console(highlight=False)
    if console.is_dumb_terminal:
        await _once(addresses)
        return
    loop = asyncio.get_running_loop()
    ends, wake = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        ends.set()
        wake.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGWINCH, wake.set)
    latest = _Latest()

    def show() -> None:
        width, height = console.size
        live.update(
            draw(
                latest.view,
                addresses=", ".join(addresses),
                problem=latest.problem,
                age_s=loop.time() - latest.at,
                width=width,
                height=height,
            ),
            refresh=True,
        )

    with (
        _keys(loop, ends, wake),
        Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
    ):
        async with Watcher(
            addresses, tls=credentials.tls(), api_key=credentials.api_key()
        ) as watcher:
            show()
            polling = asyncio.create_task(_poll(watcher, latest, interval_s, wake))
            polling.add_done_callback(lambda _: wake.set())
            try:
                while not ends.is_set():
                    await wake.wait()
                    wake.clear()
                    show()
                    if polling.done():
                        polling.result()
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                # Some terminals keep the text of the alternate screen after a resize.
                live.update("", refresh=True)


def _watcher(addresses: list[str]) -> Watcher:
    return Watcher(addresses, tls=credentials.tls(), api_key=credentials.api_key())


class _Latest:
    """The latest view, and the error of the last update.

    Attributes:
        at: Time of the view on the event loop's clock, in seconds.
    """

    def __init__(self) -> None:
        self.view: View | None = None
        self.problem = ""
        self.at = 0.0


async def _poll(watcher: Watcher, latest: _Latest, interval_s: float, wake: asyncio.Event) -> None:

    while True:
        try:
            latest.view = await watcher.look()
            latest.problem, latest.at = "", asyncio.get_running_loop().time()
        except RemoteError as error:
            latest.problem = str(error)
        wake.set()
        await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _keys(
    loop: asyncio.AbstractEventLoop, ends: asyncio.Event, wake: asyncio.Event
) -> Iterator[None]:
    """Reads keys without waiting for Enter; restores the terminal at the end."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def pressed() -> None:
        keys = os.read(stdin, 64)
        # An empty read means that the terminal was closed.
        if not keys or b"q" in keys or b"Q" in keys:
            loop.remove_reader(stdin)
            ends.set()
        wake.set()

    tty.setcbreak(stdin)
    loop.add_reader(stdin, pressed)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
