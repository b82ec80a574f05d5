"""`baton bench`: generated load on a live cell; `baton bench compare`: compare two results."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import load_run, options
from baton.cli.output import print_json, print_table
from baton.load import compare as comparison
from baton.load.generator import Generator, Outcome
from baton.load.lengths import Lengths
from baton.load.plan import LaneRule, arrival_times, generated

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
# Duration of the load when neither --duration nor --requests is set.
_DURATION_S = 60.0
_LENGTHS = "Length in tokens: N, LOW-HIGH (uniform) or MEAN~CV (log-normal)."


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    address: options.Address = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help="Open loop: send this many requests/s, even while earlier ones still run.",
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness",
            help="Burstiness of --rate: 1 is a Poisson process, less than 1 sends in bursts.",
        ),
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=1,
            max=100_000,
            help="Closed loop: keep this many requests running at a time.",
        ),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option("--prompt-tokens", help=_LENGTHS)] = "512",
    output_tokens: Annotated[str, typer.Option("--output-tokens", help=_LENGTHS)] = "128",
    batch_share: load_run.BatchShare = 0.0,
    batch_prompt_tokens: load_run.BatchPromptTokens = None,
    tenant: load_run.Tenant = "",
    requests: load_run.Requests = None,
    duration: load_run.Duration = None,
    warm_up: load_run.WarmUp = 0.0,
    timeout: load_run.Timeout = 300.0,
    max_in_flight: load_run.MaxInFlight = 4096,
    ttft_ms: load_run.TtftMs = None,
    ttft_ms_per_1k_tokens: load_run.TtftMsPer1kTokens = 0.0,
    itl_ms: load_run.ItlMs = None,
    seed: load_run.Seed = 0,
    out: load_run.Out = None,
    as_json: options.Json = False,
) -> None:
    """Put load on a live cell and print the figures.

    The figures are latencies, throughput and goodput. A latency begins at the time at which the
    request was scheduled to be sent. Ctrl-C ends the run and prints the figures so far.

    Exit codes: 0 done, 1 no request succeeded, 2 wrong usage, 3 unavailable, 130 interrupted.
    """
    if context.invoked_subcommand is not None:
        return

    if (rate is None) == (concurrency is None):
        raise typer.BadParameter("set exactly one of --rate and --concurrency", param_hint="--rate")
    if duration is None and requests is None:
        duration = _DURATION_S
    try:
        lengths = (
            Lengths.parse(prompt_tokens, "--prompt-tokens"),
            Lengths.parse(output_tokens, "--output-tokens"),
        )
        times = (
            itertools.repeat(0.0)
            if rate is None
            else arrival_times(rate, burstiness, random.Random(f"times {seed}"))
        )
        plan = generated(times, *lengths, LaneRule(batch_share, batch_prompt_tokens), seed)
    except ValueError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    plan = load_run.cut(plan, requests, duration if rate is not None else None)

    async def drive(generator: Generator, stop: asyncio.Event) -> Outcome:
        if concurrency is None:
            return await generator.open_loop(plan, max_in_flight, stop)
        lasts_s = math.inf if duration is None else duration
        return await generator.closed_loop(plan, concurrency, lasts_s, stop)

    load_run.run_load(
        "bench",
        {
            "rate": rate,
            "burstiness": burstiness if rate is not None else None,
            "concurrency": concurrency,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "batch_share": batch_share,
            "batch_prompt_tokens": batch_prompt_tokens,
            "requests": requests,
            "duration_s": duration,
            "warm_up_s": warm_up,
            "seed": seed,
        },
        drive,
        address=address,
        goal=load_run.slo(ttft_ms, ttft_ms_per_1k_tokens, itl_ms),
        tenant=tenant,
        timeout_s=timeout,
        warm_up_s=warm_up,
        max_requests=concurrency or max_in_flight,
        is_open=rate is not None,
        out=out,
        as_json=as_json,
    )


_Result = typer.Argument(
    help="Result file, written by --out or by the option --json of simulate.", show_default=False
)


@app.command()
def compare(
    a: Annotated[Path, _Result], b: Annotated[Path, _Result], as_json: options.Json = False
) -> None:
    """Show two results side by side, with their ratio.

    The results come from bench, replay or simulate.
    """
    try:
        rows = comparison.compared(comparison.read(a), comparison.read(b))
    except comparison.ResultError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        return print_json(comparison.as_json(rows))
    return print_table(["", ">A", ">B", ">B/A"], [row.cells() for row in rows], "")
