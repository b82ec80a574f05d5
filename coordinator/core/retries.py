"""Recognizes submissions that repeat a refused one, so that each request counts as demand once."""

from __future__ import annotations

from collections import deque

from baton.coordinator.state.requests import Submission

# A repetition that comes this many seconds after it was due counts as a new request.
_REMEMBERED_S = 120.0
# Different requests, and refusals of equal requests, that are remembered at most.
_MAX_REQUESTS, _MAX_EQUAL = 4096, 64


class Retries:
    """Remembers requests that were refused with a retry time.

    Clients may submit a refused request again under another ID, so a submission repeats a refused
    one if it has the same tenant, prompt and parameters, and comes when the retry was due or later.
    Earlier ones are equal requests of their own, for example several samples of one prompt. Equal
    requests that come later cannot be told from retries: of such requests, the demand is
    underestimated while some of them are refused.
    """

    def __init__(self) -> None:
        # Times at which retries are due, by tenant and digest; the latest refusal comes last.
        self._due: dict[tuple[str, int], deque[float]] = {}

    def repeats(self, submission: Submission, now: float) -> bool:
        """Whether a submission repeats a refused one, which is then forgotten."""
        if not self._due:
            return False
        key = submission.tenant, submission.digest
        due = self._due.get(key)
        if due is None:
            return False
        while due and due[0] + _REMEMBERED_S < now:
            due.popleft()
        does_repeat = bool(due) and due[0] <= now
        if does_repeat:
            due.popleft()
        if not due:
            del self._due[key]
        return does_repeat

    def refused(self, submission: Submission, retry_after_s: float, now: float) -> None:
        """Remembers that a submission was refused and may come again after `retry_after_s`."""
        key = submission.tenant, submission.digest
        due = self._due.pop(key, None)
        if due is None:
            due = deque(maxlen=_MAX_EQUAL)
        due.append(now + retry_after_s)
        self._due[key] = due
        while len(self._due) > _MAX_REQUESTS or self._is_over(next(iter(self._due)), now):
            del self._due[next(iter(self._due))]

    def _is_over(self, key: tuple[str, int], now: float) -> bool:
        return self._due[key][-1] + _REMEMBERED_S < now
