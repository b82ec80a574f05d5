"""Directory of one worker's Unix sockets: those of its transfer service and its engine.

The process that starts a worker makes the directory and removes it when all of the worker's
processes have ended; a worker that is started by hand makes its own. If a worker is killed, its
transfer service removes the directory too. If all of them are killed, the directory stays without a
lock, and the next `make` removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "baton-worker-"
# File with the targets of the engine's steps (engine/vllm_step_targets.py).
STEP_TARGETS = "step-targets"
# Linux allows a socket path of 107 bytes; vLLM names its sockets by UUIDs.
MAX_SOCKET_PATH_BYTES = 107
LONGEST_SOCKET_NAME_BYTES = 36
_SHORT = "/tmp"
# Length of the suffix that mkdtemp adds to the prefix.
_RANDOM_BYTES = 8


class WorkerDirectory:
    """A directory in use: locked until `remove`, or until this process ends.

    Attributes:
        path: Path of the directory.

    Raises:
        FileNotFoundError: The directory does not exist any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = _open(path)
        # On file systems without locks for directories, the directory is never taken as a leftover.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH)
        if not path.exists():
            self.remove()
            raise FileNotFoundError(path)

    def remove(self) -> None:
        """Removes the directory with its content; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def make() -> WorkerDirectory:
    """Makes a directory for this user only, in a place where socket paths are short enough."""
    parent = tempfile.gettempdir()
    if not fits(Path(parent) / (PREFIX + _RANDOM_BYTES * "x")):
        parent = _SHORT
    _remove_leftovers(Path(parent))
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Another process may remove it as a leftover before it is locked; then try again.
        with contextlib.suppress(FileNotFoundError):
            return WorkerDirectory(path)


def fits(directory: Path) -> bool:
    """Whether the path of every socket in the directory would be short enough."""
    return len(os.fsencode(directory)) + 1 + LONGEST_SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES


def _remove_leftovers(parent: Path) -> None:
    """Removes this user's directories that no living worker, transfer service or launcher locks."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            file = _open(path)
            try:
                if os.fstat(file).st_uid == os.getuid():
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(file)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
