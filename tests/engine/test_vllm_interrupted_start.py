"""A start that is interrupted, as by Ctrl-C while the model loads, begins nothing more."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm]

TIMEOUT_S = 240


def test_an_engine_that_is_stopped_while_it_is_configured_starts_no_process(tmp_path):
    """The worker's process could not end before the engine had loaded, and was killed for it."""
    program = Path(__file__).with_name("interrupted_start_program.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["0"], done.stderr
