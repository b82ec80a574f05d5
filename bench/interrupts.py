"""How a benchmark is told to end."""

from __future__ import annotations

import signal


def on_sigterm() -> None:
    """SIGTERM ends this process as Ctrl-C does: what it has started is stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
