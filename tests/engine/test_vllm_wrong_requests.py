"""A request that vLLM refuses is the client's fault, and no other worker would take it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm]

TIMEOUT_S = 240


def test_what_vllm_refuses_is_rejected_with_its_reason(tmp_path):
    """It was an internal error, tried on four workers in turn before it was told."""
    program = Path(__file__).with_name("wrong_requests_program.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "unclosed group" in said["regex"]
    assert "Invalid grammar" in said["grammar"]
    assert "nonsense" in said["json_schema"]
