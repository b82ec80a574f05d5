"""How many tokens a request will produce, guessed from what others of its lane produced."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable

from baton.coordinator.state.requests import Submission
from baton.coordinator.telemetry.recent_values import RecentValues


class OutputLengths:
    """A running quantile of output lengths, by lane.

    Args:
        quantile: 0 to 1: the share of requests that should produce no more than expected.
        window: outputs remembered per lane.
        initial_tokens: expected until a lane has its first output.
    """

    def __init__(self, quantile: float = 0.9, window: int = 512, initial_tokens: int = 256) -> None:
        if not 0 <= quantile <= 1:
            raise ValueError(f"quantile is {quantile}; must be 0 to 1")
        if window < 1:
            raise ValueError(f"window is {window}; must be at least 1")
        self._quantile, self._window, self._initial_tokens = quantile, window, initial_tokens
        self._recent: dict[Hashable, RecentValues[int]] = {}

    def observe(self, lane: Hashable, num_tokens: int) -> None:
        """Takes in the length of an output of this lane that ended by itself."""
        recent = self._recent.get(lane)
        if recent is None:
            recent = self._recent[lane] = RecentValues(self._window)
        recent.add(num_tokens)

    def mean(self, lane: Hashable, max_tokens: int) -> float:
        """Mean length of the lane's outputs; until there is one, at most `max_tokens`.

        What requests allow has shortened those outputs already. To cut the mean by it once more
        expects too few in sum: the fewer, the closer requests keep to what they allow.
        """
        recent = self._recent.get(lane)
        if recent is None:
            return min(self._initial_tokens, max_tokens)
        return recent.total / len(recent)

    def expected(self, lane: Hashable, max_tokens: int, num_known_tokens: int = 0) -> int:
        """Output tokens still to come; at least 1, at most what `max_tokens` leaves.

        Args:
            lane: of the request.
            max_tokens: of the whole output.
            num_known_tokens: that exist already: only longer outputs are looked at; where there
                are none, as many are expected again.
        """
        recent = self._recent.get(lane)
        ordered = recent.ordered if recent is not None else []
        longer = len(ordered) - (first := bisect_right(ordered, num_known_tokens))
        if longer:
            total = ordered[first + min(longer - 1, int(self._quantile * longer))]
        else:
            total = max(2 * num_known_tokens, self._initial_tokens)
        return max(1, min(total, max_tokens) - num_known_tokens)


def max_output_tokens(submission: Submission, max_model_len: int) -> int:
    """How many tokens the whole output can have: max_tokens, or what the context leaves.

    Args:
        submission: the request.
        max_model_len: 0 while it is not known; then max_tokens counts, 0 without.
    """
    sampling = submission.sampling
    if not max_model_len:
        return sampling.max_tokens
    room = max(0, max_model_len - len(submission.prompt_token_ids))
    return min(sampling.max_tokens, room) if sampling.HasField("max_tokens") else room
