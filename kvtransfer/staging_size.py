"""How many prompt tokens staging holds, and how much staging a model needs."""

from __future__ import annotations

import bisect

from baton.kvtransfer.layout import KvLayout

# Suggested staging for a prompt of the largest length, as a factor: room for other handoffs beside.
_FACTOR = 1.25
# Suggestions are multiples of this, and at least as large.
_STEP_BYTES = 256 * 2**20
# Longest handoff in blocks. Handoffs of models with windows in all layers have one size.
_MAX_BLOCKS = 2**24


def num_tokens(layout: KvLayout, staging_bytes: int) -> int:
    """Returns the length of the longest prompt that fits into staging of this size, in tokens."""
    # Windows and states take as much for one block as for many.
    fits = bisect.bisect_right(range(_MAX_BLOCKS), staging_bytes, key=layout.handoff_bytes) - 1
    return max(fits, 0) * layout.counted_tokens


def suggested_bytes(layout: KvLayout, max_model_len: int) -> int:
    """Returns a good size of one worker's staging in one direction.

    Args:
        layout: Layout of the KV cache.
        max_model_len: Length of the longest prompt, in tokens.
    """
    wanted = layout.handoff_bytes(layout.num_blocks(max_model_len)) * _FACTOR
    return int(-(-wanted // _STEP_BYTES)) * _STEP_BYTES


def shortage(
    layout: KvLayout, max_model_len: int, send_bytes: int, receive_bytes: int
) -> str | None:
    """Returns the consequence and the remedy if staging is too small; None if all prompts fit."""
    holds = num_tokens(layout, min(send_bytes, receive_bytes))
    if holds >= max_model_len:
        return None
    wanted = suggested_bytes(layout, max_model_len)
    return (
        f"staging holds prompts of up to {holds:,} tokens, and max_model_len is "
        f"{max_model_len:,}: one worker computes and decodes longer prompts. To hand all of them "
        f"over, set kv_transfer.send_bytes and kv_transfer.receive_bytes to {wanted}, or lower "
        "engine_args.max_model_len"
    )
