"""An engine that is still loading its model ends with its worker."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from baton.runtime import demo_model
from tests.vllm.vllm_cluster import CONFIG, ENGINE_ARGS, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GONE_TIMEOUT_S = 120.0
LOADING_TIMEOUT_S = 450.0
HOW = (signal.SIGKILL, signal.SIGTERM)


@pytest.fixture(scope="module")
def workers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[signal.Signals, psutil.Process]]:
    """One worker per signal. Its weights are in a pipe that no process writes to."""
    directory = tmp_path_factory.mktemp("loading")
    model, endless = demo_model.ensure("demo"), directory / "endless"
    shutil.copytree(model, endless, ignore=shutil.ignore_patterns("*.safetensors"))
    os.mkfifo(endless / "weights.pt")
    engine_args = {**ENGINE_ARGS, "load_format": "pt"}
    config = {**CONFIG, "model": str(endless), "engine_args": engine_args}
    started = {
        how: start_worker("127.0.0.1:1", config, directory, "decode", how.name.lower(), core)
        for core, how in enumerate(HOW)
    }
    try:
        yield {how: psutil.Process(process.pid) for how, process in started.items()}
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def engine_processes(worker: psutil.Process) -> dict[str, psutil.Process]:
    """Returns vLLM's processes by the names that vLLM gives them before it loads."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in worker.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if (title := " ".join(process.cmdline())).startswith("VLLM::"):
                    found[title.split("_")[0].strip()] = process
    return found


def until_there(worker: psutil.Process, title: str) -> list[psutil.Process]:
    deadline = time.monotonic() + LOADING_TIMEOUT_S
    while title not in (found := engine_processes(worker)):
        assert time.monotonic() < deadline, found
        assert worker.is_running()
        time.sleep(0.2)
    return list(found.values())


@pytest.mark.parametrize("how", HOW)
def test_an_engine_that_is_loading_ends_with_its_worker(
    workers: dict[signal.Signals, psutil.Process], how: signal.Signals
) -> None:
    worker = workers[how]
    loading = until_there(worker, "VLLM::Worker")
    assert len(loading) == 2
    worker.send_signal(how)
    _, alive = psutil.wait_procs([worker, *loading], timeout=GONE_TIMEOUT_S)
    assert not alive
