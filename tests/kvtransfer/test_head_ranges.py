"""Shards of a cache, and the heads that a rank takes from shards of another size."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.head_ranges import head_ranges, sources
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv import kv_fingerprint
from baton.runtime.kv.kv_groups import KvGroup

WINDOW = KvGroup("window", 1, 24, 8, 24 * 8 * 16, window_tokens=20, table=1)
STATE = KvGroup("state", 1, 12, 8, 12 * 64, table=1)


def layout_of(*others):
    """Returns the layout of a worker with one rank."""
    full = KvGroup("full", 2, 12, 4, 12 * 4 * 16)
    base = KvLayout("m", "r", "uint8", 2, 12, 8, 4, full.block_bytes, "heads,tokens,content")
    return base.with_groups([full, *others])


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]), st.booleans())
def test_each_head_of_each_shard_comes_from_its_place(num_senders, num_shards, windows):
    whole = layout_of(WINDOW) if windows else layout_of()
    sender, layout = whole.split_into(num_senders), whole.split_into(num_shards)
    assert sender.handoff_bytes(5) == layout.handoff_bytes(5) == whole.handoff_bytes(5)
    for shard in range(num_shards):
        taken = {group: {} for group in layout.groups}
        for source in sources(shard, num_shards, num_senders):
            ranges = head_ranges(layout, shard, sender, source)
            for own, staged in zip(layout.groups, sender.groups, strict=True):
                if num_senders == num_shards:
                    assert (source, ranges) == (shard, {})
                    continue
                found = ranges[staged]
                assert found.num_heads >= 1
                assert found.num_staged == staged.num_kv_heads
                for at in range(found.num_heads):
                    head = source * staged.num_kv_heads + found.first_staged + at
                    assert taken[own].setdefault(found.first + at, head) == head
        for own, heads in taken.items() if num_senders != num_shards else ():
            first = shard * own.num_kv_heads
            assert heads == {at: first + at for at in range(own.num_kv_heads)}


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_shards_of_one_cache_match(num_senders, num_shards):
    whole = layout_of(WINDOW)
    theirs, ours = (whole.split_into(each).fingerprint() for each in (num_senders, num_shards))
    # Ranks that hold the same shard make no difference.
    theirs.tp_size *= 2
    assert kv_fingerprint.differences(ours, theirs) == []
    theirs.revision = "other"
    assert kv_fingerprint.differences(ours, theirs) == ["revision is 'other', here 'r'"]


@pytest.mark.parametrize(
    "changes",
    [{"num_shards": 2}, {"num_kv_heads": 12}, {"block_bytes": 12 * 4 * 16}],
    ids=lambda changes: next(iter(changes)),
)
def test_shards_of_another_cache_differ(changes):
    ours, theirs = layout_of(), layout_of().split_into(4).fingerprint()
    for name, value in changes.items():
        setattr(theirs, name, value)
    differing = kv_fingerprint.differences(ours.fingerprint(), theirs)
    assert "tp_size is 4, here 1" in differing


def test_heads_of_one_group_that_several_ranks_hold_differ():
    """With 24 ranks, two neighbours hold each head of the first group, and one of the second."""
    whole, of_rank = layout_of(WINDOW), layout_of(WINDOW).split_into(12)
    full, window = of_rank.groups
    narrow = dataclasses.replace(window, num_kv_heads=1, block_bytes=window.block_bytes // 2)
    ranks = dataclasses.replace(of_rank, tp_size=24, own_groups=(full, narrow))
    [groups] = [
        each
        for each in kv_fingerprint.differences(whole.fingerprint(), ranks.fingerprint())
        if each.startswith("groups")
    ]
    assert "1 layers KIND_WINDOW of 8 tokens, 128 bytes" in groups


def test_states_are_not_divided_by_heads():
    layout = layout_of(STATE)
    halves = dataclasses.replace(
        layout,
        num_kv_heads=6,
        block_bytes=layout.block_bytes // 2,
        tp_size=2,
        own_groups=tuple(
            dataclasses.replace(
                group, num_kv_heads=group.num_kv_heads // 2, block_bytes=group.block_bytes // 2
            )
            for group in layout.groups
        ),
    )
    differing = kv_fingerprint.differences(layout.fingerprint(), halves.fingerprint())
    assert "tp_size is 2, here 1" in differing
    with pytest.raises(ValueError, match="num_shards is 2"):
        layout.split_into(2)


@pytest.mark.parametrize("num_shards", [5, 24])
def test_a_shard_has_whole_heads(num_shards):
    with pytest.raises(ValueError, match=f"num_shards is {num_shards}"):
        layout_of().split_into(num_shards)
