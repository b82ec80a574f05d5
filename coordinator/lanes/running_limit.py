"""How many requests of a lane may run at a time, and how many do."""

from __future__ import annotations

import math


class RunningLimit:
    """Counts a lane's running requests against `lanes.<lane>.max_running`.

    More requests may run than the limit allows: interrupted requests do not wait for it, and after
    a restart of the coordinator, workers continue the requests that they had.

    Args:
        max_running: Number of requests that may run at a time; None: no limit.

    Attributes:
        max_running: As above.
        num_running: Number of requests that are dispatched and have not ended.
    """

    __slots__ = ("max_running", "num_running")

    def __init__(self, max_running: int | None) -> None:
        self.max_running = max_running
        self.num_running = 0

    @property
    def num_free(self) -> float:
        """Number of requests that may be dispatched now; infinite without a limit."""
        if self.max_running is None:
            return math.inf
        return max(0, self.max_running - self.num_running)

    @property
    def is_reached(self) -> bool:
        """Whether no request may be dispatched now."""
        return self.num_free == 0
