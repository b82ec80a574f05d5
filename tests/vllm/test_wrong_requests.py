"""A request that vLLM refuses is the client's fault; other workers would refuse it too."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_programs import Program

pytestmark = pytest.mark.vllm


def test_a_request_that_vllm_refuses_is_rejected_with_the_reason(tmp_path: Path) -> None:
    """The request must not be tried on other workers."""
    with Program("wrong_requests_program", directory=tmp_path) as program:
        said = program.result()
    assert "unclosed group" in said["regex"]
    assert "Invalid grammar" in said["grammar"]
    assert "nonsense" in said["json_schema"]
