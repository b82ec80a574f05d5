"""`baton cache`: deletes KV blocks that workers keep."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.admin_calls import call_admin
from baton.cli.output import plain, print_json, print_table
from baton.client import AdminClient
from baton.v1 import admin_pb2

app = typer.Typer(
    help="Delete KV blocks that workers keep.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def cache() -> None:
    """Lets the group have a single command."""


@app.command()
def drop(
    tenant: Annotated[
        str,
        typer.Option(
            "--tenant",
            help="Delete the KV blocks of this tenant's requests; 'default' is the tenant of "
            "requests that name none.",
        ),
    ] = "",
    session: Annotated[
        str,
        typer.Option(
            "--session",
            help="Delete the KV blocks of this session (session_id) that no other session has. "
            "Add --tenant if several tenants have a session of this ID.",
        ),
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Delete the KV blocks of all tenants.")
    ] = False,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Delete KV blocks from the device, host memory and disk of every worker.

    The bytes are overwritten, and the files are deleted, before the command ends. Requests that run
    meanwhile keep their blocks and may store more: run the command again when they have ended.
    The exit code is 1 if a worker may have blocks left.
    """
    if everything and (tenant or session):
        raise typer.BadParameter("cannot be used with --tenant or --session", param_hint="--all")
    if not (everything or tenant or session):
        raise typer.BadParameter("set --tenant, --session or --all")

    async def question(admin: AdminClient) -> admin_pb2.DropCacheResponse:
        return await admin.drop_cache(tenant or None, session_id=session)

    answer = call_admin(address, question)
    found = answer.workers
    if as_json:
        print_json([plain(one) for one in found])
    else:
        rows = [
            [
                one.worker_id,
                str(one.device_blocks),
                str(one.host_blocks),
                str(one.disk_blocks),
                one.error or "deleted",
            ]
            for one in found
        ]
        columns = ["WORKER", ">DEVICE", ">HOST", ">DISK", "BLOCKS"]
        print_table(columns, rows, empty="no workers are attached")
    if num_shared := answer.shared_blocks:
        note = f"{num_shared} blocks of the session were kept: other sessions have them too"
        typer.echo(note, err=True)
    if any(one.error for one in found):
        raise typer.Exit(1)
