"""`baton simulate`: runs a trace on simulated workers with the production coordinator."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options, simulate_compare
from baton.cli.effective_config import load_config
from baton.cli.output import print_table
from baton.coordinator.state.scaling_config import in_seconds
from baton.load import traces
from baton.runtime.config import BatonConfig
from baton.simulator import report
from baton.simulator.picture import svg
from baton.simulator.run import simulate as run


class PolicyName(StrEnum):
    BATON = "baton"
    STATIC = "static"
    COLOCATED = "colocated"
    HPA = "hpa"
    PLANNER = "planner"
    HINDSIGHT = "hindsight"


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Trace file: Azure CSV, Mooncake JSONL, or JSON with start_time, prompt_len and "
            "output_len.",
        ),
    ],
    config: options.ConfigFile = None,
    policy: Annotated[
        PolicyName | None,
        typer.Option("--policy", help="Policy that sizes the pools; default: baton."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare colocated serving, fixed splits and autoscaling with the same workers.",
        ),
    ] = False,
    prefill: Annotated[
        int | None, typer.Option("--prefill", min=0, help="Number of prefill workers at the start.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option("--decode", min=0, help="Number of decode workers at the start.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=2,
            help="Number of workers in total, split in halves; instead of --prefill and --decode.",
        ),
    ] = None,
    ttft_ms: Annotated[
        int | None,
        typer.Option(
            "--ttft-ms",
            help="Target for the time to first token, in ms; default: scaling.targets.interactive.",
        ),
    ] = None,
    ttft_ms_per_1k_tokens: Annotated[
        int | None,
        typer.Option(
            "--ttft-ms-per-1k-tokens",
            help="Added to the target for the time to first token per 1,000 prompt tokens, in ms.",
        ),
    ] = None,
    itl_ms: Annotated[
        int | None, typer.Option("--itl-ms", help="Target for the inter-token latency, in ms.")
    ] = None,
    factor: Annotated[
        float, typer.Option("--factor", help="Factor on the request rate of the trace.")
    ] = 1.0,
    host_kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--host-kv-tokens",
            min=0,
            max=options.MOST,
            help="Tokens that each worker keeps in host memory; default: by kv_store.host_bytes.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write all figures and events to this file, as JSON."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Write an SVG chart of pool sizes, load, TTFT and ITL to this file.",
        ),
    ] = None,
) -> None:
    """Run a trace on simulated workers, under a virtual clock.

    The coordinator and the autoscaler are the production code. The `simulated` section of the
    configuration sets the speed of the workers.
    """
    if compare:
        for option, value in (("--policy", policy), ("--picture", picture)):
            if value is not None:
                raise typer.BadParameter("cannot be used with --compare", param_hint=option)
    prefill, decode = options.split_workers(workers, prefill, decode)
    policy = policy or PolicyName.BATON
    options.check_writable(json_file, "--json")
    options.check_writable(picture, "--picture")
    effective = load_config(
        config,
        engine=options.EngineName.SIMULATED,
        num_prefill=prefill,
        num_decode=decode,
        targets={
            "ttft_ms": ttft_ms,
            "ttft_ms_per_1k_tokens": ttft_ms_per_1k_tokens,
            "itl_ms": itl_ms,
        },
    )
    if host_kv_tokens is not None:
        effective = _with_host_tokens(effective, host_kv_tokens)
    try:
        arrivals = traces.read(trace)
        if factor != 1.0:
            arrivals = traces.scaled(arrivals, factor)
        if compare:
            simulate_compare.compare(effective, arrivals, json_file)
            return
        found = run(effective, arrivals, policy.value)
    except ValueError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    figures, hits = found.figures, found.figures.hits
    print_table(["", ">p50", ">p90", ">p95", ">p99"], report.table(figures), "")
    print()
    rows = [
        ["requests", f"{figures.num_requests}, {figures.num_failed} failed"],
        ["within the targets", f"{figures.attained:.2%}"],
        ["TTFT within", f"{figures.ttft_within:.2%}"],
        ["TPOT within", f"{figures.tpot_within:.2%}"],
        ["goodput per GPU", f"{figures.goodput_per_gpu:.4f}/s"],
        ["GPU-hours", f"{figures.gpu_hours:.3f}"],
        ["cold starts", f"{figures.num_cold_starts}, {figures.cold_start_s:.0f} s"],
        ["scale events", str(figures.num_events)],
    ]
    if hits.infinite:
        rows += [
            ["hits, device", f"{hits.device:.2%} of the prompt tokens"],
            ["hits, host memory", f"{hits.host:.2%}"],
            ["hits, fetched from other workers", f"{hits.fetched:.2%}"],
            ["hits, infinite cache", f"{hits.infinite:.2%}; {hits.of_infinite:.1%} of it found"],
        ]
    print_table(["figure", "value"], rows, "")
    if json_file is not None:
        json_file.write_text(
            json.dumps(report.as_json(figures, found.record), indent=1) + "\n", encoding="utf-8"
        )
    if picture is not None:
        targets = in_seconds(effective.scaling.targets.interactive)
        title = f"{options.file_name(trace)}, {policy.value}"
        picture.write_text(svg(found.record.moments, targets, title), encoding="utf-8")


def _with_host_tokens(config: BatonConfig, num_tokens: int) -> BatonConfig:
    """Returns the configuration with room for this many tokens in each worker's host memory."""
    simulated = config.simulated
    num_blocks = -(-num_tokens // simulated.block_size_tokens)
    host_bytes = num_blocks * simulated.num_layers * simulated.block_bytes
    store = config.kv_store.model_copy(update={"host_bytes": host_bytes})
    return config.model_copy(update={"kv_store": store})
