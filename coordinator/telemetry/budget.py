"""Computes the latency budget of a request: the time that it spent in each stage.

The coordinator's clock gives the limits of the spans; the workers report durations inside them.
"""

from __future__ import annotations

from typing import TypeAlias

from baton.coordinator.state.requests import Request, StageSpan
from baton.coordinator.telemetry.gaps import median_us
from baton.v1 import common_pb2

# A stage, its duration in microseconds as a worker measured it, and the worker's ID.
_Part: TypeAlias = "tuple[common_pb2.Stage.ValueType, int, str]"
# Stages before a request's first attempt.
_BEFORE_DISPATCH = (common_pb2.STAGE_TOKENIZE, common_pb2.STAGE_QUEUE)


class _Timeline:
    """Consecutive stages without gaps, in whole microseconds since the request's arrival.

    `now_us` is the end of the last stage, `end_us` the end of the whole time.
    """

    def __init__(self, request: Request, ended_at: float) -> None:
        self._arrived_at = request.submission.arrived_at
        self.stages = list(request.past_stages)
        last = self.stages[-1] if self.stages else None
        self.now_us = 0 if last is None else last.start_us + last.duration_us
        self.end_us = self._since_arrival_us(ended_at)

    def moment_us(self, at: float | None) -> int:
        """Microseconds since the arrival; None: the time has not come, so it is the end."""
        if at is None:
            return self.end_us
        at_us = self._since_arrival_us(at)
        return at_us if at_us < self.end_us else self.end_us

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
                self._append(stage, cut_us, worker_id)
                left_us -= cut_us
        if left_us > 0:
            self._append(rest, left_us, worker)

    def _append(self, stage: common_pb2.Stage.ValueType, duration_us: int, worker_id: str) -> None:
        stages = self.stages
        if stages and (last := stages[-1]).stage == stage and last.worker_id == worker_id:
            stages[-1] = last._replace(duration_us=last.duration_us + duration_us)
        else:
            stages.append(StageSpan(stage, self.now_us, duration_us, worker_id))
        self.now_us += duration_us

    def _since_arrival_us(self, at: float) -> int:
        since_us = round((at - self._arrived_at) * 1e6)
        return since_us if since_us > 0 else 0


def latency_budget(request: Request, ended_at: float) -> common_pb2.LatencyBudget:
    """Returns the stages in order, without overlaps, with durations that sum to the total.

    The coordinator sees four moments of an attempt: dispatch, end of the prompt's computation
    (usually with the first token), first output of the decode worker, and end. Between two of them,
    the durations reported by workers come first and the remainder is STAGE_NETWORK. If no worker
    reported on a span, the whole span belongs to the stage that the request was in.
    """
    timeline = _timeline(request, ended_at)
    gaps_us = request.gaps_us.tolist()
    first_token_at = request.first_token_at
    budget = common_pb2.LatencyBudget(
        ttft_us=timeline.moment_us(first_token_at) if first_token_at is not None else 0,
        total_us=timeline.end_us,
        itl_p50_us=median_us(gaps_us),
        itl_max_us=max(gaps_us, default=0),
    )
    # Adding in place avoids the copy that assigning a list of messages would make.
    add = budget.stages.add
    for stage, start_us, duration_us, worker_id in timeline.stages:
        add(stage=stage, start_us=start_us, duration_us=duration_us, worker_id=worker_id)
    return budget


def stages_until(request: Request, now: float) -> list[StageSpan]:
    """Returns the stages from the arrival of a request until now, in order, without gaps."""
    return _timeline(request, now).stages


def ttft_stages(request: Request, now: float) -> list[tuple[common_pb2.Stage.ValueType, float]]:
    """Returns the stages of the time to first token, in seconds; the first token comes at `now`.

    The time of an attempt that was lost before the first token counts as lost with it, whatever
    the attempt did.
    """
    stages = stages_until(request, now)
    if not request.interruptions:
        return [(one.stage, one.duration_us / 1e6) for one in stages]
    interruption = request.interruptions[-1].stage
    return [
        (one.stage if one.stage in _BEFORE_DISPATCH else interruption, one.duration_us / 1e6)
        for one in stages
    ]


def _timeline(request: Request, ended_at: float) -> _Timeline:
    timeline = _Timeline(request, ended_at)
    if request.interruptions:
        # Stages before the latest interruption are in `past_stages`.
        interruption = request.interruptions[-1]
        timeline.extend(timeline.moment_us(interruption.ended_at), [], interruption.stage, "")
        runs = interruption.ended_at is not None
    else:
        timeline.extend(timeline.moment_us(request.submitted_at), [], common_pb2.STAGE_TOKENIZE, "")
        timeline.extend(timeline.moment_us(request.dispatched_at), [], common_pb2.STAGE_QUEUE, "")
        runs = request.dispatched_at is not None
    if runs:
        _attempt(timeline, request)
    return timeline


def _attempt(timeline: _Timeline, request: Request) -> None:
    """Adds the stages of the latest attempt, from its dispatch or from the end of an interruption.

    Timings of stages that lie in the interruption are left out.
    """
    prefill = request.prefill[0] if request.prefill is not None else ""
    decode = request.decode[0] if request.decode is not None else ""
    if request.prefill is not None:
        prompt_done_at, timings = request.prompt_done_at, request.prefill_timings
        worker, queue = prefill, common_pb2.STAGE_PREFILL_QUEUE
    else:
        prompt_done_at, timings = request.decoding_at, request.decode_timings
        worker, queue = decode, common_pb2.STAGE_DECODE_QUEUE
    end_us = timeline.moment_us(prompt_done_at)
    if timings is None:
        timeline.extend(end_us, [], common_pb2.STAGE_PREFILL, worker)
    else:
        parts = [
            (queue, timings.queue_us, worker),
            (common_pb2.STAGE_PREFILL, timings.run_us, worker),
        ]
        timeline.extend(end_us, parts, common_pb2.STAGE_NETWORK, "")
    if prompt_done_at is None:
        return
    if request.handoff_id and request.decode is not None:
        _handoff(timeline, request, decode)
    timeline.extend(timeline.end_us, [], common_pb2.STAGE_DECODE, decode or prefill)


def _handoff(timeline: _Timeline, request: Request, decode: str) -> None:
    """From the computed prompt to the decode worker's first output."""
    end_us, timings = timeline.moment_us(request.decoding_at), request.decode_timings
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
