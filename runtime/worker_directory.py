"""The directory of one worker's Unix sockets: its transfer service's and its engine's.

Who starts a worker makes it and removes it when nothing of the worker is left; a worker that is
started by hand makes its own. Of a worker that was killed, its transfer service removes it too.
When all of them are killed it stays, locked by nobody, and goes when the next one is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "baton-worker-"
# Linux allows a path of 107 bytes; vLLM names its sockets by UUIDs.
MAX_SOCKET_PATH_BYTES = 107
LONGEST_SOCKET_NAME_BYTES = 36
_SHORT = "/tmp"
# What mkdtemp adds to the prefix.
_RANDOM_BYTES = 8


class WorkerDirectory:
    """One that is in use: it is locked until it is removed here, or this process ends.

    Attributes:
        path: of it.

    Raises:
        FileNotFoundError: it is gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = _open(path)
        # Some file systems have no locks for directories; then it is nobody's leftover either.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH)
        if not path.exists():
            self.remove()
            raise FileNotFoundError(path)

    def remove(self) -> None:
        """With all that is in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def make() -> WorkerDirectory:
    """A new one, for this user only, where the paths of sockets are not too long."""
    parent = tempfile.gettempdir()
    if not fits(Path(parent) / (PREFIX + _RANDOM_BYTES * "x")):
        parent = _SHORT
    _remove_leftovers(Path(parent))
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Another process may take it for a leftover before it is locked.
        with contextlib.suppress(FileNotFoundError):
            return WorkerDirectory(path)


def fits(directory: Path) -> bool:
    """Whether the path of any socket there is short enough."""
    return len(os.fsencode(directory)) + 1 + LONGEST_SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES


def _remove_leftovers(parent: Path) -> None:
    """Removes this user's whose worker, transfer service and launcher no longer live."""
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
