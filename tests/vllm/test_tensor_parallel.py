"""Engines of several ranks hand over, also to another number of ranks; tokens equal plain vLLM's.

The reference is one plain vLLM with a single rank. It sums over all heads at once, two ranks sum
over halves, so logits differ in their last bits; no greedy or seeded choice here depends on them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from baton.runtime import demo_model
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_cases import (
    FETCHED,
    MODEL,
    RANKS,
    SHARED,
    WAYS,
    one_by_one,
    together,
    unequal,
)
from tests.vllm.vllm_programs import PlainVllm, Program

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(RANKS == 1, reason="an engine of two ranks needs two GPUs"),
]

GONE_TIMEOUT_S = 120.0

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def made(
    engines: Program, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[cases.Case]]:
    """Results of the engines, and answers of plain vLLM."""
    handed_on = [case for way in WAYS for case in unequal(way)]
    model, given = demo_model.ensure(MODEL), {"cases": one_by_one() + together() + handed_on}
    with PlainVllm(model, given, tmp_path_factory.mktemp("plain")) as plain:
        return engines.result(), plain.result()


@pytest.fixture
def results(made: tuple[dict[str, Any], list[cases.Case]]) -> Results:
    """Results by case name."""
    results = made[0]["results"] + made[0]["unequal"]["results"]
    return {result["name"]: result for result in results}


@pytest.mark.proves("ranks", "compared", kind="llama")
def test_tokens_equal_those_of_one_plain_vllm(
    made: tuple[dict[str, Any], list[cases.Case]], results: Results
) -> None:
    expected = {case["name"]: case["expected"]["token_ids"] for case in made[1]}
    assert {name: result["token_ids"] for name, result in results.items()} == expected


@pytest.mark.proves("ranks", "compared", kind="llama")
def test_each_rank_has_its_own_heads(made: tuple[dict[str, Any], list[cases.Case]]) -> None:
    assert made[0]["num_kv_heads"] * RANKS == demo_model.SHAPES[MODEL].num_kv_heads


@pytest.mark.proves("ranks", "compared", kind="llama")
def test_every_computed_prompt_token_is_loaded(results: Results) -> None:
    for case in [*one_by_one(), *together(), *unequal("1 to 2"), *unequal("2 to 1")]:
        result, sampling = results[case["name"]], case["sampling"]
        if sampling["max_tokens"] == 1:
            continue
        # With forced tokens the prompt's last token is computed again.
        forced = {"seed", "frequency_penalty"} & sampling.keys()
        loadable = len(case["prompt"]) - bool(forced)
        if "spoiled_rank" in case:
            # One rank's part was altered, so nothing of the handoff was loaded.
            loadable = 0
        assert result["num_cached_by_decode"] + result["num_loaded"] == loadable, case["name"]


def test_blocks_from_a_prefix_cache_are_handed_over_too(results: Results) -> None:
    assert results["shared"]["num_cached_by_prefill"] == SHARED
    assert results["shared"]["num_cached_by_decode"] == 0
    assert results["shared"]["num_loaded"] == SHARED + 50
    assert results["again"]["num_cached_by_decode"] >= SHARED


@pytest.mark.parametrize("way", WAYS)
def test_engines_of_different_sizes_fetch_from_each_other(
    made: tuple[dict[str, Any], list[cases.Case]], way: str
) -> None:
    fetched = made[0]["unequal"]["fetched"][way]
    assert (fetched["num_fetched"], fetched["num_cached"]) == (FETCHED, 0)
    assert fetched["tokens"] == fetched["answer"]


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_a_continued_request_returns_prompt_logprobs_for_the_prompt_alone(
    made: tuple[dict[str, Any], list[cases.Case]], sampling: str
) -> None:
    """vLLM computes known tokens with the prompt, or replays them if the sampler has a state."""
    (tokens, rows), (continued_tokens, continued_rows) = made[0]["continued"][sampling]
    assert continued_tokens == tokens
    assert len(rows) == cases.CHUNK + 40
    assert [len(row) for row in continued_rows] == [len(row) for row in rows]
    for row, continued_row in zip(rows, continued_rows, strict=True):
        assert [token for token, _ in continued_row] == [token for token, _ in row]
        values = [value for _, value in continued_row]
        assert values == pytest.approx([value for _, value in row], abs=2e-4)


def test_cached_tokens_match_the_engines_reports(
    made: tuple[dict[str, Any], list[cases.Case]], results: Results
) -> None:
    alone = [
        results[case["name"]]
        for case in one_by_one()
        if case["sampling"]["max_tokens"] > 1 and "waits" not in case
    ]
    for side in ("prefill", "decode"):
        said = {result["name"]: result[f"said_by_{side}"] for result in alone}
        assert said == {result["name"]: result[f"num_cached_by_{side}"] for result in alone}
        # The cache holds nothing, a part, or all of these prompts.
        whole = 17 * cases.BLOCK_SIZE
        assert said["spoiled-0"] == 0 < said["long-again"] < whole == said["long-at-once-again"]
    assert min(made[0]["num_evicted"]) > 0


def test_no_kv_cache_or_staging_memory_is_left(
    made: tuple[dict[str, Any], list[cases.Case]],
) -> None:
    left = made[0]["left"] + made[0]["unequal"]["left"]
    assert left == [{"kv_tokens": 0, "send_bytes": 0, "receive_bytes": 0}] * 6
    assert made[0]["segments"]
    # Python's resource tracker frees some segments after the program has ended.
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := [path for path in made[0]["segments"] if Path(path).exists()]:
        assert time.monotonic() < deadline, f"left in memory: {left}"
        time.sleep(0.05)
