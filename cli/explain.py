"""`baton explain` shows where a request's time went; `baton cancel` ends a running request."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from google.protobuf.duration_pb2 import Duration

from baton.cli import options
from baton.cli.admin_calls import call_admin
from baton.cli.columns import gigabytes
from baton.cli.output import plain, print_json, print_table, print_text
from baton.cli.timeline import print_timeline
from baton.client import events
from baton.runtime.enum_names import enum_name, lane_name
from baton.v1 import admin_pb2, common_pb2
from baton.v1.admin_pb2 import PlacementInfo, PromptTokens, RequestInfo, Stall

Id = Annotated[
    str, typer.Argument(metavar="REQUEST", help="Request ID, as printed by `baton requests`.")
]
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant",
        help="Tenant of the request; needed only if several tenants have a request with this ID.",
    ),
]


def cancel(
    request: Id,
    tenant: Tenant = "",
    address: options.Address = None,
) -> None:
    """Cancel a running request.

    Its client keeps the tokens received so far; the stream ends with the finish reason cancelled
    (over HTTP: abort).
    """
    call_admin(address, lambda admin: admin.cancel_request(request, tenant=tenant))
    print(f"{request} is cancelled")


def explain(
    request: Id,
    tenant: Tenant = "",
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Show where the time of a running or recent request went.

    The command prints the duration of each stage and the longest gaps between tokens.
    """
    info = call_admin(address, lambda admin: admin.get_request(request, tenant=tenant))
    if as_json:
        return print_json(values(info))
    print_text("\n".join(_head(info)))
    print()
    budget = events.budget(info.budget)
    print_timeline(budget)
    sum_ms = sum(stage.duration_ms for stage in budget.stages)
    print(f"the stages add up to {sum_ms:.1f} of {budget.total_ms:.1f} ms")
    print()
    if not info.HasField("itl_target"):
        print_text("no target for the gap between tokens is set (scaling.targets, Slo.itl_ms)")
        return None
    target_ms = info.itl_target.ToNanoseconds() / 1e6
    if not info.stalls:
        print(f"no gap between tokens was over the target of {target_ms:.0f} ms")
        return None
    print(f"the longest gaps over the target of {target_ms:.0f} ms:")
    return print_table(
        (">START", ">TIME", "WORKER", "WHY"),
        [
            (
                f"{stall.start_us / 1e3:.1f} ms",
                f"{stall.duration_us / 1e3:.1f} ms",
                stall.worker_id or "-",
                why(stall, info.tenant),
            )
            for stall in info.stalls
        ],
        "",
        ("START",),
    )


def values(info: RequestInfo) -> dict[str, Any]:
    """JSON form of a request, with the summed duration of each stage in ms."""
    found, sums_ms = plain(info), dict[str, float]()
    for stage in info.budget.stages:
        name = enum_name(common_pb2.Stage.DESCRIPTOR, stage.stage)
        sums_ms[name] = sums_ms.get(name, 0.0) + stage.duration_us / 1e3
    found["stages_ms"] = {name: round(value, 3) for name, value in sums_ms.items()}
    found["total_ms"] = info.budget.total_us / 1e3
    for shown, stall in zip(found["stalls"], info.stalls, strict=True):
        shown["why"] = why(stall, info.tenant)
    return found


def why(stall: Stall, tenant: str) -> str:
    """Describes in words why a gap between tokens was long.

    Args:
        stall: The gap.
        tenant: Tenant of the request; other tenants' names are added to the text.
    """
    by = f" of {stall.by_request_id}" if stall.by_request_id else ""
    if stall.by_tenant not in ("", tenant):
        by += f" of tenant {stall.by_tenant}"
    tokens = f" ({stall.by_tokens} tokens)" if stall.by_tokens else ""
    of = f"; {stall.num_requests} requests had outputs in that step" if stall.num_requests else ""
    told = {
        admin_pb2.STALL_CAUSE_PREFILL: f"a prompt{by}{tokens} was computed on the same worker{of}",
        admin_pb2.STALL_CAUSE_JOINED: f"another request{by}{tokens} joined the batch{of}",
        admin_pb2.STALL_CAUSE_BATCH: f"one step of the running batch took this long{of}",
        admin_pb2.STALL_CAUSE_RECOVERY: "the worker of the request failed; "
        "another worker continued the request",
        admin_pb2.STALL_CAUSE_PARKED: "the request left its worker for interactive requests, or "
        "because the worker changed its role or left",
        admin_pb2.STALL_CAUSE_HANDOFF: "the KV cache was handed over and the request joined "
        "the decode batch",
        admin_pb2.STALL_CAUSE_CLIENT: "the client did not read the sent tokens in time (not part "
        "of the stages, because the coordinator had already sent them)",
    }
    return told.get(stall.cause, "no record exists of what the worker did at that time")


def _head(info: RequestInfo) -> list[str]:

    state = enum_name(admin_pb2.RequestState.DESCRIPTOR, info.state)
    lane = lane_name(info.lane)
    ended = ""
    if info.finish_reason:
        ended = f" ({enum_name(common_pb2.FinishReason.DESCRIPTOR, info.finish_reason)})"
    tokens = f"{info.prompt_tokens} prompt tokens, {info.completion_tokens} output tokens"
    lines = [
        f"{info.request_id}: {state}{ended}, {lane}, tenant {info.tenant}"
        + (f", {info.route}" if info.route else ""),
        f"{tokens}, attempt {info.attempt}",
    ]
    if info.HasField("ttft_target") and info.budget.ttft_us:
        target_ms = info.ttft_target.ToNanoseconds() / 1e6
        late = "late" if info.budget.ttft_us > target_ms * 1e3 else "in time"
        lines.append(f"first token {late}: the target is {target_ms:.0f} ms")
    if info.HasField("placement"):
        lines.append(_placement(info.placement))
    if info.HasField("prompt_sources"):
        lines.append(_sources(info.prompt_sources))
    if info.error:
        lines.append(f"failed: {info.error}")
    return lines


def _placement(placement: PlacementInfo) -> str:
    """Says which workers were chosen, and what was predicted of them."""

    def ms(one: Duration) -> str:
        return f"{one.ToNanoseconds() / 1e6:.1f} ms"

    text = f"prompt on {placement.prompt_worker_id}"
    if placement.HasField("computation"):
        queue, computation = ms(placement.queue), ms(placement.computation)
        text += f" (predicted: queue {queue}, computation {computation})"
    fetched = f"fetched from {placement.fetched_from}"
    held = [
        f"{count} tokens {where}" + (f" at {gigabytes(speed)}" if speed else "")
        for count, where, speed in (
            (placement.cached_tokens, "cached", 0),
            (placement.host_tokens, "in host memory", placement.host_bytes_per_s),
            (placement.disk_tokens, "on disk", placement.disk_bytes_per_s),
            (placement.fetched_tokens, fetched, placement.fetch_bytes_per_s),
        )
        if count
    ]
    if held:
        text += f" with {' and '.join(held)}"
    if not placement.decode_worker_id:
        return f"placed: {text}"
    where = f"decode on {placement.decode_worker_id}"
    return f"placed: {text}, {where} (predicted: {ms(placement.step)} per step)"


def _sources(found: PromptTokens) -> str:
    """Says where the KV cache of the prompt came from."""
    parts = [
        f"{found.device} from the device cache",
        f"{found.host} from host memory",
        *([f"{found.disk} from disk"] if found.disk else []),
        *([f"{found.fetched} fetched from another worker"] if found.fetched else []),
        f"{found.computed} computed",
    ]
    text = f"prompt tokens: {', '.join(parts)}"
    return f"{text}; {found.handoff} handed over to the decode worker" if found.handoff else text
