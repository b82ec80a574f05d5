"""Requests that fail inside vLLM before its scheduler sees them, while only announced or later."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_programs import Program

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def made(engines: Program) -> dict[str, Any]:
    found: dict[str, Any] = engines.result()["announced"]
    return found


@pytest.mark.parametrize("failure", ["heard of", "not heard of"])
def test_it_is_computed_from_its_prompt_at_once(made: dict[str, Any], failure: str) -> None:
    """Whether the engine knows of the failure when the first token comes, or hears of it later."""
    assert made[failure] == {"is_right": True, "is_error": False}


def test_one_that_fails_again_ends(made: dict[str, Any]) -> None:
    assert made["fails again"] == {"is_right": False, "is_error": True}


def test_one_that_is_computed_again_writes_to_no_staging(made: dict[str, Any]) -> None:
    """What it was to push has been given up, and its staging may be another's."""
    assert made["pushed"] == {"is_cut": True, "is_written": False}


def test_the_scheduler_waits_for_none_of_them(made: dict[str, Any]) -> None:
    """Nor is one left out that the scheduler has seen, when its failure crosses with its end."""
    assert made["num_unseen"] == 0
    assert made["num_untold"] == 0


def test_an_engine_without_its_transfer_service_does_not_go_on(made: dict[str, Any]) -> None:
    assert "transfer service" in made["cut off"]
