"""vLLM's second model runner, the default on GPUs; Triton interprets its kernels on the CPU here.

It describes requests to samplers in another form (engine/vllm_forced_tokens.py), and calls the
connector at other moments. The reference is plain vLLM on the same runner.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.runtime import demo_model
from baton.runtime.process import affinity
from tests.program_command import command_of
from tests.vllm import vllm_cases as cases

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# The programs have a shorter limit of their own.
HERE, TIMEOUT_S = Path(__file__).parent, 560
SEEDED = {"temperature": 1.0, "seed": 7}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}


def one_by_one() -> list[cases.Case]:
    long, shared = cases.prompt(2 * cases.CHUNK + 40, 82), cases.prompt(2 * cases.BLOCK_SIZE, 83)
    waits = {**cases.greedy("waits", cases.prompt(70, 84), 8), "waits": True}
    spoiled = {**cases.greedy("spoiled", cases.prompt(70, 85), 6), "spoiled_rank": 0}
    return [
        cases.greedy("one-token", cases.prompt(1, 81), 6),
        cases.greedy("long", long, 6),
        cases.greedy("shared", shared + cases.prompt(9, 86), 4),
        cases.greedy("shared-again", shared + cases.prompt(9, 87), 4),
        # The first token is forced, also in a prompt of several chunks.
        cases.greedy("seeded", long, 8, **SEEDED),
        cases.greedy("penalties", cases.prompt(40, 88), 8, **PENALTIES),
        cases.greedy("seeded-penalties", cases.prompt(40, 89), 8, **SEEDED, **PENALTIES),
        waits,
        spoiled,
    ]


def together() -> list[cases.Case]:
    """Returns cases with and without forced tokens for one batch."""
    return [
        cases.greedy(
            f"together-{n}", cases.prompt(20 + 50 * n, 91), 6 + n, **(SEEDED if n % 2 else {})
        )
        for n in range(4)
    ]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Results of two engines and answers of plain vLLM, by case name."""
    model, directory = demo_model.ensure("demo-2-layers"), tmp_path_factory.mktemp("second")
    cases_in = directory / "cases"
    cases_in.write_text(json.dumps({"one_by_one": one_by_one(), "together": together()}))
    # Settings that bind this process's engines must not bind others.
    environment = {k: v for k, v in os.environ.items() if k != affinity.VLLM_BIND_THREADS}
    paths = [str(HERE / "interpreted"), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    log = directory / "log"
    with cases_in.open() as given, log.open("w") as said:
        code = subprocess.run(
            [*command_of("tests.vllm.second_runner_program"), model, str(directory)],
            stdin=given,
            stdout=said,
            stderr=said,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        ).returncode
    assert code == 0, log.read_text()[-3000:]
    results = json.loads((directory / "results.json").read_text())
    expected = {case["name"]: case["expected"]["token_ids"] for case in results["plain"]}
    return results["split"], expected


def test_tokens_equal_those_of_plain_vllm(
    made: tuple[dict[str, Any], dict[str, list[int]]],
) -> None:
    result, expected = made
    assert result["has_second_runner"]
    assert {one["name"]: one["token_ids"] for one in result["results"]} == expected


def test_prompts_are_handed_over(made: tuple[dict[str, Any], dict[str, list[int]]]) -> None:
    results = {one["name"]: one for one in made[0]["results"]}
    for case in [*one_by_one(), *together()]:
        result = results[case["name"]]
        forced = {"seed", "frequency_penalty"} & case["sampling"].keys()
        loadable = 0 if "spoiled_rank" in case else len(case["prompt"]) - bool(forced)
        assert result["num_cached_by_decode"] + result["num_loaded"] == loadable, case["name"]


def test_no_kv_cache_or_staging_memory_is_left(
    made: tuple[dict[str, Any], dict[str, list[int]]],
) -> None:
    assert made[0]["left"] == [{"kv_tokens": 0, "send_bytes": 0, "receive_bytes": 0}] * 2
