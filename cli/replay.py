"""`baton replay`: sends the requests of a trace to a live cell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import load_run, options
from baton.load import traces
from baton.load.generator import Generator, Outcome
from baton.load.plan import LaneRule, replayed


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Trace file: Azure CSV, Mooncake JSONL, or JSON with start_time, prompt_len and "
            "output_len.",
        ),
    ],
    address: options.Address = None,
    speed: Annotated[
        float, typer.Option("--speed", help="Replay the trace this many times as fast.")
    ] = 1.0,
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
    """Send the requests of a trace to a live cell.

    The requests are sent at the times of the trace. Prompts are generated with the lengths of the
    trace; requests with equal hash IDs (Mooncake) share their prompt prefixes. A latency begins at
    the time at which the request was scheduled to be sent. Ctrl-C ends the run and prints the
    figures so far.

    Exit codes: 0 done, 1 no request succeeded, 2 wrong usage, 3 unavailable, 130 interrupted.
    """
    try:
        rule = LaneRule(batch_share, batch_prompt_tokens)
        plan = replayed(traces.read(trace), speed, rule, seed)
    except ValueError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    plan = load_run.cut(plan, requests, duration)

    async def drive(generator: Generator, stop: asyncio.Event) -> Outcome:
        return await generator.open_loop(plan, max_in_flight, stop)

    load_run.run_load(
        "replay",
        {
            "trace": options.file_name(trace),
            "speed": speed,
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
        max_requests=max_in_flight,
        is_open=True,
        out=out,
        as_json=as_json,
    )
