"""Carries the targets of steps from the worker's process to that of vLLM's scheduler.

The worker writes three numbers into a file beside its control socket. The scheduler maps the file,
so that reading the targets costs nothing in a step. A scheduler that reads while the worker writes
may see two of the new numbers and one old one, for one step.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from baton.runtime.process.worker_directory import STEP_TARGETS
from baton.runtime.steps.step_budget import StepTargets

# itl_s (infinite: no target), longest_gap_s, prompt_step_s.
_NUMBERS = struct.Struct("<ddd")


def write_targets(socket_path: str, targets: StepTargets) -> None:
    """Sets the targets of the next step; makes the file if there is none.

    Args:
        socket_path: Control socket of the worker's transfer service.
        targets: The targets.
    """
    itl_s = math.inf if targets.itl_s is None else targets.itl_s
    data = _NUMBERS.pack(itl_s, targets.longest_gap_s, targets.prompt_step_s)
    path = Path(socket_path).with_name(STEP_TARGETS)
    if path.exists():
        with path.open("r+b") as file:
            file.write(data)
    else:
        # A scheduler never maps an incomplete file.
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.replace(path)


def make_targets_file(socket_path: str) -> None:
    """Makes the file without an ITL target, unless the worker has already written targets."""
    if not Path(socket_path).with_name(STEP_TARGETS).exists():
        write_targets(socket_path, StepTargets())


class TargetsReader:
    """Reads the targets that the worker has written last.

    Args:
        socket_path: Control socket of the worker's transfer service.

    Raises:
        OSError: The worker has not made the file.
    """

    def __init__(self, socket_path: str) -> None:
        with Path(socket_path).with_name(STEP_TARGETS).open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), _NUMBERS.size, access=mmap.ACCESS_READ)
        self._data, self._targets = b"", StepTargets()

    def read(self) -> StepTargets:
        """Returns the current targets."""
        if (data := self._mapped[:]) != self._data:
            itl_s, longest_gap_s, prompt_step_s = _NUMBERS.unpack(data)
            self._data = data
            self._targets = StepTargets(
                None if math.isinf(itl_s) else itl_s, longest_gap_s, prompt_step_s
            )
        return self._targets
