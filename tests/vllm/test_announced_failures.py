"""Requests that fail inside vLLM before its scheduler sees them, while only announced or later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.runtime import demo_model

pytestmark = [pytest.mark.vllm]

PROGRAM = Path(__file__).with_name("announced_program.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = demo_model.ensure("demo-2-layers")
    output = tmp_path_factory.mktemp("announced") / "made.json"
    run = subprocess.run(
        [sys.executable, PROGRAM, model, output],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(output.read_text())
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
