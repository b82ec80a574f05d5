"""vLLM's schedulers with few blocks: failed loads, preempted requests and preempted sends.

Schedulers and connector are real, also in the form for GPUs; there is no model.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Program("scheduling_program", directory=tmp_path_factory.mktemp("scheduling")) as program:
        found: dict[str, Any] = program.result()
    return found


def test_a_failed_load_gives_no_token_while_another_request_needs_its_blocks(
    made: dict[str, Any],
) -> None:
    """vLLM preempts no request whose step is under way.

    Without that rule the step made meanwhile would give a token computed from blocks that were not
    loaded.
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
def test_blocks_preempted_before_they_were_computed_are_not_cached(
    made: dict[str, Any], scenario: str
) -> None:
    case = made[scenario]
    assert "prompt" in case["preempted"]
    assert case["misled"] == []
    assert set(case["ended"].values()) == {"length"}


def test_a_preempted_prefill_saves_each_block_once(made: dict[str, Any]) -> None:
    """The send goes on with the first block that was not saved; no new epoch is needed."""
    case = made["preempted send"]
    assert "prompt" in case["preempted"]
    assert 0 < len(case["saved_before"]) < len(case["saved"])
    next_block = 0
    for first_block, num_blocks, _ in case["saved"]:
        assert first_block == next_block
        next_block += num_blocks
    assert next_block == 6
    assert [last for *_, last in case["saved"]] == [False] * (len(case["saved"]) - 1) + [True]
    assert case["is_right"]
    assert case["given_up"] == 0
    assert case["ended"]["prompt"] == "length"
