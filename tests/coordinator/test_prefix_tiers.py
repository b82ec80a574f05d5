"""The prefix index of all tiers (device, host memory, disk), compared with a naive model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.routing.prefixes import prefix_index
from baton.coordinator.routing.prefixes.prefix_index import PrefixIndex, Tier
from baton.coordinator.routing.prefixes.prefix_match import MAX_TESTED_BLOCKS, HeldPrefix
from baton.coordinator.state.requests import WorkerKey
from baton.runtime.prompts.block_hashes import block_hashes

WORKERS: list[WorkerKey] = [(f"w{number}", number) for number in range(5)]
MAX_BLOCKS = 60

_PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(
    lambda ids: block_hashes(ids, 1)
)
_WORKER = st.sampled_from(WORKERS)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("computed"), _WORKER, _PROMPTS),
        st.tuples(st.just("kept"), _WORKER, _PROMPTS, st.sampled_from([Tier.HOST, Tier.DISK])),
        st.tuples(st.just("evicted"), _WORKER, st.integers(1, 8)),
        # Any blocks below the device may go, which leaves gaps.
        st.tuples(
            st.just("dropped"),
            _WORKER,
            st.lists(st.integers(0, 30), max_size=6),
            st.sampled_from([Tier.HOST, Tier.DISK]),
        ),
        st.tuples(st.just("cleared"), _WORKER, st.sampled_from(Tier)),
        st.tuples(st.just("forget"), _WORKER),
        # Lost blocks leave the masks.
        st.tuples(st.just("tidied"), _WORKER),
    ),
    max_size=40,
)


class Naive:
    """Each worker's blocks by tier; the device evicts the least recently used prompt's end."""

    def __init__(self) -> None:
        self.held: dict[WorkerKey, dict[Tier, dict[int, None]]] = {}

    def of(self, worker: WorkerKey, index: PrefixIndex) -> dict[Tier, dict[int, None]]:
        if worker not in self.held:
            self.held[worker] = {tier: {} for tier in Tier}
            index.add(worker, MAX_BLOCKS, MAX_BLOCKS, MAX_BLOCKS)
        return self.held[worker]

    def held_by(self, worker: WorkerKey, prompt: list[int]) -> HeldPrefix:
        tiers = self.held.get(worker)
        if tiers is None:
            return HeldPrefix(0, 0)
        device, host, disk = (tiers[tier] for tier in Tier)
        num_device = 0
        while num_device < len(prompt) and prompt[num_device] in device:
            num_device += 1
        num_total, num_disk = num_device, 0
        while num_total < len(prompt) and (held := prompt[num_total]) in {**host, **disk}:
            num_total += 1
            num_disk += held not in host
        return HeldPrefix(num_device, num_total, num_disk)


def applied(
    events: list[tuple], index: PrefixIndex, after_each: Callable[[], None] = lambda: None
) -> Naive:
    naive = Naive()
    for kind, worker, *rest in events:
        tiers = naive.of(worker, index)
        if kind == "computed":
            device = tiers[Tier.DEVICE]
            index.stored(worker, [block for block in rest[0] if block not in device])
            for block in reversed(rest[0]):
                device.pop(block, None)
                device[block] = None
        elif kind == "kept":
            index.stored(worker, rest[0], rest[1])
            tiers[rest[1]].update(dict.fromkeys(rest[0]))
        elif kind == "evicted":
            gone = list(tiers[Tier.DEVICE])[: rest[0]]
            index.removed(worker, gone)
            for block in gone:
                del tiers[Tier.DEVICE][block]
        elif kind == "dropped":
            blocks = list(tiers[rest[1]])
            gone = [blocks[number] for number in set(rest[0]) if number < len(blocks)]
            index.removed(worker, gone, rest[1])
            for block in gone:
                del tiers[rest[1]][block]
        elif kind == "cleared":
            index.cleared(worker, rest[0])
            tiers[rest[0]].clear()
        elif kind == "tidied":
            index.tidy(index._tidied_at + 1.0)
        else:
            index.forget(worker)
            del naive.held[worker]
        index.check_integrity()
        after_each()
    return naive


@given(
    _EVENTS,
    st.lists(_PROMPTS, min_size=1),
    st.integers(1, 6),
    st.sampled_from([0, 1, 3, prefix_index._TIDIED_AT_ONCE]),
)
def test_each_tier_gives_what_a_naive_model_gives(events, prompts, limit, tidied) -> None:
    """The model knows nothing of the lost blocks that are still in the masks."""
    index = PrefixIndex()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "_TIDIED_AT_ONCE", tidied)
        naive = applied(events, index)
    for prompt in prompts:
        wanted = {worker: naive.held_by(worker, list(prompt)) for worker in WORKERS}
        match = index.match(prompt)
        assert {worker: match.held_by(worker) for worker in WORKERS} == wanted
        found = match.holders(limit)
        assert all(wanted[worker] == held for worker, held in found.items())
        for field in ("num_device", "num_total"):
            depths = sorted((getattr(one, field) for one in wanted.values()), reverse=True)
            best = sorted((getattr(one, field) for one in found.values()), reverse=True)
            assert [one for one in best if one][:limit] == [one for one in depths if one][:limit]
        some = [worker for worker in WORKERS[::2] if worker in naive.held]
        mask = sum(index.bit(worker) for worker in some)
        assert set(match.holders(limit, mask)) <= set(some)


@given(_EVENTS, _PROMPTS)
def test_no_answer_outlives_a_change_of_a_tier(events, prompt) -> None:
    """After each event, a repeated query has the same result as a query for an equal prompt."""
    index = PrefixIndex()

    def asks() -> None:
        told = [index.match(prompt).held_by(worker) for worker in WORKERS]
        fresh = index.match(list(prompt))
        assert told == [fresh.held_by(worker) for worker in WORKERS]
        # The complete query runs last, so that its results would be in the cache.
        assert told == [index.match(prompt).held_by(worker) for worker in WORKERS]

    applied(events, index, after_each=asks)


def test_a_look_up_of_a_long_prompt_tests_a_bounded_number_of_blocks() -> None:
    index = PrefixIndex()
    index.add(WORKERS[0], 10_000, 10_000)
    prompt = block_hashes(range(8 * MAX_TESTED_BLOCKS), 1)
    index.stored(WORKERS[0], prompt[:100])
    index.stored(WORKERS[0], prompt[100:5000], Tier.HOST)
    asked = list[int]()

    class Counted(dict[int, int]):
        def get(self, block: int, default: int = 0) -> int:
            asked.append(block)
            return super().get(block, default)

    host = index._tiers[Tier.HOST]
    host._masks = Counted(host._masks)
    held = index.match(prompt).held_by(WORKERS[0])
    assert len(asked) <= MAX_TESTED_BLOCKS + 1
    assert held.num_device == 100
    # Every eighth block is tested, and only a whole stride counts.
    assert 5000 - 8 < held.num_total <= 5000
    index.add(WORKERS[1], 0, 0, 10_000)
    index.stored(WORKERS[1], prompt[:5000], Tier.DISK)
    held = index.match(list(prompt)).held_by(WORKERS[1])
    assert held == HeldPrefix(0, held.num_total, held.num_total)
    assert 5000 - 8 < held.num_total <= 5000


def test_a_tier_holds_no_more_blocks_than_its_size() -> None:
    index = PrefixIndex()
    index.add(WORKERS[0], 4, 8)
    prompt = block_hashes(range(20), 1)
    index.stored(WORKERS[0], prompt)
    index.stored(WORKERS[0], prompt, Tier.HOST)
    index.check_integrity()
    assert index.match(prompt).held_by(WORKERS[0]) == HeldPrefix(4, 8)
    index.add(WORKERS[1], 4)
    index.stored(WORKERS[1], prompt, Tier.HOST)
    assert index.match(prompt).held_by(WORKERS[1]) == HeldPrefix(0, 0)


class _Written(dict[int, int]):
    """Masks that count their changes."""

    num = 0

    def __setitem__(self, block: int, mask: int) -> None:
        self.num += 1
        super().__setitem__(block, mask)

    def __delitem__(self, block: int) -> None:
        self.num += 1
        super().__delitem__(block)


def _blocks(worker: int, num_blocks: int) -> list[int]:
    """Hashes of blocks; each worker has half of its blocks in common with the next one."""
    return list(range(worker * num_blocks // 2, worker * num_blocks // 2 + num_blocks))


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_large_tier_is_lost_in_small_steps(is_reset: bool) -> None:
    index, num_blocks, most = PrefixIndex(), 50_000, prefix_index._TIDIED_AT_ONCE
    for number, worker in enumerate(WORKERS):
        index.add(worker, 0, 0, num_blocks)
        index.stored(worker, _blocks(number, num_blocks), Tier.DISK)
    masks = index._tiers[Tier.DISK]._masks = _Written(index._tiers[Tier.DISK]._masks)
    first = _blocks(0, num_blocks)
    for worker in WORKERS[:2]:
        masks.num = 0
        if is_reset:
            index.cleared(worker, Tier.DISK)
        else:
            index.forget(worker)
        assert masks.num <= most
        # Nothing is found there any more, and everything at the other workers.
        assert index.match(first).held_by(worker) == HeldPrefix(0, 0)
    # A look-up of so many blocks tests some of them, and only whole strides count.
    stride = -(-num_blocks // MAX_TESTED_BLOCKS)
    num_found = num_blocks // stride * stride
    found = index.match(_blocks(2, num_blocks)).holders(5)
    assert found == {WORKERS[2]: HeldPrefix(0, num_found, num_found)}
    num_steps = 0
    while len(masks) > 2 * num_blocks:
        masks.num = 0
        num_steps += 1
        index.tidy(num_steps / 100)
        assert masks.num <= most
    index.check_integrity()
    assert len(masks) == 2 * num_blocks


def test_a_worker_that_comes_and_goes_takes_few_places() -> None:
    index = PrefixIndex()
    for number in range(300):
        worker = ("w", number)
        num_blocks = 60_000 if number < 2 else 3000 + number % 7
        index.add(worker, 10, 10, num_blocks)
        index.stored(worker, range(num_blocks), Tier.DISK)
        index.forget(worker)
    assert len(index._workers) < 6
    index.check_integrity()


def test_blocks_that_a_worker_reports_again_are_found_again() -> None:
    index, num_blocks = PrefixIndex(), 50_000
    index.add(WORKERS[0], 0, num_blocks, 0)
    blocks = list(range(num_blocks))
    for _ in range(3):
        index.stored(WORKERS[0], blocks, Tier.HOST)
        index.check_integrity()
        index.cleared(WORKERS[0], Tier.HOST)
        index.stored(WORKERS[0], blocks[:40], Tier.HOST)
        index.check_integrity()
        assert index.match(blocks[:100]).held_by(WORKERS[0]) == HeldPrefix(0, 40)
