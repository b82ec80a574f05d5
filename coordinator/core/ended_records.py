"""Makes the record of a request that has ended."""

from __future__ import annotations

from google.rpc import code_pb2

from baton.coordinator.state.latency_targets import LatencyTargets
from baton.coordinator.state.requests import EndedRequest, Request
from baton.coordinator.state.slow_steps import Stall
from baton.coordinator.telemetry.budget import latency_budget
from baton.runtime import errors
from baton.runtime.enum_names import enum_name
from baton.v1 import common_pb2


def ended_request(
    request: Request,
    now: float,
    targets: LatencyTargets,
    stalls: tuple[Stall, ...],
    finish_reason: common_pb2.FinishReason.ValueType,
    error: errors.BatonError | None,
    *,
    session_lost: bool,
) -> EndedRequest:
    """Returns the record of a request that has ended.

    Args:
        request: A request in a terminal state.
        now: Time by the core's clock.
        targets: Latency targets of requests that name none.
        stalls: Longest gaps of the request.
        finish_reason: Finish reason; UNSPECIFIED if the request failed.
        error: Reason of the failure; None: the request did not fail.
        session_lost: Whether the request was cancelled because its client session was lost.
    """
    return EndedRequest(
        request_id=request.id,
        state=request.state,
        lane=request.submission.lane,
        tenant=request.submission.tenant,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=len(request.token_ids),
        attempt=request.attempt,
        attempt_number=request.attempt_number,
        prefill_worker_id=request.prefill[0] if request.prefill is not None else "",
        decode_worker_id=request.decode[0] if request.decode is not None else "",
        arrived_at=request.submission.arrived_at,
        ended_at=now,
        budget=latency_budget(request, now),
        finish_reason=finish_reason,
        error_code=error.code if error is not None else 0,
        error=str(error) if error is not None else "",
        session=request.submission.to.session,
        lost_digest=request.submission.digest if session_lost else None,
        ttft_target_s=targets.ttft_s(request.submission),
        itl_target_s=targets.itl_s(request.submission),
        stalls=stalls,
        placement_prediction=request.placement_prediction,
        prompt_sources=request.prompt_sources,
        route=request.submission.route,
        revision=request.fleet.name,
    )


def outcome(record: EndedRequest) -> str:
    """Returns the finish reason of a request, or the name of its error code, in lower case."""
    if record.error_code:
        return str(code_pb2.Code.Name(record.error_code)).lower()
    return enum_name(common_pb2.FinishReason.DESCRIPTOR, record.finish_reason)
