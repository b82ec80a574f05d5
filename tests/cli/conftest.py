import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

TIMEOUT_S = 60


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def baton(tmp_path):
    """Runs the command as a person would, away from their home and environment."""

    def run(*arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        base = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        done = subprocess.run(
            [sys.executable, "-m", "baton.cli", *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=base | {"HOME": str(tmp_path), "COLUMNS": "100"} | (env or {}),
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def taken_address():
    """An address that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def unused_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
