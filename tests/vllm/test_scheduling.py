"""What vLLM's schedulers, short of blocks, make of failed loads and of requests they take back.

Schedulers and connector are the real ones, as on GPUs too; there is no model beside them.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm_programs import Program

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Program("scheduling_program", directory=tmp_path_factory.mktemp("scheduling")) as program:
        found: dict[str, Any] = program.result()
    return found


def test_a_load_that_failed_gives_no_token_though_another_wanted_its_blocks(
    made: dict[str, Any],
) -> None:
    """In the step that is made while the load's runs: nobody is preempted whose step is under way.

    Without that the token would go out, computed from what was not loaded.
    """
    case, unfenced = made["failed load"], made["failed load, unfenced"]
    assert case["loading"] == unfenced["loading"] == 1
    assert (case["following"], case["preempted"]) == ({}, [])
    assert (case["tokens"], case["ended"]) == ([], "error")
    assert case["num_named"] == 0
    assert unfenced["preempted"] == ["loads"]
    assert len(unfenced["tokens"]) == 1


@pytest.mark.parametrize(
    "scenario",
    ["prompt beside a running step", "prompt in chunks", "output beside a prompt"],
)
def test_blocks_that_were_taken_back_before_anybody_computed_them_are_not_found(
    made: dict[str, Any], scenario: str
) -> None:
    case = made[scenario]
    assert "prompt" in case["preempted"]
    assert case["misled"] == []
    assert set(case["ended"].values()) == {"length"}


def test_a_preempted_prefill_pushes_each_block_once(made: dict[str, Any]) -> None:
    """The send goes on with the first block that was not pushed; no new epoch is needed."""
    case = made["preempted send"]
    assert "prompt" in case["preempted"]
    assert 0 < len(case["pushed_before"]) < len(case["pushed"])
    next_block = 0
    for first_block, num_blocks, _ in case["pushed"]:
        assert first_block == next_block
        next_block += num_blocks
    assert next_block == 6
    assert [last for *_, last in case["pushed"]] == [False] * (len(case["pushed"]) - 1) + [True]
    assert case["is_right"]
    assert case["given_up"] == 0
    assert case["ended"]["prompt"] == "length"
