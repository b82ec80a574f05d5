"""The limit of open files as a limit of connections, because each connection is a file."""

from __future__ import annotations

import resource


def connection_limit(wanted: int) -> int:
    """Returns `wanted`, but at most 3/4 of RLIMIT_NOFILE; the rest is for other files."""
    return min(wanted, max(1, open_file_limit() * 3 // 4))


def open_file_limit() -> int:
    """Returns the number of files that this process may open (RLIMIT_NOFILE)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit
