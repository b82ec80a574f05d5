import io
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

from baton.cli.main import main

# Timeout in seconds that only bounds a command that hangs.
TIMEOUT_S = 120


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def baton(tmp_path):
    """Runs the command in a process with its own home directory and environment."""

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
def baton_here(monkeypatch, tmp_path, capsys):
    """Runs the command in this process, which saves starting one; for tests of the final result."""

    def run(*arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        with monkeypatch.context() as patch:
            for name in [one for one in os.environ if one.startswith("BATON_")]:
                patch.delenv(name)
            base = {"HOME": str(tmp_path), "COLUMNS": "100", "GRPC_VERBOSITY": "NONE"}
            for name, value in (base | (env or {})).items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["baton", *arguments])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((stdin or "").encode())))
            with pytest.raises(SystemExit) as ended:
                main()
        said = capsys.readouterr()
        return Result(ended.value.code or 0, said.out, said.err)

    return run


@pytest.fixture
def taken_address():
    """An address on which a socket listens already."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def unused_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
