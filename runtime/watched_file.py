"""Files that are read again when they change: certificates, keys, tokens."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
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
        paths: of the files that `read` reads.
        read: makes the value of them; raises ConfigError or OSError.

    Attributes:
        version: grows with each change.

    Raises:
        ConfigError: they cannot be read now.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        self._paths, self._read = [path for path in paths if path], read
        self._lock = threading.Lock()
        self.version = 1
        try:
            self._stamp = self._stamped()
            self._value = read()
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
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
            if self._problem != str(error):
                self._problem = str(error)
                _log.error("files have changed and cannot be used, the old ones hold: %s", error)
            return
        # Taken as of before they were read: what changed meanwhile is read again.
        self._stamp, self._value, self._problem = stamp, value, ""
        self.version += 1
        _log.info("files have changed and are used", extra={"files": ",".join(self._paths)})

    def _stamped(self) -> _Stamp:
        found = [os.stat(path) for path in self._paths]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


def read_secret(path: str, key: str) -> str:
    """The key or token in a file, between whatever blanks.

    Raises:
        ConfigError: it holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
    except UnicodeDecodeError:
        text = ""
    if not is_secret(text):
        raise ConfigError(f"{key}: {path} must hold {SECRETS}")
    return text
