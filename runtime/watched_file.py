"""Files that are read again when they change: certificates, keys, tokens."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from baton.runtime.config_error import ConfigError
from baton.runtime.secret_words import SECRETS, is_secret

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Between two looks at the files.
CHECK_INTERVAL_S = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[T]):
    """What some files say, as of at most CHECK_INTERVAL_S ago. Any thread may ask.

    A file that has become unreadable or wrong is logged once and changes nothing: the last good
    state holds.

    Args:
        files: that `read` reads: their paths, by what errors call them, such as a configuration's
            key; those with an empty path are not there.
        read: makes the value of them; raises ConfigError or OSError.

    Attributes:
        version: grows with each change.

    Raises:
        ConfigError: they cannot be read now.
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
        """The value of the moment."""
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
                _log.error("files have changed and cannot be used, the old ones hold: %s", said)
            return
        # Taken as of before they were read: what changed meanwhile is read again.
        self._stamp, self._value, self._problem = stamp, value, ""
        self.version += 1
        files = ",".join(self._files.values())
        _log.info("files have changed and are used", extra={"files": files})

    def _unreadable(self, error: OSError) -> str:
        found = {n: path for n, path in self._files.items() if path == error.filename}
        told = " and ".join(f"{name}: {path}" for name, path in (found or self._files).items())
        return f"{told} cannot be read: {error.strerror or error}"

    def _stamped(self) -> _Stamp:
        found = [os.stat(path) for path in self._files.values()]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


def watched_secret(path: str, key: str) -> WatchedFiles[str]:
    """The key or token in a file, as `read_secret` reads it.

    Args:
        path: of the file.
        key: the configuration's, which names it.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    return WatchedFiles({key: path}, lambda: read_secret(path, key))


def read_secret(path: str, key: str) -> str:
    """The key or token in a file, between whatever blanks.

    Raises:
        ConfigError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
    except UnicodeDecodeError:
        text = ""
    if not is_secret(text):
        raise ConfigError(f"{key}: {path} must hold {SECRETS}")
    return text
