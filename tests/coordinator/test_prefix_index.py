"""The prefix index compared with a naive model, and its results for caches with gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.routing.prefixes.prefix_index import PrefixIndex
from baton.coordinator.state.requests import WorkerKey
from baton.runtime.prompts.block_hashes import block_hashes

WORKERS: list[WorkerKey] = [(f"w{number}", number) for number in range(6)]

# Prompts from a few trees, with blocks of one token, so that they share any number of blocks.
_PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(
    lambda ids: block_hashes(ids, 1)
)
_WORKER = st.sampled_from(WORKERS)


@dataclass
class Naive:
    """Naive model: lists of every worker's blocks and expected prompts."""

    held: dict[WorkerKey, dict[int, int]] = field(default_factory=dict)
    expected: dict[str, tuple[WorkerKey, list[int]]] = field(default_factory=dict)

    def held_by(self, worker: WorkerKey, prompt: list[int]) -> int:
        held = self.held.get(worker, {})
        return next((n for n, one in enumerate(prompt) if one not in held), len(prompt))

    def expected_at(self, worker: WorkerKey, prompt: list[int]) -> int:
        """Longest prefix shared with a prompt that is expected at a worker."""
        lengths = [0]
        for where, other in self.expected.values():
            if where == worker:
                pairs = zip(prompt, other, strict=False)
                lengths.append(next((n for n, (a, b) in enumerate(pairs) if a != b), -1))
                if lengths[-1] < 0:
                    lengths[-1] = min(len(prompt), len(other))
        return max(lengths)


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), _WORKER, _PROMPTS),
        st.tuples(st.just("evicted"), _WORKER, st.integers(1, 8)),
        st.tuples(st.just("cleared"), _WORKER),
        st.tuples(st.just("forget"), _WORKER),
        st.tuples(st.just("expect"), _WORKER, _PROMPTS),
        st.tuples(st.just("settle"), st.integers(0, 40)),
    ),
    max_size=40,
)


def applied(
    events: list[tuple],
    index: PrefixIndex,
    *,
    max_blocks: int = 1000,
    after_each: Callable[[], None] = lambda: None,
) -> Naive:
    """Applies events of caches that evict the least recently used prompt from its end."""
    naive = Naive()
    for number, (kind, *rest) in enumerate(events):
        if kind == "settle":
            index.settle(f"r{rest[0]}")
            naive.expected.pop(f"r{rest[0]}", None)
            after_each()
            continue
        worker = rest[0]
        if worker not in naive.held:
            naive.held[worker] = {}
            index.add(worker, max_blocks)
        held = naive.held[worker]
        if kind == "stored":
            prompt = list(rest[1])
            index.stored(worker, [block for block in prompt if block not in held])
            # Eviction order: least recently used first; within a prompt, the last block first.
            for block in reversed(prompt):
                held.pop(block, None)
                held[block] = 0
        elif kind == "evicted":
            gone = list(held)[: rest[1]]
            index.removed(worker, gone)
            for block in gone:
                del held[block]
        elif kind == "cleared":
            index.cleared(worker)
            held.clear()
        elif kind == "forget":
            index.forget(worker)
            del naive.held[worker]
            naive.expected = {name: one for name, one in naive.expected.items() if one[0] != worker}
        else:
            index.expect(f"r{number}", worker, rest[1])
            naive.expected[f"r{number}"] = worker, list(rest[1])
        index.check_integrity()
        after_each()
    return naive


def without_expectations(events: list[tuple]) -> list[tuple]:
    return [event for event in events if event[0] not in ("expect", "settle")]


@given(_EVENTS.map(without_expectations), st.lists(_PROMPTS, min_size=1), st.integers(1, 7))
def test_reports_give_what_a_naive_model_gives(events, prompts, limit) -> None:
    index = PrefixIndex()
    naive = applied(events, index)
    for prompt in prompts:
        wanted = {worker: naive.held_by(worker, list(prompt)) for worker in WORKERS}
        match = index.match(prompt)
        assert {worker: match.blocks_of(worker) for worker in WORKERS} == wanted
        found = match.longest(limit)
        assert all(wanted[worker] == blocks for worker, blocks in found.items())
        depths = sorted((blocks for blocks in wanted.values() if blocks), reverse=True)
        assert sorted(found.values(), reverse=True) == depths[:limit]
        some = [worker for worker in WORKERS[::2] if worker in naive.held]
        mask = sum(index.bit(worker) for worker in some)
        assert set(match.longest(limit, mask)) <= set(some)
        depths = sorted((wanted[worker] for worker in some if wanted[worker]), reverse=True)
        assert sorted(match.longest(limit, mask).values(), reverse=True) == depths[:limit]


@given(_EVENTS, st.lists(_PROMPTS, min_size=1))
def test_expected_prompts_count(events, prompts) -> None:
    """At least half of the longest expected prefix, and never more than held or expected."""
    index = PrefixIndex()
    naive = applied(events, index)
    for prompt in prompts:
        match = index.match(prompt)
        found = match.longest(len(WORKERS))
        for worker in WORKERS:
            held = naive.held_by(worker, list(prompt))
            under_way = naive.expected_at(worker, list(prompt))
            assert max(held, (under_way + 1) // 2) <= match.blocks_of(worker)
            assert match.blocks_of(worker) <= max(held, under_way)
            assert found.get(worker, 0) == match.blocks_of(worker)


@given(_EVENTS, _PROMPTS)
def test_no_answer_outlives_a_change(events, prompt) -> None:
    """After each event, a repeated query has the same result as a query for an equal prompt."""
    index = PrefixIndex()

    def asks() -> None:
        told = [index.match(prompt).blocks_of(worker) for worker in WORKERS]
        fresh = index.match(list(prompt))
        assert told == [fresh.blocks_of(worker) for worker in WORKERS]
        # The complete query runs last, so that its results would be in the cache.
        assert told == [index.match(prompt).blocks_of(worker) for worker in WORKERS]

    applied(events, index, after_each=asks)


_ANY = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed"]), _WORKER, st.lists(st.integers(1, 9), max_size=9)
    ),
    max_size=30,
)


@given(_ANY, st.integers(1, 9))
def test_caches_with_holes_never_count_beyond_what_they_hold(events, max_blocks) -> None:
    index, held = PrefixIndex(), {worker: set[int]() for worker in WORKERS}
    for worker in WORKERS:
        index.add(worker, max_blocks)
    for kind, worker, blocks in events:
        getattr(index, kind)(worker, blocks)
        index.check_integrity()
        for block in blocks:
            if kind == "removed":
                held[worker].discard(block)
            elif len(held[worker]) < max_blocks:
                held[worker].add(block)
    prompt = list(range(1, 10))
    for worker in WORKERS:
        blocks = index.match(prompt).blocks_of(worker)
        assert blocks == 0 or prompt[blocks - 1] in held[worker]
        assert {one for one in prompt if index.match([one]).blocks_of(worker)} == held[worker]


def test_queries_take_turns_among_equal_workers() -> None:
    index = PrefixIndex()
    for worker in WORKERS:
        index.add(worker, 10)
        index.stored(worker, [1, 2])
    named = [frozenset(index.match([1, 2, 3]).longest(2)) for _ in range(len(WORKERS))]
    assert set().union(*named) == set(WORKERS)


def test_a_forgotten_workers_place_is_used_again() -> None:
    index = PrefixIndex()
    index.add(WORKERS[0], 10)
    index.stored(WORKERS[0], [1, 2])
    index.expect("r", WORKERS[0], [1, 2, 3])
    index.forget(WORKERS[0])
    index.check_integrity()
    index.add(WORKERS[1], 10)
    assert index.bit(WORKERS[1]) == 1
    assert index.match([1, 2, 3]).longest(4) == {}
    index.stored(WORKERS[0], [1])
    index.settle("r")
    index.check_integrity()
    assert index.match([1]).longest(4) == {}


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 1000])
def test_a_prompt_under_way_is_found_whatever_its_length(length: int) -> None:
    index = PrefixIndex()
    index.add(WORKERS[0], 10)
    prompt = block_hashes(range(length), 1)
    index.expect("r", WORKERS[0], prompt)
    assert index.match(prompt).longest(4) == {WORKERS[0]: length}
    longer = block_hashes(range(2 * length), 1)
    assert index.match(longer).longest(4) == {WORKERS[0]: length}
    assert index.match(prompt[: length // 2 + 1]).blocks_of(WORKERS[0]) == length // 2 + 1
    index.settle("r")
    assert index.match(prompt).longest(4) == {}
