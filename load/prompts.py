"""Prompts of a length, as token ids, that share exactly the blocks that they are to share."""

from __future__ import annotations

import math
import random
from array import array

from baton.load.plan import Planned
from baton.load.traces import MOONCAKE_BLOCK_TOKENS

_POOL_TOKENS = 1 << 16
# Odd, so that every number has an offset of its own until the pool is used up.
_STRIDE = 0x9E3779B1
_KEY_BITS = 64


class Prompts:
    """Makes prompts fast: a few tokens that name the block, the rest from a pool of random ones.

    Whatever has another name differs from its first tokens on, so that no prefix cache takes the
    one for the other. Prompts differ from those of every other seed too: what a cluster has cached
    of another run helps nobody.

    Args:
        vocab_size: of the model; ids come from its middle, since special tokens stand at the ends.
        seed: of the contents.
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
        """A planned request's prompt; Mooncake's blocks are equal where their ids are."""
        tokens = array("I")
        for block in planned.block_ids:
            tokens.extend(self._named(2 * block, MOONCAKE_BLOCK_TOKENS))
        missing = planned.num_prompt_tokens - len(tokens)
        if missing > 0:
            tokens.extend(self._named(2 * planned.number + 1, missing))
        return tokens[: planned.num_prompt_tokens]

    def _named(self, name: int, num_tokens: int) -> array[int]:
        """So many tokens, of this name alone; fewer than a name has may be of several."""
        key = (name ^ self._salt) % 2**_KEY_BITS
        tokens = array("I")
        for _ in range(self._num_digits):
            key, digit = divmod(key, len(self._ids))
            tokens.append(self._ids[digit])
        offset = name * _STRIDE % _POOL_TOKENS
        while len(tokens) < num_tokens:
            tokens.extend(self._pool[offset : offset + num_tokens - len(tokens)])
            offset = 0
        return tokens[:num_tokens]
