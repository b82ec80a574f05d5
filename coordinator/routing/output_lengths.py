"""Predicts the output length of a request from recent outputs of the same lane."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable

from baton.coordinator.state.requests import Submission
from baton.coordinator.telemetry.recent_values import RecentValues


class OutputLengths:
    """A running quantile of output lengths, by lane.

    Args:
        quantile: Share of requests (0 to 1) whose output should not exceed the prediction.
        window: Number of recent outputs kept per lane.
        initial_tokens: Prediction for a lane without any finished output.
    """

    def __init__(self, quantile: float = 0.9, window: int = 512, initial_tokens: int = 256) -> None:
        if not 0 <= quantile <= 1:
            raise ValueError(f"quantile is {quantile}; must be 0 to 1")
        if window < 1:
            raise ValueError(f"window is {window}; must be at least 1")
        self._quantile, self._window, self._initial_tokens = quantile, window, initial_tokens
        self._recent: dict[Hashable, RecentValues[int]] = {}

    def observe(self, lane: Hashable, num_tokens: int) -> None:
        """Records the length of a finished output of this lane."""
        recent = self._recent.get(lane)
        if recent is None:
            recent = self._recent[lane] = RecentValues(self._window)
        recent.add(num_tokens)

    def mean(self, lane: Hashable, max_tokens: int) -> float:
        """Mean length of the lane's outputs; `initial_tokens` or `max_tokens` before the first.

        The mean is not limited to `max_tokens`: the recent outputs were already cut at the limits
        of their requests, and a second cut would make the expected total too low.
        """
        mean = self.recent_mean(lane, 1)
        return min(self._initial_tokens, max_tokens) if mean is None else mean

    def mean_of_running(self, lane: Hashable, max_tokens: int) -> float:
        """Mean whole length of the lane's outputs that run at a moment; else as `mean`.

        It exceeds the mean of all outputs: a long output runs for longer, so more of the outputs
        that run at a moment are long.
        """
        recent = self._recent.get(lane)
        if recent is None or not recent.total:
            return self.mean(lane, max_tokens)
        return recent.size_biased_mean

    def recent_mean(self, lane: Hashable, least: int) -> float | None:
        """Mean length of the lane's outputs; None: fewer than `least` have ended."""
        recent = self._recent.get(lane)
        if recent is None or len(recent) < least:
            return None
        return recent.total / len(recent)

    def expected(self, lane: Hashable, max_tokens: int, num_known_tokens: int = 0) -> int:
        """Predicted number of further output tokens; at least 1 and within `max_tokens`.

        Args:
            lane: lane of the request.
            max_tokens: limit of the whole output.
            num_known_tokens: tokens generated so far. The prediction uses only recent outputs
                longer than this; if there are none, it expects the output to double.
        """
        recent = self._recent.get(lane)
        ordered = recent.ordered if recent is not None else []
        longer = len(ordered) - (first := bisect_right(ordered, num_known_tokens))
        if longer:
            total = ordered[first + min(longer - 1, int(self._quantile * longer))]
        else:
            total = max(2 * num_known_tokens, self._initial_tokens)
        return max(1, min(total, max_tokens) - num_known_tokens)

    def goes_on(
        self, lane: Hashable, max_tokens: int, num_known_tokens: int = 0
    ) -> Callable[[int], float]:
        """Returns a function: the probability that an output has more than so many further tokens.

        Args:
            lane: lane of the request.
            max_tokens: limit of the whole output.
            num_known_tokens: tokens generated so far. Only recent outputs longer than this count;
                if there are none, the output surely reaches what `expected` predicts.
        """
        recent = self._recent.get(lane)
        ordered = recent.ordered if recent is not None else []
        longer = len(ordered) - bisect_right(ordered, num_known_tokens)
        num_left = max(1, max_tokens - num_known_tokens)
        if not longer:
            num_left = min(num_left, self.expected(lane, max_tokens, num_known_tokens))

        def share(num_further: int) -> float:
            if num_further >= num_left:
                return 0.0
            if not longer:
                return 1.0
            return (len(ordered) - bisect_right(ordered, num_known_tokens + num_further)) / longer

        return share


def max_output_tokens(submission: Submission, max_model_len: int) -> int:
    """Limit of the whole output in tokens: max_tokens or the rest of the context, if smaller.

    Args:
        submission: the request.
        max_model_len: context length of the model; 0 if unknown: then the limit is max_tokens
            (0 if the request has none).
    """
    sampling = submission.sampling
    if not max_model_len:
        return sampling.max_tokens
    room = max(0, max_model_len - len(submission.prompt_token_ids))
    return min(sampling.max_tokens, room) if sampling.HasField("max_tokens") else room
