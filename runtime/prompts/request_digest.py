"""A digest of a request's prompt, images, sampling and adapter, equal in every process."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton.runtime.prompts.block_hashes import root_of
from baton.runtime.prompts.prompt_images import keyed_tokens
from baton.v1 import common_pb2


def request_digest(
    prompt_token_ids: Sequence[int],
    sampling: common_pb2.SamplingParams,
    adapter: str = "",
    images: Sequence[common_pb2.PromptImage] = (),
) -> int:
    """xxh3_64 over the prompt's token IDs and images, seeded with the hash of the other parts.

    Args:
        prompt_token_ids: Token IDs from 0 to 2^32 - 1.
        sampling: Sampling parameters as sent to a worker.
        adapter: Name of the LoRA adapter; empty for the base model.
        images: Images of the prompt.

    Returns:
        64 bits, enough to tell a returning request from a different one with the same ID.
    """
    words = keyed_tokens(prompt_token_ids, images)
    seed = xxhash.xxh3_64_intdigest(
        sampling.SerializeToString(deterministic=True), root_of(adapter)
    )
    return xxhash.xxh3_64_intdigest(words.tobytes(), seed)
