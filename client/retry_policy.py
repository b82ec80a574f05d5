"""When and how often the client retries requests that were refused or lost their session."""

from __future__ import annotations

from google.rpc import code_pb2

from baton.client import errors
from baton.runtime.errors import RemoteError

# Limit of resumed requests that were sent and not yet accepted, so that a coordinator that has just
# restarted is not flooded.
MAX_UNACCEPTED = 64
# A request may lose this many sessions in a row without a new token. A request that loses more may
# be the cause of the losses.
MAX_LOSSES_WITHOUT_PROGRESS = 8
_FIRST_BACKOFF_S, _MAX_BACKOFF_S, _BACKOFF_GROWTH = 0.1, 2.0, 1.25
# Transient refusals of a resumed request: the coordinator has not yet noticed that the old session
# is lost (ALREADY_EXISTS), or workers are not attached again (UNAVAILABLE).
_TRANSIENT = (code_pb2.ALREADY_EXISTS, code_pb2.UNAVAILABLE)


def backoff_s(num_failures: int, random: float) -> float:
    """Returns the backoff before the next attempt: 0.1 s, growing by 25 % per failure up to 2 s.

    With this growth, the client finds a restarted coordinator within about 25 % of the outage time.

    Args:
        num_failures: Number of consecutive failures before the latest one.
        random: Random number in [0, 1); subtracts up to half as jitter.
    """
    longest = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * _BACKOFF_GROWTH ** min(num_failures, 16))
    return longest * (1 - random / 2)


def resume_retry_delay_s(error: RemoteError, num_refusals: int, random: float) -> float | None:
    """Returns the delay before a refused resumed request is sent again; None: do not retry.

    Args:
        error: Error of the refusal.
        num_refusals: Number of consecutive refusals of this request before this one.
        random: Random number in [0, 1), for jitter.
    """
    if error.code == code_pb2.RESOURCE_EXHAUSTED:
        return error.retry_after_s
    return backoff_s(num_refusals, random) if error.code in _TRANSIENT else None


def new_request_retry_delay_s(error: RemoteError, random: float) -> float | None:
    """Returns the delay before a refused new request is sent again; None: do not retry.

    Args:
        error: Error of the refusal.
        random: Random number in [0, 1); adds up to 10 % of jitter.
    """
    retry_after_s = error.retry_after_s
    return retry_after_s * (1 + random / 10) if retry_after_s is not None else None


def resume_failed(cause: RemoteError, within_s: float | None = None) -> RemoteError:
    """Returns the error of a request that could not be resumed, with the code of its cause."""
    within = f" within {within_s:g} s" if within_s is not None else ""
    message = f"the request lost its session and could not be resumed{within}: {cause}"
    return errors.make(cause.code, message, cause.details())
