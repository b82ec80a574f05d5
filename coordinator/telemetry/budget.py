"""Computes the latency budget of a request: the time that it spent in each stage.

The coordinator's clock gives the limits of the spans; the workers report durations inside them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeAlias

from baton.coordinator.state.requests import Interruption, Request
from baton.coordinator.telemetry.gaps import median_us
from baton.v1 import common_pb2

# A stage, its duration in microseconds as a worker measured it, and the worker's ID.
_Part: TypeAlias = "tuple[common_pb2.Stage.ValueType, int, str]"
# Stages on the worker that computes the prompt.
_PREFILL_STAGES = (common_pb2.STAGE_PREFILL_QUEUE, common_pb2.STAGE_PREFILL)


@dataclass(slots=True)
class _Span:
    """Mutable form of a StageTime; updating a protobuf message takes several times as long."""

    stage: common_pb2.Stage.ValueType
    start_us: int
    duration_us: int
    worker_id: str


class _Timeline:
    """Consecutive stages without gaps, in whole microseconds since the request's arrival.

    `now_us` is the end of the last stage.
    """

    def __init__(self, request: Request) -> None:
        self._arrived_at = request.submission.arrived_at
        self.stages: list[_Span] = []
        self.now_us = 0

    def since_arrival_us(self, at: float) -> int:
        since_us = round((at - self._arrived_at) * 1e6)
        return since_us if since_us > 0 else 0

    def extend(
        self, end_us: int, parts: list[_Part], rest: common_pb2.Stage.ValueType, worker: str
    ) -> None:
        """Divides the time up to `end_us` among parts, in order; `rest` gets the remainder.

        The durations of parts come from the workers' clocks. If they exceed the time up to
        `end_us`, the last parts are shortened.
        """
        left_us = end_us - self.now_us
        for stage, duration_us, worker_id in parts:
            cut_us = duration_us if duration_us < left_us else left_us
            if cut_us > 0:
                _append(self.stages, stage, self.now_us, cut_us, worker_id)
                self.now_us += cut_us
                left_us -= cut_us
        if left_us > 0:
            _append(self.stages, rest, self.now_us, left_us, worker)
            self.now_us = end_us


def latency_budget(request: Request, ended_at: float) -> common_pb2.LatencyBudget:
    """Returns the stages in order, without overlaps, with durations that sum to the total.

    The coordinator sees four moments: dispatch, first token, second token and end. Between two of
    them, the durations reported by workers come first and the remainder is STAGE_NETWORK. If no
    worker reported on a span, the whole span belongs to the stage that the request was in.
    """
    timeline = _Timeline(request)
    prefill = request.prefill[0] if request.prefill is not None else ""
    decode = request.decode[0] if request.decode is not None else ""
    total_us = timeline.since_arrival_us(ended_at)

    def moment(at: float | None) -> int:
        return total_us if at is None else min(timeline.since_arrival_us(at), total_us)

    timeline.extend(moment(request.submitted_at), [], common_pb2.STAGE_TOKENIZE, "")
    timeline.extend(moment(request.dispatched_at), [], common_pb2.STAGE_QUEUE, "")
    if request.dispatched_at is not None:
        _first_token(timeline, request, prefill, decode, moment(request.first_token_at))
    if request.first_token_at is not None:
        if request.handoff_id and request.decode is not None:
            _handoff(timeline, request, decode, moment(request.decoding_at))
        timeline.extend(total_us, [], common_pb2.STAGE_DECODE, decode or prefill)
    gaps_us = request.gaps_us.tolist()
    budget = common_pb2.LatencyBudget(
        ttft_us=moment(request.first_token_at) if request.first_token_at is not None else 0,
        total_us=total_us,
        itl_p50_us=median_us(gaps_us),
        itl_max_us=max(gaps_us, default=0),
    )
    # Adding in place avoids the copy that assigning a list of messages would make.
    add = budget.stages.add
    for one in _with_interruptions(timeline, request, total_us):
        add(
            stage=one.stage,
            start_us=one.start_us,
            duration_us=one.duration_us,
            worker_id=one.worker_id,
        )
    return budget


def ttft_stages(request: Request, now: float) -> list[tuple[common_pb2.Stage.ValueType, float]]:
    """Returns the stages of the time to first token, in seconds; the first token comes at `now`."""
    timeline = _Timeline(request)
    prefill = request.prefill[0] if request.prefill is not None else ""
    decode = request.decode[0] if request.decode is not None else ""
    end_us = timeline.since_arrival_us(now)
    timeline.extend(
        min(timeline.since_arrival_us(request.submitted_at), end_us),
        [],
        common_pb2.STAGE_TOKENIZE,
        "",
    )
    if request.dispatched_at is None:
        timeline.extend(end_us, [], common_pb2.STAGE_QUEUE, "")
    else:
        timeline.extend(
            min(timeline.since_arrival_us(request.dispatched_at), end_us),
            [],
            common_pb2.STAGE_QUEUE,
            "",
        )
        _first_token(timeline, request, prefill, decode, end_us)
    return [
        (one.stage, one.duration_us / 1e6) for one in _with_interruptions(timeline, request, end_us)
    ]


def _with_interruptions(timeline: _Timeline, request: Request, total_us: int) -> list[_Span]:
    """Returns the stages; times without a worker become STAGE_RECOVERY or STAGE_PARKED.

    A stage before such a time gets the worker of its own attempt, because the timeline names only
    the workers of the latest attempt.
    """
    interruptions = [
        (
            one.stage,
            timeline.since_arrival_us(one.began_at),
            total_us if one.ended_at is None else timeline.since_arrival_us(one.ended_at),
        )
        for one in request.interruptions
    ]
    if not interruptions:
        return timeline.stages
    cuts = sorted({at for _, begin_us, end_us in interruptions for at in (begin_us, end_us)})
    found: list[_Span] = []
    for stage in timeline.stages:
        end_us = stage.start_us + stage.duration_us
        edges = [stage.start_us, *(at for at in cuts if stage.start_us < at < end_us), end_us]
        for start_us, until_us in itertools.pairwise(edges):
            interruption = next(
                (
                    kind
                    for kind, begin_us, ended_us in interruptions
                    if begin_us <= start_us and until_us <= ended_us
                ),
                None,
            )
            kind, worker = stage.stage, stage.worker_id
            if interruption is not None:
                kind, worker = interruption, ""
            if worker:
                later = (
                    one
                    for one in request.interruptions
                    if timeline.since_arrival_us(one.began_at) >= until_us
                )
                worker = _worker_before(next(later, None), kind) or worker
            _append(found, kind, start_us, until_us - start_us, worker)
    return found


def _worker_before(interruption: Interruption | None, stage: common_pb2.Stage.ValueType) -> str:
    """ID of a stage's worker in the attempt that this interruption ended; empty if unknown."""
    if interruption is None:
        return ""
    keys = interruption.prefill, interruption.decode
    first, other = keys if stage in _PREFILL_STAGES else reversed(keys)
    key = first or other
    return key[0] if key is not None else ""


def _append(
    stages: list[_Span],
    stage: common_pb2.Stage.ValueType,
    start_us: int,
    duration_us: int,
    worker_id: str,
) -> None:
    if stages and (last := stages[-1]).stage == stage and last.worker_id == worker_id:
        last.duration_us += duration_us
    else:
        stages.append(_Span(stage, start_us, duration_us, worker_id))


def _first_token(
    timeline: _Timeline, request: Request, prefill: str, decode: str, end_us: int
) -> None:
    """From dispatch to the first token: on the prefill worker, or on the decode worker alone."""
    if request.prefill is not None:
        timings, worker, queue = request.prefill_timings, prefill, common_pb2.STAGE_PREFILL_QUEUE
    else:
        timings, worker, queue = request.decode_timings, decode, common_pb2.STAGE_DECODE_QUEUE
    if timings is None:
        timeline.extend(end_us, [], common_pb2.STAGE_PREFILL, worker)
        return
    parts = [
        (queue, timings.queue_us, worker),
        (common_pb2.STAGE_PREFILL, timings.run_us, worker),
    ]
    timeline.extend(end_us, parts, common_pb2.STAGE_NETWORK, "")


def _handoff(timeline: _Timeline, request: Request, decode: str, end_us: int) -> None:
    """From the first token to the decode worker's first output."""
    timings = request.decode_timings
    if timings is None:
        timeline.extend(end_us, [], common_pb2.STAGE_HANDOFF, decode)
        return
    exposed_us = request.exposed_us if request.exposed_us is not None else timings.handoff_wait_us
    parts = [
        (common_pb2.STAGE_HANDOFF, exposed_us, decode),
        (common_pb2.STAGE_DECODE_QUEUE, max(0, timings.queue_us - timings.handoff_wait_us), decode),
    ]
    # Network time comes before the decode worker's run, so that the run joins STAGE_DECODE.
    run_from_us = max(timeline.now_us, end_us - timings.run_us)
    timeline.extend(run_from_us, parts, common_pb2.STAGE_NETWORK, "")
    timeline.extend(end_us, [], common_pb2.STAGE_DECODE, decode)
