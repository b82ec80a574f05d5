"""The time of the event that the core handles."""

from __future__ import annotations


class CoreClock:
    """Time by the core's clock, for the parts of one core.

    Only `Core.handle` sets it, once per event. An object that has the clock takes no time as an
    argument. Policies, values, timers and statistics have no clock: they get the time as `now`.

    Attributes:
        now: Time of the event, in seconds of a clock that never goes back.
    """

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
