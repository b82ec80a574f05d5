"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

# The files of cgroup v2, as a container sees its own group.
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns the memory that is free on the host and within the container's limit, in bytes.

    Args:
        cgroup: Directory of the cgroup v2 files.
    """
    free = psutil.virtual_memory().available
    try:
        limit, used = (
            (cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current")
        )
    except OSError:
        return free
    if not (limit.isdecimal() and used.isdecimal()):
        # "max" stands for no limit.
        return free
    return min(free, max(0, int(limit) - int(used)))
