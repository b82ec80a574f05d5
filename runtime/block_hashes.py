"""What names a block of a prompt's KV cache, equally in every process.

A block's KV depends on every token up to its end, so its hash does too: xxh3_64 over the block's
token ids, seeded with the hash of the block before it. Equal hashes mean equal prefixes; 64 bits
do for choosing a worker, and nothing is ever loaded on the strength of one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

ROOT = 0
"""The parent of a prompt's first block."""


def root_of(adapter: str) -> int:
    """The parent of a prompt's first block that is computed with a LoRA adapter.

    Args:
        adapter: its name; empty for the base model.
    """
    return xxhash.xxh3_64_intdigest(f"adapter {adapter}".encode()) if adapter else ROOT


def block_hashes(
    token_ids: Sequence[int], block_size_tokens: int, parent: int = ROOT
) -> array[int]:
    """Hashes of the full blocks, in order; tokens of a last, partial block are left out.

    Args:
        token_ids: each 0 to 2^32 - 1; hashed as little-endian 4-byte words, which is the order of
            every machine that engines run on.
        block_size_tokens: at least 1.
        parent: hash of the block before the first of these tokens.

    Returns:
        64-bit numbers, 8 bytes each.
    """
    if block_size_tokens < 1:
        raise ValueError(f"block_size_tokens is {block_size_tokens}; must be at least 1")
    words = array("I", token_ids)
    assert words.itemsize == 4
    block_bytes = 4 * block_size_tokens
    data, digest = memoryview(words.tobytes()), xxhash.xxh3_64_intdigest
    hashes = array("Q")
    for begin in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = digest(data[begin : begin + block_bytes], parent)
        hashes.append(parent)
    return hashes
