"""The speed of loads that a worker reports is that by which a prompt's bytes are predicted."""

import pytest

from baton.coordinator.routing.prefixes.prefix_index import Tier
from baton.coordinator.routing.speeds.tier_speeds import TierSpeeds
from baton.kvtransfer.connector.tiers.load_counts import LoadCounts
from baton.kvtransfer.layout import KvLayout

NUM_TOKENS, SECONDS = 4096, 0.25


def layout(num_ranks: int, num_replicas: int) -> KvLayout:
    return KvLayout(
        model="m",
        revision="",
        dtype="bfloat16",
        num_layers=4,
        num_kv_heads=1,
        head_size=512,
        block_size_tokens=16,
        block_bytes=16 * 1024,
        axes="heads,tokens,content",
        tp_size=num_ranks,
        num_replicas=num_replicas,
    )


# With latent attention, every rank holds the same.
@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 1), (8, 1), (8, 2), (8, 8)])
def test_the_time_of_a_load_is_predicted_from_the_same_load(num_ranks, num_replicas):
    cache = layout(num_ranks, num_replicas)
    num_blocks = cache.num_blocks(NUM_TOKENS)
    counts = LoadCounts(num_ranks, num_replicas)
    for _ in range(num_ranks):
        counts.add("host", cache.shard_bytes(num_blocks), SECONDS)
    num_bytes, seconds = counts.take()["host"]
    speeds = TierSpeeds(1e9, 1e9)
    speeds.observe(Tier.HOST, num_bytes, seconds, now=0.0)
    # The coordinator knows the bytes of a prompt from the size of its handoff.
    predicted_s = speeds.seconds(Tier.HOST, cache.handoff_bytes(num_blocks), now=0.0)
    assert predicted_s == pytest.approx(SECONDS)


def test_the_time_of_failed_loads_counts_when_bytes_follow():
    counts = LoadCounts(num_ranks=2, num_replicas=1)
    counts.add("disk", 0, 0.5)
    assert counts.take() == {}
    counts.add("disk", 1000, 1.5)
    counts.add("host", 10, 1.0)
    assert counts.take() == {"disk": (1000, 1.0), "host": (10, 0.5)}
    assert counts.take() == {}
