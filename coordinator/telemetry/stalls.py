"""Finds the longest gaps between a stream's tokens and their causes."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from baton.coordinator.state.requests import Interruption, Request, WorkerKey
from baton.coordinator.state.slow_steps import Cause, SlowStep, Stall
from baton.runtime.names import request_name_parts
from baton.v1 import common_pb2

# Maximum number of stalls reported per request.
MAX_STALLS = 8
# Tolerance for matching the end of a gap to a slow step. Each gap is rounded to a microsecond, and
# the end of a gap is a sum of rounded gaps.
_SLACK_S = 0.002


_CAUSES = {
    common_pb2.STAGE_RECOVERY: Cause.RECOVERY,
    common_pb2.STAGE_PARKED: Cause.PARKED,
}


def stalls(
    request: Request,
    target_s: float | None,
    slow_steps: Callable[[WorkerKey | None], Iterable[SlowStep]],
) -> tuple[Stall, ...]:
    """Returns a request's longest gaps over its target, in order of time.

    Args:
        request: a request with or without tokens.
        target_s: target for gaps between tokens; None: no target, so no gap is a stall.
        slow_steps: returns the recent slow steps of a worker; none if it is not attached.
    """
    if target_s is None or request.first_token_at is None or not request.gaps_us:
        return ()
    limit_us = target_s * 1e6
    if max(request.gaps_us) <= limit_us:
        return ()
    arrived_at = request.submission.arrived_at
    first_us = round((request.first_token_at - arrived_at) * 1e6)
    found = []
    for number, end_us, gap_us in _longest(request.gaps_us, limit_us, first_us):
        ended_at = arrived_at + end_us / 1e6
        # The attempt that the gap belongs to: one that a later interruption ended, or the latest.
        attempt = next(
            (one for one in request.interruptions if one.began_at >= ended_at - _SLACK_S), request
        )
        worker = attempt.decode
        stall = Stall(end_us - gap_us, gap_us, Cause.UNKNOWN, worker[0] if worker else "")
        interrupted = _interruption(request.interruptions, ended_at - gap_us / 1e6, ended_at)
        if interrupted is not None:
            stall = stall._replace(cause=_CAUSES[interrupted.stage], worker_id="")
        elif number == 0 and attempt.handoff_id:
            stall = stall._replace(cause=Cause.HANDOFF)
        else:
            steps = slow_steps(worker)
            step = next((one for one in steps if abs(one.at - ended_at) <= _SLACK_S), None)
            if step is not None:
                tenant, by = "", ""
                if step.by is not None and step.by != request.key:
                    tenant, by = request_name_parts(step.by)
                stall = stall._replace(
                    cause=step.cause,
                    by_request_id=by,
                    by_tenant=tenant,
                    num_tokens=step.num_tokens,
                    num_requests=step.num_requests,
                )
        found.append(stall)
    return tuple(found)


def _longest(gaps_us: array[int], limit_us: float, first_us: int) -> Iterator[tuple[int, int, int]]:
    """Yields index, end and length of each of the longest gaps over the limit, in order of time.

    Args:
        gaps_us: lengths of all gaps between the request's tokens, in microseconds.
        limit_us: gaps up to this length are left out.
        first_us: time of the first token, since the request's arrival, like the returned ends.
    """
    over = [number for number, gap_us in enumerate(gaps_us) if gap_us > limit_us]
    if len(over) > MAX_STALLS:
        over = sorted(heapq.nlargest(MAX_STALLS, over, key=gaps_us.__getitem__))
    wanted = iter(over)
    following = next(wanted, None)
    for number, end_us in enumerate(accumulate(gaps_us, initial=first_us), start=-1):
        if number == following:
            yield number, end_us, gaps_us[number]
            following = next(wanted, None)
            if following is None:
                return


def _interruption(
    interruptions: Iterable[Interruption], began_at: float, ended_at: float
) -> Interruption | None:
    """The first interruption that overlaps the gap; None if there is none."""
    for one in interruptions:
        if one.began_at < ended_at and (one.ended_at is None or one.ended_at > began_at):
            return one
    return None
