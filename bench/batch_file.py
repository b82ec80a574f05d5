"""Runs a batch of 10,000 lines while the gateway, the coordinator and a worker are killed.

`python -m baton.bench.batch_file --help`. A cell on the simulated engine serves interactive
requests at a constant rate, first alone and then beside the batch. At three points of the batch the
gateway, the coordinator and a worker are killed (SIGKILL) and started again. The result file must
have every line exactly once, with the tokens of an undisturbed run. Interactive requests are
measured alone, beside the batch before the first kill, and from there to its end.

The exit code is 1 if a line is missing, twice, failed or different.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import openai

from baton.bench import interrupts
from baton.bench.chaos_cell import POLL_S, START_TIMEOUT_S, Cell
from baton.bench.systems import free_port
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.load import stats
from baton.runtime import demo_model

MODEL = "batch-file"
ROUTE: Final = "/v1/completions"
# Shares of the lines after which each process is killed.
KILL_GATEWAY, KILL_COORDINATOR, KILL_WORKER = 0.4, 0.6, 0.8
# Tokens of a line, and of an interactive request.
PROMPT_TOKENS, OUTPUT_TOKENS = (20, 60), (8, 24)
INTERACTIVE_PROMPT_TOKENS, INTERACTIVE_OUTPUT_TOKENS = 32, 8
POLL_BATCH_S = 0.25
# A batch that takes longer counts as hung.
BATCH_TIMEOUT_S = 3600.0


@dataclass(slots=True)
class Phase:
    """Interactive requests that began in one phase of the run.

    Attributes:
        ttfts_s: Times to first token.
        num_failed: Requests that failed, for example because the gateway was killed.
    """

    ttfts_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "requests": len(self.ttfts_s) + self.num_failed,
            "ttft_p50_ms": 1e3 * stats.percentile(self.ttfts_s, 50),
            "ttft_p99_ms": 1e3 * stats.percentile(self.ttfts_s, 99),
            "failed": self.num_failed,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """Contents of the result files, in lines.

    Attributes:
        wrong: Lines whose text differs from the undisturbed one.
        errors: Lines of the error file.
    """

    lines: int
    duplicates: int
    missing: int
    wrong: int
    errors: int

    @property
    def is_right(self) -> bool:
        return not (self.duplicates or self.missing or self.wrong or self.errors)


class GatewayCell(Cell):
    """A cell with a gateway that may be killed.

    Attributes:
        url: URL of the gateway; a restarted gateway has the same.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{listen}"
        batches = {"dir": str(directory / "batches")}
        super().__init__(directory, {**config, "http": {"listen": listen, "batches": batches}})
        self._gateway: subprocess.Popen[bytes] | None = None

    async def start_gateway(self) -> None:
        """Returns when the gateway serves."""
        self._gateway = self._start("gateway", "gateway", "--coordinator", self.address)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await asyncio.to_thread(self._serves):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no gateway: {self.last_log_lines()}")
            await asyncio.sleep(POLL_S)

    async def kill_gateway(self) -> None:
        assert self._gateway is not None
        self._gateway.kill()
        await asyncio.to_thread(self._gateway.wait)

    async def aclose(self) -> None:
        if self._gateway is not None:
            await asyncio.to_thread(self._terminate, [self._gateway])
        await super().aclose()

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=START_TIMEOUT_S):
                return True
        except (urllib.error.URLError, OSError):
            return False


class Run:
    """One run.

    Args:
        cell: The cell; its workers serve.
        vocabulary: Vocabulary of its model.
        num_lines: Lines of the batch.
        alone_s: Seconds of interactive requests without the batch.
        rate: Interactive requests per second.
        seed: Seed of the prompts.

    Attributes:
        phases: Interactive requests by phase.
        batch_s: Duration of the batch.
    """

    def __init__(
        self,
        cell: GatewayCell,
        vocabulary: Vocabulary,
        num_lines: int,
        alone_s: float,
        rate: float,
        seed: int,
    ) -> None:
        self._cell, self._vocabulary = cell, vocabulary
        self._num_lines, self._alone_s, self._rate = num_lines, alone_s, rate
        self._prompts = random.Random(seed)
        self._expected: dict[str, str] = {}
        self._phase = Phase()
        self.phases: dict[str, Phase] = {}
        self.batch_s = 0.0
        self._client = openai.AsyncOpenAI(
            base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=START_TIMEOUT_S
        )

    async def run(self) -> Result:
        async with self._client, asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask_at_rate(group))
            self._begin_phase("alone")
            await asyncio.sleep(self._alone_s)
            self._begin_phase("beside the batch")
            begun_at = time.monotonic()
            batch = await self._submit()
            await self._completed(batch.id, KILL_GATEWAY)
            self._begin_phase("beside the batch, with kills")
            await self._kill("gateway")
            await self._completed(batch.id, KILL_COORDINATOR)
            await self._kill("coordinator")
            await self._completed(batch.id, KILL_WORKER)
            await self._kill("worker")
            batch = await self._completed(batch.id, 1.0)
            self.batch_s = time.monotonic() - begun_at
            asking.cancel()
            return await self._checked(batch)

    # ---- The batch

    async def _submit(self) -> openai.types.Batch:
        lines = [self._line(f"line-{number}") for number in range(self._num_lines)]
        data = io.BytesIO("\n".join(lines).encode())
        file = await self._client.files.create(file=("lines.jsonl", data), purpose="batch")
        return await self._client.batches.create(
            input_file_id=file.id, endpoint=ROUTE, completion_window="24h"
        )

    def _line(self, custom_id: str) -> str:
        prompt = self._prompt(self._prompts.randint(*PROMPT_TOKENS))
        num_tokens = self._prompts.randint(*OUTPUT_TOKENS)
        tokens = expected_tokens(self._vocabulary, prompt, num_tokens)
        self._expected[custom_id] = self._vocabulary.tokenizer.decode(tokens)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens}
        line = {"custom_id": custom_id, "method": "POST", "url": ROUTE, "body": body}
        return json.dumps(line)

    async def _completed(self, batch_id: str, share: float) -> openai.types.Batch:
        """Waits until this share of the lines is done; for share 1 until the batch has ended."""
        deadline = time.monotonic() + BATCH_TIMEOUT_S
        while True:
            with contextlib.suppress(openai.APIConnectionError):
                batch = await self._client.batches.retrieve(batch_id)
                counts = batch.request_counts
                assert counts is not None
                if batch.status not in ("validating", "in_progress"):
                    return batch
                if share < 1 and counts.completed + counts.failed >= share * self._num_lines:
                    return batch
            if time.monotonic() > deadline:
                raise TimeoutError(f"batch {batch_id} did not end within {BATCH_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_BATCH_S)

    async def _checked(self, batch: openai.types.Batch) -> Result:
        found, errors = Counter[str](), 0
        wrong = 0
        for line in await self._content(batch.output_file_id):
            found[line["custom_id"]] += 1
            text = line["response"]["body"]["choices"][0]["text"]
            wrong += text != self._expected.get(line["custom_id"])
        errors = len(await self._content(batch.error_file_id))
        return Result(
            lines=found.total(),
            duplicates=found.total() - len(found),
            missing=len(self._expected.keys() - found.keys()),
            wrong=wrong,
            errors=errors,
        )

    async def _content(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = (await self._client.files.content(file_id)).text
        return [json.loads(line) for line in text.splitlines()]

    async def _kill(self, what: str) -> None:
        """Kills a process and starts it again."""
        begun_at = time.monotonic()
        if what == "gateway":
            await self._cell.kill_gateway()
            await self._cell.start_gateway()
        elif what == "coordinator":
            await self._cell.kill_coordinator()
            self._cell.start_coordinator()
            await self._cell.listening()
        else:
            member = self._cell.members["decode-1"]
            member.kill()
            await asyncio.to_thread(member.popen.wait)
            del self._cell.members[member.worker_id]
            self._cell.start_worker(member.pool)
            await self._cell.all_serve()
        print(f"killed the {what}; after {time.monotonic() - begun_at:.1f} s it served again")

    # ---- Interactive requests

    def _begin_phase(self, name: str) -> None:
        self._phase = self.phases[name] = Phase()

    async def _ask_at_rate(self, group: asyncio.TaskGroup) -> None:
        """Starts requests at a constant rate, whether earlier ones have ended or not."""
        begun_at, number = time.monotonic(), 0
        while True:
            number += 1
            await asyncio.sleep(begun_at + number / self._rate - time.monotonic())
            group.create_task(self._ask(self._phase))

    async def _ask(self, phase: Phase) -> None:
        begun_at, has_first = time.monotonic(), False
        try:
            stream = await self._client.completions.create(
                model=MODEL,
                prompt=self._prompt(INTERACTIVE_PROMPT_TOKENS),
                max_tokens=INTERACTIVE_OUTPUT_TOKENS,
                stream=True,
            )
            async for _ in stream:
                if not has_first:
                    has_first = True
                    phase.ttfts_s.append(time.monotonic() - begun_at)
        except (openai.APIError, OSError):
            phase.num_failed += not has_first

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._prompts.randint(5, 400) for _ in range(num_tokens)]


def config(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "served_model_name": MODEL,
        "engine": "simulated",
        "log_level": "warning",
        "simulated": {
            "step_base_ms": 20,
            "step_per_request_ms": 0.1,
            "prefill_base_ms": 10,
            "prefill_per_token_ms": 0.1,
            "kv_tokens": 2**17,
            # Every answer ends at its max_tokens.
            "mean_output_tokens": 0,
        },
        "kv_transfer": {"send_bytes": 2**25, "receive_bytes": 2**25},
    }


async def measure(arguments: argparse.Namespace, directory: Path) -> tuple[Run, Result]:
    model = demo_model.ensure("demo", weights=False)
    async with GatewayCell(directory, config(model)) as cell:
        cell.start_worker("prefill")
        for _ in range(2):
            cell.start_worker("decode")
        await cell.all_serve()
        await cell.start_gateway()
        vocabulary = Vocabulary.load(model)
        run = Run(
            cell,
            vocabulary,
            arguments.lines,
            arguments.alone_s,
            arguments.rate,
            arguments.seed,
        )
        try:
            return run, await run.run()
        except BaseException:
            print(cell.last_log_lines(), file=sys.stderr)
            raise


def show(run: Run, result: Result) -> None:
    rows = [
        [
            name,
            f"{figures['requests']:.0f}",
            f"{figures['ttft_p50_ms']:.0f}",
            f"{figures['ttft_p99_ms']:.0f}",
            f"{figures['failed']:.0f}",
        ]
        for name, figures in ((name, phase.figures()) for name, phase in run.phases.items())
    ]
    header = ["", "requests", "TTFT p50 ms", "TTFT p99 ms", "failed"]
    stats.print_table("Interactive requests", header, rows)
    values = asdict(result)
    stats.print_table(
        f"Result file after {run.batch_s:.0f} s", [*values], [[str(one) for one in values.values()]]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=4.0, help="interactive requests per second")
    parser.add_argument("--alone-s", type=float, default=30.0, help="seconds without the batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="500 lines, 10 s alone")
    parser.add_argument("--json", type=Path, default=Path("bench/results/batch_file.json"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.lines, arguments.alone_s = 500, 10.0
    interrupts.on_sigterm()
    # gRPC would log every broken connection to a dead process.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        run, result = asyncio.run(measure(arguments, Path(directory)))
    show(run, result)
    stats.save(
        {
            "interactive": {name: phase.figures() for name, phase in run.phases.items()},
            "batch_s": run.batch_s,
            "result": asdict(result),
        },
        arguments.json,
    )
    print(f"figures in {arguments.json}")
    return 0 if result.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
