"""Directory of one worker's Unix sockets: those of its transfer service and its engine.

The process that starts a worker makes the directory and removes it when all of the worker's
processes have ended; a worker that is started by hand makes its own. If a worker is killed, its
transfer service removes the directory too. If all of them are killed, the next `make` removes it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from baton.runtime.process import locked_directory
from baton.runtime.process.locked_directory import LockedDirectory

PREFIX = "baton-worker-"
# File with the targets of the engine's steps (engine/vllm_step_targets.py).
STEP_TARGETS = "step-targets"
# Linux allows a socket path of 107 bytes; vLLM names its sockets by UUIDs.
MAX_SOCKET_PATH_BYTES = 107
LONGEST_SOCKET_NAME_BYTES = 36
_SHORT = "/tmp"
# Length of the suffix that mkdtemp adds to the prefix.
_RANDOM_BYTES = 8


def make() -> LockedDirectory:
    """Makes a directory in a place where socket paths are short enough."""
    parent = tempfile.gettempdir()
    if not fits(Path(parent) / (PREFIX + _RANDOM_BYTES * "x")):
        parent = _SHORT
    return locked_directory.make(Path(parent), PREFIX)


def fits(directory: Path) -> bool:
    """Whether the path of every socket in the directory would be short enough."""
    return len(os.fsencode(directory)) + 1 + LONGEST_SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES
