"""Programs of this folder: vLLM takes seconds to import, and warns while it does."""

import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 240


@pytest.fixture
def run_program(tmp_path):
    """Runs one of them in a process of its own, to its end."""

    def run(name):
        return subprocess.run(
            [sys.executable, str(Path(__file__).with_name(name))],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=tmp_path,
        )

    return run
