"""Phases of an engine's start, which its first rank records for the waiting worker.

The phases are lines of a file beside the control socket, because vLLM's processes report nothing
until the start is complete.
"""

from __future__ import annotations

import time
from pathlib import Path

_FILE = "start-phases"

# WEIGHTS ends when the model is loaded and the size of the KV cache is known; KV ends when the
# cache is allocated.
WEIGHTS, KV = "weights", "kv"


def record(socket_path: str, phase: str) -> None:
    """Records that a phase has ended."""
    with Path(socket_path).with_name(_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{phase} {time.monotonic()}\n")


def ended_at(socket_path: str) -> dict[str, float]:
    """Returns when each recorded phase ended, in seconds of time.monotonic().

    All processes of a host share that clock. The last record of a phase counts.
    """
    try:
        lines = Path(socket_path).with_name(_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {phase: float(at) for phase, _, at in (line.partition(" ") for line in lines)}


def remove(socket_path: str) -> None:
    """Removes the records. Idempotent."""
    Path(socket_path).with_name(_FILE).unlink(missing_ok=True)
