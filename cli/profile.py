"""`baton profile`: records what a live worker's engine computes, as trace files."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from baton.cli import options
from baton.cli.admin_calls import call_admin
from baton.cli.output import print_json
from baton.cli.pool_sizes import Worker
from baton.client import AdminClient
from baton.runtime.errors import Internal
from baton.runtime.profiling import DEFAULT_PROFILE_S, LEAST_PROFILE_S, MOST_PROFILE_S
from baton.v1 import cluster_pb2

_SUFFIXES = (".json.gz", ".json", ".gz")


def profile(
    worker: Worker,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=LEAST_PROFILE_S,
            max=MOST_PROFILE_S,
            metavar="SECONDS",
            help="Duration of the recording.",
        ),
    ] = DEFAULT_PROFILE_S,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Trace file; with several ranks each file name gets the rank's number. "
            "Default: WORKER-TIME.trace.json.gz.",
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Record a profile of a live worker.

    The command writes a trace per rank, for ui.perfetto.dev or chrome://tracing. The worker keeps
    serving, a little slower. It pauses while it writes the trace.
    """
    path = out or Path(f"{worker.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json.gz")
    options.check_writable(path, "--out", replaced=True)

    async def question(admin: AdminClient) -> list[dict[str, Any]]:
        found, traces = [], _Traces(path)
        with traces:
            async with contextlib.aclosing(admin.profile(worker, seconds)) as events:
                async for event in events:
                    if event.HasField("started"):
                        print(f"recording {worker} for {seconds:g} s", file=sys.stderr)
                    elif event.HasField("file"):
                        into = traces.begin(event.file)
                        size = {"bytes": event.file.num_bytes}
                        found.append({"rank": event.file.rank, "path": str(into), **size})
                    else:
                        traces.write(event.data)
            traces.finish()
        return found

    found = call_admin(address, question)
    if as_json:
        return print_json(found)
    for one in found:
        print(f"{one['path']}  {one['bytes'] / 1e6:.1f} MB")
    return None


class _Traces:
    """Trace files; they get their final names only when all of them are complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[tuple[Path, Path, int]] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Traces:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        for part, _, _ in self._parts:
            part.unlink(missing_ok=True)

    def begin(self, trace: cluster_pb2.TraceFile) -> Path:
        """Begins the next trace; returns its final path."""
        self._close()
        into = self._path if trace.num_files == 1 else _of_rank(self._path, trace.rank)
        part = into.with_name(f".{into.name}.part")
        self._file = part.open("wb")
        self._parts.append((part, into, trace.num_bytes))
        return into

    def write(self, data: bytes) -> None:
        if self._file is not None:
            self._file.write(data)

    def finish(self) -> None:
        """Renames the complete files; raises Internal if a file is incomplete."""
        self._close()
        for part, into, num_bytes in self._parts:
            if (size := part.stat().st_size) != num_bytes:
                raise Internal(f"{into}: received only {size} of {num_bytes} bytes")
        for part, into, _ in self._parts:
            part.replace(into)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _of_rank(path: Path, rank: int) -> Path:
    """Path of one rank's trace: trace.json.gz becomes trace.rank1.json.gz."""
    suffix = next((one for one in _SUFFIXES if path.name.endswith(one)), "")
    return path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")
