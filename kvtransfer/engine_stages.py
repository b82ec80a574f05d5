"""How far an engine has come in its start, noted by its first rank for the worker that waits.

As lines of a file beside the control socket: vLLM's processes tell nothing before all is done.
"""

from __future__ import annotations

import time
from pathlib import Path

_FILE = "engine-stages"

# The model is loaded, and how much cache fits beside it is known; the cache is allocated.
WEIGHTS, KV = "weights", "kv"


def note(socket_path: str, stage: str) -> None:
    """Says that a stage has ended."""
    with Path(socket_path).with_name(_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{stage} {time.monotonic()}\n")


def ended_at(socket_path: str) -> dict[str, float]:
    """When each stage that was noted had ended, by time.monotonic, which a host's processes share.

    Of what happened twice, the last time.
    """
    try:
        lines = Path(socket_path).with_name(_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {stage: float(at) for stage, _, at in (line.partition(" ") for line in lines)}


def forget(socket_path: str) -> None:
    """Removes what was noted; idempotent."""
    Path(socket_path).with_name(_FILE).unlink(missing_ok=True)
