"""Limits of fetches that real and simulated engines share."""

from __future__ import annotations

from baton.v1 import cluster_pb2

# Most blocks of a device that are kept for requests that wait for a fetch, as a share of its
# cache: running requests need the others.
MAX_KEPT_SHARE = 0.25


def tokens_to_send(
    plan: cluster_pb2.HandoffPlan, num_held_tokens: int, block_size_tokens: int
) -> int:
    """Returns how much the holder of a fetch sends if it lacks some of the wanted blocks.

    It is the new `num_tokens` of the fetch's handoff; 0: the holder sends nothing.

    Args:
        plan: The handoff, as the coordinator has planned it.
        num_held_tokens: Number of prompt tokens, from the first, that the holder has in any tier.
        block_size_tokens: Tokens per block; only whole blocks are sent.
    """
    num_tokens = num_held_tokens // block_size_tokens * block_size_tokens
    least = max(plan.least_tokens, plan.skip_tokens + 1)
    return num_tokens if plan.least_tokens and least <= num_tokens < plan.num_tokens else 0
