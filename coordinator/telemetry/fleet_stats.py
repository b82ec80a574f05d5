"""Latencies and errors of the requests of one fleet, for the comparison of two fleets."""

from __future__ import annotations

from collections import Counter

from google.rpc import code_pb2

from baton.coordinator.state.lanes import LANES
from baton.coordinator.telemetry.sketch import Sketch


class LaneLatency:
    """Sketches of one lane's times to first token and gaps between outputs."""

    __slots__ = ("itl", "ttft")

    def __init__(self) -> None:
        self.ttft, self.itl = Sketch(), Sketch()


class FleetStats:
    """Counters and latencies of one fleet since the comparison of two fleets began.

    Attributes:
        errors: Admitted requests that failed, by the error code's name in lower case.
        num_recoveries: Lost attempts whose requests were tried again.
        num_moved: Requests without any output that moved from this fleet to the stable fleet.
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
