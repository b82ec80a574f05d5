"""`make demo`: a whole cell on vLLM answers a question, and the demo prints where the time went.

The demo starts `baton up` in a process, sends one request through the Python client, stops the
process with SIGINT and checks that no process is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

import psutil
from google.rpc import code_pb2

from baton.cli.output import print_text
from baton.cli.timeline import print_timeline
from baton.client import Accepted, BatonClient, Finished, Tokens
from baton.client.errors import make
from baton.runtime import demo_model
from baton.runtime.errors import BatonError, RemoteError
from baton.runtime.process import main_coroutine

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
# Longest time that child processes may outlive `baton up`.
EXIT_TIMEOUT_S = 5.0
# Small enough for any laptop; eager, because compiling takes longer than the demo.
ENGINE_ARGS = (
    "dtype=float32",
    "enforce_eager=true",
    "max_model_len=2048",
    "kv_cache_memory_bytes=67108864",
)
QUESTION = "What is TTFT?"
MAX_TOKENS = 128


class DemoFailed(BatonError):
    code = code_pb2.INTERNAL


async def demo(arguments: list[str]) -> None:
    """Runs the demo; raises BatonError if a step fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            async with _cluster(arguments, log) as address:
                await _ask(address)
        except BatonError:
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-20:])
            raise
    print("stopped; no process is left")


@asynccontextmanager
async def _cluster(arguments: list[str], log: IO[str]) -> AsyncIterator[str]:
    """Runs `baton up`; yields its address, and stops it with all its processes."""
    command = [sys.executable, "-m", "baton.cli", "up", "--listen", "127.0.0.1:0", "--no-http"]
    # Shows a handoff: an idle elastic cell would answer on one worker.
    command.append("--no-elastic")
    command += [part for argument in ENGINE_ARGS for part in ("--engine-arg", argument)]
    print("starting a coordinator, one prefill and one decode worker", flush=True)
    up = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        # Ctrl-C reaches only this process, which then stops the others in order.
        process_group=0,
    )
    try:
        yield await _ready_address(up)
    except BaseException:
        await _stop(up)
        raise
    if problem := await _stop(up):
        raise DemoFailed(problem)


async def _ready_address(up: Process) -> str:
    assert up.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            async for line in up.stdout:
                words = line.decode().split()
                if words[:1] == ["ready"]:
                    print(line.decode().strip(), flush=True)
                    return next(word for word in words if word.startswith("grpc="))[len("grpc=") :]
            raise DemoFailed(f"baton up ended with exit code {await up.wait()} before it was ready")
    except TimeoutError:
        raise DemoFailed(f"baton up was not ready within {START_TIMEOUT_S:g} s") from None


async def _ask(address: str) -> None:
    """Streams one answer: the first token is the prefill worker's, the rest the decode worker's."""
    model, finished = "", None
    async with BatonClient(address) as client:
        stream = client.generate(
            [{"role": "user", "content": QUESTION}],
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            timeout_s=REQUEST_TIMEOUT_S,
        )
        print("\nQUESTION  ", QUESTION, "\nANSWER    ", sep="", end="", flush=True)
        async for event in stream:
            if isinstance(event, Accepted):
                model = event.model
            elif isinstance(event, Tokens):
                print(event.text.replace("\n", " "), end="", flush=True)
            elif isinstance(event, Finished):
                finished = event
    if finished is None or finished.reason == "cancelled":
        raise make(
            code_pb2.DATA_LOSS, f"the answer is incomplete: the stream ended with {finished}"
        )
    print("\n")
    if model == demo_model.GLOSSARY:
        print_text("This model is a toy: it knows only a glossary of serving latency.\n")
    print_timeline(finished.budget)
    stages = {stage.stage: stage.worker_id for stage in finished.budget.stages}
    prefill, decode = stages.get("prefill"), stages.get("decode")
    if prefill is None or decode is None or prefill == decode:
        raise DemoFailed(f"prefill and decode were not on two workers: {stages}")
    num_tokens = finished.usage.completion_tokens
    print_text(f"token 1 of {num_tokens} came from {prefill}, the other tokens from {decode}")


async def _stop(up: Process) -> str | None:
    """Ends `baton up` with SIGINT; returns a description of the problem, if any."""
    try:
        started = psutil.Process(up.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    problem = None
    if up.returncode is None:
        up.send_signal(signal.SIGINT)
    try:
        if (code := await asyncio.wait_for(up.wait(), STOP_TIMEOUT_S)) != 0:
            problem = f"baton up ended with exit code {code}"
    except TimeoutError:
        problem = f"baton up did not end within {STOP_TIMEOUT_S:g} s of SIGINT"
        up.kill()
        await up.wait()
    _, left = await asyncio.to_thread(psutil.wait_procs, started, EXIT_TIMEOUT_S)
    for process in left:
        process.kill()
        problem = f"processes left running: {', '.join(str(process.pid) for process in left)}"
    return problem


def main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        main_coroutine.run(demo(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (RemoteError, DemoFailed) as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
