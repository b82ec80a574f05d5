"""This process's stdout and stderr, written by threads, so that a paused reader blocks nothing.

A pager that does not read, a terminal after Ctrl-S or any other full pipe blocks a write until
the reader goes on. An event loop that writes by itself would stop meanwhile, with all its streams.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, TextIO

# Most characters that wait for the reader; when there are more, the oldest are dropped.
MAX_WAITING_CHARS = 2**20
# Longest wait at the end of a process for the reader.
FLUSH_TIMEOUT_S = 2.0


def _note(num_lines: int) -> str:
    return f"{num_lines} lines dropped\n"


class OutputStream:
    """Standard output or standard error. Any thread may use it.

    The caller itself writes the text to a stream that is not a file (in tests), and where no
    thread can help: in a forked child, after `atexit` has run, or if no thread can be started.

    Args:
        name: Name of the stream in `sys`.

    Attributes:
        note: Makes the text that tells the reader how many lines were dropped.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name, self._pid = name, os.getpid()
        self.note: Callable[[int], str] = _note
        # Guards the attributes below.
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._num_chars = self._num_dropped = 0
        self._is_writing = self._is_closed = False
        self._thread: threading.Thread | None = None
        # Only the thread uses this: whether the latest text ended a line.
        self._is_at_line_start = True

    def write(self, text: str) -> None:
        """Writes text in the order of the calls; never blocks on a pipe or terminal.

        Beyond MAX_WAITING_CHARS the oldest text is dropped: the latest may tell why the process
        ends. Errors are ignored, because a closed stream must not end the process.
        """
        if not text:
            return
        if self._descriptor() is None or self._is_closed or os.getpid() != self._pid:
            self._write_directly(text)
            return
        with self._changed:
            if has_thread := self._has_thread():
                self._keep(text)
        if not has_thread:
            self._write_directly(text)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Waits until all text is written; returns whether that took at most `timeout_s`."""
        if os.getpid() != self._pid:
            # The parent's thread writes what waits; its lock may be held here for ever.
            return True
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._is_writing, timeout_s
            )

    def _has_thread(self) -> bool:
        """Starts the thread at the first call; returns False while it cannot be started."""
        if self._thread is None:
            # A daemon, because a reader may never read again.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
            atexit.register(self._close)
        return True

    def _keep(self, text: str) -> None:
        self._waiting.append(text)
        self._num_chars += len(text)
        while self._num_chars > MAX_WAITING_CHARS and len(self._waiting) > 1:
            oldest = self._waiting.popleft()
            self._num_chars -= len(oldest)
            self._num_dropped += max(1, oldest.count("\n"))
        self._changed.notify_all()

    def _close(self) -> None:
        self.flush()
        self._is_closed = True

    def _stream(self) -> TextIO | None:
        # None if it was closed before the start, contrary to its declared type.
        stream: TextIO | None = getattr(sys, self._name)
        return stream

    def _descriptor(self) -> int | None:
        """File descriptor of the stream; None if it is closed or not a file."""
        stream = self._stream()
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                return stream.fileno()
        return None

    def _write_directly(self, text: str) -> None:
        stream = self._stream()
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
                stream.flush()

    # ---- In the thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                self._is_writing = True
                num_dropped, self._num_dropped = self._num_dropped, 0
                text = self._waiting.popleft()
                self._num_chars -= len(text)
            if num_dropped:
                line_end = "" if self._is_at_line_start else "\n"
                text = f"{line_end}{self.note(num_dropped)}{text}"
            self._is_at_line_start = text.endswith("\n")
            self._write(text)

    def _write(self, text: str) -> None:
        """Writes to the descriptor, because a blocked write must not hold the stream's own lock.

        Python ends with a fatal error if a thread holds that lock at the exit.
        """
        descriptor, stream = self._descriptor(), self._stream()
        if descriptor is None or stream is None:
            return
        rest = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
        with contextlib.suppress(OSError, ValueError):
            while rest:
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except BlockingIOError:
                    # Another process has made the shared pipe or terminal non-blocking.
                    poll = select.poll()
                    poll.register(descriptor, select.POLLOUT)
                    poll.poll()


stdout = OutputStream("stdout")
stderr = OutputStream("stderr")


def flush() -> None:
    """Waits at most FLUSH_TIMEOUT_S for each of both streams."""
    stdout.flush()
    stderr.flush()
