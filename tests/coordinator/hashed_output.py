"""Outputs of which every token is a hash of all that came before it: a wrong one shows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import xxhash

from baton.v1 import common_pb2

NUM_TOKENS = 500
# One in so many ends an output.
_LAST = 64


class HashedOutput:
    """What comes after a prompt, and after tokens that are known already.

    Args:
        prompt: token ids.
        adapter, revision: whose weights compute it.
        known: tokens of its output so far.
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
    """Whether the output ends with it, as with an end-of-sequence token."""
    return token % _LAST == 0


def most_tokens(sampling: common_pb2.SamplingParams) -> float:
    """Of an output that does not end by itself."""
    return sampling.max_tokens if sampling.HasField("max_tokens") else math.inf


def text_of(token: int) -> str:
    """One letter, so that text and tokens can be counted against each other."""
    return chr(ord("a") + token % 26)


def undisturbed(prompt: Sequence[int], adapter: str, revision: str, max_tokens: float) -> list[int]:
    """The output of a request that one worker computes from beginning to end."""
    output, tokens = HashedOutput(prompt, adapter, revision), list[int]()
    while len(tokens) < max_tokens and not (tokens and is_last(tokens[-1])):
        tokens.append(output.next())
    return tokens
