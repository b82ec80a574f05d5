"""Requests that fail in vLLM's engine core before its scheduler gets them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def made(engines: Program) -> dict[str, Any]:
    found: dict[str, Any] = engines.result()["failures"]
    return found


def test_a_request_that_fails_once_is_computed_from_its_prompt(made: dict[str, Any]) -> None:
    assert made["fails once"] == {"is_right": True, "is_error": False}


def test_a_request_that_fails_twice_ends_with_an_error(made: dict[str, Any]) -> None:
    assert made["fails twice"] == {"is_right": False, "is_error": True}


def test_a_retried_prefill_writes_to_no_staging(made: dict[str, Any]) -> None:
    """Its send was given up, and another handoff may own the staging."""
    assert made["sent"] == {"is_cut": True, "is_written": False}


def test_an_engine_without_its_transfer_service_ends(made: dict[str, Any]) -> None:
    assert "transfer service" in made["cut off"]


def test_a_retry_leaves_prompt_logprobs_to_the_prefill_worker(made: dict[str, Any]) -> None:
    """The prefill worker has returned them; again, they would cost the prompt's cached blocks."""
    assert made["prompt logprobs"] == {"is_right": True, "num_rows": 0}
