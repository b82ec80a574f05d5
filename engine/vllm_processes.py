"""Finds and kills vLLM's processes, and finds the shared memory that killed processes leave."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

# Pattern of the names that vLLM's CPU communicator gives.
_RANK_SEGMENTS = "/dev/shm/vllm_dist_*"


def rank_segments(processes: Sequence[psutil.Process]) -> set[Path]:
    """Returns the shared memory of CPU ranks, which ranks unlink unless they are killed."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            found.update(Path(mapped.path) for mapped in process.memory_maps())
    return {path for path in found if path.match(_RANK_SEGMENTS)}


def kill_vllm(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Kills those of the processes that belong to vLLM."""
    engine = [process for process in processes if _is_vllm(process)]
    for process in engine:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return engine


def _is_vllm(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        line = " ".join(process.cmdline())
        # Python's resource tracker is spared: it ends after the last of them, and frees their
        # leaks.
        tracker = "resource_tracker" in line
        return not tracker and ("VLLM" in line or "multiprocessing" in line)
    return False
