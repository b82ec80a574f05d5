"""Groups of layers of an engine's KV cache, which its first rank records for the waiting worker.

vLLM makes the groups when it has loaded the model, and reports nothing of them to the process that
has started it. The record is a file beside the control socket.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from baton.runtime.kv.kv_groups import KvGroup

_FILE = "engine-groups.json"


def record(socket_path: str, groups: Sequence[KvGroup]) -> None:
    """Records the groups, before the engine reports that it has started."""
    text = json.dumps([dataclasses.asdict(group) for group in groups])
    Path(socket_path).with_name(_FILE).write_text(text, encoding="utf-8")


def recorded(socket_path: str) -> list[KvGroup]:
    """Returns the groups of the engine that has started.

    Raises:
        OSError: The engine has recorded nothing.
    """
    text = Path(socket_path).with_name(_FILE).read_text(encoding="utf-8")
    return [KvGroup(**group) for group in json.loads(text)]


def remove(socket_path: str) -> None:
    """Removes the record. Idempotent."""
    Path(socket_path).with_name(_FILE).unlink(missing_ok=True)
