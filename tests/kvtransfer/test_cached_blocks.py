"""vLLM's cache events, translated to Baton's block hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.block_changes import CacheChange
from baton.kvtransfer.connector.tiers.cached_blocks import CachedBlocks
from baton.kvtransfer.disk.orders import BlockName, owner_of
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.runtime.prompts.prompt_images import block_keys
from baton.v1 import common_pb2

BLOCK_SIZE = 4
PROMPT = list(range(100, 100 + 4 * BLOCK_SIZE))
HASHES = list(block_hashes(PROMPT, BLOCK_SIZE))


def changed(
    stored: Sequence[int] = (), removed: Sequence[int] = (), *, cleared: bool = False
) -> CacheChange:
    return CacheChange(list(stored), list(removed), cleared)


def with_prompt() -> CachedBlocks:
    cached = CachedBlocks(BLOCK_SIZE)
    cached.stored(None, [b"a", b"b"], PROMPT[: 2 * BLOCK_SIZE], None)
    return cached


def test_blocks_are_named_by_their_whole_prefix():
    cached = with_prompt()
    assert cached.take() == changed(stored=HASHES[:2])
    cached.stored(b"b", [b"c", b"d"], PROMPT[2 * BLOCK_SIZE :], [None, None])
    assert cached.take() == changed(stored=HASHES[2:])
    cached.removed([b"d", b"c"])
    assert cached.take() == changed(removed=[HASHES[3], HASHES[2]])
    assert cached.take() is None


def test_a_block_is_described_with_the_block_before_it():
    cached = with_prompt()
    cached.stored(b"b", [b"c", b"d"], PROMPT[2 * BLOCK_SIZE :], [None, None])
    described = [cached.described(name) for name in (b"a", b"b", b"c", b"d")]
    assert described == [
        (block_hash, owner_of(""), parent)
        for block_hash, parent in zip(HASHES, [0, *HASHES[:3]], strict=True)
    ]
    assert set(cached.parents()) == set(zip(HASHES, [0, *HASHES[:3]], strict=True))
    # Also when it has come from disk.
    cached.come_from_disk(b"e", BlockName(b"e", 7, owner_of(""), HASHES[3]))
    assert cached.described(b"e") == (7, owner_of(""), HASHES[3])


def test_a_block_cached_twice_goes_with_its_last_copy():
    cached = with_prompt()
    cached.stored(None, [b"a"], PROMPT[:BLOCK_SIZE], None)
    cached.take()
    cached.removed([b"a"])
    assert cached.take() is None
    cached.removed([b"a"])
    assert cached.take() == changed(removed=HASHES[:1])


def test_blocks_with_extra_keys_and_their_successors_are_left_out():
    cached = CachedBlocks(BLOCK_SIZE)
    extra_keys = [None, ("embeds",), None]
    cached.stored(None, [b"a", b"b", b"c"], PROMPT[: 3 * BLOCK_SIZE], extra_keys)
    assert cached.take() == changed(stored=HASHES[:1])
    cached.stored(b"c", [b"d"], PROMPT[3 * BLOCK_SIZE :], None)
    cached.removed([b"d", b"c", b"b"])
    assert cached.take() is None


def test_blocks_of_images_are_named_as_the_prompts_with_these_images():
    images = [common_pb2.PromptImage(id="cat", offset=BLOCK_SIZE + 3, num_tokens=BLOCK_SIZE)]
    keys = block_keys(images, 0, len(PROMPT), BLOCK_SIZE)
    hashes = list(block_hashes(PROMPT, BLOCK_SIZE, root_of("poet", "salt"), keys))
    cached = CachedBlocks(BLOCK_SIZE)
    # vLLM's order: adapter, images, salt.
    extra_keys = [("poet", "salt"), ("poet", ("cat", 3)), ("poet", ("cat", -1)), ("poet",)]
    cached.stored(None, [b"a", b"b", b"c", b"d"], PROMPT, extra_keys, "poet")
    assert cached.take() == changed(stored=hashes)
    # With an image in the first block, beside the salt.
    images = [common_pb2.PromptImage(id="dog", offset=1, num_tokens=2)]
    keys = block_keys(images, 0, BLOCK_SIZE, BLOCK_SIZE)
    cached.stored(None, [b"x"], PROMPT[:BLOCK_SIZE], [(("dog", 1), "salt")])
    salted = list(block_hashes(PROMPT[:BLOCK_SIZE], BLOCK_SIZE, root_of("", "salt"), keys))
    assert cached.take() == changed(stored=salted)
    assert not {*hashes, *salted} & {*HASHES}


def test_blocks_of_an_adapter_are_named_as_the_prompts_of_that_adapter():
    cached = CachedBlocks(BLOCK_SIZE)
    poet = [("poet",)] * 2
    cached.stored(None, [b"a", b"b"], PROMPT[: 2 * BLOCK_SIZE], poet, "poet")
    cached.stored(b"b", [b"c"], PROMPT[2 * BLOCK_SIZE : 3 * BLOCK_SIZE], [("poet", "salt")], "poet")
    hashes = list(block_hashes(PROMPT, BLOCK_SIZE, root_of("poet")))
    assert cached.take() == changed(stored=hashes[:2])
    # The base model's hashes differ.
    cached.stored(None, [b"x"], PROMPT[:BLOCK_SIZE], None)
    assert cached.take() == changed(stored=HASHES[:1])
    assert not set(hashes) & set(HASHES) | set(hashes) & set(
        block_hashes(PROMPT, BLOCK_SIZE, root_of("clerk"))
    )


def test_parts_of_blocks_are_left_out():
    cached = with_prompt()
    cached.take()
    cached.stored(b"b", [b"half"], PROMPT[2 * BLOCK_SIZE : 2 * BLOCK_SIZE + 2], None)
    assert cached.take() is None


def test_blocks_that_come_and_go_between_two_reads_are_not_reported():
    cached = with_prompt()
    cached.removed([b"b", b"a"])
    assert cached.take() is None
    cached.stored(None, [b"a"], PROMPT[:BLOCK_SIZE], None)
    cached.cleared()
    assert cached.take() == changed(cleared=True)
    cached.stored(None, [b"a"], PROMPT[:BLOCK_SIZE], None)
    assert cached.take() == changed(stored=HASHES[:1])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, 2), st.integers(1, 4)),
            st.tuples(st.just("remove"), st.integers(0, 30)),
            st.sampled_from([("clear",), ("take",)]),
        ),
        max_size=40,
    )
)
def test_applying_every_change_gives_the_cache(steps: list[tuple]) -> None:
    """Runs a pool that reports every block, and removes blocks in any order."""
    cached, pool, known = CachedBlocks(BLOCK_SIZE), Counter[int](), set[int]()
    prompts = [PROMPT, [*PROMPT[:6], *PROMPT[:10]], PROMPT[::-1]]

    def take() -> None:
        if (change := cached.take()) is not None:
            assert known.isdisjoint(change.stored) or change.cleared
            if change.cleared:
                known.clear()
            assert known.issuperset(change.removed)
            known.difference_update(change.removed)
            known.update(change.stored)

    for step in steps:
        match step:
            case ("store", prompt, num_blocks):
                hashes = list(block_hashes(prompts[prompt], BLOCK_SIZE))
                # vLLM's hashes differ from Baton's; here they are the negative ones.
                first = next((i for i in range(num_blocks) if not pool[hashes[i]]), 0)
                parent = -hashes[first - 1] if first else None
                tokens = prompts[prompt][first * BLOCK_SIZE : num_blocks * BLOCK_SIZE]
                stored = hashes[first:num_blocks]
                cached.stored(parent, [-each for each in stored], tokens, None)
                pool.update(stored)
            case ("remove", index) if pool:
                block = sorted(pool)[index % len(pool)]
                cached.removed([-block])
                pool -= Counter([block])
            case ("clear",):
                cached.cleared()
                pool.clear()
            case ("take",):
                take()
    take()
    assert known == set(pool)


def test_blocks_in_host_memory_are_reported_while_they_are_there():
    cached = with_prompt()
    cached.go_to_host([b"a", b"b"])
    assert cached.take_host() is None
    cached.arrive_in_host([b"a", b"b"])
    assert cached.take_host() == changed(stored=HASHES[:2])
    cached.take()
    # Their names stay known after the cache has evicted them.
    cached.removed([b"b", b"a"])
    assert cached.take() == changed(removed=[HASHES[1], HASHES[0]])
    assert cached.take_host() is None
    cached.leave_host([b"b"])
    assert cached.take_host() == changed(removed=[HASHES[1]])
    # A block that comes back into the cache from host memory has its place behind its parent.
    cached.stored(b"a", [b"b"], PROMPT[BLOCK_SIZE : 2 * BLOCK_SIZE], None)
    assert cached.take() == changed(stored=[HASHES[1]])


def test_a_block_evicted_on_its_way_to_host_memory_is_known_when_it_arrives():
    cached = with_prompt()
    cached.go_to_host([b"a"])
    cached.removed([b"b", b"a"])
    cached.arrive_in_host([b"a"])
    assert cached.take_host() == changed(stored=HASHES[:1])


def test_blocks_without_a_known_hash_are_not_reported_from_host_memory():
    cached = CachedBlocks(BLOCK_SIZE)
    cached.go_to_host([b"salted"])
    cached.arrive_in_host([b"salted"])
    cached.leave_host([b"salted"])
    assert cached.take_host() is None


def test_a_block_in_host_memory_is_reported_when_its_hash_becomes_known():
    cached = CachedBlocks(BLOCK_SIZE)
    # The parent was deleted, so the hash is not known.
    cached.stored(b"a", [b"b"], PROMPT[BLOCK_SIZE : 2 * BLOCK_SIZE], None)
    cached.go_to_host([b"b"])
    cached.arrive_in_host([b"b"])
    assert cached.take_host() is None
    cached.stored(None, [b"a", b"b"], PROMPT[: 2 * BLOCK_SIZE], None)
    assert cached.take_host() == changed(stored=[HASHES[1]])
    cached.leave_host([b"b"])
    assert cached.take_host() == changed(removed=[HASHES[1]])


def test_a_copy_that_failed_is_not_reported():
    cached = with_prompt()
    cached.go_to_host([b"a"])
    cached.leave_host([b"a"])
    assert cached.take_host() is None


def test_cleared_tiers_do_not_change_each_other():
    cached = with_prompt()
    cached.go_to_host([b"a", b"b"])
    cached.arrive_in_host([b"a", b"b"])
    cached.take(), cached.take_host()
    cached.cleared()
    assert cached.take() == changed(cleared=True)
    assert cached.take_host() is None
    cached.clear_host()
    assert cached.take_host() == changed(cleared=True)
    assert not cached._blocks, "blocks in no tier are forgotten"


def test_blocks_with_a_salt_are_named_as_the_prompts_with_that_salt():
    cached = CachedBlocks(BLOCK_SIZE)
    keys = [("poet", "search"), ("poet",)]
    cached.stored(None, [b"a", b"b"], PROMPT[: 2 * BLOCK_SIZE], keys, "poet")
    cached.stored(b"b", [b"c"], PROMPT[2 * BLOCK_SIZE : 3 * BLOCK_SIZE], [("poet",)], "poet")
    hashes = list(block_hashes(PROMPT, BLOCK_SIZE, root_of("poet", "search")))
    assert cached.take() == changed(stored=hashes[:3])
    assert not set(hashes) & set(block_hashes(PROMPT, BLOCK_SIZE, root_of("poet")))


def test_a_block_with_an_unknown_copy_goes_once():
    cached = CachedBlocks(BLOCK_SIZE)
    cached.stored(b"unknown", [b"a"], PROMPT[:BLOCK_SIZE], None)
    cached.stored(None, [b"a"], PROMPT[:BLOCK_SIZE], None)
    cached.go_to_host([b"a"])
    cached.take()
    cached.removed([b"a"])
    cached.removed([b"a"])
    cached.stored(None, [b"a"], PROMPT[:BLOCK_SIZE], None)
    assert cached.take() is None, "removed and stored again"
    cached.removed([b"a"])
    assert cached.take() == changed(removed=HASHES[:1])


def test_an_event_without_blocks_changes_nothing():
    cached = CachedBlocks(BLOCK_SIZE)
    cached.stored(None, [], PROMPT[:BLOCK_SIZE], None)
    cached.stored(None, [], PROMPT[:BLOCK_SIZE], [])
    assert cached.take() is None
