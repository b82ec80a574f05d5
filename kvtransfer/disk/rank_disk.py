"""Reads and writes one rank's files, in threads of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.kvtransfer.disk import block_file
from baton.kvtransfer.disk.block_file import Identity, WrongFile
from baton.kvtransfer.disk.directory import remove_empty, temporary_file
from baton.kvtransfer.disk.orders import (
    BlockName,
    BlockSelection,
    Delete,
    DeleteSelected,
    DiskReport,
    Load,
    Order,
    Write,
)

_log = logging.getLogger(__name__)

# Threads that load: enough to keep a fast disk busy while checksums are computed.
_NUM_LOADERS = 2
_WRITER_NICE = 5


class RankDisk:
    """Carries out the orders of DiskIndex in one rank; the connector in the rank owns it.

    Writes and deletions are done in their order by one thread, loads by others. Only the first
    thread makes and removes directories; the search for blocks (directory.scan) also removes empty
    ones, while nothing is written. The index bounds the number of orders. A disk that fails is not
    used any more.

    Args:
        directory: The rank's directory.
        namespace: Namespace that the headers of files must name (block_file.Identity).
        rank: The rank.
        pages: Returns a block of host memory, one buffer per layer, by its index.
    """

    def __init__(
        self,
        directory: Path,
        namespace: bytes,
        rank: int,
        pages: Callable[[int], Sequence[memoryview]],
    ) -> None:
        self._directory, self._namespace, self._rank = directory, namespace, rank
        self._pages = pages
        self._lock = threading.Lock()
        self._report = DiskReport()
        self._off = ""
        # Loads under way, and the time up to which their duration has been reported.
        self._num_loading, self._timed_until = 0, 0.0
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._changes: queue.SimpleQueue[Write | Delete | DeleteSelected | None] = (
            queue.SimpleQueue()
        )
        # The threads do not keep a process alive whose disk hangs.
        self._threads = [
            threading.Thread(target=self._change, name="baton-disk-write", daemon=True),
            *(
                threading.Thread(target=self._load, name=f"baton-disk-load-{n}", daemon=True)
                for n in range(_NUM_LOADERS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, orders: Sequence[Order]) -> None:
        """Begins the orders of a step."""
        for order in orders:
            if isinstance(order, Load):
                self._loads.put(order)
            else:
                self._changes.put(order)

    def take_report(self) -> DiskReport | None:
        """Returns what ended since the last call; None for nothing."""
        with self._lock:
            report, self._report = self._report, DiskReport()
        return report if report else None

    def close(self, timeout_s: float) -> None:
        """Finishes the orders, for at most this long, and ends the threads."""
        until = time.monotonic() + timeout_s
        self._changes.put(None)
        for _ in range(_NUM_LOADERS):
            self._loads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    # ---- Threads

    def _change(self) -> None:
        # On CPUs the thread shares the rank's cores, and a write can wait longer than a step. The
        # kernel applies this to the thread only.
        os.nice(_WRITER_NICE)
        while (order := self._changes.get()) is not None:
            if isinstance(order, Delete):
                for block in order.blocks:
                    self._delete(block)
                    self._note_deletion()
                for group in {block.path.parent for block in order.blocks}:
                    remove_empty(self._directory / group)
                    self._note_deletion()
                continue
            done = False
            if isinstance(order, DeleteSelected):
                done = self._delete_selected(order.selection)
            elif not self._off:
                try:
                    self._write(order)
                    done = True
                except OSError as error:
                    self._turn_off(error)
            self._end(order.order_id, done)

    def _load(self) -> None:
        while (order := self._loads.get()) is not None:
            done, num_wrong, num_bytes = False, 0, 0
            self._begin_load()
            if not self._off:
                try:
                    num_bytes = self._read(order)
                    done = True
                except WrongFile as error:
                    _log.debug("a KV block on disk is not used: %s", error)
                    num_wrong = 1
                    self._delete(order.block)
                    if not self._directory.is_dir():
                        self._turn_off(error)
                except OSError as error:
                    self._turn_off(error)
            self._end_load(num_bytes)
            self._end(order.order_id, done, num_wrong)

    def _write(self, order: Write) -> None:
        path = self._directory / order.block.path
        temporary = temporary_file(self._directory)
        try:
            block_file.write(path, temporary, self._identity(order.block), self._pages(order.slot))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _read(self, order: Load) -> int:
        """Loads a block; returns its size in bytes."""
        path, pages = self._directory / order.block.path, self._pages(order.slot)
        block_file.read(path, self._identity(order.block), pages)
        # The next worker evicts by last use.
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return sum(len(page) for page in pages)

    def _begin_load(self) -> None:
        with self._lock:
            if not self._num_loading:
                self._timed_until = time.monotonic()
            self._num_loading += 1

    def _end_load(self, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            # Time in which several threads load counts once.
            self._report.load_s += now - self._timed_until
            self._report.loaded_bytes += num_bytes
            self._num_loading, self._timed_until = self._num_loading - 1, now

    def _delete(self, block: BlockName) -> None:
        try:
            (self._directory / block.path).unlink(missing_ok=True)
        except OSError as error:
            self._turn_off(error)

    def _delete_selected(self, selection: BlockSelection) -> bool:
        """Deletes files, also while the disk is not used; returns whether none of them is left.

        A load that runs meanwhile has opened its file before; its result is not used.
        """
        try:
            if selection.owner is not None:
                paths = [self._directory / selection.owner]
            else:
                paths = [one for one in self._directory.iterdir() if one.is_dir()]
            # The index knows no files of an earlier worker before it has found them all.
            selection = selection.with_followers(
                (block.hash, block.parent)
                for group in self._groups(paths)
                for _, block in _blocks_in(group)
            )
            for group in self._groups(paths):
                _delete_in(group, selection)
            for path in paths if selection.hashes is None else ():
                _remove_tree(path)
        except OSError as error:
            self._turn_off(error)
            # Without the directory there is no file.
            return not self._directory.exists()
        return True

    def _groups(self, owners: Sequence[Path]) -> Iterator[Path]:
        """Yields the groups of these owners, at most 256 of each, and notes each one's end."""
        for owner in owners:
            for group in _listed(owner) if owner.is_dir() else ():
                if group.is_dir():
                    yield group
                    self._note_deletion()

    def _note_deletion(self) -> None:
        """Shows that the disk does not hang, although an order takes long."""
        with self._lock:
            self._report.has_deleted = True

    def _identity(self, block: BlockName) -> Identity:
        return Identity(self._namespace, block.key, self._rank)

    def _turn_off(self, error: Exception) -> None:
        with self._lock:
            if not self._off:
                self._off = self._report.off = str(error) or type(error).__name__

    def _end(self, order_id: int, done: bool, num_wrong: int = 0) -> None:
        with self._lock:
            self._report.ended.append((order_id, done))
            self._report.num_wrong += num_wrong


def _blocks_in(group: Path) -> Iterator[tuple[Path, BlockName]]:
    """Yields the files of a group that are blocks."""
    for file in _listed(group):
        block = BlockName.parse(group.parent.name, group.name, file.name)
        if block is not None:
            yield file, block


def _delete_in(group: Path, selection: BlockSelection) -> None:
    """Deletes a group's files of a selection."""
    if selection.hashes is None:
        _remove_tree(group)
        return
    for file, block in _blocks_in(group):
        if selection.includes(block.hash, block.owner):
            file.unlink(missing_ok=True)
    remove_empty(group)


def _listed(path: Path) -> list[Path]:
    """Returns what a directory holds: nothing if the search for blocks has removed it."""
    try:
        return list(path.iterdir())
    except FileNotFoundError:
        return []


def _remove_tree(path: Path) -> None:
    """Removes a directory from which the search for blocks may remove files meanwhile.

    shutil.rmtree of Python 3.11 fails if a file is gone. Each try removes further files.
    """
    while path.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
