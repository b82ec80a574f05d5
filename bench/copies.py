"""Counts the bytes that a process copies in user space, with a preloaded library.

Not counted: copies by the kernel (sockets), copies of less than 1 KiB, and loops that copy without
calling memcpy or memmove.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("count_copies.c")
COMPILE_TIMEOUT_S = 60.0


class CopyCounter:
    """Reads the counts of processes that were started with `environment`."""

    def __init__(self, directory: Path) -> None:
        """Uses a directory with the compiled library; call `compiled` instead."""
        self._directory = directory
        self.environment = {
            "LD_PRELOAD": str(directory / "count_copies.so"),
            "COUNT_COPIES_DIR": str(directory),
        }

    def copied_bytes(self, pid: int) -> int:
        """Returns how many bytes a running process has copied since its start."""
        (count,) = struct.unpack("=Q", (self._directory / str(pid)).read_bytes())
        return int(count)


@contextlib.contextmanager
def compiled() -> Iterator[CopyCounter | None]:
    """Compiles the library into a temporary directory; yields None if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="bench-copies-") as name:
        counter = CopyCounter(Path(name))
        command = [compiler, "-shared", "-fPIC", "-O1", "-fno-builtin", "-o"]
        command += [counter.environment["LD_PRELOAD"], str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)
        yield counter


@contextlib.contextmanager
def in_environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for the processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
