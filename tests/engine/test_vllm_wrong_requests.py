"""A request that vLLM refuses is the client's fault, and no other worker would take it."""

import json

import pytest

pytestmark = [pytest.mark.vllm]


def test_what_vllm_refuses_is_rejected_with_its_reason(run_program):
    """It was an internal error, tried on four workers in turn before it was told."""
    done = run_program("wrong_requests_program.py")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "unclosed group" in said["regex"]
    assert "Invalid grammar" in said["grammar"]
    assert "nonsense" in said["json_schema"]
