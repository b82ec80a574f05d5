"""The processes that vLLM starts, and what they leave when they are killed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

# As vLLM's CPU communicator names them.
_RANK_SEGMENTS = "/dev/shm/vllm_dist_*"


def rank_segments(processes: Sequence[psutil.Process]) -> set[Path]:
    """Shared memory through which CPU ranks add up: they unlink it unless they are killed."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            found.update(Path(mapped.path) for mapped in process.memory_maps())
    return {path for path in found if path.match(_RANK_SEGMENTS)}


def kill_vllm(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that are vLLM's, told to end at once."""
    engine = [process for process in processes if _is_vllm(process)]
    for process in engine:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return engine


def _is_vllm(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        line = " ".join(process.cmdline())
        # Python's resource tracker ends with the last of them, after it has freed what they leaked.
        tracker = "resource_tracker" in line
        return not tracker and ("VLLM" in line or "multiprocessing" in line)
    return False
