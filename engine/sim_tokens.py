"""The simulated model's output tokens and KV bytes.

Token i of an output is a hash over the prompt and all tokens before it, so a lost, repeated or
foreign token changes every later token. KV bytes come from the digest of the prompt up to the end
of their block, so bytes of another prompt, block or layer are detected.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import xxhash

from baton.runtime.prompts.block_hashes import root_of

# Seed of the hash that chooses answer lengths, so that lengths do not follow from first tokens.
_LENGTH_SEED = 1
# This many tokens suffice for tests to tell outputs apart; scanning a large vocabulary would make
# the start slow.
_MAX_PRINTABLE = 4096


class Vocabulary:
    """A tokenizer, and the token IDs that a simulated model picks from.

    Attributes:
        tokenizer: A tokenizers.Tokenizer.
        printable: IDs of tokens that are printable ASCII text; never special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        self.printable = _printable_ids(tokenizer)
        if not self.printable:
            raise ValueError("the tokenizer has no token of printable ASCII text")

    @classmethod
    def load(cls, model: str) -> Vocabulary:
        """Reads the tokenizer.json of a local model directory.

        Raises:
            ValueError: The file is missing or holds no tokenizer.
        """
        path = Path(model) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"model {model}: has no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise ValueError(f"{path}: no tokenizer: {error}") from None
        return cls(tokenizer)


class TokenChain:
    """Picks the next token of one output as a chain of xxh3_64 hashes.

    The chain starts with the hash of the prompt's IDs (little-endian, 4 bytes each), seeded by the
    adapter. It advances by hashing its 8 bytes and the 4 bytes of the next token.

    Args:
        vocabulary: Vocabulary of the model.
        prompt: Token IDs of the prompt.
        adapter: Name of the LoRA adapter; empty: none.
        written: Token IDs of the written answer to the prompt; empty: there is none.
    """

    __slots__ = ("_hash", "_num_tokens", "_printable", "_prompt_hash", "_written")

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        adapter: str = "",
        written: Sequence[int] = (),
    ) -> None:
        self._printable = vocabulary.printable
        self._written, self._num_tokens = written, 0
        self._prompt_hash = xxhash.xxh3_64_intdigest(token_bytes(prompt), root_of(adapter))
        self._hash = self._prompt_hash

    def advance(self, token_ids: Iterable[int]) -> None:
        """Adds tokens of the output, from this engine or another one."""
        for token_id in token_ids:
            self._hash = xxhash.xxh3_64_intdigest(struct.pack("<QI", self._hash, token_id))
            self._num_tokens += 1

    def next(self) -> int:
        """Returns the token after those added; the same until `advance`."""
        if self._num_tokens < len(self._written):
            return self._written[self._num_tokens]
        return self._printable[self._hash % len(self._printable)]

    def answer_length(self, mean_tokens: int) -> int | None:
        """Number of tokens after which the answer to the prompt ends by itself; None: never.

        A written answer ends after its tokens.

        The length depends only on the prompt and the adapter, so that every attempt at a request
        ends at the same token. Lengths are spread evenly between half and one and a half times the
        mean.

        Args:
            mean_tokens: Mean answer length over many prompts, in tokens; 0: answers do not end.
        """
        if self._written:
            return len(self._written)
        if not mean_tokens:
            return None
        shortest = (mean_tokens + 1) // 2
        spread = 2 * (mean_tokens - shortest) + 1
        digest = xxhash.xxh3_64_intdigest(struct.pack("<Q", self._prompt_hash), _LENGTH_SEED)
        return shortest + digest % spread


def expected_tokens(
    vocabulary: Vocabulary, prompt: Sequence[int], num_tokens: int, adapter: str = ""
) -> list[int]:
    """Returns the tokens that every simulated engine answers, however the work was split."""
    chain, tokens = TokenChain(vocabulary, prompt, adapter), list[int]()
    for _ in range(num_tokens):
        tokens.append(chain.next())
        chain.advance(tokens[-1:])
    return tokens


class KvDigests:
    """Digests of a prompt up to the end of each block, computed as far as needed."""

    __slots__ = ("_block_size", "_digests", "_hash", "_tokens")

    def __init__(
        self, prompt: Sequence[int], num_tokens: int, block_size_tokens: int, adapter: str = ""
    ) -> None:
        self._tokens = prompt[:num_tokens]
        self._block_size = block_size_tokens
        self._hash = xxhash.xxh3_128(seed=root_of(adapter))
        self._digests: list[bytes] = []

    def kv_bytes(self, layer: int, block: int, block_bytes: int) -> bytes:
        """Returns the content of one block of one layer."""
        while len(self._digests) <= block:
            first = len(self._digests) * self._block_size
            self._hash.update(token_bytes(self._tokens[first : first + self._block_size]))
            self._digests.append(self._hash.digest())
        unit: bytes = xxhash.xxh3_128_digest(self._digests[block] + struct.pack("<I", layer))
        return (unit * (block_bytes // len(unit) + 1))[:block_bytes]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns token IDs as little-endian 4-byte words."""
    words = array("I", token_ids)
    assert words.itemsize == 4
    return words.tobytes()


def _printable_ids(tokenizer: Any) -> tuple[int, ...]:
    special = set(tokenizer.get_added_tokens_decoder())
    found: list[int] = []
    for token_id in range(tokenizer.get_vocab_size()):
        if token_id in special or tokenizer.id_to_token(token_id) is None:
            continue
        text = tokenizer.decode([token_id])
        if text and text.isascii() and text.isprintable():
            found.append(token_id)
            if len(found) == _MAX_PRINTABLE:
                break
    return tuple(found)
