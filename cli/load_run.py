"""Options, run and printed results that `baton bench` and `baton replay` share."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from baton.cli import credentials, interrupts, options
from baton.cli.output import print_json, print_table
from baton.client import BatonClient
from baton.load.figures import Result
from baton.load.generator import Generator, Outcome
from baton.load.measured import Slo
from baton.load.plan import Planned
from baton.load.prompts import Prompts
from baton.runtime.process import lifecycle
from baton.runtime.ttft_target import TtftTarget

Drive = Callable[["Generator", asyncio.Event], Coroutine[Any, Any, "Outcome"]]

BatchShare = Annotated[
    float,
    typer.Option(
        "--batch-share",
        help="Share of the requests, from 0 to 1, that go to the batch lane, chosen at random.",
    ),
]
BatchPromptTokens = Annotated[
    int | None,
    typer.Option(
        "--batch-prompt-tokens",
        min=1,
        help="Prompts of at least this many tokens also go to the batch lane.",
    ),
]
Tenant = Annotated[
    str, typer.Option("--tenant", help="Tenant of the requests; empty: the default tenant.")
]
Requests = Annotated[
    int | None, typer.Option("--requests", min=1, help="Send at most this many requests.")
]
Duration = Annotated[
    float | None,
    typer.Option(
        "--duration",
        metavar="SECONDS",
        min=0.001,
        help="Stop sending requests after this time; inf: at Ctrl-C.",
    ),
]
WarmUp = Annotated[
    float,
    typer.Option(
        "--warm-up",
        metavar="SECONDS",
        min=0.0,
        help="Do not count requests that are sent in this time after the start.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Fail a request that takes longer than this."
    ),
]
MaxInFlight = Annotated[
    int,
    typer.Option(
        "--max-in-flight",
        min=1,
        help="Largest number of requests that run at the same time; further requests are not sent "
        "and count as failed.",
    ),
]
TtftMs = Annotated[
    float | None,
    typer.Option(
        "--ttft-ms", help="Goodput counts requests with at most this time to first token, in ms."
    ),
]
TtftMsPer1kTokens = Annotated[
    float,
    typer.Option(
        "--ttft-ms-per-1k-tokens",
        help="Added to --ttft-ms per 1,000 prompt tokens, in ms.",
    ),
]
ItlMs = Annotated[
    float | None,
    typer.Option(
        "--itl-ms", help="Goodput counts requests with at most this mean gap between tokens, in ms."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the random times, lengths and lanes.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Write all figures to this file, as JSON.", dir_okay=False
    ),
]

_READY_TIMEOUT_S = 10.0
# Longest timeout of a request, in seconds: three years, as for durations of the configuration.
_MOST_TIMEOUT_S = 1e8
# Terminal codes: carriage return, then clear the line.
_CLEAR = "\r\x1b[K"


def slo(ttft_ms: float | None, ttft_ms_per_1k_tokens: float, itl_ms: float | None) -> Slo:
    """Builds the latency goal; raises typer.BadParameter for a target that is out of range."""
    for name, value in (("--ttft-ms", ttft_ms), ("--itl-ms", itl_ms)):
        if value is not None and not 0 < value < math.inf:
            raise typer.BadParameter(
                f"is {value:g}; must be finite and more than 0", param_hint=name
            )
    slope, option = ttft_ms_per_1k_tokens, "--ttft-ms-per-1k-tokens"
    if not 0 <= slope < math.inf:
        raise typer.BadParameter(f"is {slope:g}; must be finite and at least 0", param_hint=option)
    if slope and ttft_ms is None:
        raise typer.BadParameter("cannot be used without --ttft-ms", param_hint=option)
    return Slo(TtftTarget.from_ms(ttft_ms, slope), None if itl_ms is None else itl_ms / 1e3)


def cut(
    plan: Iterator[Planned], num_requests: int | None, duration_s: float | None
) -> Iterator[Planned]:
    """The first `num_requests` of a plan that are due within the duration."""
    if duration_s is not None:
        plan = itertools.takewhile(lambda one: one.at_s < duration_s, plan)
    return itertools.islice(plan, num_requests)


def run_load(
    kind: str,
    load: dict[str, Any],
    drive: Drive,
    *,
    address: str | None,
    goal: Slo,
    tenant: str,
    timeout_s: float,
    warm_up_s: float,
    max_requests: int,
    is_open: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Runs a load, prints the result, and exits with the command's code.

    Ctrl-C ends the run: the figures so far are printed and the exit code is 130. A second Ctrl-C
    ends the process at once.
    """
    if not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise typer.BadParameter(
            f"is {timeout_s:g}; must be more than 0 and at most {_MOST_TIMEOUT_S:g}",
            param_hint="--timeout",
        )
    duration_s = load["duration_s"]
    if not math.isfinite(warm_up_s):
        raise typer.BadParameter(f"is {warm_up_s:g}; must be finite", param_hint="--warm-up")
    if duration_s is not None and warm_up_s >= duration_s:
        raise typer.BadParameter(
            f"is {warm_up_s:g}; must be less than --duration ({duration_s:g})",
            param_hint="--warm-up",
        )
    addresses = options.resolve_addresses(address)
    options.check_writable(out, "--out")
    outcome = interrupts.run(
        _run(
            drive,
            addresses,
            goal=goal,
            tenant=tenant,
            timeout_s=timeout_s,
            warm_up_s=warm_up_s,
            max_requests=max_requests,
        ),
        uvloop.new_event_loop,
    )
    result = Result.of(kind, load, goal, outcome, is_open=is_open)
    _print(result, out, as_json)
    if result.interrupted:
        raise typer.Exit(130)
    if not result.total.num_ended:
        problem = "no request succeeded"
        if warm_up_s and not result.total.num_requests:
            problem = f"no request was due after the first {warm_up_s:g} s (--warm-up)"
            problem += ", so there are no figures"
        typer.echo(f"baton: {problem}", err=True)
        raise typer.Exit(1)


async def _run(
    drive: Drive,
    addresses: list[str],
    *,
    goal: Slo,
    tenant: str,
    timeout_s: float,
    warm_up_s: float,
    max_requests: int,
) -> Outcome:

    async with BatonClient(
        addresses, max_requests=max_requests, tls=credentials.tls(), api_key=credentials.api_key()
    ) as client:
        # The first call fails at once without a coordinator; workers may still need time to serve.
        await client.model()
        await client.wait_ready(_READY_TIMEOUT_S)
        model = await client.model()
        # Before this point there are no figures to print, and Ctrl-C ends the command.
        stop = lifecycle.stop_requested()
        generator = Generator(
            client,
            # A random seed makes new prompts, so that no prefix cache holds them already.
            Prompts(model.vocab_size, secrets.randbits(64)),
            goal,
            timeout_s=timeout_s,
            warm_up_s=warm_up_s,
            tenant=tenant,
        )
        progress = asyncio.create_task(_show_progress(generator)) if sys.stderr.isatty() else None
        try:
            return await drive(generator, stop)
        finally:
            if progress is not None:
                progress.cancel()
                sys.stderr.write(_CLEAR)


async def _show_progress(generator: Generator) -> None:
    """Shows the progress on one terminal line, updated every second."""
    while True:
        await asyncio.sleep(1.0)
        sys.stderr.write(_CLEAR + generator.progress)
        sys.stderr.flush()


def _print(result: Result, out: Path | None, as_json: bool) -> None:

    if as_json:
        print_json(result.as_json())
    else:
        print_table(["", ">p50", ">p90", ">p95", ">p99"], result.latency_rows(), "")
        print()
        print_table(["figure", "value"], result.figure_rows(), "")
        if rows := result.failure_rows():
            print()
            print_table(["failed", "reason", ">requests", "first message"], rows, "")
    if result.warning:
        typer.echo(f"baton: {result.warning}", err=True)
    if out is not None:
        # The file is written last, so that a full disk does not lose the printed figures.
        out.write_text(
            json.dumps(result.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
