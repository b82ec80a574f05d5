"""Files that are read again when they change: certificates, keys and tokens."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from baton.runtime.config_error import ConfigError
from baton.runtime.security.secret_format import SECRETS, is_secret

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds between two checks for changed files.
CHECK_INTERVAL_S = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[T]):
    """Value read from some files, at most CHECK_INTERVAL_S old. Thread-safe.

    A file that becomes unreadable or invalid is logged once, and the last valid value stays.

    Args:
        files: Paths that `read` reads, by their names in error messages (such as a configuration
            key); empty paths are ignored.
        read: Reads the value; raises ConfigError or OSError.

    Attributes:
        version: Number that grows with each change.

    Raises:
        ConfigError: The files cannot be read now.
    """

    def __init__(self, files: Mapping[str, str], read: Callable[[], T]) -> None:
        self._files, self._read = {name: path for name, path in files.items() if path}, read
        self._lock = threading.Lock()
        self.version = 1
        try:
            self._stamp = self._stamped()
            self._value = read()
        except OSError as error:
            raise ConfigError(self._unreadable(error)) from None
        self._checked_at = time.monotonic()
        self._problem = ""

    def get(self) -> T:
        """Current value."""
        if time.monotonic() - self._checked_at >= CHECK_INTERVAL_S:
            with self._lock:
                self._check()
        return self._value

    def _check(self) -> None:
        if time.monotonic() - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = time.monotonic()
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                self._problem = ""
                return
            value = self._read()
        except (OSError, ConfigError) as error:
            said = self._unreadable(error) if isinstance(error, OSError) else str(error)
            if self._problem != said:
                self._problem = said
                _log.error("changed files cannot be used, the old values stay in use: %s", said)
            return
        # The stamp was taken before reading, so a change during the read is noticed next time.
        self._stamp, self._value, self._problem = stamp, value, ""
        self.version += 1
        files = ",".join(self._files.values())
        _log.info("changed files are now in use", extra={"files": files})

    def _unreadable(self, error: OSError) -> str:
        found = {n: path for n, path in self._files.items() if path == error.filename}
        told = " and ".join(f"{name}: {path}" for name, path in (found or self._files).items())
        return f"{told} cannot be read: {error.strerror or error}"

    def _stamped(self) -> _Stamp:
        found = [os.stat(path) for path in self._files.values()]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


def watched_secret(path: str, key: str) -> WatchedFiles[str]:
    """Key or token in a file, read by `read_secret`.

    Args:
        path: Path of the file.
        key: Configuration key that names the file, for error messages.

    Raises:
        ConfigError: The file cannot be read or holds something else.
    """
    return WatchedFiles({key: path}, lambda: read_secret(path, key))


def read_secret(path: str, key: str) -> str:
    """Reads the key or token in a file, without surrounding white space.

    Raises:
        ConfigError: The file holds something else.
        OSError: The file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
    except UnicodeDecodeError:
        text = ""
    if not is_secret(text):
        raise ConfigError(f"{key}: {path} must hold {SECRETS}")
    return text
