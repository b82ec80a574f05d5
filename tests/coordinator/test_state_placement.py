"""Handoffs of models with recurrent states: whole, and only to workers that can continue."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.runtime.prompts.block_hashes import block_hashes
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

BLOCK = 16
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
FULL = kv_transfer_pb2.KvGroup(
    kind=kv_transfer_pb2.KvGroup.KIND_FULL,
    num_layers=1,
    num_kv_heads=1,
    block_size_tokens=BLOCK,
    block_bytes=64,
)
STATE = kv_transfer_pb2.KvGroup(
    kind=kv_transfer_pb2.KvGroup.KIND_STATE,
    num_layers=1,
    block_size_tokens=BLOCK,
    block_bytes=1000,
    table=1,
)


@pytest.fixture
def cell(new_world):
    """Makes a cell whose workers keep these groups; "d" has four blocks of every prompt cached."""

    def make(*groups, **changes):
        world = new_world(local_prefill=False, fetch=False, **changes)
        fingerprint = kv_transfer_pb2.KvFingerprint(
            num_layers=len(groups), block_size_tokens=BLOCK, block_bytes=1000, tp_size=1,
            groups=groups,
        )  # fmt: skip
        capacity = cluster_pb2.Capacity(
            kv_tokens=65536,
            block_size_tokens=BLOCK,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_send_bytes=2000,
            max_receive_bytes=2000,
            supports_forced_tokens=True,
            keeps_prefixes=True,
        )
        world.attach("p", PREFILL, capacity=capacity, fingerprint=fingerprint)
        world.attach("d", DECODE, capacity=capacity, fingerprint=fingerprint)
        hashes = block_hashes(range(4 * BLOCK), BLOCK)
        world.handle(ev.WorkerCache(("d", 1), cluster_pb2.CacheEvents(stored=hashes)))
        return world

    return make


@pytest.mark.parametrize(("groups", "skipped"), [((FULL,), 64), ((FULL, STATE), 0)])
def test_a_cached_prefix_is_sent_again_if_a_state_belongs_to_it(cell, groups, skipped):
    """The worker has the prefix's keys and values, and perhaps not the state at its end."""
    world = cell(*groups)
    world.submit(num_prompt=100)
    (command,) = world.commands["p"]
    assert command.handoff.skip_tokens == skipped


@pytest.mark.parametrize(("groups", "splits"), [((FULL,), True), ((FULL, STATE), False)])
def test_a_forced_first_token_is_computed_where_the_prompt_is(cell, groups, splits):
    world = cell(*groups)
    world.submit(num_prompt=100, sampling={"temperature": 1.0, "seed": 7})
    assert bool(world.commands["p"]) is splits
    assert bool(world.commands["d"]) is not splits


def test_a_state_counts_once_in_the_size_of_a_handoff(cell):
    """100 tokens have 448 bytes of keys and values; a second state would not fit."""
    assert cell(FULL, STATE).submit(num_prompt=100)
    world = cell(FULL, STATE)
    world.submit(num_prompt=240)
    assert world.commands["p"]
    world = cell(FULL, STATE)
    world.submit(num_prompt=260)
    assert not world.commands["p"]
