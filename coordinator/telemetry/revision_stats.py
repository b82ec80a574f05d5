"""Latencies and errors of the requests of one revision, for the comparison of two revisions."""

from __future__ import annotations

from collections import Counter

from google.rpc import code_pb2

from baton.coordinator.state.lanes import LANES
from baton.coordinator.telemetry.sketch import Sketch


class LaneLatency:
    """Of one lane: times to first token, and gaps between outputs."""

    __slots__ = ("itl", "ttft")

    def __init__(self) -> None:
        self.ttft, self.itl = Sketch(), Sketch()


class Side:
    """One revision, since both are compared.

    Attributes:
        errors: requests that failed after they had been let in, by the code's name.
        num_recoveries: attempts that were lost and went on.
        num_moved: requests that went on with the stable revision, nothing of them having been sent.
    """

    __slots__ = ("errors", "lanes", "num_admitted", "num_ended", "num_moved", "num_recoveries")

    def __init__(self) -> None:
        self.num_admitted = self.num_ended = self.num_recoveries = self.num_moved = 0
        self.errors: Counter[str] = Counter()
        self.lanes = {lane: LaneLatency() for lane in LANES}

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    def ended(self, error_code: int) -> None:
        self.num_ended += 1
        if error_code:
            self.errors[code_pb2.Code.Name(error_code).lower()] += 1
