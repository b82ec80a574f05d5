"""A request gets the very blocks that an early load has filled for it, from vLLM's own pool."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_programs import Program

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Program(
        "early_blocks_program", directory=tmp_path_factory.mktemp("early_blocks")
    ) as program:
        found: dict[str, Any] = program.result()
    return found


@pytest.mark.parametrize("caching", ["true", "false"])
def test_the_request_gets_the_blocks_that_were_filled(made: dict[str, Any], caching: str) -> None:
    for case in made[caching]["offered"]:
        assert case["got"] == case["filled"]
        assert (case["is_same"], case["num_held"]) == (True, 0)


@pytest.mark.parametrize("caching", ["true", "false"])
def test_what_another_request_computed_is_left_out(made: dict[str, Any], caching: str) -> None:
    case = made[caching]["computed"]
    assert case["num_cached"] == (32 if caching == "true" else 0)
    assert case["got"] == case["filled"]
    assert case["num_cleared"] == case["num_cached"] // 16
    assert (case["is_same"], case["num_held"]) == (True, 0)


@pytest.mark.parametrize("caching", ["true", "false"])
def test_blocks_of_a_load_that_failed_are_cleared_before_somebody_gets_them(
    made: dict[str, Any], caching: str
) -> None:
    case = made[caching]["spoilt"]
    assert case == {
        "is_shared": True,
        "first": True,
        "inherited": True,
        "then": True,
        "rest": False,
    }
