"""Estimates how many of the assigned outputs of an elastic cell decode at the same time."""

from __future__ import annotations

from collections.abc import Iterable

from baton.coordinator.routing.worker_load import WorkerLoad

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

    def observe(
        self, loads: Iterable[WorkerLoad], *, prompt_s: float, output_s: float, due_share: float
    ) -> None:
        """Records a placement.

        Args:
            loads: the workers that are compared.
            prompt_s: seconds to compute the prompt on a worker without other work.
            output_s: expected seconds to decode the output.
            due_share: predicted time until the first token, as a share of the time until it is due.
        """
        self._num_placements += 1
        num_assigned = num_decoding = 0
        for load in loads:
            num_assigned += load.num_decodes
            num_decoding += load.decodes.num_arrived
        if num_assigned:
            self._decoding += _WEIGHT * (num_decoding / num_assigned - self._decoding)
        self._prompt_share += _WEIGHT * (min(1.0, prompt_s / output_s) - self._prompt_share)
        self._due_share += _WEIGHT * (min(1.0, due_share) - self._due_share)

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
