"""How much longer waits turn out than they were foreseen."""

from __future__ import annotations

from baton.coordinator.telemetry.recent_values import RecentValues

# So many of the latest waits were no longer than what is reckoned with: who is let in is in time.
_SHARE = 0.995
# Nor is more reckoned with than this: an incident that made everybody late is soon over, and those
# late are among the latest for longer.
_MAX_RATIO = 4.0


class WaitCorrection:
    """By what waits that are foreseen are multiplied: as nearly all of the latest turned out.

    As in conformal prediction: Vovk, Gammerman, Shafer, 2005.

    Args:
        window: how many of the latest count.
    """

    __slots__ = ("_ratios",)

    def __init__(self, window: int) -> None:
        self._ratios = RecentValues[float](window)

    @property
    def value(self) -> float:
        """From 1 to 4; 1 until a wait has turned out."""
        ratios = self._ratios
        return min(max(1.0, ratios.quantile(_SHARE)), _MAX_RATIO) if len(ratios) else 1.0

    def turned_out(self, waited_s: float, foreseen_s: float) -> None:
        """A wait is over, or has lasted for so long already."""
        self._ratios.add(waited_s / foreseen_s)
