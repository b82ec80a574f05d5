"""Settings and assumptions for vLLM on CUDA GPUs, as far as a CPU can show them."""

from typing import Any

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("cuda")
    with Program("cuda_settings_program", directory=directory) as program:
        answers: dict[str, Any] = program.result()
    return answers


def test_vllm_leaves_each_gpu_the_memory_of_the_copies(told: dict[str, Any]) -> None:
    """Two rings of 8 slots of 8 MiB each, or of one larger block each."""
    assert told["left"] == pytest.approx(2 * 8 * 8 * 2**20, abs=1000)
    assert told["left_by_large_blocks"] == pytest.approx(2 * 8 * 12 * 2**20, abs=1000)


def test_rays_executor_is_refused_also_when_vllm_chooses_it(told: dict[str, Any]) -> None:
    assert told["refused"].startswith("engine_args.distributed_executor_backend: is not set, and ")
    assert told["not_refused"] == ""


def test_backends_that_arrange_a_cache_equally_have_one_name(told: dict[str, Any]) -> None:
    """The modules of FlashInfer and CUTLASS need a GPU, so their methods do not run here."""
    stored = told["stored"]
    assert {"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_MLA", "FLASHMLA"} <= set(stored)
    latent = {name for name in stored if name.endswith("MLA")}
    assert {stored[name] for name in latent} == {"latent,rope"}
    assert {stored[name] for name in stored.keys() - latent} == {"keys,values"}
    assert told["named"] == [
        *["keys,values"] * 3,
        *["latent,rope"] * 2,
        "FLASH_ATTN+B12X",
        "FLASHMLA+FLASH_ATTN",
    ]
