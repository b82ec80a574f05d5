"""What names a request's prompt, sampling and adapter, equally in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from baton.runtime.block_hashes import root_of
from baton.v1 import common_pb2


def request_digest(
    prompt_token_ids: Sequence[int], sampling: common_pb2.SamplingParams, adapter: str = ""
) -> int:
    """xxh3_64 over the prompt's token ids, seeded with the hash of the rest.

    Args:
        prompt_token_ids: each 0 to 2^32 - 1.
        sampling: as a worker is sent it.
        adapter: its name; empty for the base model.

    Returns:
        64 bits: enough to tell a request that came back from another one of its id.
    """
    words = array("I", prompt_token_ids)
    seed = xxhash.xxh3_64_intdigest(
        sampling.SerializeToString(deterministic=True), root_of(adapter)
    )
    return xxhash.xxh3_64_intdigest(words.tobytes(), seed)
