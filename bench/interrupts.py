"""Ends a benchmark on SIGTERM."""

from __future__ import annotations

import signal


def on_sigterm() -> None:
    """Makes SIGTERM end this process like Ctrl-C, so that its child processes are stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
