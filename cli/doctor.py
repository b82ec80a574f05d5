"""`baton doctor`: finds what is slow now, in which stage, with evidence and a first remedy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from baton.cli import options
from baton.cli.admin_calls import call_admin
from baton.cli.output import print_json, print_text
from baton.client import AdminClient
from baton.client.doctor import diagnose, summary
from baton.runtime.durations import to_seconds
from baton.v1 import admin_pb2

_Answers: TypeAlias = tuple[
    admin_pb2.GetStatusResponse, list[admin_pb2.WorkerInfo], list[admin_pb2.RequestInfo]
]


def doctor(
    address: options.Address = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Simulate the latest requests with colocated serving, the present split and an "
            "elastic cell.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Find out what is slow now, and what to change first.

    Each finding names the slow stage and the evidence. With --compare, the command instead
    simulates the latest requests and says with which setup they meet their targets best.

    Exit codes: 0 healthy, 1 there are findings. With --compare: 0 compared, 1 too few measurements,
    or workers that cannot be compared.
    """
    if compare:
        _compare(address, as_json=as_json)
        return

    status = call_admin(address, lambda admin: admin.get_status())
    findings = diagnose(status)
    if as_json:
        text = "" if findings else summary(status)
        print_json(
            {
                "healthy": not findings,
                "summary": text,
                "window_s": to_seconds(status.window),
                "findings": [asdict(one) for one in findings],
            }
        )
    elif not findings:
        print_text(summary(status))
    else:
        for number, one in enumerate(findings, start=1):
            print_text(f"{number}. {one.what} [{one.kind}]")
            print(f"   stage: {one.stage}")
            for line in one.evidence:
                print_text(f"   - {line}")
            print_text(f"   first: {one.first}")
    raise typer.Exit(1 if findings else 0)


def _compare(address: str | None, *, as_json: bool) -> None:
    # Imported here, because the simulator takes longer to import than a diagnosis takes.
    from baton.cli.simulate_compare import print_rows, simulated_rows
    from baton.simulator import comparison
    from baton.simulator.measured import NotMeasured, measured

    async def ask(admin: AdminClient) -> _Answers:
        requests = await admin.list_requests(include_ended=True)
        return await admin.get_status(), await admin.list_workers(), requests

    try:
        cell = measured(*call_admin(address, ask))
        rows = simulated_rows(cell.config, cell.arrivals, cell.setups(), cell.engines)
    except ValueError as error:
        problem = error if isinstance(error, NotMeasured) else f"no comparison: {error}"
        typer.echo(f"baton: {problem}", err=True)
        raise typer.Exit(1) from None
    best, text = cell.best(rows), cell.conclusion(rows)
    if as_json:
        print_json(
            {"conclusion": text, "best": best.setup.name, "rows": comparison.rows_as_json(rows)}
        )
        return
    lasted_s = cell.arrivals[-1].at_s
    print(
        f"The latest {len(cell.arrivals)} requests that ended, which arrived in {lasted_s:.0f} s:"
    )
    print()
    print_rows(rows, best, cell.targets, "--json has all")
    print_text(text)
