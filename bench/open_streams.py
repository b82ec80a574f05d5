"""Keeps 10,000 HTTP streams open through two gateways, then kills one gateway.

`python -m baton.bench.open_streams --help`. One coordinator, workers with the simulated engine, and
two gateways serve streamed completions that all are open at the same time. Some streams go over a
gRPC session instead, without a gateway: the baseline of the gaps in the same run. It measures:

1. Memory: resident memory with all streams open, without streams, and after the end.
2. Cost: CPU time and gaps between tokens for some seconds.
3. A gateway that dies (SIGKILL): its streams must end with a connection error, and the coordinator
   must free their requests. All other streams must go on and be complete, with the right tokens.

The exit code is 1 if a stream is wrong or anything is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from baton.bench import interrupts
from baton.bench.chaos_cell import POLL_S
from baton.bench.open_stream_cell import StreamsCell, Usage
from baton.bench.open_stream_clients import (
    GapFigures,
    Gaps,
    Output,
    Stream,
    open_http,
    read_grpc,
)
from baton.client import BatonClient
from baton.engine.sim_tokens import Vocabulary
from baton.load import stats
from baton.runtime import demo_model

NUM_GATEWAYS = 2
SETTLE_TIMEOUT_S = 60.0
# Streams that one gateway serves before the first measurement: the first requests import modules.
NUM_WARM_UP = 16
# Open files of a process beside its streams.
OTHER_FILES = 256
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """The load of a run.

    Attributes:
        num_streams: HTTP streams, distributed evenly over the gateways.
        num_probes: Streams over the gRPC session.
        num_tokens: Output tokens of each stream; together with `step_ms` its duration.
        num_prompt_tokens: Prompt tokens of each stream.
        step_ms: Time between two tokens of a stream.
        num_decode: Decode workers. They do not decode at the same moments.
        num_opening: Streams that wait for their first token at the same time.
        steady_s: Duration of the measurement of cost and gaps.
        seed: Seed of the prompts.
    """

    num_streams: int = 10_000
    num_probes: int = 64
    num_tokens: int = 120
    num_prompt_tokens: int = 24
    step_ms: float = 2000.0
    num_decode: int = 4
    num_opening: int = 128
    steady_s: float = 20.0
    seed: int = 0

    def config(self, model: str) -> dict[str, Any]:
        most = self.num_streams + self.num_probes + NUM_WARM_UP
        kv_tokens = (self.num_prompt_tokens + self.num_tokens + 32) * most
        requests = {"max_requests_per_worker": most}
        return {
            "model": model,
            "served_model_name": "bench",
            "engine": "simulated",
            "log_level": "warning",
            "elastic": False,
            "prefill": requests,
            "decode": requests,
            "http": {"max_connections": most, "max_running_requests": most},
            "coordinator": {
                "max_running_requests": most,
                "max_requests_per_session": most,
                # Other work may keep the processes from running; no worker dies here.
                "worker_silent_s": 30,
                "worker_timeout_s": 60,
                "worker_stuck_s": 120,
                "handoff_timeout_s": 60,
            },
            "lanes": {"interactive": {"max_queued": most, "itl_ms": round(3 * self.step_ms)}},
            "simulated": {
                "step_base_ms": self.step_ms,
                "step_per_request_ms": 0,
                "prefill_base_ms": 5,
                "prefill_per_token_ms": 0.01,
                "mean_output_tokens": 0,
                "max_num_seqs": most,
                "max_num_batched_tokens": max(2048, most),
                "max_model_len": 2048,
                "kv_tokens": max(4096, kv_tokens),
            },
            "kv_transfer": {"send_bytes": 2**26, "receive_bytes": 2**26},
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the processes while all streams are open, in ms per 1,000 tokens of all streams.

    Attributes:
        gateways: Per 1,000 tokens of HTTP streams.
    """

    coordinator: float
    gateways: float
    workers: float
    client: float


@dataclass(slots=True)
class Run:
    """Results of one run.

    Attributes:
        num_open: HTTP streams that were open at the same time.
        opening_s: Time in which they were opened.
        idle_bytes, open_bytes, end_bytes: Resident memory by process: before the streams, with all
            streams open, after all have ended.
        stream_bytes: Memory per stream: of the coordinator for all streams, of each gateway for its
            own.
        num_files: Open files by process, with all streams open.
        num_tokens: Tokens of all streams while the cost was measured.
        http_gaps, grpc_gaps: Gaps during that time.
        kill_http_gaps, kill_grpc_gaps: Gaps of the surviving streams in the first seconds after the
            kill.
        num_cut: Streams of the killed gateway that ended with a connection error.
        cut_s: Time from the kill until the last client of the dead gateway had its error.
        freed_s: Time from the kill until the coordinator held no request of the dead gateway.
        freed_cpu_s: CPU time of the coordinator in that time; it serves the other streams too.
        num_complete: Streams that have their last event.
        num_wrong: Streams with a wrong text, or with another end than they should have.
        problems: Problems in words.
    """

    num_open: int = 0
    opening_s: float = 0.0
    idle_bytes: dict[str, int] = field(default_factory=dict)
    open_bytes: dict[str, int] = field(default_factory=dict)
    end_bytes: dict[str, int] = field(default_factory=dict)
    stream_bytes: dict[str, float] = field(default_factory=dict)
    num_files: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    cost: Cost | None = None
    http_gaps: GapFigures | None = None
    grpc_gaps: GapFigures | None = None
    kill_http_gaps: GapFigures | None = None
    kill_grpc_gaps: GapFigures | None = None
    num_cut: int = 0
    cut_s: float = 0.0
    freed_s: float = 0.0
    freed_cpu_s: float = 0.0
    num_complete: int = 0
    num_wrong: int = 0
    problems: list[str] = field(default_factory=list)


class Bench:
    """One run of a plan in a cell whose coordinator serves."""

    def __init__(self, plan: Plan, cell: StreamsCell, vocabulary: Vocabulary) -> None:
        self._plan, self._cell, self._vocabulary = plan, cell, vocabulary
        self._prompts = random.Random(plan.seed)
        self._http_gaps, self._grpc_gaps = Gaps(), Gaps()
        # HTTP streams by gateway, and streams over the gRPC session.
        self._streams: list[list[Stream]] = [[] for _ in range(NUM_GATEWAYS)]
        self._probes: list[Stream] = []
        self.found = Run()

    async def run(self) -> Run:
        plan, cell, found = self._plan, self._cell, self.found
        cell.start_worker("prefill")
        for _ in range(plan.num_decode):
            cell.start_worker("decode")
        for _ in range(NUM_GATEWAYS):
            cell.start_gateway()
        await cell.all_serve()
        await cell.gateways_serve()
        await self._warm_up()
        found.idle_bytes = self._resident_bytes()
        async with BatonClient(cell.address) as client, asyncio.TaskGroup() as group:
            await self._open(client, group)
            await self._measure()
            await self._kill_gateway()
            for stream in (*self._survivors(), *self._probes):
                await stream.ended
        await self._check()
        return found

    def _output(self, num_tokens: int) -> Output:
        count = self._plan.num_prompt_tokens
        return Output([self._prompts.randint(5, 400) for _ in range(count)], num_tokens)

    async def _warm_up(self) -> None:
        for gateway in self._cell.gateways:
            for _ in range(NUM_WARM_UP // NUM_GATEWAYS):
                stream = await open_http(gateway.url, self._output(2), Gaps())
                await stream.ended
                if stream.error:
                    raise RuntimeError(f"{gateway.name}: {stream.error}")

    async def _open(self, client: BatonClient, group: asyncio.TaskGroup) -> None:
        plan, found = self._plan, self.found
        for _ in range(plan.num_probes):
            output = self._output(plan.num_tokens)
            stream = Stream(output, self._grpc_gaps)
            self._probes.append(stream)
            group.create_task(read_grpc(client, stream, output))
        began_at, turns = time.monotonic(), iter(range(plan.num_streams))

        async def open_in_turn() -> None:
            for number in turns:
                index = number % NUM_GATEWAYS
                url, output = self._cell.gateways[index].url, self._output(plan.num_tokens)
                self._streams[index].append(await open_http(url, output, self._http_gaps))

        async with asyncio.TaskGroup() as opening:
            for _ in range(plan.num_opening):
                opening.create_task(open_in_turn())
        for stream in self._probes:
            await stream.begun
        found.opening_s = time.monotonic() - began_at
        found.num_open = sum(stream.is_open for streams in self._streams for stream in streams)
        found.open_bytes = self._resident_bytes()
        shares = {gateway.name: len(streams) for gateway, streams in self._by_gateway()}
        shares["coordinator"] = plan.num_streams + plan.num_probes
        found.stream_bytes = {
            name: (found.open_bytes[name] - found.idle_bytes[name]) / count
            for name, count in shares.items()
        }
        found.num_files = {name: usage.num_files for name, usage in self._usages().items()}

    def _by_gateway(self) -> Any:
        return zip(self._cell.gateways, self._streams, strict=True)

    def _survivors(self) -> list[Stream]:
        return [stream for streams in self._streams[:-1] for stream in streams]

    def _usages(self) -> dict[str, Usage]:
        """Usage of the coordinator and of the gateways that run."""
        found = {"coordinator": self._cell.coordinator_usage()}
        for gateway in self._cell.gateways:
            if gateway.popen.poll() is None:
                found[gateway.name] = Usage.of(gateway.popen.pid)
        return found

    def _resident_bytes(self) -> dict[str, int]:
        return {name: usage.resident_bytes for name, usage in self._usages().items()}

    async def _measure(self) -> None:
        """Measures cost and gaps while all streams are open and decode."""
        plan, found = self._plan, self.found
        for stream in (*(one for streams in self._streams for one in streams), *self._probes):
            await stream.decodes
        since, before = time.perf_counter(), self._cpu_s()
        await asyncio.sleep(plan.steady_s)
        until, after = time.perf_counter(), self._cpu_s()
        found.http_gaps = GapFigures.of(self._http_gaps, since, until)
        found.grpc_gaps = GapFigures.of(self._grpc_gaps, since, until)
        num_http = found.http_gaps.num_gaps
        found.num_tokens = num_http + found.grpc_gaps.num_gaps
        used_ms = {name: (after[name] - before[name]) * 1e6 for name in after}
        found.cost = Cost(
            coordinator=used_ms["coordinator"] / max(1, found.num_tokens),
            gateways=sum(used_ms[one.name] for one in self._cell.gateways) / max(1, num_http),
            workers=used_ms["workers"] / max(1, found.num_tokens),
            client=used_ms["client"] / max(1, found.num_tokens),
        )

    def _cpu_s(self) -> dict[str, float]:
        usages = {**self._usages(), "workers": self._cell.workers_usage()}
        return {
            "client": Usage.of(os.getpid()).cpu_s,
            **{name: usage.cpu_s for name, usage in usages.items()},
        }

    async def _kill_gateway(self) -> None:
        """Kills the last gateway, and waits for its clients and for the coordinator."""
        plan, found = self._plan, self.found
        *_, gateway = self._cell.gateways
        *_, streams = self._streams
        since, before_s = time.perf_counter(), self._cell.coordinator_usage().cpu_s
        gateway.kill()
        for stream in streams:
            await stream.ended
        found.cut_s = time.perf_counter() - since
        while (state := await self._cell.state(checks=False))["requests"] > self._num_running():
            if time.perf_counter() - since > SETTLE_TIMEOUT_S:
                left = state["requests"] - self._num_running()
                found.problems.append(f"{left} requests of the killed gateway are still held")
                break
            await asyncio.sleep(POLL_S)
        found.freed_s = time.perf_counter() - since
        found.freed_cpu_s = self._cell.coordinator_usage().cpu_s - before_s
        await asyncio.sleep(max(0.0, 2 * plan.step_ms / 1e3 - found.freed_s))
        until = time.perf_counter()
        found.kill_http_gaps = GapFigures.of(self._http_gaps, since, until)
        found.kill_grpc_gaps = GapFigures.of(self._grpc_gaps, since, until)
        self._report("after the kill", await self._cell.state(checks=True))

    def _num_running(self) -> int:
        """Number of streams that have not ended, as their clients see it."""
        return sum(not one.ended.done() for one in (*self._survivors(), *self._probes))

    def _report(self, when: str, state: dict[str, Any]) -> None:
        if state["problem"]:
            self.found.problems.append(f"coordinator, {when}: {state['problem']}")

    async def _check(self) -> None:
        """Checks all texts, and that nothing is held any more."""
        found, cell = self.found, self._cell
        *_, streams = self._streams
        found.num_cut = sum(stream.error.startswith("connection error") for stream in streams)
        # A stream of the killed gateway may have ended before the kill.
        for stream in (*self._survivors(), *self._probes, *streams):
            may_be_cut = stream.error.startswith("connection error") and stream in streams
            found.num_complete += not stream.error
            if (stream.error and not may_be_cut) or not stream.is_right(self._vocabulary):
                found.num_wrong += 1
                if found.num_wrong <= 3:
                    found.problems.append(f"a stream is wrong: {stream.error or 'other text'}")
        found.problems += await cell.settled(SETTLE_TIMEOUT_S)
        state = await cell.state(checks=True)
        if state["requests"] or state["sessions"] > len(cell.gateways):
            found.problems.append(f"the coordinator still holds {state}")
        self._report("at the end", state)
        found.end_bytes = self._resident_bytes()


def raise_open_files(num_streams: int) -> None:
    """Raises the limit of open files to the allowed maximum. Raises ValueError if it is too low."""
    needed = num_streams + OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{num_streams} streams need {needed} open files in one process; the hard limit "
            f"RLIMIT_NOFILE is {hard} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(plan: Plan, directory: Path, model: str) -> Run:
    """Runs a plan.

    Args:
        plan: The load.
        directory: Empty directory for logs and temporary files.
        model: Directory of a model with a tokenizer.
    """
    cell = StreamsCell(directory, plan.config(model))
    async with cell:
        bench = Bench(plan, cell, Vocabulary.load(model))
        try:
            found = await bench.run()
        except BaseException:
            print(cell.last_log_lines(), file=sys.stderr)
            raise
    found.problems += await asyncio.to_thread(cell.remains)
    return found


def show(plan: Plan, found: Run) -> None:
    assert found.cost is not None
    print(
        f"{found.num_open} HTTP streams were open at the same time, opened in "
        f"{found.opening_s:.0f} s, and {plan.num_probes} streams over gRPC"
    )
    rows = [
        [
            name,
            f"{found.idle_bytes[name] / MIB:.0f}",
            f"{found.open_bytes[name] / MIB:.0f}",
            f"{found.end_bytes[name] / MIB:.0f}" if name in found.end_bytes else "killed",
            f"{found.stream_bytes[name] / 1024:.1f}",
            f"{found.num_files[name]}",
        ]
        for name in found.idle_bytes
    ]
    header = ["", "idle, MiB", "open, MiB", "end, MiB", "KiB per stream", "open files"]
    stats.print_table("Resident memory", header, rows)
    rows = [[name, f"{value:.1f}"] for name, value in asdict(found.cost).items()]
    stats.print_table(
        f"CPU ms per 1,000 tokens, over {found.num_tokens} tokens", ["", "CPU ms"], rows
    )
    rows = [
        [what, f"{one.num_gaps}", f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}", f"{one.longest_ms:.0f}"]
        for what, one in (
            ("HTTP, all streams open", found.http_gaps),
            ("gRPC, all streams open", found.grpc_gaps),
            ("HTTP, after the kill", found.kill_http_gaps),
            ("gRPC, after the kill", found.kill_grpc_gaps),
        )
        if one is not None
    ]
    header = ["", "gaps", "p50 ms", "p99 ms", "longest ms"]
    stats.print_table(f"Gaps between tokens; steps take {plan.step_ms:.0f} ms", header, rows)
    print(
        f"{found.num_cut} streams of the killed gateway ended with a connection error within "
        f"{found.cut_s:.2f} s; the coordinator had freed them after {found.freed_s:.2f} s, with "
        f"{found.freed_cpu_s:.2f} s of its CPU time"
    )
    print(f"{found.num_complete} streams are complete, {found.num_wrong} are wrong")
    for problem in found.problems:
        print(f"PROBLEM: {problem}")


def main() -> None:
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=plan.num_streams, help="HTTP streams")
    parser.add_argument("--output-tokens", type=int, default=plan.num_tokens)
    parser.add_argument("--step-ms", type=float, default=plan.step_ms, help="ITL of each stream")
    parser.add_argument("--seconds", type=float, default=plan.steady_s, help="measured time")
    parser.add_argument("--quick", action="store_true", help="1,000 streams, steps of 0.5 s")
    parser.add_argument("--json", type=Path, default=Path("bench/results/open_streams.json"))
    arguments = parser.parse_args()
    plan = Plan(
        num_streams=arguments.streams,
        num_tokens=arguments.output_tokens,
        step_ms=arguments.step_ms,
        steady_s=arguments.seconds,
    )
    if arguments.quick:
        plan = Plan(num_streams=1000, num_tokens=60, step_ms=500.0, steady_s=5.0)
    interrupts.on_sigterm()
    try:
        raise_open_files(plan.num_streams + plan.num_probes)
    except ValueError as error:
        parser.error(str(error))
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        model = demo_model.ensure("demo", weights=False)
        found = uvloop.run(run(plan, Path(directory), model))
    stats.save(asdict(found), arguments.json)
    show(plan, found)
    print(f"figures in {arguments.json}")
    sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    main()
