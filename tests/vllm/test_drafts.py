"""Drafts with a KV cache of their own (EAGLE, EAGLE-3, MTP, a draft model) beside handoffs.

The reference is an engine of the same model without a draft. For the share of drafted tokens that
are right, it is an engine with the draft and without handoffs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm_cases as cases
from vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KINDS = ["eagle", "eagle3", "mtp", "draft_model"]
LENGTHS = [1, 31, 32, 33, cases.CHUNK, cases.CHUNK + 1, 2 * cases.CHUNK + 5]
SHARED = cases.prompt(2 * cases.BLOCK_SIZE, 63)


def given(kind: str) -> dict[str, list[cases.Case]]:
    lengths = LENGTHS if kind == "eagle" else LENGTHS[-1:]
    long = [
        cases.greedy(f"long-{n}", cases.prompt(n, 60), 40, ignore_eos=True)
        for n in (70, 150, 250, 300)
    ]
    return {
        "sent": [
            *(cases.greedy(f"length-{n}", cases.prompt(n, 61), 12) for n in lengths),
            {**cases.greedy("waits", cases.prompt(100, 62), 12), "waits": True},
            cases.greedy("shared", SHARED + cases.prompt(9, 64), 12),
            cases.greedy("shared-again", SHARED + cases.prompt(9, 65), 12),
            {**cases.greedy("spoiled", cases.prompt(230, 66), 12), "spoiled_rank": 0},
            *long,
        ],
        "left_out": [
            {**case, "name": f"{case['name']}-left-out", "prompt": case["prompt"][::-1]}
            for case in long
        ],
        "without": [cases.greedy("without", cases.prompt(cases.CHUNK + 20, 67), 12)],
    }


class Made:
    """Results by kind of draft; each kind's program runs when its first test asks."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._results = directory, dict[str, dict[str, Any]]()

    def __getitem__(self, kind: str) -> dict[str, Any]:
        if kind not in self._results:
            directory = self._directory / kind
            directory.mkdir(exist_ok=True)
            with Program("drafts_program", kind, given(kind), directory=directory) as program:
                self._results[kind] = program.result()
        return self._results[kind]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_without_a_draft(made: Made, kind: str) -> None:
    """Whichever of both ends has a draft."""
    results = made[kind]
    told = {
        one["name"]: one["token_ids"]
        for way in ("sent", "left_out", "without")
        for one in results[way]
    }
    assert told == results["expected"]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_handed_over(made: Made, kind: str) -> None:
    prompts = {case["name"]: case["prompt"] for way in given(kind).values() for case in way}
    for way in ("sent", "left_out", "without"):
        for one in made[kind][way]:
            if one["name"] != "spoiled":
                loaded = one["num_cached_by_decode"] + one["num_loaded"]
                assert loaded == len(prompts[one["name"]]), one["name"]


@pytest.mark.parametrize("kind", KINDS)
def test_handed_over_drafts_are_as_often_right_as_those_of_one_engine(
    made: Made, kind: str
) -> None:
    results = made[kind]
    assert results["share_alone_sent"] > 0.05
    assert results["share_sent"] == pytest.approx(results["share_alone_sent"], abs=0.02)


@pytest.mark.parametrize("kind", ["eagle", "mtp", "draft_model"])
def test_drafts_without_the_prompt_s_kv_cache_are_right_less_often(made: Made, kind: str) -> None:
    assert 0 < made[kind]["share_left_out"] < made[kind]["share_alone_left_out"]


def test_host_memory_keeps_the_draft_s_kv_cache(made: Made) -> None:
    reloaded = made["eagle"]["reloaded"]
    assert reloaded["num_host"] > 0
    assert reloaded["tokens"] == made["eagle"]["expected"]["long-300"]
    first, again = reloaded["shares"]
    assert again == pytest.approx(first, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_s_layers_are_counted_without_those_of_the_draft(made: Made, kind: str) -> None:
    assert made[kind]["layers"] == [4 if kind == "draft_model" else 3, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_output_is_not_continued_with_other_random_numbers(made: Made, kind: str) -> None:
    assert "known_token_ids" in made[kind]["refused"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_kv_cache_or_staging_memory_is_left(made: Made, kind: str) -> None:
    assert made[kind]["left"] == [{"kv_tokens": 0, "send_bytes": 0, "receive_bytes": 0}] * 3
