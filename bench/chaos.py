"""Kills and stops workers and the coordinator under load; checks tokens, pauses and leaks.

`python -m baton.bench.chaos --help`. Four prefill and four decode workers on the simulated engine
serve 200 streams at a time. Each worker is a process with its own transfer service. Every 3 s a
serving worker is either killed (SIGKILL) and replaced, or stopped (SIGSTOP) and continued some
seconds later. A second run also kills and restarts the coordinator twice. Each pool always keeps
one undisturbed worker, because otherwise a pause would only measure the start of a process.

Every stream is compared token by token with the output of an undisturbed run. The exit code is 1 if
a stream failed or differs, or if anything is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baton.bench import chaos_report, interrupts
from baton.bench.chaos_cell import POOLS, Cell, Member
from baton.bench.chaos_report import Disturbance, Kind, Stream
from baton.client import BatonClient, Tokens
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.load import stats
from baton.runtime import demo_model
from baton.runtime.errors import RemoteError

SUPERVISE_S = 0.1
# A stream that takes longer counts as hung.
STREAM_TIMEOUT_S = 180.0
SETTLE_TIMEOUT_S = 30.0
FENCED = "fenced by the coordinator"


@dataclass(frozen=True, slots=True)
class Plan:
    """The load and the disturbances of one run.

    Attributes:
        num_streams: Streams at a time; a new stream begins when one ends.
        duration_s: Duration of the disturbances; streams in flight then are read to their end.
        every_s: Seconds between two disturbances of workers.
        stop_s: Shortest and longest time in seconds for which a worker is stopped.
        num_restarts: Restarts of the coordinator, evenly spread.
        prompt_tokens, output_tokens: Smallest and largest number of tokens.
        step_ms: Duration of a decode step. More than ten processes share the machine, which should
            be busy but not saturated.
        coordinator: Non-default keys of the section `coordinator`.
        elastic: Whether any worker may compute prompts and decode.
        seed: Seed of victims, streams and times.
    """

    num_prefill: int = 4
    num_decode: int = 4
    num_streams: int = 200
    duration_s: float = 60.0
    every_s: float = 3.0
    stop_s: tuple[float, float] = (0.5, 14.0)
    num_restarts: int = 0
    prompt_tokens: tuple[int, int] = (20, 500)
    output_tokens: tuple[int, int] = (50, 250)
    step_ms: float = 100.0
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    elastic: bool = False
    seed: int = 0

    def config(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "served_model_name": "chaos",
            "engine": "simulated",
            "log_level": "warning",
            "elastic": self.elastic,
            "coordinator": dict(self.coordinator),
            "simulated": {
                "step_base_ms": self.step_ms,
                "step_per_request_ms": 0.1,
                "prefill_base_ms": 10,
                "prefill_per_token_ms": 0.1,
                # One worker can hold all streams; this benchmark does not test a full KV cache.
                "max_num_seqs": 2 * self.num_streams,
                "kv_tokens": 2**19,
                # Every stream ends at its own max_tokens.
                "mean_output_tokens": 0,
            },
            "kv_transfer": {"send_bytes": 2**25, "receive_bytes": 2**25},
        }


class Chaos:
    """One run of a plan.

    Attributes:
        streams: Streams in the order of their start.
        disturbances: Disturbances in the order of time.
        left: Resources that are still held or left behind at the end, in words.
        odd_ends: Workers that ended although they were neither killed nor fenced.
        counters: Sum of the counters of all coordinator processes.
        num_replaced: Replaced workers, by "new id" and "same id".
        busy: Share of the machine's CPU time that all processes used during the disturbances.
        own_busy: Share of the CPU time that this benchmark's processes used, from the start of the
            first to the end of the last; transfer services of killed workers are not counted.
    """

    def __init__(self, plan: Plan, cell: Cell, vocabulary: Vocabulary) -> None:
        self._plan, self._cell, self._vocabulary = plan, cell, vocabulary
        # Separate random generators, so that the number of streams does not change the victims.
        self._victims, self._prompts = random.Random(plan.seed), random.Random(plan.seed + 1)
        self._over = False
        self._begun_at = 0.0
        self.streams: list[Stream] = []
        self.disturbances: list[Disturbance] = []
        self.left: list[str] = []
        self.odd_ends: list[str] = []
        self.counters: Counter[str] = Counter()
        self.num_replaced: Counter[str] = Counter()
        self.busy = self.own_busy = 0.0

    async def run(self) -> None:
        """Runs the plan, from the start of the workers until all resources should be free."""
        plan, cell = self._plan, self._cell
        for pool, count in zip(POOLS, (plan.num_prefill, plan.num_decode), strict=True):
            for _ in range(count):
                cell.start_worker(pool)
        await cell.all_serve()
        async with BatonClient(cell.address) as client, asyncio.TaskGroup() as group:
            supervising = group.create_task(self._supervise())
            self._begun_at = time.monotonic()
            reading = [
                group.create_task(self._read(client, number)) for number in range(plan.num_streams)
            ]
            psutil.cpu_percent()
            async with asyncio.TaskGroup() as disturbing:
                disturbing.create_task(self._disturb_workers(disturbing))
                disturbing.create_task(self._restart_coordinators())
                await self._until(plan.duration_s)
                self.busy = psutil.cpu_percent() / 100
            self._over = True
            await asyncio.gather(*reading)
            await cell.all_serve()
            self.left += await cell.settled(SETTLE_TIMEOUT_S)
            self.counters = cell.counted + await cell.counters()
            supervising.cancel()

    # ---- Streams

    async def _read(self, client: BatonClient, number: int) -> None:
        """Reads one stream after another; the first streams start before the disturbances."""
        source, plan = self._prompts, self._plan
        await self._until(number / plan.num_streams * plan.every_s * 2 / 3)
        while not self._over:
            prompt = [source.randint(5, 400) for _ in range(source.randint(*plan.prompt_tokens))]
            stream = Stream(prompt, source.randint(*plan.output_tokens), time.monotonic())
            self.streams.append(stream)
            await self._follow(client, stream)

    async def _follow(self, client: BatonClient, stream: Stream) -> None:
        expected = expected_tokens(self._vocabulary, stream.prompt, stream.num_tokens)
        reason = ""
        try:
            async with client.generate(
                stream.prompt, max_tokens=stream.num_tokens, timeout_s=STREAM_TIMEOUT_S
            ) as reading:
                async for event in reading:
                    if isinstance(event, Tokens):
                        stream.add(event, time.monotonic())
                    else:
                        reason = getattr(event, "reason", "")
        except RemoteError as error:
            stream.error = str(error)
        stream.num_resumes = reading.num_resumes
        text = self._vocabulary.tokenizer.decode(expected)
        stream.right = (stream.token_ids, stream.text, reason) == (expected, text, "length")

    # ---- Disturbances

    async def _until(self, after_s: float) -> None:
        await asyncio.sleep(self._begun_at + after_s - time.monotonic())

    async def _disturb_workers(self, group: asyncio.TaskGroup) -> None:
        plan, source = self._plan, self._victims
        for number in range(1, round(plan.duration_s / plan.every_s)):
            await self._until(number * plan.every_s)
            victim = source.choice(await self._possible_victims())
            is_kill, stop_s = source.random() < 0.5, source.uniform(*plan.stop_s)
            kind = Kind.WORKER_KILLED if is_kill else Kind.WORKER_STOPPED
            disturbance = Disturbance(kind, victim.pool, time.monotonic())
            self.disturbances.append(disturbance)
            if is_kill:
                victim.kill()
            else:
                victim.stop()
                group.create_task(self._resume(victim, disturbance, stop_s))

    async def _resume(self, victim: Member, disturbance: Disturbance, stop_s: float) -> None:
        await asyncio.sleep(stop_s)
        victim.resume()
        disturbance.lasted_s = stop_s

    async def _possible_victims(self) -> list[Member]:
        """Waits for pools with more than one serving worker and returns the workers of these."""
        while True:
            serving = await self._cell.serving()
            found = [one for pool in serving.values() if len(pool) > 1 for one in pool]
            if found:
                return sorted(found, key=lambda member: member.worker_id)
            await asyncio.sleep(SUPERVISE_S)

    async def _restart_coordinators(self) -> None:
        plan = self._plan
        for number in range(plan.num_restarts):
            # Halfway between two disturbances of workers.
            share = (number + 1) / (plan.num_restarts + 1)
            await self._until((round(share * plan.duration_s / plan.every_s) + 0.5) * plan.every_s)
            disturbance = Disturbance(Kind.COORDINATOR_KILLED, "", time.monotonic())
            self.disturbances.append(disturbance)
            await self._cell.kill_coordinator()
            self._cell.start_coordinator()
            await self._cell.listening()
            disturbance.lasted_s = time.monotonic() - disturbance.at

    async def _supervise(self) -> None:
        """Replaces each worker that has ended, with the same worker ID or a new one at random."""
        while True:
            for member in [one for one in self._cell.members.values() if not one.lives]:
                fenced = FENCED in self._cell.last_line(member.worker_id)
                if not member.killed and not fenced:
                    last = self._cell.last_line(member.worker_id)
                    self.odd_ends.append(f"{member.worker_id}: {member.popen.returncode}: {last}")
                same = self._victims.random() < 0.5
                del self._cell.members[member.worker_id]
                self._cell.start_worker(member.pool, member.worker_id if same else "")
                self.num_replaced["same id" if same else "new id"] += 1
            await asyncio.sleep(SUPERVISE_S)


async def run(plan: Plan, directory: Path, model: str) -> Chaos:
    """Runs a plan in an empty directory."""
    begun_at, used_s = time.monotonic(), _used_s()
    async with Cell(directory, plan.config(model)) as cell:
        chaos = Chaos(plan, cell, Vocabulary.load(model))
        try:
            await chaos.run()
        except BaseException:
            print(cell.last_log_lines(), file=sys.stderr)
            raise
    cores_s = (time.monotonic() - begun_at) * len(os.sched_getaffinity(0))
    chaos.own_busy = (_used_s() - used_s) / cores_s
    chaos.left += await asyncio.to_thread(cell.remains)
    return chaos


def _used_s() -> float:
    """Returns the CPU time of this process and of its ended child processes."""
    found = [
        resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(one.ru_utime + one.ru_stime for one in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="streams at a time")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="60 streams, 30 s")
    parser.add_argument("--elastic", action="store_true", help="workers without strict roles")
    parser.add_argument("--json", type=Path, default=Path("bench/results/chaos.json"))
    arguments = parser.parse_args()
    interrupts.on_sigterm()
    num_streams = 60 if arguments.quick else arguments.streams
    duration_s = 30.0 if arguments.quick else arguments.duration_s
    # gRPC would log every broken connection to a dead process.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    model = demo_model.ensure("demo", weights=False)
    results: dict[str, Any] = {}
    for name, num_restarts in (("workers", 0), ("workers and coordinator", 2)):
        plan = Plan(
            num_streams=num_streams,
            duration_s=duration_s,
            num_restarts=num_restarts,
            elastic=arguments.elastic,
            seed=arguments.seed,
        )
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            chaos = asyncio.run(run(plan, Path(directory), model))
        results[name] = chaos_report.figures(chaos)
        chaos_report.show(name, results[name])
    stats.save(results, arguments.json)
    print(f"figures in {arguments.json}")
    return 0 if all(one["correct"] for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
