"""Blocks come back from disk after an eviction and after a restart; damaged files do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.runtime import demo_model
from tests.vllm import engine_cases
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    model, directory = demo_model.ensure(engine_cases.MODEL), tmp_path_factory.mktemp("disk")
    with Program("disk_tier_program", model, engine_cases.RANKS, directory=directory) as program:
        yield program.result()


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // cases.BLOCK_SIZE * cases.BLOCK_SIZE


def found(answer: dict[str, Any]) -> int:
    """Returns how many tokens of a prompt came from any tier."""
    return int(answer["num_cached"] + answer["num_host"] + answer["num_disk"])


def test_a_prompt_that_host_memory_has_evicted_comes_back(made: dict[str, Any]) -> None:
    again = made["again"]
    assert again["tokens"] == made["first"]["tokens"]
    assert (again["num_cached"], again["num_host"]) == (0, 0)
    assert again["num_disk"] == whole_blocks(330)
    assert again["num_handoff"] == 0
    assert made["cached"]["num_cached"] == whole_blocks(330)


def test_equal_prompts_load_their_blocks_once(made: dict[str, Any]) -> None:
    assert [one["tokens"] for one in made["twins"]] == [made["first"]["tokens"]] * 2
    assert sum(one["num_disk"] for one in made["twins"]) == whole_blocks(330)
    assert [found(one) for one in made["twins"]] == [whole_blocks(330)] * 2


def test_tenants_do_not_find_each_others_files(made: dict[str, Any]) -> None:
    other = made["other tenant"]
    assert found(other) == 0
    assert other["tokens"] == made["first"]["tokens"]


def test_damaged_files_are_computed_again_and_written_again(made: dict[str, Any]) -> None:
    assert made["num_damaged"] > whole_blocks(330) // cases.BLOCK_SIZE
    damaged = made["damaged"]
    assert found(damaged) == 0
    assert damaged["tokens"] == made["first"]["tokens"]
    assert made["num_wrong_files"] >= whole_blocks(330) // cases.BLOCK_SIZE
    assert made["written again"]["num_disk"] == whole_blocks(330)
    assert made["written again"]["tokens"] == made["first"]["tokens"]


def test_loads_of_both_tiers_are_measured(made: dict[str, Any]) -> None:
    # A block has 32 KiB in all layers and ranks.
    num_bytes = made["written again"]["num_disk"] // cases.BLOCK_SIZE * 2**15
    for loads in made["loads"]:
        assert loads["num_bytes"] == num_bytes
        assert loads["seconds"] > 0


def test_a_restarted_engine_finds_the_files(made: dict[str, Any]) -> None:
    assert made["num_files"] > 0
    assert made["restarted"]["num_disk"] == whole_blocks(330)
    assert made["restarted"]["tokens"] == made["first"]["tokens"]
    assert made["restarted, other tenant"]["tokens"] == made["first"]["tokens"]
    answered = 330 + len(made["first"]["tokens"])
    assert found(made["next"]) == whole_blocks(answered)
    assert made["num_on_disk"] >= whole_blocks(answered) // cases.BLOCK_SIZE
    assert made["disk_kv_tokens"] > 0


def test_the_user_s_own_offloading_connector_sets_the_host_memory(made: dict[str, Any]) -> None:
    # The second engine got vLLM's settings and evicts by "arc"; the other tests show its blocks.
    assert made["host_kv_tokens"] == 64 * cases.BLOCK_SIZE


def test_chosen_blocks_are_deleted_from_all_tiers(made: dict[str, Any]) -> None:
    # The last token of an answer has no keys and values. The answer's blocks were not chosen, and
    # follow the chosen ones.
    num_computed = 330 + len(made["tenant's"]["tokens"]) - 1
    num_deleted = num_computed // cases.BLOCK_SIZE - engine_cases.NUM_KEPT
    assert num_deleted > whole_blocks(330) // cases.BLOCK_SIZE - engine_cases.NUM_KEPT
    deleted = made["chosen deleted"]
    assert [deleted[tier] for tier in ("device", "host", "disk")] == [num_deleted] * 3
    assert not deleted["has_files_left"]
    assert found(made["chosen again"]) == engine_cases.NUM_KEPT * cases.BLOCK_SIZE
    assert made["chosen again"]["tokens"] == made["tenant's"]["tokens"]


def test_the_blocks_of_a_tenant_are_deleted(made: dict[str, Any]) -> None:
    num_blocks = whole_blocks(330) // cases.BLOCK_SIZE
    deleted = made["deleted"]
    assert min(deleted["device"], deleted["host"], deleted["disk"]) >= num_blocks
    assert not deleted["has_files_left"]
    assert made["num_owner_directories"] == engine_cases.RANKS
    assert made["num_owner_directories, deleted"] == 0
    assert found(made["tenant's again"]) == 0
    assert made["tenant's again"]["tokens"] == made["tenant's"]["tokens"]
    assert found(made["other's"]) == whole_blocks(420)


def test_all_blocks_are_deleted(made: dict[str, Any]) -> None:
    assert made["num_files, before"] > 0
    assert min(made["all deleted"][tier] for tier in ("device", "host", "disk")) > 0
    # The second order deletes the blocks of requests that ran meanwhile.
    assert made["num_files, after"] == 0
    assert (made["num_in_host"], made["num_on_disk, after"]) == (0, 0)
    assert found(made["computed again"]) == 0
    assert made["computed again"]["tokens"] == made["next"]["tokens"]


def test_a_disk_that_is_gone_fails_no_request(made: dict[str, Any]) -> None:
    assert made["without a disk"]["tokens"] == made["next"]["tokens"]
    assert made["disk_failed"]
    assert made["left"] == [{"kv_tokens": 0, "send_bytes": 0, "receive_bytes": 0}]
