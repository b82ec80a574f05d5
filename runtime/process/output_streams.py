"""This process's stdout and stderr, written by threads, so that a paused reader blocks nothing.

A pager that does not read, a terminal after Ctrl-S or any other full pipe blocks a write until
the reader goes on. An event loop that writes by itself would stop meanwhile, with all its streams.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Literal, TextIO

# Most characters that wait for the reader; when there are more, the oldest are dropped.
MAX_WAITING_CHARS = 2**20
# Longest wait of a flush while the reader reads nothing, and longest wait in all.
FLUSH_TIMEOUT_S = 2.0
FLUSH_LIMIT_S = 4.0
# Lines that wait are written together, up to about this size: a pipe may mix larger writes with
# those of other processes.
_WRITE_BYTES = select.PIPE_BUF


def _note(num_lines: int) -> str:
    return f"{num_lines} lines dropped\n"


class OutputStream:
    """Standard output or standard error. Any thread may use it.

    The caller itself writes the text to a stream that is not a file (in tests), and where no
    thread can help: after `atexit` has run, or if no thread can be started. A forked child has a
    thread of its own from its first write; the parent writes all text from before the fork. Code
    that ends a process with os._exit must call `flush` before.

    Args:
        name: Name of the stream in `sys`.

    Attributes:
        note: Makes the text that tells the reader how many lines were dropped.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self.note: Callable[[int], str] = _note
        self._is_closed = False
        self.reset()

    def reset(self) -> None:
        """Forgets text that waits, and the thread; for a forked child, which has no such thread."""
        # Guards the attributes below. Another thread may have held the parent's lock in the fork.
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._num_chars = self._num_dropped = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None
        # When a flush has last given up; on the clock of time.monotonic().
        self._gave_up_at = 0.0
        # Only the thread sets these: whether the latest text ended a line, and when the reader or
        # the pipe has last taken text.
        self._is_at_line_start, self._written_at = True, 0.0

    def write(self, text: str) -> None:
        """Writes text in the order of the calls; never blocks on a pipe or terminal.

        Beyond MAX_WAITING_CHARS the oldest text is dropped: the latest may tell why the process
        ends. Errors are ignored, because a closed stream must not end the process.
        """
        if not text:
            return
        if self._descriptor() is None or self._is_closed:
            self._write_directly(text)
            return
        with self._changed:
            if has_thread := self._has_thread():
                self._keep(text)
        if not has_thread:
            self._write_directly(text)

    def flush(self, began_at: float | None = None) -> bool:
        """Waits until all text is written; returns whether it is.

        Gives up when the reader has read nothing for FLUSH_TIMEOUT_S, and after FLUSH_LIMIT_S; at
        once if an earlier flush has given up and the reader has read nothing since, or if one has
        taken FLUSH_LIMIT_S: a process that ends flushes several times.

        Args:
            began_at: Time from which the waiting counts, on the clock of time.monotonic(); None
                means now.
        """
        began_at = monotonic() if began_at is None else began_at
        with self._changed:
            while self._waiting or self._is_writing:
                if self._gave_up_at > self._written_at:
                    return False
                silent_at = max(began_at, self._written_at) + FLUSH_TIMEOUT_S
                left_s = min(silent_at, began_at + FLUSH_LIMIT_S) - monotonic()
                if left_s <= 0:
                    now = monotonic()
                    self._gave_up_at = math.inf if now >= began_at + FLUSH_LIMIT_S else now
                    return False
                self._changed.wait(left_s)
        return True

    def close(self) -> None:
        """Makes callers of `write` write by themselves from now on."""
        self._is_closed = True

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
        return True

    def _keep(self, text: str) -> None:
        self._waiting.append(text)
        self._num_chars += len(text)
        while self._num_chars > MAX_WAITING_CHARS and len(self._waiting) > 1:
            oldest = self._waiting.popleft()
            self._num_chars -= len(oldest)
            self._num_dropped += max(1, oldest.count("\n"))
        if not self._is_writing:
            self._changed.notify_all()

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
                if not self._waiting:
                    self._is_writing = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._waiting)
                self._is_writing = True
                num_dropped, self._num_dropped = self._num_dropped, 0
                text = self._take()
            if num_dropped:
                line_end = "" if self._is_at_line_start else "\n"
                text = f"{line_end}{self.note(num_dropped)}{text}"
            self._is_at_line_start = text.endswith("\n")
            self._write(text)

    def _take(self) -> str:
        """Takes the oldest text, up to _WRITE_BYTES characters unless the first part is longer."""
        parts = [self._waiting.popleft()]
        num_chars = len(parts[0])
        while self._waiting and num_chars + len(self._waiting[0]) <= _WRITE_BYTES:
            parts.append(self._waiting.popleft())
            num_chars += len(parts[-1])
        self._num_chars -= num_chars
        return "".join(parts)

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
                    # In parts: a blocked write returns only when all of it is written.
                    rest = rest[os.write(descriptor, rest[:_WRITE_BYTES]) :]
                    self._written_at = monotonic()
                except BlockingIOError:
                    # Another process has made the shared pipe or terminal non-blocking.
                    poll = select.poll()
                    poll.register(descriptor, select.POLLOUT)
                    poll.poll()


stdout = OutputStream("stdout")
stderr = OutputStream("stderr")


def flush() -> None:
    """Waits for both streams together, as OutputStream.flush does for one."""
    began_at = monotonic()
    stdout.flush(began_at)
    stderr.flush(began_at)


def _close() -> None:
    began_at = monotonic()
    for stream in (stdout, stderr):
        # While nothing reads, a caller that writes by itself would block.
        if stream.flush(began_at):
            stream.close()


atexit.register(_close)
os.register_at_fork(after_in_child=stdout.reset)
os.register_at_fork(after_in_child=stderr.reset)
