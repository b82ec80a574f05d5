"""Models whose caches differ from a float32 Llama's: windows, states, sizes, latents, fp8.

Some hand over to an engine with another number of ranks.

The reference is an engine of the same model without handoffs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# vLLM supports fp8 caches only on CPUs with AVX-512.
HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
# Hybrids whose CPU kernels keep no states for the prefix cache, and a model with states only: one
# engine hands over to itself.
HYBRIDS, STATES_ONLY = ["nemotron", "granite", "falcon"], ["mamba"]
WITH_FP8 = pytest.mark.skipif(not HAS_AVX512, reason="no AVX-512 here")
MODELS = [
    "windowed",
    "gpt-oss",
    "all windowed",
    "two sizes",
    "recurrent",
    *HYBRIDS,
    *STATES_ONLY,
    "latent",
    pytest.param("fp8", marks=WITH_FP8),
]
WANTED_RANKS = {
    "windowed": [1, 2],
    "gpt-oss": [1, 1],
    "all windowed": [1, 1],
    "two sizes": [2, 1],
    "recurrent": [1, 1],
    "nemotron": [1],
    "granite": [2],
    "falcon": [2],
    "mamba": [1],
    "latent": [1, 2],
    "fp8": [1, 1],
    **({name: [1, 1] for name in HYBRIDS} if cases.NUM_GPUS else {}),
}
RANKS = {model: [cases.num_ranks(num) for num in each] for model, each in WANTED_RANKS.items()}
# vLLM's kernels for latents take no float32 on GPUs.
IN_BFLOAT16 = ["recurrent", *(["latent"] if cases.NUM_GPUS else [])]
LENGTHS = [1, 31, 33, cases.CHUNK + 1, 2 * cases.CHUNK + 5]
# Prompts around the end of a block, where a state goes to the next block; vLLM makes blocks of 544
# tokens of this model.
MORE_LENGTHS = {"recurrent": [543, 544, 545, 900]}
# Their states move to the next block, of 544 tokens, after some of their output tokens.
BESIDE_DROPS = {"recurrent": [532, 531, 530]}
SHARED = cases.prompt(2 * cases.BLOCK_SIZE, 33)


def handed_over_whole(model: str) -> list[cases.Case]:
    lengths = LENGTHS + MORE_LENGTHS.get(model, [])
    long = cases.prompt(600, 32)
    return [
        *(cases.greedy(f"length-{n}", cases.prompt(n, 30), 12) for n in lengths),
        cases.greedy("long", long + cases.prompt(20, 33), 4),
        cases.greedy("long-again", long + cases.prompt(70, 34), 8),
        {**cases.greedy("waits", cases.prompt(100, 31), 8), "waits": True},
        cases.greedy("shared", SHARED + cases.prompt(9, 34), 4),
        cases.greedy("shared-again", SHARED + cases.prompt(9, 35), 4),
    ]


def all_cases(model: str) -> dict[str, list[cases.Case]]:
    sampled = {"temperature": 1.0, "seed": 7}
    return {
        "one_by_one": [
            *handed_over_whole(model),
            cases.greedy("seeded", cases.prompt(2 * cases.CHUNK, 36), 12, **sampled),
            cases.greedy("penalties", cases.prompt(60, 37), 12, frequency_penalty=1.5),
            {**cases.greedy("spoiled", cases.prompt(230, 38), 8), "spoiled_rank": 0},
        ],
        # In bfloat16, plain vLLM's answers depend on what else is in a step.
        "together": [
            cases.greedy(f"together-{n}", cases.prompt(20 + 50 * n, 39), 10)
            for n in range(4 if model not in IN_BFLOAT16 else 0)
        ],
        "lost": recoveries(),
        "dropped": [
            cases.greedy(f"dropped-{n}", cases.prompt(n, 40), 24, ignore_eos=True)
            for n in BESIDE_DROPS.get(model, [])
        ],
    }


def lost(
    name: str, num_tokens: int, number: int, lost_after: list[int], **sampling: Any
) -> cases.Case:
    """Returns a request of 24 tokens that loses its decode worker after so many tokens."""
    case = cases.greedy(name, cases.prompt(num_tokens, number), 24, ignore_eos=True, **sampling)
    return {**case, "lost_after": lost_after}


def recoveries() -> list[cases.Case]:
    """Requests that lose their decode worker once or twice."""
    sampled = {"temperature": 1.0, "seed": 7}
    return [
        # The known tokens cross the end of a block and of a window of 64 tokens.
        lost("lost", 59, 21, [9]),
        lost("lost-at-once", cases.CHUNK + 1, 22, [1]),
        lost("lost-twice", 2 * cases.CHUNK + 5, 23, [2, 15]),
        lost("lost-seeded", 93, 24, [7], **sampled),
        lost("lost-penalties", 70, 25, [5, 12], frequency_penalty=1.5),
    ]


class Made:
    """Results of the cases by model; each model's program runs when its first test asks."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._results = directory, dict[str, dict[str, Any]]()

    def __getitem__(self, model: str) -> dict[str, Any]:
        if model not in self._results:
            directory = self._directory / model.replace(" ", "-")
            directory.mkdir(exist_ok=True)
            given = (model, RANKS[model], all_cases(model))
            with Program("other_models_program", *given, directory=directory) as program:
                self._results[model] = program.result()
        return self._results[model]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("models"))


@pytest.mark.proves("handoff", "compared", of="model")
@pytest.mark.proves("seeds", "compared", of="model")
@pytest.mark.parametrize("model", MODELS)
def test_tokens_equal_those_without_a_handoff(made: Made, model: str) -> None:
    results = made[model]["results"]
    alone = {one["name"]: made[model]["alone"][one["name"]] for one in results}
    assert {one["name"]: one["token_ids"] for one in results} == alone


@pytest.mark.proves("recovery", "compared", of="model")
@pytest.mark.parametrize("model", MODELS)
def test_streams_that_lose_their_decode_worker_continue_with_the_same_tokens(
    made: Made, model: str
) -> None:
    recovered = made[model]["recovered"]
    alone = {one["name"]: made[model]["alone"][one["name"]] for one in recovered}
    assert {one["name"]: one["token_ids"] for one in recovered} == alone
    assert all(len(tokens) == 24 for tokens in alone.values())


@pytest.mark.proves("recovery", "compared", of="model")
@pytest.mark.parametrize("model", MODELS)
def test_known_tokens_are_handed_over_with_the_prompt(made: Made, model: str) -> None:
    recovered = {one["name"]: one["num_loaded"] for one in made[model]["recovered"]}
    num_prompt = 2 * cases.CHUNK + 5
    assert recovered["lost-twice"] == [num_prompt, num_prompt + 1, num_prompt + 14]
    # Forced tokens: the last prompt token is computed again, which states do not support.
    assert recovered["lost-seeded"] == ([92, 92] if not made[model]["has_states"] else [0, 0])


@pytest.mark.proves("handoff", "compared", of="model")
@pytest.mark.parametrize("model", MODELS)
def test_prompts_are_handed_over(made: Made, model: str) -> None:
    results = {one["name"]: one for one in made[model]["results"]}
    for case in handed_over_whole(model):
        result = results[case["name"]]
        loaded = result["num_cached_by_decode"] + result["num_loaded"]
        assert loaded == len(case["prompt"]), case["name"]


@pytest.mark.proves("ranks", "compared", of="model")
@pytest.mark.parametrize("model", [model for model, ranks in RANKS.items() if max(ranks) > 1])
def test_engines_of_several_ranks_hand_over(made: Made, model: str) -> None:
    results = {one["name"]: one for one in made[model]["results"]}
    assert made[model]["num_ranks"] == RANKS[model]
    for name in ("long", "waits", "seeded", "penalties"):
        assert results[name]["num_loaded"] > 0 or made[model]["has_states"]
        assert results[name]["token_ids"] == made[model]["alone"][name]


@pytest.mark.parametrize("model", BESIDE_DROPS)
def test_a_state_that_moves_while_the_cache_is_deleted_is_kept(made: Made, model: str) -> None:
    """vLLM copies it into a free block, which the deletion overwrites."""
    dropped = made[model]["dropped"]
    assert dropped == {name: made[model]["alone"][name] for name in dropped}
    assert all(len(tokens) == 24 for tokens in dropped.values())


@pytest.mark.proves("prefix reuse", "compared", of="model")
@pytest.mark.parametrize(
    "model",
    [
        "windowed",
        "gpt-oss",
        "all windowed",
        "two sizes",
        "recurrent",
        pytest.param("fp8", marks=WITH_FP8),
        *([*HYBRIDS, "latent"] if cases.NUM_GPUS else []),
    ],
)
def test_a_prefix_is_found_again(made: Made, model: str) -> None:
    """Two prompts share 600 tokens: 18 blocks of 32, 9 of 64, one of 544."""
    results = {one["name"]: one for one in made[model]["results"]}
    assert results["long"]["num_cached_by_prefill"] == 0
    found = results["long-again"]["num_cached_by_prefill"]
    assert found == 600 - 600 % made[model]["block_size"] > 0


@pytest.mark.skipif(cases.NUM_GPUS == 1, reason="an engine of two ranks needs two GPUs")
def test_latents_that_all_ranks_hold_are_handed_over_once(
    made: Made,
) -> None:
    """One rank sends to two, and each of them loads the same bytes."""
    assert made["latent"]["num_shards"] == 1
    # A token has 512 values and 64 rotated values.
    size = 2 if "latent" in IN_BFLOAT16 else 4
    assert made["latent"]["block_bytes"] == made["latent"]["block_size"] * (512 + 64) * size


@WITH_FP8
def test_an_fp8_cache_is_handed_over_without_conversion(made: Made) -> None:
    # Two heads of 32 values, keys and values.
    assert made["fp8"]["block_bytes"] == made["fp8"]["block_size"] * 2 * 32 * 2


def test_the_fingerprint_has_the_block_size_of_the_attention_backend(
    made: Made,
) -> None:
    """Otherwise ranks would choose another size, and the handoff would be refused."""
    assert made["latent"]["announced_block_size"] == 64


@pytest.mark.parametrize("model", MODELS)
def test_no_kv_cache_or_staging_memory_is_left(made: Made, model: str) -> None:
    assert made[model]["left"] == [{"kv_tokens": 0, "send_bytes": 0, "receive_bytes": 0}] * 4
