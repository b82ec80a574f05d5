"""Engines with pipeline stages hand over to engines with as many or with another number.

The reference is an engine of one stage without handoffs.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_programs import Program

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(cases.NUM_GPUS == 1, reason="an engine of two stages needs two GPUs"),
]

# Number of stages of each engine of a model, and from which engine to which handoffs go.
MODELS = {
    # Windows beside full attention: a stage has no layers of some block tables.
    "windowed": ([1, 2, 2], ("0 to 1", "1 to 0", "1 to 2")),
    # States beside full attention; vLLM wants full attention in each stage.
    "recurrent, 8 layers": ([1, 2], ("0 to 1", "1 to 0")),
}
LENGTHS = [1, 33, cases.CHUNK + 1, 2 * cases.CHUNK + 5]


def one_by_one(model: str, way: str, number: int) -> list[cases.Case]:
    made = [cases.greedy(f"{way}, length-{n}", cases.prompt(n, 50 + number), 10) for n in LENGTHS]
    if model != "windowed":
        return made
    shared = cases.prompt(3 * cases.BLOCK_SIZE, 40 + number)
    return [
        *made,
        cases.greedy(f"{way}, seeded", cases.prompt(300, 60 + number), 8, temperature=1.0, seed=7),
        cases.greedy(f"{way}, shared", shared + cases.prompt(9, 70 + number), 6),
        cases.greedy(f"{way}, shared-again", shared + cases.prompt(5, 80 + number), 6),
        {**cases.greedy(f"{way}, waits", cases.prompt(300, 90 + number), 6), "waits": True},
        {**cases.greedy(f"{way}, spoiled", cases.prompt(230, 95 + number), 6), "spoiled_rank": 0},
    ]


def together(model: str, way: str, number: int) -> list[cases.Case]:
    """Requests that fill all stages at a time."""
    if model != "windowed":
        # In bfloat16, answers depend on what else is in a step.
        return []
    return [
        cases.greedy(f"{way}, together-{n}", cases.prompt(20 + 150 * n, 30 + number), 8)
        for n in range(4)
    ]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    sizes, ways = MODELS[request.param]
    given = {
        way: {
            "one_by_one": one_by_one(request.param, way, number),
            "together": together(request.param, way, number),
        }
        for number, way in enumerate(ways)
    }
    directory = tmp_path_factory.mktemp("stages")
    with Program("stages_program", request.param, sizes, given, directory=directory) as program:
        return {**program.result(), "given": given, "sizes": sizes}


@pytest.mark.proves("stages", "compared", of="made")
def test_tokens_equal_those_of_one_stage_without_a_handoff(made: Any) -> None:
    assert {one["name"]: one["token_ids"] for one in made["results"]} == made["alone"]


@pytest.mark.proves("stages", "compared", of="made")
def test_prompts_are_handed_over(made: Any) -> None:
    results = {one["name"]: one for one in made["results"]}
    for of_way in made["given"].values():
        for case in of_way["one_by_one"] + of_way["together"]:
            loadable = len(case["prompt"]) - ("seed" in case["sampling"])
            if "spoiled_rank" in case:
                # A layer of one stage was altered, so no stage's part was used.
                loadable = 0
            result = results[case["name"]]
            assert result["num_cached_by_decode"] + result["num_loaded"] == loadable, case["name"]


def test_the_fingerprint_has_the_layers_of_all_stages(made: Any) -> None:
    assert made["num_stages"] == made["sizes"]
    assert made["num_layers"] == [made["num_layers"][0]] * len(made["sizes"])


def test_no_kv_cache_or_staging_memory_is_left(made: Any) -> None:
    held = {"kv_tokens": 0, "send_bytes": 0, "receive_bytes": 0}
    assert made["left"] == [held] * len(made["sizes"])
