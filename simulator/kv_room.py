"""Counts the KV blocks of a batch whose requests grow by one token per step."""

from __future__ import annotations

from collections.abc import Sequence


def num_blocks(num_tokens: int, block_size_tokens: int) -> int:
    """Returns how many blocks hold this many tokens of one request."""
    return -(-num_tokens // block_size_tokens)


def num_steps_that_fit(
    lengths: Sequence[int], most_steps: int, room_blocks: int, block_size_tokens: int
) -> int:
    """Returns for how many steps the blocks of a batch fit, from 1 to `most_steps`.

    Args:
        lengths: Tokens of each request before the first step.
        most_steps: Largest number of steps that is of interest.
        room_blocks: Blocks that the batch may hold.
        block_size_tokens: Tokens per block.
    """

    def fits(num_steps: int) -> bool:
        needed = sum(num_blocks(one + num_steps, block_size_tokens) for one in lengths)
        return needed <= room_blocks

    least, most = 1, max(1, most_steps)
    while least < most:
        middle = (least + most + 1) // 2
        if fits(middle):
            least = middle
        else:
            most = middle - 1
    return least
