"""Simulated outputs in which each token is a hash of all tokens before it.

A token that is wrong, missing or repeated therefore changes every later token of the output.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import xxhash

from baton.v1 import common_pb2

NUM_TOKENS = 500
# One of this many token IDs ends an output.
_LAST = 64


class HashedOutput:
    """Generates the output of a prompt, from its beginning or after known output tokens.

    Args:
        prompt: Prompt token IDs.
        adapter: Adapter that the request uses; empty for the base model.
        revision: Revision of the model's weights.
        known: Output tokens that exist already.
    """

    def __init__(
        self, prompt: Sequence[int], adapter: str, revision: str, known: Iterable[int] = ()
    ) -> None:
        weights = xxhash.xxh3_64_intdigest(f"{adapter} {revision}".encode())
        self._state = xxhash.xxh3_64_intdigest(array("I", prompt).tobytes(), weights)
        for token in known:
            self._follow(token)

    def next(self) -> int:
        """Computes one token."""
        token = self._state % NUM_TOKENS
        self._follow(token)
        return token

    def _follow(self, token: int) -> None:
        self._state = xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), self._state)


def is_last(token: int) -> bool:
    """Whether this token ends the output, as an end-of-sequence token does."""
    return token % _LAST == 0


def most_tokens(sampling: common_pb2.SamplingParams) -> float:
    """Returns the length at which the output is cut: `max_tokens`, or infinity if it is unset."""
    return sampling.max_tokens if sampling.HasField("max_tokens") else math.inf


def text_of(token: int) -> str:
    """Returns the text of a token: one letter, so that texts and tokens have equal lengths."""
    return chr(ord("a") + token % 26)


def undisturbed(prompt: Sequence[int], adapter: str, revision: str, max_tokens: float) -> list[int]:
    """Returns the output of a request that one worker computes from beginning to end."""
    output, tokens = HashedOutput(prompt, adapter, revision), list[int]()
    while len(tokens) < max_tokens and not (tokens and is_last(tokens[-1])):
        tokens.append(output.next())
    return tokens
