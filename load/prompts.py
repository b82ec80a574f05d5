"""Makes prompts of a given length as token IDs, with exactly the shared prefixes of the plan."""

from __future__ import annotations

import math
import random
from array import array

from baton.load.plan import Planned
from baton.load.traces import MOONCAKE_BLOCK_TOKENS

_POOL_TOKENS = 1 << 16
# An odd stride gives consecutive numbers distinct offsets until the pool is exhausted.
_STRIDE = 0x9E3779B1
_KEY_BITS = 64


class Prompts:
    """Makes prompts fast: each block starts with tokens that encode a key, then random tokens.

    Blocks with different keys differ in their first tokens, so no prefix cache treats them as
    equal. Prompts also differ from those of every other seed, so the cache entries of an earlier
    run cause no hits.

    Args:
        vocab_size: Vocabulary size of the model. Token IDs come from its middle, because special
            tokens are usually at the ends.
        seed: Seed of the contents.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        if vocab_size < 4:
            raise ValueError(f"vocab_size is {vocab_size}; must be at least 4")
        self._ids = range(vocab_size // 10, vocab_size - vocab_size // 10)
        chance = random.Random(seed)
        self._pool = array("I", chance.choices(self._ids, k=_POOL_TOKENS))
        self._salt = chance.getrandbits(_KEY_BITS)
        self._num_digits = math.ceil(_KEY_BITS / math.log2(len(self._ids)))

    def of(self, planned: Planned) -> array[int]:
        """Returns the prompt of a planned request; equal block IDs give equal tokens."""
        tokens = array("I")
        for block in planned.block_ids:
            tokens.extend(self._block(2 * block, MOONCAKE_BLOCK_TOKENS))
        missing = planned.num_prompt_tokens - len(tokens)
        if missing > 0:
            tokens.extend(self._block(2 * planned.number + 1, missing))
        return tokens[: planned.num_prompt_tokens]

    def _block(self, number: int, num_tokens: int) -> array[int]:
        """Returns `num_tokens` tokens that are unique to this number.

        Blocks with fewer tokens than an encoded key are not guaranteed to be unique.
        """
        key = (number ^ self._salt) % 2**_KEY_BITS
        tokens = array("I")
        for _ in range(self._num_digits):
            key, digit = divmod(key, len(self._ids))
            tokens.append(self._ids[digit])
        offset = number * _STRIDE % _POOL_TOKENS
        while len(tokens) < num_tokens:
            tokens.extend(self._pool[offset : offset + num_tokens - len(tokens)])
            offset = 0
        return tokens[:num_tokens]
