"""How many bytes a process copies in user space: counted by a library preloaded into it.

Not counted: what the kernel copies (sockets), copies of less than 1 KiB, and loops that copy
without calling memcpy or memmove.
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
    """The library, and the counts of processes that were started with its environment."""

    def __init__(self, directory: Path) -> None:
        """Takes over a directory with the compiled library; use `compiled`."""
        self._directory = directory
        self.environment = {
            "LD_PRELOAD": str(directory / "count_copies.so"),
            "COUNT_COPIES_DIR": str(directory),
        }

    def copied_bytes(self, pid: int) -> int:
        """By a running process, since its start."""
        (count,) = struct.unpack("=Q", (self._directory / str(pid)).read_bytes())
        return int(count)


@contextlib.contextmanager
def compiled() -> Iterator[CopyCounter | None]:
    """Compiles the library for as long as it is used; None where there is no C compiler."""
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
    """For the processes that are started inside."""
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
