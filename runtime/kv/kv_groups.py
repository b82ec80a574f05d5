"""Groups of layers of a KV cache, and the blocks of each group that a handoff holds.

Most models have one group: every layer keeps every token. A layer with a sliding window keeps the
last tokens only, so a handoff holds only the blocks of those. A recurrent layer keeps one state,
whose content belongs to the last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

# ID of the block that stands for blocks that a request does not keep; no request owns it (vLLM).
NULL_BLOCK = 0

Kind: TypeAlias = Literal["full", "window", "state"]


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose blocks have one kind and one size.

    Attributes:
        kind: "full": every token is kept. "window": the last window_tokens tokens are kept.
            "state": one block holds a recurrent state after the last token.
        num_layers: Number of layers.
        num_kv_heads: Number of KV heads of one rank; 0 for states.
        block_size_tokens: Tokens per block. For a state: how often the engine may keep one.
        block_bytes: Bytes of one block of one layer on one rank.
        window_tokens: Tokens of a window; 0 for other kinds.
        table: Index of the engine's list of a request's blocks, which layers of several groups may
            share (vLLM: KV cache group).
        is_draft: Whether the layers belong to a speculative draft.
    """

    kind: Kind
    num_layers: int
    num_kv_heads: int
    block_size_tokens: int
    block_bytes: int
    window_tokens: int = 0
    table: int = 0
    is_draft: bool = False

    def blocks(self, num_blocks: int, counted_tokens: int) -> range:
        """Returns the blocks of each layer in a handoff, as indices from its first token on.

        Args:
            num_blocks: Size of the handoff, in blocks of counted_tokens tokens; the last one may be
                partly filled.
            counted_tokens: Smallest block size of all groups but a draft's, in tokens; see
                `smallest_block`.
        """
        if self.kind == "state":
            return range(1)
        end = -(-num_blocks * counted_tokens // self.block_size_tokens)
        if self.kind == "full":
            return range(end)
        # Shortest prompt with this number of blocks. A receiver that computes the last token again
        # needs the window before that token.
        shortest = (num_blocks - 1) * counted_tokens + 1
        return range(max(0, shortest - self.window_tokens) // self.block_size_tokens, end)


def split(groups: Sequence[KvGroup], num_shards: int, num_wanted: int) -> list[KvGroup] | None:
    """Returns the groups of one shard when the same cache is held in another number of shards.

    Args:
        groups: Groups of one shard.
        num_shards: Number of shards of the cache.
        num_wanted: The other number of shards.

    Returns:
        None if the heads of a group cannot be divided so, or a group keeps states, of which a shard
        is not a range of heads.
    """
    if num_wanted == num_shards:
        return list(groups)
    made = []
    for group in groups:
        num_heads, num_bytes = group.num_kv_heads * num_shards, group.block_bytes * num_shards
        if group.kind == "state" or not num_heads or num_heads % num_wanted:
            return None
        made.append(
            replace(
                group,
                num_kv_heads=num_heads // num_wanted,
                block_bytes=num_bytes // num_wanted,
            )
        )
    return made


def smallest_block(groups: Sequence[KvGroup]) -> int:
    """Returns the smallest block size in tokens; it divides the others."""
    return min(_block_sizes(groups))


def common_block(groups: Sequence[KvGroup]) -> int:
    """Returns the tokens of the shortest prefix that is whole blocks in every group."""
    return math.lcm(*_block_sizes(groups))


def _block_sizes(groups: Sequence[KvGroup]) -> list[int]:
    """Returns the block sizes of the groups that keep tokens, or else those of states."""
    sizes = [group.block_size_tokens for group in groups if group.kind != "state"]
    return sizes or [group.block_size_tokens for group in groups]


def shard_bytes(groups: Sequence[KvGroup], num_blocks: int, counted_tokens: int) -> int:
    """Returns the size of one shard of a handoff, in bytes.

    Args:
        groups: All groups, also those of a draft.
        num_blocks: Size of the handoff, in blocks of counted_tokens tokens.
        counted_tokens: Smallest block size of all groups but a draft's, in tokens.
    """
    return sum(
        group.num_layers * len(group.blocks(num_blocks, counted_tokens)) * group.block_bytes
        for group in groups
    )
