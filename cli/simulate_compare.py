"""`baton simulate --compare`: several ways to serve one trace, as rows of a table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from baton.cli.output import print_table
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import Targets, in_seconds
from baton.load.traces import Arrival
from baton.runtime.config import BatonConfig, SimulatedConfig
from baton.simulator import comparison
from baton.simulator.comparison import Row, Setup


def compare(config: BatonConfig, arrivals: Sequence[Arrival], json_file: Path | None) -> None:
    """Simulates all setups, prints the table and writes the JSON file.

    Raises:
        ValueError: there are too few workers, or a request is too long.
        ConfigError: there are more workers than autoscaled pools may have.
    """
    targets = in_seconds(config.scaling.targets.interactive)
    rows = simulated_rows(config, arrivals, comparison.setups(config))
    found = comparison.concluded(rows, targets)
    if json_file is not None:
        text = json.dumps(comparison.as_json(rows, found), indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
    print_rows(rows, found.best, targets, "--json FILE has all")
    print(f"best: {found.rule}.")
    print(found.text)


def print_rows(rows: Sequence[Row], best: Row, targets: Targets, left_out_hint: str) -> None:
    """Prints the table of a comparison, and what its columns mean."""
    shown = [
        index
        for index, name in enumerate(comparison.COLUMNS)
        if name != comparison.HITS or comparison.has_hits(rows)
    ]
    print_table(
        [comparison.COLUMNS[index] for index in shown],
        [[line[index] for index in shown] for line in comparison.table(rows, best)],
        "",
        drop_first=comparison.DROP_FIRST,
        left_out_hint=left_out_hint,
    )
    print()
    print(comparison.legend(targets))


def simulated_rows(
    config: BatonConfig,
    arrivals: Sequence[Arrival],
    setups: Sequence[Setup],
    engines: Mapping[Pool, SimulatedConfig] | None = None,
) -> list[Row]:
    """Runs the simulations; shows their progress on standard error if that is a terminal.

    Args and errors: see `comparison.run`.
    """
    rows: dict[int, Row] = {}
    progress = Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
    try:
        with progress:
            task = progress.add_task("simulations", total=len(setups))
            num_processes = os.cpu_count() or 1
            found = comparison.run(config, arrivals, setups, num_processes, engines)
            for index, row in found:
                rows[index] = row
                progress.advance(task)
    except BrokenProcessPool:
        typer.echo("baton: a simulation was killed; the machine may lack memory", err=True)
        raise typer.Exit(1) from None
    return [rows[index] for index in sorted(rows)]
