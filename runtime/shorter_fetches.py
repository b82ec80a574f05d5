"""How much the holder of a fetch sends when it lacks some of the wanted blocks."""

from __future__ import annotations

from baton.v1 import cluster_pb2


def tokens_to_send(
    plan: cluster_pb2.HandoffPlan, num_held_tokens: int, block_size_tokens: int
) -> int:
    """Returns the new `num_tokens` of a fetch's handoff; 0: the holder sends nothing.

    Args:
        plan: The handoff, as the coordinator has planned it.
        num_held_tokens: Number of prompt tokens, from the first, that the holder has in any tier.
        block_size_tokens: Tokens per block; only whole blocks are sent.
    """
    num_tokens = num_held_tokens // block_size_tokens * block_size_tokens
    least = max(plan.least_tokens, plan.skip_tokens + 1)
    return num_tokens if plan.least_tokens and least <= num_tokens < plan.num_tokens else 0
