"""When and how often a request is tried again that was refused, or whose session was lost."""

from __future__ import annotations

from google.rpc import code_pb2

from baton.client import errors
from baton.runtime.errors import RemoteError

# Resubmissions that a coordinator has not accepted yet, at most: one that has just come back gets
# its requests in portions.
MAX_UNACCEPTED = 64
# Sessions that one request may lose in a row without a new token: it may be what ends them.
MAX_FRUITLESS_LOSSES = 8
_FIRST_BACKOFF_S, _MAX_BACKOFF_S, _BACKOFF_GROWTH = 0.1, 2.0, 1.25
# The old coordinator has not noticed yet that the old session is gone, or workers are not back.
_PASSING = (code_pb2.ALREADY_EXISTS, code_pb2.UNAVAILABLE)


def backoff_s(num_failures: int, random: float) -> float:
    """The pause before the next try: grows by a quarter each time, from 0.1 s to 2 s.

    So a coordinator that is back is found within a quarter of the time that it was away, about.

    Args:
        num_failures: in a row, before the one just seen.
        random: in [0, 1); takes away up to half, so that clients do not come back in step.
    """
    longest = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * _BACKOFF_GROWTH ** min(num_failures, 16))
    return longest * (1 - random / 2)


def retry_delay_s(error: RemoteError, num_refusals: int, random: float) -> float | None:
    """How long a refused resubmission waits before it is sent again; None: it never is.

    Args:
        error: with which the coordinator refused it.
        num_refusals: of this request in a row, before this one.
        random: as in `backoff_s`.
    """
    if error.code == code_pb2.RESOURCE_EXHAUSTED:
        return error.retry_after_s
    return backoff_s(num_refusals, random) if error.code in _PASSING else None


def later_s(error: RemoteError, random: float) -> float | None:
    """How long a new request waits that was refused before it is sent again; None: it never is.

    Args:
        error: with which the coordinator refused it.
        random: in [0, 1); adds up to a tenth, so that those refused together do not come together.
    """
    told_s = error.retry_after_s
    return told_s * (1 + random / 10) if told_s is not None else None


def not_resumed(cause: RemoteError, within_s: float | None = None) -> RemoteError:
    """The end of a request that could not be resumed: its cause's code and details."""
    within = f" within {within_s:g} s" if within_s is not None else ""
    message = f"the request lost its session and could not be resumed{within}: {cause}"
    return errors.make(cause.code, message, cause.details())
