"""Estimates how many of the assigned outputs of an elastic cell decode at the same time."""

from __future__ import annotations

from baton.coordinator.routing.choices import PlacementSample

# Weight of the latest placement in the running means.
_WEIGHT = 0.03
# Number of placements before which all outputs count: short outputs are the first ones to end, so
# at first all outputs seem to be short.
_LEAST_PLACEMENTS = 100
# At least this share of the assigned outputs counts: the prompts of a burst may end together.
_LEAST = 0.6
# Time to compute a prompt, as a share of the time to decode its output. Below the first number,
# the prompts that wait begin to decode together. From the second on, they begin one after the
# other, while earlier outputs end.
_SHORT_PROMPT, _LONG_PROMPT = 0.08, 0.12
# Predicted time until the first token, as a share of the time until it is due. Below the first
# number, prompts have time enough beside decodes, and longer steps would gain nothing. From the
# second on, they need workers without decodes.
_EARLY, _URGENT = 0.2, 0.4


class WaitingOutputs:
    """Running means over the latest placements.

    An output is assigned to a decode worker when its prompt is placed. If prompts are long, many
    outputs wait there for their prompts, and others end before these begin. If all of them counted,
    outputs would take more workers than they need; fewer workers would then compute prompts, and
    even more outputs would wait.
    """

    def __init__(self) -> None:
        self._num_placements = 0
        self._decoding = 1.0
        self._prompt_share = self._due_share = 0.0

    def add(self, sample: PlacementSample) -> None:
        """Counts the placement of a request that begins."""
        self._num_placements += 1
        if sample.num_assigned:
            decoding = sample.num_decoding / sample.num_assigned
            self._decoding += _WEIGHT * (decoding - self._decoding)
        self._prompt_share += _WEIGHT * (min(1.0, sample.prompt_share) - self._prompt_share)
        self._due_share += _WEIGHT * (min(1.0, sample.due_share) - self._due_share)

    @property
    def counted_share(self) -> float:
        """Share of the assigned outputs that steps are predicted with."""
        if self._num_placements < _LEAST_PLACEMENTS:
            return 1.0
        is_long = _between(self._prompt_share, _SHORT_PROMPT, _LONG_PROMPT)
        is_urgent = _between(self._due_share, _EARLY, _URGENT)
        return 1 - is_long * is_urgent * (1 - max(_LEAST, self._decoding))


def _between(value: float, low: float, high: float) -> float:
    """Where a value lies between two numbers, from 0 to 1."""
    return max(0.0, min(1.0, (value - low) / (high - low)))
