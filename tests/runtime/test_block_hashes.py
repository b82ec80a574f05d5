import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.prompts.block_hashes import block_hashes

_TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(_TOKENS, _TOKENS, st.integers(1, 8))
def test_equal_hashes_are_equal_prefixes(first: list[int], second: list[int], size: int) -> None:
    ours, theirs = block_hashes(first, size), block_hashes(second, size)
    assert len(ours) == len(first) // size
    for block, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        assert (one == other) == (first[: block * size] == second[: block * size])


@given(_TOKENS, st.integers(1, 8), st.integers(0, 8))
def test_a_chain_continues_from_a_parent_hash(tokens: list[int], size: int, blocks: int) -> None:
    whole = block_hashes(tokens, size)
    blocks = min(blocks, len(whole))
    parent = whole[blocks - 1] if blocks else 0
    assert whole[:blocks] + block_hashes(tokens[blocks * size :], size, parent) == whole


def test_every_process_names_blocks_equally() -> None:
    code = (
        "from baton.runtime.prompts.block_hashes import block_hashes\n"
        "print(*block_hashes(range(64), 16))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert [int(one) for one in told.stdout.split()] == list(block_hashes(range(64), 16))


def test_an_invalid_block_size_is_named() -> None:
    with pytest.raises(ValueError, match="block_size_tokens is 0; must be at least 1"):
        block_hashes([1], 0)
