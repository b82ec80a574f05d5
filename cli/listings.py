"""`baton pools`, `baton workers` and `baton requests`: tables of the state of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.admin_calls import call_admin
from baton.cli.columns import POOL_COLUMNS, gigabytes, pool_cells, share, state_name
from baton.cli.output import plain, print_json, print_json_line, print_table
from baton.cli.watch import follow_changes
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import enum_name, lane_name, role_name
from baton.v1 import admin_pb2
from baton.v1.admin_pb2 import LatencyInfo, ListPoolsResponse, WorkerInfo

# Names of the sources of KV blocks in a worker itself (KvSpeed.source).
_TIERS = {"host": "its host memory", "disk": "its disk"}


def pools(
    address: options.Address = None,
    as_json: options.Json = False,
    watch: options.Watch = False,
) -> None:
    """Show the two pools and the lanes.

    With --watch and --json each change is one line.
    """
    if watch and as_json:
        return follow_changes(address, True, lambda event: print_json_line(plain(event.pools)))
    if watch:
        return follow_changes(address, False, lambda event: _show_pools(event.pools))
    answer = call_admin(address, lambda admin: admin.list_pools())
    return print_json(plain(answer)) if as_json else _show_pools(answer)


def _show_pools(answer: ListPoolsResponse) -> None:

    print_table(
        POOL_COLUMNS,
        [pool_cells(pool) for pool in answer.pools],
        "no pools",
        ("RUNNING", "WAITING", "DRAINING"),
    )
    for pool in answer.pools:
        if pool.problem:
            print(f"{role_name(pool.role)}: {pool.problem}")
    print()
    print_table(
        ("LANE", ">QUEUED", ">RUNNING", ">LIMIT", ">OLDEST"),
        [
            (
                lane_name(lane.lane),
                str(lane.num_queued),
                str(lane.num_running),
                str(lane.max_queued),
                _seconds(to_seconds(lane.oldest_wait)) if lane.num_queued else "-",
            )
            for lane in answer.lanes
        ],
        "no lanes",
    )


def workers(
    address: options.Address = None,
    as_json: options.Json = False,
    watch: options.Watch = False,
) -> None:
    """List the workers, and the transports of their handoffs."""
    if watch and as_json:
        return follow_changes(
            address, True, lambda event: print_json_line([plain(one) for one in event.workers])
        )
    if watch:
        return follow_changes(address, False, lambda event: _show_workers(event.workers))
    found = call_admin(address, lambda admin: admin.list_workers())
    return print_json([plain(worker) for worker in found]) if as_json else _show_workers(found)


def _show_workers(found: Sequence[WorkerInfo]) -> None:

    print_table(
        (
            "WORKER",
            "ROLE",
            "STATE",
            "REVISION",
            "HOST",
            ">REQUESTS",
            ">WAITING",
            ">KV USED",
            ">1K PREFILL/STEP",
            "ENGINE",
            ">PID",
        ),
        [
            (
                worker.worker_id,
                " > ".join(role_name(role) for role in (worker.role, worker.flips_to) if role),
                state_name(worker),
                worker.revision,
                _host(worker.labels),
                str(worker.num_requests),
                str(worker.load.num_waiting),
                share(worker.load.kv_tokens_used, worker.load.kv_tokens_total),
                _speed(worker.latency),
                f"{worker.engine} {worker.engine_version}".strip(),
                str(worker.pid),
            )
            for worker in found
        ],
        "no workers",
        ("REVISION", "ENGINE", "PID", "HOST", "WAITING", "1K PREFILL/STEP", "REQUESTS"),
    )
    if not found:
        return
    for worker in found:
        if worker.unresponsive:
            print(f"{worker.worker_id} {worker.unresponsive}")
    print()
    print_table(
        ("WORKER", "HANDS OVER TO", "TRANSPORT", "WHY NOT FASTER"),
        [
            (worker.worker_id, peer.worker_id, peer.transport, peer.reason or "-")
            for worker in found
            for peer in worker.peers
            if peer.worker_id  # Empty if that worker is no longer attached.
        ],
        "no handoffs yet",
    )
    speeds = [
        (
            worker.worker_id,
            f"worker {one.from_worker_id}"
            if one.from_worker_id
            else _TIERS.get(one.source, one.source),
            gigabytes(one.bytes_per_s),
        )
        for worker in found
        for one in worker.kv_speeds
    ]
    if speeds:
        print()
        print_table(("WORKER", "GETS KV BLOCKS FROM", ">MEASURED SPEED"), speeds, "")


def requests(
    address: options.Address = None,
    as_json: options.Json = False,
    ended: Annotated[bool, typer.Option("--all", help="List recently ended requests too.")] = False,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            min=0,
            max=options.MOST,
            help="Largest number of requests to list; 0 lists all.",
        ),
    ] = 0,
) -> None:
    """List the running requests."""
    found = call_admin(address, lambda admin: admin.list_requests(include_ended=ended, limit=limit))
    if as_json:
        return print_json([plain(request) for request in found])
    return print_table(
        (
            "REQUEST",
            "TENANT",
            "STATE",
            "LANE",
            ">PROMPT",
            ">OUTPUT",
            ">AGE",
            "PREFILL",
            "DECODE",
            "ERROR",
        ),
        [
            (
                request.request_id,
                request.tenant,
                enum_name(admin_pb2.RequestState.DESCRIPTOR, request.state),
                lane_name(request.lane),
                str(request.prompt_tokens),
                str(request.completion_tokens),
                _seconds(to_seconds(request.age)),
                request.prefill_worker_id or "-",
                request.decode_worker_id or "-",
                request.error,
            )
            for request in found
        ],
        "no requests" if ended else "no requests running",
        ("LANE", "PROMPT", "PREFILL", "TENANT", "DECODE", "AGE", "OUTPUT"),
    )


def _host(labels: Mapping[str, str]) -> str:
    """Host name of a worker, with the first 8 digits of its Ray node ID, if it has one."""
    host, node = labels.get("host", "-"), labels.get("ray_node", "")
    return f"{host}/{node[:8]}" if node else host


def _speed(latency: LatencyInfo) -> str:
    """Measured times of a 1,000-token prompt and of a decode step with 1,000 KV tokens, in ms.

    Then the 90th percentile of the prediction error, of the kind of step where it is largest.
    """
    if not latency.num_samples:
        return "-"
    prefill_ms = (
        latency.prefill_base_ms
        + latency.prefill_per_token_ms * 1e3
        + latency.prefill_per_token_squared_ms * 1e6
    )
    step_ms = (
        latency.step_base_ms + latency.step_per_request_ms + latency.step_per_kv_token_ms * 1e3
    )
    error = max(
        one.p90 for one in (latency.prefill_errors, latency.decode_errors, latency.mixed_errors)
    )
    return f"{prefill_ms:.3g}/{step_ms:.3g} ms ±{error:.0%}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"
