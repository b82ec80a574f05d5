"""The SQLite database in the directory of one gateway process, used from one thread.

The database has prompts, results, and the credentials with which unfinished batches are submitted.
Its directory is therefore readable by its owner only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import ParamSpec, TypeVar

from baton.runtime.closing import AsyncClosing, Closing
from baton.runtime.config_error import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

_KEY = "http.batches.dir"
_DATABASE, _LOCK = "batches.sqlite", "lock"
# Changes with the schema.
_VERSION = 2
# Changes a database of version 1.
_FROM_VERSION_1 = """
ALTER TABLE lines ADD COLUMN model_number INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN line_bytes INTEGER NOT NULL DEFAULT 0;
"""
# The write-ahead log is truncated to this after a checkpoint.
_MAX_LOG_BYTES = 64 * 2**20


class Database(Closing):
    """An open database; no other process can open it.

    Args:
        directory: Made if it does not exist.

    Raises:
        ConfigError: The directory cannot be used, or another process uses it.
    """

    def __init__(self, directory: str) -> None:
        self._path = path = Path(directory)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(path)
        except OSError as error:
            raise ConfigError(f"{_KEY}: cannot use {directory}: {error.strerror}") from None
        try:
            self._connection = _connected(path)
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise ConfigError(f"{_KEY}: cannot use {path / _DATABASE}: {error}") from None
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commits at the end of the `with` block; an exception undoes all changes."""
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            # SQLite may have undone the changes itself.
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    @property
    def num_bytes(self) -> int:
        """Size of the content; the file may be larger."""
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._page_bytes

    @property
    def num_free_bytes(self) -> int:
        """Free space of the disk and inside the database."""
        inside = self._pragma("freelist_count") * self._page_bytes
        return shutil.disk_usage(self._path).free + inside

    @property
    def _page_bytes(self) -> int:
        return self._pragma("page_size")

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])


def _locked(path: Path) -> int:
    """Returns the open lock file; the kernel frees it when this process ends in any way."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise ConfigError(
            f"{_KEY}: {path} is used by another gateway process ({holder or 'unknown'}); every "
            "gateway process needs a directory of its own"
        ) from None
    except OSError:
        os.close(lock)
        raise
    # Only the error above needs the ID: on a full disk the gateway starts without it.
    with contextlib.suppress(OSError):
        os.truncate(lock, 0)
        os.write(lock, f"pid {os.getpid()}\n".encode())
    return lock


def _connected(path: Path) -> sqlite3.Connection:
    file = path / _DATABASE
    # SQLite would make the file readable by others.
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing. A power failure may undo the latest results, but not a
        # part of a transaction: these lines run again.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
        # Deleted credentials do not stay in free space.
        connection.execute("PRAGMA secure_delete = FAST")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version in (0, 1):
            schema = resources.files(__package__).joinpath("schema.sql").read_text("utf-8")
            changes = schema if version == 0 else _FROM_VERSION_1
            connection.executescript(
                f"BEGIN IMMEDIATE; {changes} PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        elif version != _VERSION:
            raise ConfigError(
                f"{_KEY}: {file} has version {version}; this Baton needs {_VERSION}: use another "
                "directory"
            )
    except BaseException:
        connection.close()
        raise
    return connection


class DatabaseThread(AsyncClosing):
    """Calls functions that use the database in one thread, one after the other.

    The event loop does not wait for the disk. Calls that wait are bounded by the callers: a
    request or a running line has one at a time.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def aclose(self) -> None:
        """Waits for the calls that have begun."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function in the thread. If this call is cancelled, the function may still run."""
        run = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, run)
