"""Blocks that the engine's cache evicts come back from host memory, and no wrong block does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import vllm_cases as cases
from tests.vllm.engine_cases import NUM_HOST_BLOCKS
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def made(engines: Program) -> dict[str, Any]:
    """Results of two engines of two ranks."""
    found: dict[str, Any] = engines.result()["host tier"]
    return found


@pytest.fixture
def turns(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["conversation"]
    return found


@pytest.fixture
def handoffs(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["handoffs"]
    return found


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // cases.BLOCK_SIZE * cases.BLOCK_SIZE


@pytest.mark.proves("kv store", "compared", kind="llama")
def test_an_evicted_prompt_comes_back(turns: dict[str, Any]) -> None:
    assert turns["again"]["tokens"] == turns["first"]["tokens"]
    assert turns["again"]["num_cached"] == 0
    assert turns["again"]["num_host"] == whole_blocks(330)


@pytest.mark.proves("kv store", "compared", kind="llama")
def test_the_next_turn_finds_the_answer_too(turns: dict[str, Any]) -> None:
    assert turns["next"]["num_host"] == whole_blocks(330 + len(turns["first"]["tokens"]))
    assert turns["next"]["tokens"] == turns["next, computed"]["tokens"]
    assert turns["next, computed"]["num_host"] == 0
    # Loaded blocks are in the engine's cache.
    assert turns["next, cached"]["num_cached"] == whole_blocks(420)
    assert turns["next, cached"]["tokens"] == turns["next"]["tokens"]


def test_equal_prompts_load_their_blocks_once(turns: dict[str, Any]) -> None:
    twins = [turns["twin 1"], turns["twin 2"]]
    assert [one["tokens"] for one in twins] == [turns["next"]["tokens"]] * 2
    assert sorted(one["num_host"] for one in twins) == [0, whole_blocks(420)]
    assert [one["num_host"] + one["num_cached"] for one in twins] == [whole_blocks(420)] * 2


def test_a_prompt_of_stored_blocks_only_computes_its_last_token(turns: dict[str, Any]) -> None:
    assert turns["whole"]["num_host"] == whole_blocks(330)
    assert turns["whole"]["tokens"] == turns["whole, computed"]["tokens"]


def test_blocks_in_host_memory_are_reported(made: dict[str, Any], turns: dict[str, Any]) -> None:
    assert turns["num_reported"] == whole_blocks(420) // cases.BLOCK_SIZE
    assert made["host_kv_tokens"] == NUM_HOST_BLOCKS * cases.BLOCK_SIZE
    assert all(0 < num <= NUM_HOST_BLOCKS for num in made["num_in_host"])


def test_tenants_do_not_find_each_others_blocks(turns: dict[str, Any]) -> None:
    other, again = turns["other tenant"], turns["other tenant again"]
    assert (other["num_cached"], other["num_host"]) == (0, 0)
    assert again["num_cached"] == whole_blocks(420)
    assert [other["tokens"], again["tokens"]] == [turns["next"]["tokens"]] * 2
    assert turns["num_reported_salted"] >= whole_blocks(420) // cases.BLOCK_SIZE - 1


@pytest.mark.proves("kv store", "compared", kind="llama")
def test_blocks_from_host_memory_are_handed_over(handoffs: dict[str, Any]) -> None:
    first, second = handoffs["computed"], handoffs["from host"]
    assert second["num_host_by_prefill"] == whole_blocks(330)
    assert second["num_loaded"] == 330
    assert second["token_ids"] == first["token_ids"]


def test_nothing_of_a_wrong_handoff_is_stored(handoffs: dict[str, Any]) -> None:
    spoiled, right = handoffs["spoiled"], handoffs["right"]["tokens"]
    assert spoiled["num_loaded"] == 0
    assert spoiled["token_ids"] == right[: len(spoiled["token_ids"])]
    # The prompt was computed after the handoff failed, and these blocks were stored.
    assert handoffs["after"]["num_host"] == whole_blocks(340)
    assert handoffs["after"]["tokens"] == right


def test_a_handoff_that_gets_a_prompts_blocks_does_not_change_the_stored_ones(
    made: dict[str, Any],
) -> None:
    taken = made["taken blocks"]
    # The last block of the prompt is not full.
    assert taken["stored"]["num_host"] == whole_blocks(900)
    assert taken["stored"]["tokens"] == taken["computed"]["tokens"]
