"""Converts a request's latency budget into trace spans."""

from __future__ import annotations

from google.rpc import code_pb2

from baton.coordinator.state.requests import EndedRequest
from baton.runtime.enum_names import enum_name, lane_name
from baton.runtime.telemetry.tracing import Span
from baton.v1 import common_pb2


def request_span(record: EndedRequest, arrived_ns: int, kept: str = "") -> Span:
    """Creates a request's span, with one child per stage of its budget and one per stall.

    Args:
        record: record of an ended request.
        arrived_ns: time of arrival, in nanoseconds since 1970.
        kept: reason of tail sampling (see TailSampler); empty: not sampled.
    """
    budget = record.budget
    attributes: dict[str, str | int] = {
        "baton.request.id": record.request_id,
        "baton.request.attempt": record.attempt,
        "baton.lane": lane_name(record.lane),
        "baton.tenant": record.tenant,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "baton.ttft_us": budget.ttft_us,
    }
    if kept:
        attributes["baton.sampled"] = kept
    if record.finish_reason:
        attributes["baton.finish_reason"] = enum_name(
            common_pb2.FinishReason.DESCRIPTOR, record.finish_reason
        )
    if record.error_code:
        attributes["rpc.grpc.status_code"] = record.error_code
    children = [
        Span(
            f"request {enum_name(common_pb2.Stage.DESCRIPTOR, stage.stage)}",
            arrived_ns + stage.start_us * 1000,
            arrived_ns + (stage.start_us + stage.duration_us) * 1000,
            {"baton.worker.id": stage.worker_id} if stage.worker_id else {},
        )
        for stage in budget.stages
    ]
    children += [
        Span(
            "request stall",
            arrived_ns + stall.start_us * 1000,
            arrived_ns + (stall.start_us + stall.duration_us) * 1000,
            {
                "baton.stall.cause": stall.cause.name.lower(),
                "baton.worker.id": stall.worker_id,
                "baton.stall.by_request_id": stall.by_request_id,
                "baton.stall.by_tenant": stall.by_tenant,
            },
        )
        for stall in record.stalls
    ]
    error = ""
    if record.error_code:
        error = f"{code_pb2.Code.Name(record.error_code)}: {record.error}"
    end_ns = arrived_ns + budget.total_us * 1000
    return Span("request", arrived_ns, end_ns, attributes, error, children)
