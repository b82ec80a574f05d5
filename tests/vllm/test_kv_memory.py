"""Models with sliding windows need no more KV memory under Baton than in plain vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("model", ["windowed", "gpt-oss"])
def test_a_cache_holds_as_many_tokens_as_in_plain_vllm(model: str, tmp_path: Path) -> None:
    with Program("kv_memory_program", model, directory=tmp_path) as program:
        found = program.result()
    assert found["kv_tokens"] == found["plain_kv_tokens"]
    # Layers with windows: two of three, or two of four. Each token has 2 heads of 32 keys and 32
    # values in a layer, and a handoff of 1024 tokens has at most 4 blocks of 32 for a window of 64.
    num_full, num_windowed = (1, 2) if model == "windowed" else (2, 2)
    itemsize = 4
    layer_bytes = 2 * 64 * itemsize
    assert found["token_bytes"] == num_full * layer_bytes
    windows = num_windowed * 4 * 32 * layer_bytes
    assert found["handoff_bytes"] <= 1024 * found["token_bytes"] + windows
