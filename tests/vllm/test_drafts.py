"""Drafts with a KV cache of their own (EAGLE, EAGLE-3, MTP, a draft model) beside handoffs.

The reference is an engine of the same model without a draft; for the share of drafted tokens that
are right, one with the draft and without handoffs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# Kinds of drafts by model: those of one model share an engine without a draft.
LLAMA, LATENT = ["eagle", "eagle3", "draft_model"], ["mtp"]
KINDS = [
    *(
        pytest.param(kind, marks=pytest.mark.proves("drafts", "compared", kind="llama"))
        for kind in LLAMA
    ),
    *(
        pytest.param(
            kind,
            marks=[
                pytest.mark.proves("drafts", "compared", kind="latent"),
                pytest.mark.skipif(
                    cases.NUM_GPUS > 0, reason="vLLM's GPU kernels for latents take no float32"
                ),
            ],
        )
        for kind in LATENT
    ),
]
LENGTHS = [1, 31, 32, 33, cases.CHUNK, cases.CHUNK + 1, 2 * cases.CHUNK + 5]
SHARED = cases.prompt(2 * cases.BLOCK_SIZE, 63)
WAYS = ("sent", "left_out", "without")


def given(kind: str) -> dict[str, list[cases.Case]]:
    """Prompts that are sent with the draft's KV cache, without it, and to an engine without one."""
    lengths = LENGTHS if kind == "eagle" else LENGTHS[-1:]
    long = [
        cases.greedy(f"{kind}-long-{n}", cases.prompt(n, 60), 40, ignore_eos=True)
        for n in ((70, 150, 250, 300) if kind == "eagle" else (150, 300))
    ]
    shared = [cases.greedy(f"shared-{n}", SHARED + cases.prompt(9, n), 12) for n in range(2)]
    return {
        "sent": [
            *(cases.greedy(f"{kind}-length-{n}", cases.prompt(n, 61), 12) for n in lengths),
            {**cases.greedy(f"{kind}-waits", cases.prompt(100, 62), 12), "waits": True},
            {**cases.greedy(f"{kind}-spoiled", cases.prompt(230, 66), 12), "spoiled_rank": 0},
            *(shared if kind == "eagle" else []),
            *long,
        ],
        "left_out": [
            {**case, "name": f"{case['name']}-left-out", "prompt": case["prompt"][::-1]}
            for case in long
        ],
        "without": [cases.greedy(f"{kind}-without", cases.prompt(cases.CHUNK + 20, 67), 12)],
    }


class Made:
    """Results by kind of draft; each model's program runs when its first test asks."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._results = directory, dict[str, dict[str, Any]]()

    def of_model(self, kind: str) -> dict[str, Any]:
        kinds = LLAMA if kind in LLAMA else LATENT
        if (name := kinds[0]) not in self._results:
            directory = self._directory / name
            directory.mkdir(exist_ok=True)
            of_kinds = {one: given(one) for one in kinds}
            with Program("drafts_program", of_kinds, directory=directory) as program:
                self._results[name] = program.result()
        return self._results[name]

    def __getitem__(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = self.of_model(kind)[kind]
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("drafts"))


@pytest.mark.proves("handoff", "compared", of="kind")
@pytest.mark.proves("drafts", "compared", of="kind")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_without_a_draft(made: Made, kind: str) -> None:
    """Whichever of both ends has a draft, and on an engine with a draft without a handoff."""
    results = made[kind]
    told = {one["name"]: one["token_ids"] for way in WAYS for one in results[way]}
    assert told == results["expected"]
    for way in ("sent", "left_out"):
        assert results["expected"].items() >= results[f"alone_{way}"].items()


@pytest.mark.proves("recovery", "compared", of="kind")
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_loses_its_decode_worker_continues_with_the_same_tokens(
    made: Made, kind: str
) -> None:
    """The stream is lost twice; the known tokens are handed over with the prompt."""
    recovered = made[kind]["recovered"]
    assert recovered["token_ids"] == made[kind]["expected"][f"{kind}-long-300"]
    assert recovered["num_loaded"] == [300, 301, 314]


@pytest.mark.proves("prefix reuse", "compared", kind="eagle")
def test_a_prefix_is_found_again(made: Made) -> None:
    first, again = (one for one in made["eagle"]["sent"] if one["name"].startswith("shared-"))
    assert first["num_cached_by_prefill"] == first["num_cached_by_decode"] == 0
    assert again["num_cached_by_prefill"] == again["num_cached_by_decode"] == len(SHARED)


@pytest.mark.proves("handoff", "compared", of="kind")
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_handed_over(made: Made, kind: str) -> None:
    prompts = {case["name"]: case["prompt"] for way in given(kind).values() for case in way}
    for way in WAYS:
        for one in made[kind][way]:
            loaded = one["num_cached_by_decode"] + one["num_loaded"]
            expected = 0 if "spoiled" in one["name"] else len(prompts[one["name"]])
            assert loaded == expected, one["name"]


@pytest.mark.proves("drafts", "compared", of="kind")
@pytest.mark.parametrize("kind", KINDS)
def test_handed_over_drafts_are_as_often_right_as_those_of_one_engine(
    made: Made, kind: str
) -> None:
    results = made[kind]
    assert results["share_sent_alone"] > 0
    assert results["share_sent"] == pytest.approx(results["share_sent_alone"], abs=0.02)


@pytest.mark.parametrize("kind", ["eagle", "draft_model", "mtp"])
def test_drafts_without_the_prompt_s_kv_cache_are_right_less_often(made: Made, kind: str) -> None:
    assert made[kind]["share_left_out"] < made[kind]["share_left_out_alone"] / 2


@pytest.mark.proves("kv store", "compared", kind="eagle")
def test_host_memory_keeps_the_draft_s_kv_cache(made: Made) -> None:
    reloaded = made.of_model("eagle")["reloaded"]
    assert reloaded["num_host"] > 0
    assert reloaded["tokens"] == made["eagle"]["expected"]["eagle-long-300"]
    first, again = reloaded["shares"]
    assert again == pytest.approx(first, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_s_layers_are_counted(made: Made, kind: str) -> None:
    assert made.of_model(kind)["plain_layers"] == 2
    assert made[kind]["num_layers"] == (4 if kind == "draft_model" else 3)


def test_a_seeded_output_is_not_continued_with_other_random_numbers(made: Made) -> None:
    """The coordinator does not ask for it."""
    assert made.of_model("eagle")["refused"].startswith("known_token_ids has 1 tokens; ")


@pytest.mark.parametrize("kind", KINDS)
def test_no_kv_cache_or_staging_memory_is_left(made: Made, kind: str) -> None:
    num_engines = 3 if kind == "eagle" else 2
    nothing = {"kv_tokens": 0, "send_bytes": 0, "receive_bytes": 0}
    assert made[kind]["left"] == [nothing] * num_engines
