import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from baton.runtime.process import worker_directory
from tests.worker.scripted_coordinator import WAIT_S

# Replaces Python as the transfer service: creates a file when it starts, and never serves.
SILENT_SERVICE = """#!/bin/sh
touch {begun}
exec sleep 600
"""


async def test_a_stop_signal_does_not_wait_for_the_transfer_service(
    start_worker, tmp_path, monkeypatch
):
    begun, program = tmp_path / "begun", tmp_path / "python"
    program.write_text(SILENT_SERVICE.format(begun=begun))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    worker = start_worker()
    async with asyncio.timeout(WAIT_S):
        while not begun.exists():
            assert not worker.task.done()
            await asyncio.sleep(0.01)
    worker.stop.set()
    assert await worker.exit_code() == 0


async def test_the_failure_of_a_transfer_service_is_reported_once(
    start_worker, tmp_path, monkeypatch, capsys
):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert await start_worker().exit_code() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(": transfer service: ended with exit code 3")
    assert last.count("transfer service") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_does_not_wait_for_the_import_of_the_engine(tmp_path, model, number):
    begun, package = tmp_path / "begun", tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    forever = f"import time\nopen({str(begun)!r}, 'w').close()\nwhile True:\n    time.sleep(0.01)\n"
    (package / "__init__.py").write_text(forever)
    config = tmp_path / "baton.yaml"
    config.write_text(f"model: {model}\nengine: vllm\n")
    command = ["worker", "--role", "prefill", "--coordinator", "127.0.0.1:1", "--config", config]
    paths = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    directory = worker_directory.make()
    worker = subprocess.Popen(
        [sys.executable, "-m", "baton.cli.main", *command, "--directory", directory.path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            while not begun.exists():
                assert worker.poll() is None
                await asyncio.sleep(0.01)
        children = psutil.Process(worker.pid).children(recursive=True)
        assert children
        worker.send_signal(number)
        _, told = await asyncio.to_thread(worker.communicate, timeout=WAIT_S)
    finally:
        worker.kill()
        await asyncio.to_thread(worker.wait)
    assert (worker.returncode, told) == (0, "")
    assert psutil.wait_procs(children, WAIT_S)[1] == []
    assert not directory.path.exists()
    directory.remove()
