"""Directories that are removed with the processes that use them.

Each of these processes locks its directory. If all of them are killed, the directory stays without
a lock, and the next `make` removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class LockedDirectory:
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


def make(parent: Path, prefix: str) -> LockedDirectory:
    """Makes a directory for this user only, and removes leftovers of the same prefix.

    Args:
        parent: Where the directory is made.
        prefix: Beginning of the directory's name. Every process that uses a directory with such a
            name must lock it.
    """
    _remove_leftovers(parent, prefix)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may remove it as a leftover before it is locked; then try again.
        with contextlib.suppress(FileNotFoundError):
            return LockedDirectory(path)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Removes this user's directories that no living process locks."""
    for path in parent.glob(f"{prefix}*"):
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
