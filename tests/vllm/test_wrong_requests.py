"""A request that vLLM refuses is the client's fault; other workers would refuse it too."""

from __future__ import annotations

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = pytest.mark.vllm


def test_a_request_that_vllm_refuses_is_rejected_with_the_reason(engines: Program) -> None:
    """The request must not be tried on other workers."""
    said = engines.result()["wrong requests"]
    assert "unclosed group" in said["regex"]
    assert "Invalid grammar" in said["grammar"]
    assert "nonsense" in said["json_schema"]
