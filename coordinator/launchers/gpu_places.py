"""Which GPUs local workers get: left alone, every vLLM on a host takes the first ones."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.runtime.visible_gpus import VISIBLE, visible_gpus

_DEVICE = re.compile(r"nvidia(\d+)")


def gpus_here(
    environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> list[str]:
    """This process's GPUs: those that CUDA shows it, or all of this host."""
    if (visible := visible_gpus(environment)) is not None:
        return visible
    found = (_DEVICE.fullmatch(path.name) for path in devices.glob("nvidia*"))
    return [str(index) for index in sorted(int(one[1]) for one in found if one is not None)]


class GpuPlaces:
    """Deals GPUs out to workers as they are started, those that the fewest have first.

    So workers share GPUs only where there are too few of them; how much memory each may take is
    vLLM's `gpu_memory_utilization` then.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._taken: dict[str, tuple[str, ...]] = {}

    def take(self, worker_id: str, number: int) -> dict[str, str]:
        """The environment of a worker with so many GPUs.

        It is left alone where the host has fewer: vLLM says so.
        """
        if not 0 < number <= len(self._gpus):
            return {}
        workers = Counter(gpu for gpus in self._taken.values() for gpu in gpus)
        chosen = sorted(self._gpus, key=lambda gpu: workers[gpu])[:number]
        self._taken[worker_id] = tuple(gpu for gpu in self._gpus if gpu in chosen)
        return {VISIBLE: ",".join(self._taken[worker_id])}

    def give_back(self, worker_id: str) -> None:
        """The worker has ended; unknown ones are ignored."""
        self._taken.pop(worker_id, None)
