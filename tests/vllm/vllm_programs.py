"""Processes of this folder that run vLLM beside the tests.

A fork server imports vLLM once for all of them, because the import takes longer than most programs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from baton.runtime.closing import Closing
from baton.runtime.process import affinity, output_streams
from tests.vllm import vllm_cases as cases

TIMEOUT_S = 500
# torch believes the CPU's flags. Otherwise each rank compiles and runs programs to test its vector
# instructions.
TORCH = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
IMPORTED = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "baton.engine.vllm_engine")

_context = multiprocessing.get_context("forkserver")


def begin_imports() -> None:
    """Starts the imports and returns at once. Idempotent."""
    # The server has one thread, like a worker when it starts an engine.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **TORCH}):
        # Settings that bind this process's engines must not bind others.
        os.environ.pop(affinity.VLLM_BIND_THREADS, None)
        # A process that is forked after vLLM's import cannot use a GPU.
        preload = [] if torch.cuda.is_available() else list(IMPORTED)
        _context.set_forkserver_preload(preload)
        forkserver.ensure_running()


def fork(
    target: Callable[..., None],
    *arguments: Any,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Starts a process with vLLM imported, in its own process group; it writes to `log`."""
    begin_imports()
    given = (log, dict(environment or {}), target, arguments)
    process = _context.Process(target=_run, args=given, name=log.stem)
    process.start()
    return process


def _run(
    log: Path, environment: dict[str, str], target: Callable[..., None], arguments: Sequence[Any]
) -> None:
    os.setpgid(0, 0)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    # Resources that its engines leave are freed when it ends, not with the tests' process.
    tracker = resource_tracker._resource_tracker
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None
    try:
        target(*arguments)
    finally:
        # The process ends without the functions of atexit.
        output_streams.flush()


def run_baton(*arguments: str) -> None:
    """Runs the `baton` command."""
    from baton.cli.main import main

    sys.argv = ["baton", *arguments]
    main()


class Program(Closing):
    """A program that runs from its construction on.

    Args:
        name: Name of its module in this folder, whose `main` it runs.
        arguments: Arguments of `main`.
        directory: Directory for its files.
    """

    def __init__(self, name: str, *arguments: Any, directory: Path) -> None:
        self._output, self._log = directory / f"{name}.json", directory / f"{name}.log"
        self._process = fork(_write_result, self._output, name, arguments, log=self._log)

    def close(self) -> None:
        if self._process.is_alive():
            # Its engines end with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()

    def result(self) -> Any:
        """Waits for the return value of `main`."""
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode == 0, self._log.read_text()[-3000:]
        return json.loads(self._output.read_text())


def _write_result(output: Path, name: str, arguments: Sequence[Any]) -> None:
    output.write_text(json.dumps(importlib.import_module(f"tests.vllm.{name}").main(*arguments)))


class PlainVllm(Program):
    """One plain vLLM, which answers cases one at a time.

    Args:
        model: A local directory.
        given: See vllm_reference.py.
        directory: Directory for its files.
    """

    def __init__(self, model: str, given: dict[str, Any], directory: Path) -> None:
        super().__init__("vllm_reference", model, given, directory=directory)

    def result(self) -> list[cases.Case]:
        """Waits for all answers; returns the cases with them."""
        made: list[cases.Case] = super().result()
        return made
