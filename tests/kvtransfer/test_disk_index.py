"""Random orders and reports of ranks: the index keeps its bounds, and frees every place."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.disk.index import DiskIndex
from baton.kvtransfer.disk.orders import (
    BlockSelection,
    Delete,
    DeleteSelected,
    DiskReport,
    Load,
    Order,
    Write,
)
from tests.kvtransfer.disk_store import block

MAX_BLOCKS, MAX_WRITES, NUM_RANKS, NUM_SLOTS = 6, 3, 2, 8
SALTS = ("", "search")

_BLOCKS = st.tuples(st.integers(0, 9), st.sampled_from(SALTS))
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(_BLOCKS, min_size=1, max_size=4)),
        st.tuples(st.just("load"), _BLOCKS),
        st.tuples(st.just("found"), st.lists(_BLOCKS, max_size=8)),
        st.tuples(st.just("used"), st.lists(_BLOCKS, max_size=4)),
        st.tuples(st.just("ranks")),
        st.tuples(st.just("rank"), st.integers(0, NUM_RANKS - 1), st.booleans()),
        st.tuples(
            st.just("delete"),
            st.sampled_from([*SALTS, None]),
            st.one_of(st.none(), st.frozensets(_BLOCKS, max_size=4)),
        ),
        st.tuples(st.just("empty")),
        st.tuples(st.just("off")),
        # Seconds.
        st.tuples(st.just("time"), st.sampled_from([1, 6, 11])),
    ),
    max_size=60,
)


# Hash and owner of each block, by its key.
OWNERS = {
    one.key: (one.hash, one.owner) for one in (block(n, salt) for n in range(10) for salt in SALTS)
}


class Worker:
    """A worker with an index and ranks that carry out its orders one by one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.index = DiskIndex(MAX_BLOCKS, MAX_WRITES, NUM_RANKS, lambda: self.now_s)
        self.orders: list[deque[Order]] = [deque() for _ in range(NUM_RANKS)]
        self.free = set(range(NUM_SLOTS))
        self.reported: set[int] = set()
        # Keys of the blocks of which each rank has a file.
        self.files: list[set[bytes]] = [set() for _ in range(NUM_RANKS)]

    def apply(self, event: tuple[Any, ...]) -> None:
        index = self.index
        match event:
            case ("write", names):
                for one in (block(*name) for name in names):
                    if self.free and index.accepts(one.key):
                        index.write(one, self.free.pop())
            case ("load", (number, salt)):
                key = block(number, salt).key
                if self.free and key in index and key not in index._loading:
                    index.load(key, self.free.pop())
            case ("found", names):
                index.found([block(*name) for name in names])
            case ("used", names):
                index.used([block(*name).key for name in names])
            case ("ranks",):
                self.run_all()
            case ("rank", rank, done):
                self.run(rank, done=done)
            case ("delete", salt, only):
                index.delete(BlockSelection.of(salt, only and {block(*one).hash for one in only}))
            case ("empty",):
                index.host_emptied()
                index.clear()
            case ("off",):
                index.turn_off("it failed")
            case ("time", seconds):
                for _ in range(seconds):
                    self.now_s += 1.0
                    index.check_time()
        for order in index.take_orders():
            for orders in self.orders:
                orders.append(order)
        self.check()

    def run_all(self) -> None:
        """Carries out all orders."""
        while any(self.orders):
            for rank in range(NUM_RANKS):
                self.run(rank, done=True)

    def run(self, rank: int, *, done: bool) -> None:
        """Carries out a rank's next order."""
        if not self.orders[rank]:
            return
        order = self.orders[rank].popleft()
        files = self.files[rank]
        match order:
            case Delete():
                files.difference_update(one.key for one in order.blocks)
                return
            case DeleteSelected():
                gone = {one for one in files if order.selection.includes(*OWNERS[one])}
                files.difference_update(gone)
            case Write():
                # A failed write may leave a file.
                files.add(order.block.key)
            case Load() if not done:
                files.discard(order.block.key)
        assert len(files) <= MAX_BLOCKS
        for ended in self.index.reported(DiskReport([(order.order_id, done)])):
            assert ended.slot not in self.free
            assert not (ended.done and not ended.wanted)
            self.free.add(ended.slot)

    def check(self) -> None:
        index = self.index
        index.check_integrity()
        assert index.slots.isdisjoint(self.free)
        assert index.slots | self.free == set(range(NUM_SLOTS))
        change = index.take_change()
        if change is not None:
            if change.cleared:
                self.reported.clear()
            assert self.reported.issuperset(change.removed)
            self.reported.difference_update(change.removed)
            assert self.reported.isdisjoint(change.stored)
            self.reported.update(change.stored)
        held = {one.hash for one in index._blocks.values()}
        assert self.reported == held


@given(_EVENTS)
def test_places_and_reports_agree_after_every_event(events: list[tuple[Any, ...]]) -> None:
    worker = Worker()
    for event in events:
        worker.apply(event)
    while any(worker.orders):
        for rank in range(NUM_RANKS):
            worker.run(rank, done=True)
        worker.apply(("used", []))
    assert worker.free == set(range(NUM_SLOTS))
    assert not any(worker.index.take_deleted(one) is None for one in list(worker.index._deletions))


@given(st.permutations(range(2 * NUM_RANKS)))
def test_a_wrong_part_of_any_rank_makes_the_block_a_miss(turns: list[int]) -> None:
    worker = Worker()
    for number in (1, 2):
        worker.apply(("write", [(number, "")]))
    for _ in range(2):
        for rank in range(NUM_RANKS):
            worker.run(rank, done=True)
    worker.apply(("load", (1, "")))
    worker.apply(("load", (2, "")))
    assert all(isinstance(one, Load) for orders in worker.orders for one in orders)
    for turn in turns:
        rank = turn % NUM_RANKS
        first = worker.orders[rank][0]
        assert not isinstance(first, Delete | DeleteSelected)
        # The second rank's part of the first block is wrong.
        worker.run(rank, done=not (rank == 1 and first.block == block(1)))
    worker.apply(("used", []))
    assert block(1).key not in worker.index
    assert block(2).key in worker.index
    assert [type(one) for one in worker.orders[0]] == [Delete]
