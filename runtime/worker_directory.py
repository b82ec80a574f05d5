"""The directory of one worker's Unix sockets: its transfer service's and its engine's.

Who starts a worker makes it and removes it when nothing of the worker is left; a worker that is
started by hand makes its own. Of a worker that was killed, its transfer service removes it too.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PREFIX = "baton-"
# Linux allows a path of 107 bytes; vLLM names its sockets by UUIDs.
MAX_SOCKET_PATH_BYTES = 107
LONGEST_SOCKET_NAME_BYTES = 36
_SHORT = "/tmp"
# What mkdtemp adds to the prefix.
_RANDOM_BYTES = 8


def make() -> Path:
    """A new one, for this user only, where the paths of sockets are not too long."""
    parent = tempfile.gettempdir()
    if not fits(Path(parent) / (PREFIX + _RANDOM_BYTES * "x")):
        parent = _SHORT
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))


def fits(directory: Path) -> bool:
    """Whether the path of any socket there is short enough."""
    return len(os.fsencode(directory)) + 1 + LONGEST_SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES
