"""An engine that is still loading its model goes with its worker."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from vllm_cluster import CONFIG, ENGINE_ARGS

pytestmark = pytest.mark.vllm

GONE_TIMEOUT_S = 30.0
LOADING_TIMEOUT_S = 240.0


@pytest.fixture
def worker(model: str, tmp_path: Path) -> Iterator[psutil.Process]:
    """That starts and never gets its weights: nobody writes to the file that has them."""
    endless = tmp_path / "endless"
    shutil.copytree(model, endless, ignore=shutil.ignore_patterns("*.safetensors"))
    os.mkfifo(endless / "weights.pt")
    path = tmp_path / "baton.yaml"
    engine_args = {**ENGINE_ARGS, "load_format": "pt"}
    path.write_text(yaml.safe_dump({**CONFIG, "model": str(endless), "engine_args": engine_args}))
    command = [sys.executable, "-m", "baton.cli.main", "worker", "--role", "decode"]
    command += ["--coordinator", "127.0.0.1:1", "--config", str(path)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, process_group=0) as process,
    ):
        try:
            yield psutil.Process(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def engine_processes(worker: psutil.Process) -> dict[str, psutil.Process]:
    """vLLM's, by what it calls them; each is called so before it begins to load."""
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
        time.sleep(0.01)
    return list(found.values())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_is_loading_ends_with_its_worker(
    worker: psutil.Process, how: signal.Signals
) -> None:
    loading = until_there(worker, "VLLM::Worker")
    assert len(loading) == 2
    worker.send_signal(how)
    _, alive = psutil.wait_procs([worker, *loading], timeout=GONE_TIMEOUT_S)
    assert not alive
