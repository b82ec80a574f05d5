"""A request that vLLM refuses is the client's fault, and no other worker would take it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_programs import Program

pytestmark = pytest.mark.vllm


def test_what_vllm_refuses_is_rejected_with_its_reason(tmp_path: Path) -> None:
    """It was an internal error, tried on four workers in turn before it was told."""
    with Program("wrong_requests_program", directory=tmp_path) as program:
        said = program.result()
    assert "unclosed group" in said["regex"]
    assert "Invalid grammar" in said["grammar"]
    assert "nonsense" in said["json_schema"]
