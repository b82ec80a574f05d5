"""Corrects predicted waits by how much longer recent waits were than predicted."""

from __future__ import annotations

from baton.coordinator.telemetry.recent_values import RecentValues

# Quantile of the recent ratios that a prediction must cover: an admitted request should be in time.
_QUANTILE = 0.995
# Largest correction. After an incident that made many requests late, their ratios stay in the
# window for longer than the incident lasts.
_MAX_RATIO = 4.0


class WaitCorrection:
    """Correction factor for predicted waits, from the ratios of actual to predicted wait.

    As in conformal prediction: Vovk, Gammerman, Shafer, "Algorithmic Learning in a Random World"
    (2005).

    Args:
        window: Number of recent ratios that count.
    """

    __slots__ = ("_ratios",)

    def __init__(self, window: int) -> None:
        self._ratios = RecentValues[float](window)

    @property
    def value(self) -> float:
        """The 99.5th percentile of the recent ratios, limited to 1 to 4; 1 without any ratio."""
        ratios = self._ratios
        return min(max(1.0, ratios.quantile(_QUANTILE)), _MAX_RATIO) if len(ratios) else 1.0

    def observe(self, waited_s: float, predicted_s: float) -> None:
        """Adds a wait that is over, or that has already lasted `waited_s`."""
        self._ratios.add(waited_s / predicted_s)
