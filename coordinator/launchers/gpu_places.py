"""Assigns GPUs to local workers; otherwise all vLLM processes on a host use the first GPUs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.runtime.visible_gpus import VISIBLE, visible_gpus

_DEVICE = re.compile(r"nvidia\d+")


def gpus_here(
    environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> list[str]:
    """GPUs of this process: those in CUDA_VISIBLE_DEVICES, or all that it has device files for.

    CUDA numbers them from 0. A container with some of a host's GPUs has their device files under
    the host's numbers.
    """
    if (visible := visible_gpus(environment)) is not None:
        return visible
    found = [path for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name)]
    return [str(index) for index in range(len(found))]


class GpuPlaces:
    """Assigns GPUs to workers when they start; the GPUs with the fewest workers come first.

    Workers share GPUs only if there are too few. Then vLLM's `gpu_memory_utilization` must limit
    the memory of each worker.

    Args:
        gpus: GPU names in the form of CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._taken: dict[str, tuple[str, ...]] = {}

    def take(self, worker_id: str, number: int) -> dict[str, str]:
        """Environment of a worker with this number of GPUs.

        Empty if the host has fewer GPUs; vLLM then reports the error.
        """
        if not 0 < number <= len(self._gpus):
            return {}
        workers = Counter(gpu for gpus in self._taken.values() for gpu in gpus)
        chosen = sorted(self._gpus, key=lambda gpu: workers[gpu])[:number]
        self._taken[worker_id] = tuple(gpu for gpu in self._gpus if gpu in chosen)
        return {VISIBLE: ",".join(self._taken[worker_id])}

    def give_back(self, worker_id: str) -> None:
        """Frees the GPUs of a worker that has ended; ignores unknown workers."""
        self._taken.pop(worker_id, None)
