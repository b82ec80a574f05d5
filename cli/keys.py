"""`baton keys`: API keys for tenants and operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import print_table
from baton.runtime.config_error import ConfigError
from baton.runtime.security import api_keys

app = typer.Typer(
    help="Add, list and remove API keys.", no_args_is_help=True, rich_markup_mode=None
)

KeysFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="File named by the configuration key security.api_keys_file."
    ),
]


@app.command()
def add(
    file: KeysFile,
    name: Annotated[str, typer.Option("--name", help="Name of the key in logs and metrics.")],
    tenant: Annotated[
        str,
        typer.Option(
            "--tenant",
            help="Tenant of requests with this key; empty: the key cannot send requests.",
        ),
    ] = "",
    lane: Annotated[
        list[options.LaneName] | None,
        typer.Option(
            "--lane",
            metavar="interactive|batch",
            help="Lane that the key may use; repeatable; left out: both lanes.",
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option("--max-prompt-tokens", min=1, help="Largest prompt that the key may send."),
    ] = None,
    max_output_tokens: Annotated[
        int | None,
        typer.Option("--max-output-tokens", min=1, help="Largest max_tokens of a request."),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(
            "--max-concurrent",
            min=1,
            help="Largest number of requests that may run at the same time.",
        ),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow calls of the Admin service.")
    ] = False,
    days: Annotated[
        int | None,
        typer.Option(
            "--days",
            min=1,
            max=options.MOST_DAYS,
            help="Number of days until the key expires; left out: never.",
        ),
    ] = None,
) -> None:
    """Add a key to FILE and print it.

    FILE holds only the hash of the key, so the key cannot be printed again.
    """
    if not tenant and not admin:
        raise typer.BadParameter(
            "a key needs --tenant, to send requests, or --admin", param_hint="--tenant"
        )
    if not tenant:
        for option, limit in (
            ("--lane", lane),
            ("--max-prompt-tokens", max_prompt_tokens),
            ("--max-output-tokens", max_output_tokens),
            ("--max-concurrent", max_concurrent),
        ):
            if limit:
                raise typer.BadParameter(
                    "limits requests, which the key cannot send without --tenant",
                    param_hint=option,
                )
    grants = {
        "tenant": tenant,
        "lanes": [one.value for one in lane] if lane else None,
        "max_prompt_tokens": max_prompt_tokens,
        "max_output_tokens": max_output_tokens,
        "max_concurrent": max_concurrent,
        "admin": admin,
        "expires": datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
        if days
        else None,
    }
    key, entry = api_keys.make(name, **{k: v for k, v in grants.items() if v is not None})
    with _locked(file):
        known = list(_read(file).values()) if Path(file).exists() else []
        if any(one.name == name for one in known):
            raise ConfigError(f"--name: {file} already has a key {name!r}")
        _write(file, [*known, entry])
    typer.echo(key)


@app.command("list")
def show(file: KeysFile) -> None:
    """List the keys without their secrets."""
    print_table(
        ("NAME", "ID", "TENANT", "LANES", "ADMIN", "EXPIRES"),
        [
            (
                key.name,
                key.id,
                key.tenant or "-",
                ",".join(key.lanes) if key.tenant else "-",
                "yes" if key.admin else "no",
                key.expires.isoformat() if key.expires is not None else "never",
            )
            for key in _read(file).values()
        ],
        "no keys",
    )


@app.command()
def remove(
    file: KeysFile,
    name: Annotated[
        str, typer.Option("--name", help="Name of the key, as printed by `baton keys list`.")
    ],
) -> None:
    """Remove a key from FILE.

    Coordinators that read FILE refuse the key within a second.
    """
    with _locked(file):
        known = list(_read(file).values())
        kept = [key for key in known if key.name != name]
        if len(kept) == len(known):
            raise ConfigError(f"--name: {file} has no key {name!r}")
        _write(file, kept)


@contextmanager
def _locked(file: str) -> Iterator[None]:

    with ExitStack() as stack:
        try:
            stack.enter_context(api_keys.locked(file))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
        yield


def _read(file: str) -> dict[str, api_keys.ApiKey]:

    try:
        return api_keys.read(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def _write(file: str, keys: list[api_keys.ApiKey]) -> None:

    try:
        api_keys.write(file, keys)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
