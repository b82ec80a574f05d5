"""`baton scale`, `targets`, `autoscale`, `drain`, `flip`, `why`: the sizes of the pools."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.admin_calls import call_admin, print_answer, print_progress
from baton.cli.watch import follow_changes, wait_until

if TYPE_CHECKING:
    from datetime import datetime

    from baton.client import AdminClient
    from baton.v1 import admin_pb2, common_pb2


class PoolName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class LaneName(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


Pool = Annotated[PoolName, typer.Argument(metavar="POOL", help="prefill or decode")]
Worker = Annotated[str, typer.Argument(metavar="WORKER", help="As `baton workers` calls it.")]
Wait = Annotated[
    float,
    typer.Option("--wait", min=0, metavar="SECONDS", help="Until it is done; exit code 1 if late."),
]


def scale(
    pool: Pool,
    workers: Annotated[int, typer.Argument(metavar="N", min=0, max=options.MOST, help="Workers.")],
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Set a pool's size; it holds, whatever the load, until `baton autoscale on`."""
    from baton.cli.output import plain, print_json

    async def question(admin: AdminClient) -> admin_pb2.ScalePoolResponse:
        answer = await admin.scale_pool(_role(pool), workers)
        if wait:
            print_progress(answer.message, as_json=as_json)
            what = f"{pool.value} does not have {workers} workers"
            event = await wait_until(admin, lambda one: _has_size(one, pool, workers), wait, what)
            answer.pool.CopyFrom(_pool(event, pool))
            answer.message = f"{pool.value} has {workers} workers"
        return answer

    answer = call_admin(address, question)
    if as_json:
        return print_json(plain(answer))
    return print(answer.message)


def targets(
    lane: Annotated[
        LaneName, typer.Option("--lane", help="Whose targets change.")
    ] = LaneName.INTERACTIVE,
    ttft_ms: Annotated[
        int | None,
        typer.Option(
            "--ttft-ms", min=0, max=options.MOST, help="Time to first token; 0: no promise."
        ),
    ] = None,
    itl_ms: Annotated[
        int | None,
        typer.Option(
            "--itl-ms", min=0, max=options.MOST, help="Inter-token latency; 0: no promise."
        ),
    ] = None,
    percentile: Annotated[
        float | None, typer.Option("--percentile", help="That they hold for, such as 95.")
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Show what the pools are sized for, or change it; what is not named stays."""
    from baton.cli.output import plain, print_json, print_table
    from baton.runtime.enum_names import lane_name
    from baton.v1 import admin_pb2, common_pb2

    changed = []
    if (ttft_ms, itl_ms, percentile) != (None, None, None):
        number = common_pb2.Lane.Value(f"LANE_{lane.value.upper()}")
        changed.append(
            admin_pb2.LaneTargets(
                lane=number, ttft_ms=ttft_ms, itl_ms=itl_ms, percentile=percentile
            )
        )
    found = call_admin(address, lambda admin: admin.set_targets(changed))
    if as_json:
        return print_json([plain(one) for one in found])
    return print_table(
        ("LANE", ">TTFT", ">ITL", ">PERCENTILE"),
        [
            (
                lane_name(one.lane),
                f"{one.ttft_ms} ms" if one.ttft_ms else "-",
                f"{one.itl_ms} ms" if one.itl_ms else "-",
                f"{one.percentile:g}",
            )
            for one in found
        ],
        "no targets",
    )


def autoscale(
    switch: Annotated[Switch, typer.Argument(metavar="on|off")],
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Let the pools size themselves, or keep the sizes they have; on takes sizes by hand back."""
    from baton.cli.output import print_json

    enabled = call_admin(address, lambda admin: admin.set_autoscale(enabled=switch is Switch.ON))
    if as_json:
        return print_json({"enabled": enabled})
    return print(f"autoscaling is {'on' if enabled else 'off'}")


def drain(
    worker: Worker,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0.001, metavar="SECONDS", help="Then what runs goes on elsewhere."
        ),
    ] = None,
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Have a worker take nothing new, finish what it has, and leave."""

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
    role: Annotated[PoolName, typer.Argument(metavar="POOL", help="prefill or decode")],
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Have a worker change to the other pool, without loading its model again."""

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
        PoolName | None, typer.Argument(metavar="POOL", help="prefill or decode; both without.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, max=options.MOST, help="Of each pool; 0: all.")
    ] = 5,
    address: options.Address = None,
    as_json: options.Json = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="The latest, then each when it is made, until Ctrl-C."),
    ] = False,
) -> None:
    """Say why the pools have the sizes they have: the last decisions with their numbers.

    With --watch the oldest first; with --json too, one line each.
    """
    from baton.cli.output import plain, print_json, print_json_line
    from baton.v1 import common_pb2

    role = common_pb2.ROLE_UNSPECIFIED if pool is None else _role(pool)
    # Of a coordinator that decides nothing this says so, also to those who would follow it.
    found = call_admin(address, lambda admin: admin.list_decisions(role, limit=limit))
    if watch:

        def show(event: admin_pb2.WatchEvent) -> None:
            for one in event.decisions:
                if role not in (common_pb2.ROLE_UNSPECIFIED, one.role):
                    continue
                if as_json:
                    print_json_line(plain(one))
                else:
                    _show_decision(one)

        return follow_changes(address, True, show)
    if as_json:
        return print_json([plain(one) for one in found])
    if not found:
        return print("nothing has been decided yet")
    for one in found:
        _show_decision(one)
    return None


def _show_decision(one: admin_pb2.ScalingDecision) -> None:
    from baton.runtime.enum_names import role_name

    size = f"{one.from_workers} -> {one.to_workers}"
    if one.from_workers == one.to_workers:
        size = f"{one.to_workers}"
    since, at = _clock(one.since.ToDatetime()), _clock(one.at.ToDatetime())
    when = since if since == at else f"{since} to {at}"
    print(f"{when} UTC  {role_name(one.role)} {size}: {one.reason}")
    print("  " + ", ".join(f"{key} {one.inputs[key]:.4g}" for key in sorted(one.inputs)))


def _role(pool: PoolName) -> common_pb2.Role.ValueType:
    from baton.v1 import common_pb2

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
