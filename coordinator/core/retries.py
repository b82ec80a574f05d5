"""Recognizes submissions that repeat a refused one, so that each request counts as demand once."""

from __future__ import annotations

from dataclasses import dataclass

from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.requests import Submission

# A repetition that comes this many seconds after it was due counts as a new request.
_REMEMBERED_S = 120.0
# Different requests that are remembered at most.
_MAX_REQUESTS = 4096

# Lane, tenant and digest of a request.
_Key = tuple[Lane, str, int]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The latest refusal of a request.

    Attributes:
        due_at: Time at which the retry is due, at most _REMEMBERED_S after the refusal.
        is_only: Whether no equal request came between the refusal and that time.
    """

    due_at: float
    is_only: bool


class Retries:
    """Remembers requests that were refused with a retry time.

    Clients may submit a refused request again under another ID, so a submission repeats a refused
    one if it has the same lane, tenant, prompt and parameters, and comes when the retry was due or
    later. An equal request that comes earlier is a request of its own, for example another sample
    of the prompt, or one of a load test with a single prompt. From then on, retries and new
    requests cannot be told apart, and all of these equal requests count, until none was refused
    for _REMEMBERED_S: too much demand does less harm than too little.
    """

    def __init__(self) -> None:
        # The latest refusal comes last.
        self._refusals: dict[_Key, _Refusal] = {}

    def repeats(self, submission: Submission, now: float) -> bool:
        """Whether a submission repeats a refused one, which is then forgotten."""
        self._forget_old(now)
        if not self._refusals:
            return False
        key = _key(submission)
        refusal = self._refusals.get(key)
        if refusal is None or not refusal.is_only:
            return False
        if now < refusal.due_at:
            self._refusals[key] = _Refusal(refusal.due_at, is_only=False)
            return False
        del self._refusals[key]
        return now <= refusal.due_at + _REMEMBERED_S

    def refused(self, submission: Submission, retry_after_s: float, now: float) -> None:
        """Remembers that a submission was refused and may come again after `retry_after_s`."""
        key = _key(submission)
        # An earlier refusal that is still remembered was of an equal request.
        earlier = self._refusals.pop(key, None)
        is_only = earlier is None or earlier.due_at + _REMEMBERED_S < now
        due_at = now + min(retry_after_s, _REMEMBERED_S)
        self._refusals[key] = _Refusal(due_at, is_only)
        if len(self._refusals) > _MAX_REQUESTS:
            del self._refusals[next(iter(self._refusals))]

    def _forget_old(self, now: float) -> None:
        """Forgets the oldest refusals, so that submissions after an overload are not hashed."""
        while self._refusals:
            oldest = next(iter(self._refusals))
            if now <= self._refusals[oldest].due_at + _REMEMBERED_S:
                break
            del self._refusals[oldest]


def _key(submission: Submission) -> _Key:
    return submission.lane, submission.tenant, submission.digest
