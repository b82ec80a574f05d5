"""The heads that a rank takes from the shards of a sender that has another number of shards.

Shard i of n holds the heads from i * H / n up to (i + 1) * H / n, of H heads in all. In staging a
block is [heads, tokens, content], so neighbouring heads of one block follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv.kv_groups import KvGroup


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Neighbouring heads of a sender's shard, and their place in a rank's cache.

    Attributes:
        num_heads: Number of heads in the range.
        first: Index of the first one in the rank's cache.
        first_staged: Index of the first one in a block in staging.
        num_staged: Number of all heads of a block in staging.
    """

    num_heads: int
    first: int
    first_staged: int
    num_staged: int


def sources(shard: int, num_shards: int, num_senders: int) -> range:
    """Returns the sender's shards that hold heads of a shard.

    Args:
        shard: Index of the receiver's shard.
        num_shards: Number of the receiver's shards.
        num_senders: Number of the sender's shards.
    """
    return range(
        shard * num_senders // num_shards,
        -(-(shard + 1) * num_senders // num_shards),
    )


def head_ranges(
    layout: KvLayout, shard: int, sender: KvLayout, source: int
) -> Mapping[KvGroup, HeadRange]:
    """Returns the heads to take of the layers of each of the sender's groups.

    Empty if the sender's shards are the receiver's: all heads are taken.

    Args:
        layout: The receiver's layout.
        shard: Index of the receiver's shard.
        sender: The sender's layout.
        source: Index of one of the sender's shards in `sources`.
    """
    if layout.num_shards == sender.num_shards:
        return {}
    ranges = {}
    for own, staged in zip(layout.groups, sender.groups, strict=True):
        begin = shard * own.num_kv_heads
        begin_staged = source * staged.num_kv_heads
        first = max(begin, begin_staged)
        end = min(begin + own.num_kv_heads, begin_staged + staged.num_kv_heads)
        ranges[staged] = HeadRange(
            end - first, first - begin, first - begin_staged, staged.num_kv_heads
        )
    return ranges
