"""Hashes that name a block of a prompt's KV cache equally in every process.

The KV of a block depends on every token and image up to the end of the block. The hash does too:
it is xxh3_64 over the block's token IDs, seeded with the hash of the previous block, which the
images that the block has tokens of change first. Equal hashes mean equal prefixes. 64 bits are
enough to choose a worker; no KV is loaded on the hash alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from baton.runtime.prompts.prompt_images import ImageKey

ROOT = 0
"""Parent hash of a prompt's first block, for the base model and without a salt."""


def root_of(adapter: str, cache_salt: str = "") -> int:
    """Parent hash of the first block of a prompt with an adapter or a salt.

    Args:
        adapter: Name of the LoRA adapter; empty for the base model.
        cache_salt: Requests find only blocks of requests with the same salt.
    """
    root = xxhash.xxh3_64_intdigest(f"adapter {adapter}".encode()) if adapter else ROOT
    return xxhash.xxh3_64_intdigest(f"salt {cache_salt}".encode(), root) if cache_salt else root


def image_seed(parent: int, keys: Sequence[ImageKey]) -> int:
    """Seed of the hash of a block that has tokens of images; the parent's hash without images."""
    for image_id, offset in keys:
        parent = xxhash.xxh3_64_intdigest(f"image {image_id} {offset}".encode(), parent)
    return parent


def block_hashes(
    token_ids: Sequence[int],
    block_size_tokens: int,
    parent: int = ROOT,
    image_keys: Sequence[Sequence[ImageKey]] = (),
) -> array[int]:
    """Hashes the full blocks of a prompt, in order; a partial last block is left out.

    Args:
        token_ids: Token IDs from 0 to 2^32 - 1, hashed as little-endian 4-byte words (the byte
            order of every machine that engines run on).
        block_size_tokens: Tokens per block, at least 1.
        parent: Hash of the block before the first of these tokens.
        image_keys: For each block the images that it has tokens of (block_keys of
            runtime/prompts/prompt_images.py); empty: none.

    Returns:
        One 64-bit hash per block, 8 bytes each.
    """
    if block_size_tokens < 1:
        raise ValueError(f"block_size_tokens is {block_size_tokens}; must be at least 1")
    words = array("I", token_ids)
    assert words.itemsize == 4
    block_bytes = 4 * block_size_tokens
    data, digest = memoryview(words.tobytes()), xxhash.xxh3_64_intdigest
    hashes = array("Q")
    for begin in range(0, len(data) - block_bytes + 1, block_bytes):
        if image_keys:
            parent = image_seed(parent, image_keys[len(hashes)])
        parent = digest(data[begin : begin + block_bytes], parent)
        hashes.append(parent)
    return hashes
