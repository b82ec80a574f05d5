"""Assigns GPUs to local workers; otherwise all vLLM processes on a host use the first GPUs."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.runtime.process.visible_gpus import VISIBLE, visible_gpus

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
    the memory of each worker. The GPUs of a worker that is ending are free for others, which must
    wait until it has ended, because its processes may hold memory until then.

    Args:
        gpus: GPU names in the form of CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._taken: dict[str, tuple[str, ...]] = {}
        # Workers that are ending; each event is set when the worker has ended.
        self._ending: dict[str, asyncio.Event] = {}

    def take(self, worker_id: str, number: int) -> dict[str, str]:
        """Environment of a worker with this number of GPUs.

        Empty if the host has fewer GPUs; vLLM then reports the error.
        """
        if not 0 < number <= len(self._gpus):
            return {}
        staying, ending = Counter[str](), Counter[str]()
        for other, gpus in self._taken.items():
            (ending if other in self._ending else staying).update(gpus)
        chosen = sorted(self._gpus, key=lambda gpu: (staying[gpu], ending[gpu]))[:number]
        self._taken[worker_id] = tuple(gpu for gpu in self._gpus if gpu in chosen)
        return {VISIBLE: ",".join(self._taken[worker_id])}

    def ends(self, worker_id: str) -> None:
        """Marks a worker as ending; ignores workers without GPUs."""
        if worker_id in self._taken:
            self._ending.setdefault(worker_id, asyncio.Event())

    def blocked_by(self, worker_id: str) -> list[str]:
        """IDs of the workers that are ending and still hold GPUs of this worker."""
        own = set(self._taken.get(worker_id, ()))
        return [
            other
            for other in self._ending
            if other != worker_id and not own.isdisjoint(self._taken[other])
        ]

    async def unblocked(self, worker_id: str) -> None:
        """Waits until the workers that block this worker now have ended."""
        for ended in [self._ending[other] for other in self.blocked_by(worker_id)]:
            await ended.wait()

    def give_back(self, worker_id: str) -> None:
        """Frees the GPUs of a worker that has ended; ignores unknown workers."""
        self._taken.pop(worker_id, None)
        if (ended := self._ending.pop(worker_id, None)) is not None:
            ended.set()
