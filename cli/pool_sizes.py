"""`baton scale`, `targets`, `autoscale`, `drain`, `flip` and `why`: commands for pool sizes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.admin_calls import call_admin, print_answer, print_progress
from baton.cli.columns import ttft_target
from baton.cli.output import plain, print_json, print_json_line, print_table, print_text
from baton.cli.watch import follow_changes, wait_until
from baton.client import AdminClient
from baton.runtime.counted import counted
from baton.runtime.enum_names import lane_name, role_name
from baton.v1 import admin_pb2, common_pb2

# Decisions per pool that `baton why` prints by default.
_NUM_DECISIONS = 5


class PoolName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


Pool = Annotated[PoolName, typer.Argument(metavar="POOL", help="Pool: prefill or decode.")]
Worker = Annotated[
    str, typer.Argument(metavar="WORKER", help="Worker ID, as printed by `baton workers`.")
]
Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        min=0,
        metavar="SECONDS",
        help="Wait up to this long for completion; exit code 1 on timeout.",
    ),
]


def scale(
    pool: Pool,
    workers: Annotated[
        int, typer.Argument(metavar="N", min=0, max=options.MOST, help="Number of workers.")
    ],
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Set the size of a pool.

    Autoscaling leaves the pool alone until `baton autoscale on`.
    """

    async def question(admin: AdminClient) -> admin_pb2.ScalePoolResponse:
        answer = await admin.scale_pool(_role(pool), workers)
        if wait:
            print_progress(answer.message, as_json=as_json)
            what = f"the {pool.value} pool does not have {counted(workers, 'worker')}"
            event = await wait_until(
                admin,
                lambda one: _has_size(one, pool, workers),
                wait,
                what,
                lambda one: _pool(one, pool).problem,
            )
            answer.pool.CopyFrom(_pool(event, pool))
            answer.message = f"the {pool.value} pool has {counted(workers, 'worker')}"
        return answer

    answer = call_admin(address, question)
    if as_json:
        return print_json(plain(answer))
    return print_text(answer.message)


def targets(
    lane: Annotated[
        options.LaneName, typer.Option("--lane", help="Lane whose targets are changed.")
    ] = options.LaneName.INTERACTIVE,
    ttft_ms: Annotated[
        int | None,
        typer.Option(
            "--ttft-ms",
            min=0,
            max=options.MOST,
            help="Target for the time to first token, in ms; 0 removes the target.",
        ),
    ] = None,
    ttft_ms_per_1k_tokens: Annotated[
        int | None,
        typer.Option(
            "--ttft-ms-per-1k-tokens",
            min=0,
            max=options.MOST,
            help="Added to the target for the time to first token per 1,000 prompt tokens, in ms; "
            "0: one target for all prompts.",
        ),
    ] = None,
    itl_ms: Annotated[
        int | None,
        typer.Option(
            "--itl-ms",
            min=0,
            max=options.MOST,
            help="Target for the inter-token latency, in ms; 0 removes the target.",
        ),
    ] = None,
    percentile: Annotated[
        float | None,
        typer.Option(
            "--percentile", help="Percentage of requests that should meet the targets, such as 95."
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Show or change the latency targets of the lanes.

    Autoscaling sizes the pools for these targets. Targets that are not given stay unchanged.
    """
    changed = []
    if any(one is not None for one in (ttft_ms, ttft_ms_per_1k_tokens, itl_ms, percentile)):
        number = common_pb2.Lane.Value(f"LANE_{lane.value.upper()}")
        changed.append(
            admin_pb2.LaneTargets(
                lane=number,
                ttft_ms=ttft_ms,
                ttft_ms_per_1k_tokens=ttft_ms_per_1k_tokens,
                itl_ms=itl_ms,
                percentile=percentile,
            )
        )
    found = call_admin(address, lambda admin: admin.set_targets(changed))
    if as_json:
        return print_json([plain(one) for one in found])
    return print_table(
        ("LANE", ">TTFT", ">ITL", ">PERCENTILE", ">LONGEST GAP", "WHY"),
        [
            (
                lane_name(one.lane),
                ttft_target(one),
                f"{one.itl_ms} ms" if one.itl_ms else "-",
                f"{one.percentile:g}",
                f"{one.longest_gap_ms:g} ms" if one.longest_gap_ms else "-",
                one.longest_gap_reason,
            )
            for one in found
        ],
        "no targets",
        ("WHY", "LONGEST GAP", "PERCENTILE"),
    )


def autoscale(
    switch: Annotated[Switch, typer.Argument(metavar="on|off", help="Whether autoscaling runs.")],
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Turn autoscaling on or off.

    Turning it on discards the sizes that `baton scale` has set.
    """
    enabled = call_admin(address, lambda admin: admin.set_autoscale(enabled=switch is Switch.ON))
    if as_json:
        return print_json({"enabled": enabled})
    return print(f"autoscaling is {'on' if enabled else 'off'}")


def drain(
    worker: Worker,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.001,
            metavar="SECONDS",
            help="Move requests that still run after this time to other workers.",
        ),
    ] = None,
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Drain a worker.

    The worker takes no new requests, finishes the running ones, and exits.
    """

    async def question(admin: AdminClient) -> str:
        message = await admin.drain_worker(worker, timeout)
        if wait:
            print_progress(message, as_json=as_json)
            what = f"{worker} has not left"
            await wait_until(admin, lambda event: _has_left(event, worker), wait, what)
            message = f"{worker} has left"
        return message

    print_answer(call_admin(address, question), as_json=as_json)


def flip(
    worker: Worker,
    role: Annotated[PoolName, typer.Argument(metavar="POOL", help="Pool: prefill or decode.")],
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Move a worker to the other pool.

    The worker does not load its model again.
    """

    async def question(admin: AdminClient) -> str:
        message = await admin.flip_worker(worker, _role(role))
        if wait:
            print_progress(message, as_json=as_json)
            what = f"{worker} does not serve {role.value}"
            await wait_until(admin, lambda event: _serves(event, worker, role), wait, what)
            message = f"{worker} serves {role.value}"
        return message

    print_answer(call_admin(address, question), as_json=as_json)


def why(
    pool: Annotated[
        PoolName | None,
        typer.Argument(metavar="POOL", help="Pool: prefill or decode; both if left out."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=0,
            max=options.MOST,
            help="Number of earlier decisions per pool; 0 shows all; default: 5, with --watch 1.",
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Print the earlier decisions, then each new one, until Ctrl-C."
        ),
    ] = False,
) -> None:
    """Show the last autoscaling decisions and their reasons.

    With --watch the oldest decision comes first; with --json as well, each decision is one line.
    """
    role = common_pb2.ROLE_UNSPECIFIED if pool is None else _role(pool)
    # A coordinator that does not size pools refuses this call; --watch needs the same error.
    if limit is None:
        limit = 1 if watch else _NUM_DECISIONS
    found = call_admin(address, lambda admin: admin.list_decisions(role, limit=limit))
    if watch:
        # Consecutive decisions on a pool differ in their sizes.
        latest = dict[int, tuple[int, int, int]]()

        def show_new(decisions: Iterable[admin_pb2.ScalingDecision]) -> None:
            for one in decisions:
                if role not in (common_pb2.ROLE_UNSPECIFIED, one.role):
                    continue
                sizes = (one.from_workers, one.needed_workers, one.to_workers)
                if latest.get(one.role) == sizes:
                    # A new connection begins with the latest decisions.
                    continue
                latest[one.role] = sizes
                if as_json:
                    print_json_line(plain(one))
                else:
                    _show_decision(one)

        show_new(sorted(found, key=lambda one: one.since.ToNanoseconds()))
        return follow_changes(address, True, lambda event: show_new(event.decisions))
    if as_json:
        return print_json([plain(one) for one in found])
    if not found:
        return print("no decisions yet")
    for one in found:
        _show_decision(one)
    return None


def _show_decision(one: admin_pb2.ScalingDecision) -> None:

    size = f"{one.from_workers} -> {one.to_workers}"
    if one.from_workers == one.to_workers:
        size = f"{one.to_workers}"
    since, at = _clock(one.since.ToDatetime()), _clock(one.at.ToDatetime())
    when = since if since == at else f"{since} to {at}"
    print_text(f"{when} UTC  {role_name(one.role)} {size}: {one.reason}")
    print_text("  " + ", ".join(f"{key} {one.inputs[key]:.4g}" for key in sorted(one.inputs)))


def _role(pool: PoolName) -> common_pb2.Role.ValueType:

    return common_pb2.ROLE_PREFILL if pool is PoolName.PREFILL else common_pb2.ROLE_DECODE


def _clock(at: datetime) -> str:
    return at.strftime("%H:%M:%S")


def _pool(event: admin_pb2.WatchEvent, pool: PoolName) -> admin_pb2.PoolInfo:
    return next(one for one in event.pools.pools if one.role == _role(pool))


def _has_size(event: admin_pb2.WatchEvent, pool: PoolName, workers: int) -> bool:
    found = _pool(event, pool)
    return (found.num_serving, found.num_draining) == (workers, 0)


def _has_left(event: admin_pb2.WatchEvent, worker: str) -> bool:
    return worker not in {one.worker_id for one in event.workers}


def _serves(event: admin_pb2.WatchEvent, worker: str, role: PoolName) -> bool:
    return any((one.worker_id, one.role) == (worker, _role(role)) for one in event.workers)
