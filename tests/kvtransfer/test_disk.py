"""KV blocks on disk: what comes back is what was written, or nothing."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.kvtransfer.block_changes import CacheChange
from baton.kvtransfer.disk import block_file, directory
from baton.kvtransfer.disk.directory import rank_directory, scan
from baton.kvtransfer.disk.index import TIMEOUT_S, DiskIndex
from baton.kvtransfer.disk.orders import BlockName, BlockSelection, DiskReport, Load
from tests.kvtransfer.disk_store import (
    NUM_RANKS,
    PAYLOAD_BYTES,
    Store,
    block,
    content,
    following,
    namespace,
)
from tests.program_command import ROOT


def test_blocks_come_back(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(n) for n in range(20)]
    assert all(store.write(blocks))
    assert all(store.load(one) for one in blocks)
    assert not store.load(block(99))
    assert store.index.take_change() == CacheChange([one.hash for one in blocks], [])
    # Each rank has loaded its part, and says how long that took.
    assert store.loaded_bytes == len(blocks) * NUM_RANKS * PAYLOAD_BYTES
    assert store.load_s > 0
    # Written once.
    assert store.write(blocks[:1]) == [False]
    assert (store.num_wrong, store.off) == (0, "")


def test_a_restarted_worker_finds_its_blocks(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(n, f"tenant {n % 3}") for n in range(20)]
    store.write(blocks)
    store.close()
    after = Store(tmp_path)
    assert after.directory.path == store.directory.path
    assert all(after.load(one) for one in blocks)
    change = after.index.take_change()
    assert change is not None
    assert set(change.stored) == {one.hash for one in blocks}


def flipped(path: Path, random: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def cut(path: Path, random: random.Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def grown(path: Path, random: random.Random) -> None:
    path.write_bytes(path.read_bytes() + random.randbytes(random.randrange(1, 5000)))


def gone(path: Path, random: random.Random) -> None:
    path.unlink()


def zeros(path: Path, random: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _place(tmp_path: Path, **changed: object) -> Store:
    """A store whose files claim to be of the usual layout, and are of another one."""
    return Store(tmp_path / "other", found=namespace(**changed))


@pytest.mark.parametrize("damage", [flipped, cut, grown, gone, zeros])
@pytest.mark.parametrize("restarts", [False, True])
def test_no_damaged_file_is_loaded(
    tmp_path: Path, damage: Callable[[Path, random.Random], None], restarts: bool
):
    store, chance = Store(tmp_path), random.Random(1)
    blocks = [block(n) for n in range(75)]
    store.write(blocks)
    for one in blocks:
        damage(store.path(one, chance.randrange(NUM_RANKS)), chance)
    if restarts:
        store.close()
        store = Store(tmp_path)
    assert not any(store.load(one) for one in blocks)
    store.step()
    assert store.num_wrong == len(blocks)
    assert not store.files()
    # The tier goes on, and writes them again.
    assert all(store.write(blocks[:3]))
    assert all(store.load(one) for one in blocks[:3])


@pytest.mark.parametrize(
    "changed",
    [{"revision": "weights 2"}, {"model": "other"}, {"dtype": "float16"}, {"num_layers": 4}],
)
def test_no_file_of_another_layout_is_loaded(tmp_path: Path, changed: dict[str, object]):
    other = _place(tmp_path, **changed)
    store = Store(tmp_path)
    blocks = [block(n) for n in range(50)]
    other.write(blocks)
    store.write(blocks)
    for one in blocks:
        for rank in range(NUM_RANKS):
            shutil.copy(other.path(one, rank), store.path(one, rank))
    assert not any(store.load(one) for one in blocks)
    assert store.num_wrong == NUM_RANKS * len(blocks)


def test_no_file_of_another_format_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker of another version, with the same engine and model, takes over the directory."""
    blocks = [block(n) for n in range(20)]
    with monkeypatch.context() as patched:
        patched.setattr(block_file, "VERSION", block_file.VERSION + 1)
        other = Store(tmp_path)
        assert all(other.write(blocks))
        other.close()
    store = Store(tmp_path)
    assert store.directory.path == other.directory.path
    assert not any(store.load(one) for one in blocks)
    assert store.num_wrong == NUM_RANKS * len(blocks)
    assert all(store.write(blocks))
    assert all(store.load(one) for one in blocks)
    store.close()


def test_no_file_under_another_name_or_of_another_rank_is_loaded(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(n) for n in range(50)]
    store.write(blocks)
    for one, other in zip(blocks[::2], blocks[1::2], strict=True):
        for rank in range(NUM_RANKS):
            _swap(store.path(one, rank), store.path(other, rank))
    assert not any(store.load(one) for one in blocks)
    swapped = [block(n) for n in range(100, 110)]
    store.write(swapped)
    for one in swapped:
        _swap(store.path(one, 0), store.path(one, 1))
    assert not any(store.load(one) for one in swapped)


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_a_new_revision_empties_the_directory_of_the_old_one(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    store.close()
    after = Store(tmp_path, found=namespace(revision="weights 2"))
    assert after.directory.path == store.directory.path
    assert not after.load(block(1))
    assert not after.files()


@pytest.mark.parametrize("damaged", [b"\xff\xfe", b""])
def test_a_directory_whose_layout_is_damaged_is_emptied(tmp_path: Path, damaged: bytes):
    store = Store(tmp_path)
    store.write([block(1)])
    store.close()
    (store.directory.path / "layout").write_bytes(damaged)
    after = Store(tmp_path)
    assert after.directory.path == store.directory.path
    assert not after.files()
    assert all(after.write([block(2)]))
    after.close()
    assert Store(tmp_path).load(block(2))


def test_a_missing_directory_of_a_rank_is_made_again(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    store.close()
    shutil.rmtree(rank_directory(store.directory.path, 1))
    after = Store(tmp_path)
    assert after.directory.path == store.directory.path
    # The other rank's part is of no use.
    assert after.index.take_counts().num_wrong == 1
    assert not after.load(block(1))
    assert after.write([block(1)]) == [True]
    assert after.load(block(1))
    assert after.off == ""


def test_workers_of_one_host_have_directories_of_their_own(tmp_path: Path):
    first, second = Store(tmp_path), Store(tmp_path)
    other = Store(tmp_path, found=namespace(model="other"))
    paths = [first.directory.path, second.directory.path, other.directory.path]
    assert len(set(paths)) == 3
    first.write([block(1)])
    second.write([block(2)])
    other.write([block(3)])
    for store in (first, second, other):
        store.close()
    # Each layout finds its own again.
    other = Store(tmp_path, found=namespace(model="other"))
    assert other.load(block(3))
    first, second = Store(tmp_path), Store(tmp_path)
    assert {first.load(block(1)), second.load(block(1))} == {True, False}
    assert {other.directory.path, first.directory.path, second.directory.path} == set(paths)


def test_the_block_unused_for_longest_is_evicted(tmp_path: Path):
    store = Store(tmp_path, max_blocks=4)
    blocks = [block(n) for n in range(8)]
    store.write(blocks[:4])
    store.index.used([one.key for one in blocks[:2]])
    store.write(blocks[4:6])
    # The last block of a prompt goes first.
    assert [one.key in store.index for one in blocks[:6]] == [True, True, False, False, True, True]
    store.write(blocks[6:7])
    assert [one.key in store.index for one in blocks[:2]] == [True, False]
    assert len(store.files()) == 4 * NUM_RANKS
    assert store.load(blocks[0])


def test_the_bound_holds_after_every_order(tmp_path: Path):
    """Many writes are under way, and the disk is full."""
    most = 4
    store = Store(tmp_path, max_blocks=most)
    numbers = iter(range(1000))
    loading: BlockName | None = None
    for _ in range(6):
        if loading is None and len(store.index):
            # A block that is being loaded stays.
            loading = next(iter(store.index._blocks.values()))
            store.index.load(loading.key, 1)
        for slot in range(2, 12):
            one = block(next(numbers))
            if store.index.accepts(one.key):
                store.index.write(one, slot)
        for order in store.index.take_orders():
            if isinstance(order, Load):
                continue
            report = store.run([order])
            assert len(store.files()) <= most * NUM_RANKS
            store.index.reported(report)
        store.index.check_integrity()
    assert len(store.files()) == most * NUM_RANKS
    assert loading is not None
    assert loading.key in store.index


def test_a_full_disk_that_loads_every_block_takes_no_write(tmp_path: Path):
    store = Store(tmp_path, max_blocks=2)
    blocks = [block(n) for n in range(2)]
    store.write(blocks)
    for slot, one in enumerate(blocks):
        store.index.load(one.key, slot)
    assert not store.index.accepts(block(2).key)
    store.step()
    assert store.index.accepts(block(2).key)


def test_a_smaller_bound_after_a_restart_keeps_what_was_used_last(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(n) for n in range(10)]
    store.write(blocks)
    for age, one in enumerate(reversed(blocks)):
        for rank in range(NUM_RANKS):
            os.utime(store.path(one, rank), (1000 - age, 1000 - age))
    assert store.load(blocks[0])
    store.close()
    after = Store(tmp_path, max_blocks=4)
    after.step()
    assert [one for one in blocks if after.load(one)] == [blocks[0], *blocks[7:]]
    assert len(after.files()) == 4 * NUM_RANKS


def num_usable(store: Store, prompt: Sequence[BlockName]) -> int:
    """Returns how many first blocks of a prompt can be loaded."""
    return next((n for n, one in enumerate(prompt) if one.key not in store.index), len(prompt))


def test_the_ends_of_conversations_are_evicted_first_after_a_restart(tmp_path: Path):
    """Each turn writes its own blocks, and finds all earlier ones in faster tiers."""
    store, size = Store(tmp_path, max_blocks=204), 4
    system = following(None, range(size))
    assert all(store.write(system))
    talks = [following(system[-1], range(1000 * n, 1000 * n + 20)) for n in range(1, 11)]
    for turn in range(0, 20, size):
        for talk in talks:
            assert all(store.write(talk[turn : turn + size]))
            store.index.used([one.key for one in [*system, *talk[: turn + size]]])
    store.close()
    after = Store(tmp_path, max_blocks=204)
    after.step()
    assert all(after.write([block(10**6 + n) for n in range(40)]))
    assert num_usable(after, system) == size
    # The two conversations that were used first have made room, from their ends.
    assert [num_usable(after, talk) for talk in talks] == [0, 0] + [20] * 8
    assert len(after.files()) == 204 * NUM_RANKS


def test_a_smaller_bound_after_a_restart_keeps_what_can_be_loaded(tmp_path: Path):
    store = Store(tmp_path)
    system = following(None, range(4))
    talks = [following(system[-1], range(100 * n, 100 * n + 4)) for n in range(1, 4)]
    for blocks in (system, *talks):
        assert all(store.write(blocks))
    store.close()
    after = Store(tmp_path, max_blocks=10)
    after.step()
    assert num_usable(after, system) == 4
    assert [num_usable(after, talk) for talk in talks] == [0, 2, 4]
    assert len(after.files()) == 10 * NUM_RANKS


def test_a_load_makes_the_blocks_before_it_young_too(tmp_path: Path):
    store = Store(tmp_path)
    prompts = [following(None, range(10 * n, 10 * n + 3)) for n in range(2)]
    for age, one in enumerate(one for prompt in reversed(prompts) for one in prompt):
        assert all(store.write([one]))
        for rank in range(NUM_RANKS):
            os.utime(store.path(one, rank), (1000 + age, 1000 + age))
    assert store.load(prompts[1][-1])
    store.close()
    after = Store(tmp_path, max_blocks=3)
    assert num_usable(after, prompts[1]) == 3


def test_every_file_is_found_whatever_its_name_says_about_other_blocks(tmp_path: Path):
    """Also blocks without the block before them, in a circle, or with the hash of another one."""
    store = Store(tmp_path)
    one, two, three = (block(n) for n in range(3))
    orphan = block(3)._replace(parent=12345)
    circle = [one._replace(parent=two.hash), two._replace(parent=one.hash)]
    own, same = three._replace(parent=three.hash), block(4)._replace(hash=three.hash)
    every = [orphan, *circle, own, same]
    assert all(store.write(every))
    store.close()
    after = Store(tmp_path)
    assert {after.index.get(one.key) for one in every} == set(every)
    assert all(after.load(one) for one in every)


def test_the_bound_holds_although_a_slow_disk_is_searched_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each look at a directory takes 40 s."""
    clock = itertools.count(0, 40)
    monkeypatch.setattr(directory, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for restart in range(3):
        store = Store(tmp_path, max_blocks=20)
        store.step()
        written = [block(number, f"restart {restart}") for number in range(20)]
        assert len(store.index) == (20 if restart else 0)
        assert all(store.write(written))
        assert len(store.files()) == 20 * NUM_RANKS
        told: list[int] = []
        found = scan(store.directory.path, NUM_RANKS, PAYLOAD_BYTES, told.append)
        assert set(found.blocks) == set(written)
        assert told == sorted(told)
        assert told[-1] > 0
        store.close()


def test_a_slow_search_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each look at a directory takes 40 s, and the blocks that were used last are found last."""
    store = Store(tmp_path)
    owners = [[block(number, f"tenant {tenant}") for number in range(5)] for tenant in range(2)]
    owners.sort(key=lambda blocks: store.path(blocks[0], 0))
    for age, blocks in zip((2000, 1000), owners, strict=True):
        assert all(store.write(blocks))
        for one, rank in itertools.product(blocks, range(NUM_RANKS)):
            os.utime(store.path(one, rank), (5000 - age, 5000 - age))
    store.close()
    clock = itertools.count(0, 40)
    monkeypatch.setattr(directory, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    after = Store(tmp_path, max_blocks=5)
    after.step()
    assert all(after.load(one) for one in owners[1])
    assert len(after.files()) == 5 * NUM_RANKS


def of_files(store: Store) -> set[Path]:
    """Returns the directories that hold files, or directories with files."""
    return {parent for path in store.files() for parent in (path.parent, path.parent.parent)}


def test_evicted_tenants_leave_no_directories(tmp_path: Path):
    store = Store(tmp_path, max_blocks=4)
    for tenant in range(5):
        assert all(store.write([block(number, f"tenant {tenant}") for number in range(4)]))
    assert len(store.files()) == 4 * NUM_RANKS
    assert store.directories() == of_files(store)
    # The same tenant may come back.
    assert all(store.write([block(number, "tenant 0") for number in range(4)]))
    assert all(store.load(block(number, "tenant 0")) for number in range(4))


def test_a_restarted_worker_removes_empty_directories(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    for rank in range(NUM_RANKS):
        store.path(block(2, "gone"), rank).parent.mkdir(parents=True)
        store.path(block(3, "killed"), rank).parent.parent.mkdir()
        # One file is no whole block, and is the only one of its tenant.
        store.path(block(4, "damaged"), rank).parent.mkdir(parents=True)
    store.path(block(4, "damaged"), 1).write_bytes(b"cut")
    store.close()
    after = Store(tmp_path)
    assert after.directories() == of_files(after)
    assert after.load(block(1))


def test_writes_beyond_the_bound_are_dropped(tmp_path: Path):
    store = Store(tmp_path)
    accepted = 0
    for n in range(100):
        if store.index.accepts(block(n).key):
            store.index.write(block(n), n % 64)
            accepted += 1
    assert accepted == 32
    assert len(store.step()) == 32


def test_a_disk_without_room_turns_the_tier_off(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAYLOAD_BYTES // 2, before[1]))
    try:
        assert store.write([block(2), block(3)]) == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in store.off
    # Off is off, for loads too, and nothing is half written.
    assert not store.load(block(1))
    assert store.files() == {store.path(block(1), rank) for rank in range(NUM_RANKS)}
    assert store.index.take_change() == CacheChange([], [], cleared=True)
    store.close()
    after = Store(tmp_path)
    assert after.load(block(1))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["writev", "readv", "open"])
def test_a_failing_disk_turns_the_tier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
):
    store = Store(tmp_path)
    store.write([block(1)])

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        assert not store.load(block(1)) or call == "writev"
        assert store.write([block(2)]) == [False]
    assert os.strerror(number) in store.off
    assert not store.load(block(1))


@pytest.mark.parametrize("loads", [False, True])
def test_a_removed_directory_turns_the_tier_off(tmp_path: Path, loads: bool):
    store = Store(tmp_path)
    store.write([block(1)])
    shutil.rmtree(store.directory.path)
    if loads:
        assert not store.load(block(1))
    else:
        assert store.write([block(2)]) == [False]
    assert store.off
    assert not store.write([block(3)])[0]


def test_a_load_that_hangs_turns_the_tier_off(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    store.index.load(block(1).key, 1)
    orders = store.index.take_orders()
    store.index.check_time()
    assert not store.index.is_lost(block(1).key)
    store.pass_time(TIMEOUT_S + 1)
    assert store.index.is_lost(block(1).key)
    # A rank may still write there.
    assert store.index.slots == {1}
    store.index._orders = orders
    (ended,) = store.step()
    assert not ended.done
    assert store.index.slots == set()


def test_a_busy_disk_stays_on_until_no_load_ends(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(number) for number in range(32)]
    store.write(blocks)
    for slot, one in enumerate(blocks):
        store.index.load(one.key, slot)
    *loads, last = store.index.take_orders()
    for order in loads:
        store.pass_time(0.5)
        for _ in range(NUM_RANKS):
            store.index.reported(DiskReport([(order.order_id, True)]))
    # The last load has waited for 15 s for its turn.
    assert blocks[-1].key in store.index
    store.pass_time(TIMEOUT_S - 1)
    # One rank's part is there.
    store.index.reported(DiskReport([(last.order_id, True)]))
    store.pass_time(TIMEOUT_S - 1)
    assert blocks[-1].key in store.index
    store.pass_time(2)
    assert blocks[-1].key not in store.index


def test_a_write_that_hangs_turns_the_tier_off(tmp_path: Path):
    store = Store(tmp_path)
    store.index.write(block(1), 1)
    orders = store.index.take_orders()
    store.pass_time(TIMEOUT_S - 1)
    assert store.index.accepts(block(2).key)
    store.pass_time(2)
    # No more host memory is kept for writes; a rank may still read this block.
    assert not store.index.accepts(block(2).key)
    assert store.index.slots == {1}
    store.index._orders = orders
    (ended,) = store.step()
    assert not ended.done
    assert store.index.slots == set()


def test_a_deletion_that_hangs_is_given_up(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    _, deletion = store.index.delete(BlockSelection())
    orders = store.index.take_orders()
    store.pass_time(TIMEOUT_S - 1)
    assert store.index.take_deleted(deletion) is None
    store.pass_time(2)
    assert store.index.take_deleted(deletion) is False
    # The next one does not wait again.
    _, again = store.index.delete(BlockSelection())
    orders += store.index.take_orders()
    store.pass_time(1)
    assert store.index.take_deleted(again) is False
    # The disk comes back: these orders end, and a later one is waited for.
    store.index._orders = orders
    store.step()
    _, later = store.index.delete(BlockSelection())
    store.pass_time(1)
    assert store.index.take_deleted(later) is None
    store.step()
    assert store.index.take_deleted(later) is True
    assert not store.files()
    store.index.check_integrity()


def test_a_long_deletion_is_waited_for(tmp_path: Path):
    store = Store(tmp_path)
    _, deletion = store.index.delete(BlockSelection())
    for _ in range(5):
        store.pass_time(TIMEOUT_S - 1)
        store.index.reported(DiskReport(has_deleted=True))
    assert store.index.take_deleted(deletion) is None
    assert store.index.accepts(block(1).key)
    store.step()
    assert store.index.take_deleted(deletion) is True


@pytest.mark.parametrize("owner", [None, "search"])
@pytest.mark.parametrize("only", [None, frozenset({1})])
def test_a_rank_reports_that_it_deletes_files(
    tmp_path: Path, owner: str | None, only: frozenset[int] | None
):
    store = Store(tmp_path)
    store.write([block(1, "search")])
    store.index.delete(BlockSelection.of(owner, only))
    assert store.run(store.index.take_orders()).has_deleted


def test_time_without_steps_does_not_count(tmp_path: Path):
    """The engine was idle, because the request that needed the block was cancelled."""
    store = Store(tmp_path)
    store.write([block(1)])
    store.index.load(block(1).key, 1)
    store.now_s += 3600
    store.index.check_time()
    store.step()
    store.index.check_time()
    assert store.load(block(1))


def test_a_block_counts_only_if_every_rank_has_it(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(n) for n in range(4)]
    store.write(blocks)
    store.path(blocks[0], 1).unlink()
    assert not store.load(blocks[0])
    assert not store.path(blocks[0], 0).exists()
    store.path(blocks[1], 0).unlink()
    store.close()
    after = Store(tmp_path)
    assert blocks[1].key not in after.index
    assert not after.path(blocks[1], 1).exists()
    assert [after.load(one) for one in blocks[2:]] == [True, True]


def test_emptied_host_memory_keeps_what_ranks_use(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    store.index.load(block(1).key, 1)
    store.index.write(block(2), 2)
    store.index.host_emptied()
    store.index.clear()
    assert store.index.slots == {1, 2}
    ended = store.step()
    assert [(one.slot, one.done, one.wanted) for one in ended] == [
        (1, False, False),
        (2, False, False),
    ] or {one.slot for one in ended if not one.done and not one.wanted} == {1, 2}
    store.step()
    assert not store.files()
    assert len(store.index) == 0


_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.kvtransfer.disk_store import Store, block
store, n = Store(Path(sys.argv[1])), int(sys.argv[3])
while True:
    store.write([block(n)])
    print(n, flush=True)
    n += 1
"""


def test_a_killed_worker_leaves_only_whole_blocks(tmp_path: Path):
    written: list[BlockName] = []
    for begin, num_lines in ((0, 1), (200, 3), (400, 8)):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), ROOT]
        with subprocess.Popen([*command, str(begin)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(num_lines):
                written.append(block(int(writer.stdout.readline())))
            writer.send_signal(signal.SIGKILL)
        store = Store(tmp_path)
        # Files that were reported as written are there; others are never loaded with wrong bytes.
        assert all(store.load(one) for one in written)
        for n in range(begin, begin + 200):
            store.load(block(n))
        assert store.num_wrong <= 2
        found = scan(store.directory.path, NUM_RANKS, PAYLOAD_BYTES, lambda _: None)
        assert found.num_wrong == 0
        store.close()


def test_a_stopped_worker_keeps_its_directory_and_goes_on(tmp_path: Path):
    command = [sys.executable, "-c", _WRITER, str(tmp_path), ROOT, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        first = block(int(writer.stdout.readline()))
        writer.send_signal(signal.SIGSTOP)
        other = Store(tmp_path)
        assert other.write([first]) == [True]
        writer.send_signal(signal.SIGCONT)
        written = [first, *(block(int(writer.stdout.readline())) for _ in range(100))]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert other.load(first)
        store = Store(tmp_path)
        assert store.directory.path != other.directory.path
        assert all(store.load(one) for one in written)
        for one in (store, other):
            one.close()


def test_other_files_are_not_taken_for_blocks(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    good = store.path(block(1), 0)
    for name in ("x", "zz-zz", good.name.upper(), f"{good.name}.tmp", "00-1"):
        (good.parent / name).write_bytes(good.read_bytes())
    temporary = rank_directory(store.directory.path, 0) / "written"
    temporary.write_bytes(b"half")
    store.close()
    after = Store(tmp_path)
    assert after.load(block(1))
    # A deletion of all blocks would not find it.
    assert not temporary.exists()
    assert len(after.files()) == NUM_RANKS


def test_files_from_a_time_to_come_count_as_all_others(tmp_path: Path):
    """The clock was wrong when they were written, or is now."""
    store = Store(tmp_path)
    store.write([block(1), block(2)])
    store.path(block(2), 1).unlink()
    later = time.time() + 3600
    for path in store.files():
        os.utime(path, (later, later))
    store.close()
    after = Store(tmp_path, max_blocks=2)
    assert after.num_wrong + after.index.take_counts().num_wrong == 1
    assert after.load(block(1))
    # They are evicted like others, so the bound holds.
    assert all(after.write([block(n) for n in range(10, 14)]))
    assert len(after.files()) == 2 * NUM_RANKS
    assert block(1).key not in after.index


@pytest.mark.parametrize("owner", ["search", None])
def test_an_owner_s_files_are_deleted(tmp_path: Path, owner: str | None):
    store = Store(tmp_path)
    kept, gone = [block(n) for n in range(5)], [block(n, "search") for n in range(5)]
    store.write([*kept, *gone])
    # The index does not know this file.
    unknown = store.path(block(99, "search"), 0)
    unknown.parent.mkdir(parents=True, exist_ok=True)
    unknown.write_bytes(b"anything")
    store.index.take_change()
    num_blocks, deletion = store.index.delete(BlockSelection.of(owner, None))
    assert num_blocks == (5 if owner else 10)
    assert store.index.take_deleted(deletion) is None
    store.step()
    assert store.index.take_deleted(deletion) is True
    assert len(store.files()) == (5 * NUM_RANKS if owner else 0)
    assert not any(store.load(one) for one in gone)
    assert [store.load(one) for one in kept] == [owner is not None] * 5
    change = store.index.take_change()
    assert change is not None
    assert {one.hash for one in gone} <= set(change.removed)


def test_files_that_vanish_during_a_deletion_leave_the_disk_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The search for blocks removes wrong files meanwhile."""
    store, unlink = Store(tmp_path), os.unlink
    store.write([block(number) for number in range(5)])
    _, deletion = store.index.delete(BlockSelection())

    def unlink_twice(path, *, dir_fd=None):
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_twice)
    store.step()
    assert not store.off
    assert store.index.take_deleted(deletion) is True


@pytest.mark.parametrize("num_deletions", [1, 1000])
def test_what_is_deleted_during_the_search_is_not_found(tmp_path: Path, num_deletions: int):
    store = Store(tmp_path)
    kept = [block(n, "search") for n in range(3)]
    chosen = [block(n, "search") for n in range(3, 6)]
    gone = [block(n, "gone") for n in range(3)]
    store.write([*kept, *gone, *chosen])
    found = list(store.index._blocks.values())
    index = DiskIndex(100, 8, NUM_RANKS, lambda: 0.0)
    index.is_searching = True
    for _ in range(num_deletions):
        index.delete(BlockSelection.of("gone", None))
        index.delete(BlockSelection.of("search", {one.hash for one in chosen}))
    index.take_orders()
    index.found(found[:4])
    index.found(found[4:])
    # So many deletions are not remembered one by one.
    expected = kept if num_deletions == 1 else []
    assert [one for one in found if one.key in index] == expected
    deleted = [one for order in index.take_orders() for one in order.blocks]  # type: ignore[union-attr]
    assert deleted == [one for one in found if one not in expected]
    change = index.take_change()
    assert change is None or change.stored == [one.hash for one in expected]
    index.end_search()
    index.found(gone)
    assert all(one.key in index for one in gone)


def test_blocks_that_are_found_after_the_cache_was_emptied_are_deleted(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    index = DiskIndex(100, 8, NUM_RANKS, lambda: 0.0)
    index.is_searching = True
    index.clear()
    index.found([block(1)])
    assert block(1).key not in index
    store.run(index.take_orders())
    assert not store.files()


def test_files_of_chosen_blocks_are_deleted(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(n, "search") for n in range(4)]
    store.write([*blocks, block(0)])
    # The index does not know this block; a temporary file and a foreign one are no blocks.
    unknown, foreign = block(9, "search"), store.path(blocks[0], 0).with_name("foreign")
    store.path(unknown, 0).parent.mkdir(parents=True, exist_ok=True)
    for path in (store.path(unknown, 0), foreign):
        path.write_bytes(b"anything")
    hashes = {one.hash for one in (blocks[0], blocks[2], unknown, block(0))}
    num_blocks, deletion = store.index.delete(BlockSelection.of("search", hashes))
    assert num_blocks == 2
    store.step()
    assert store.index.take_deleted(deletion) is True
    assert foreign.exists()
    assert not store.path(unknown, 0).exists()
    assert [store.load(one) for one in blocks] == [False, True, False, True]
    assert store.load(block(0))


def test_what_follows_chosen_blocks_is_deleted_too(tmp_path: Path):
    """The coordinator does not know an output that a lost worker went on with."""
    store = Store(tmp_path)
    system, other = following(None, range(3)), following(None, range(90, 93))
    prompt = following(system[-1], range(10, 13))
    kept = [*system, *other, *following(system[-1], range(20, 23))]
    lost = [one for n in (40, 50, 60) for one in following(prompt[-1], range(n, n + 4))]
    assert all(store.write([*kept, *prompt, *lost]))
    chosen = BlockSelection.of("", [one.hash for one in prompt])
    num_blocks, _ = store.index.delete(chosen.with_followers(store.index.parents()))
    store.step()
    assert num_blocks == len([*prompt, *lost])
    assert store.files() == {store.path(one, rank) for one in kept for rank in range(NUM_RANKS)}
    # All blocks of an owner need no others.
    every = BlockSelection.of("", None)
    assert every.with_followers(store.index.parents()) == every


def test_what_follows_chosen_blocks_is_deleted_although_the_index_does_not_know_it(tmp_path: Path):
    store = Store(tmp_path)
    prompt = following(None, range(3))
    lost = following(prompt[-1], range(10, 14))
    assert all(store.write([*prompt, *lost]))
    # As while a new worker searches the files of an earlier one.
    store.index = DiskIndex(10**6, 4, NUM_RANKS, lambda: 0.0)
    _, deletion = store.index.delete(BlockSelection.of("", [one.hash for one in prompt]))
    store.step()
    assert store.index.take_deleted(deletion) is True
    assert not store.files()


def test_what_follows_a_block_that_was_deleted_during_the_search_is_not_found(tmp_path: Path):
    store = Store(tmp_path)
    prompt = following(None, range(3))
    lost, kept = following(prompt[-1], range(10, 14)), following(prompt[0], range(20, 23))
    assert all(store.write([*prompt, *lost, *kept]))
    store.close()
    before = scan(store.directory.path, NUM_RANKS, PAYLOAD_BYTES, lambda _: None)
    index = DiskIndex(10**6, 4, NUM_RANKS, lambda: 0.0)
    index.is_searching = True
    index.delete(BlockSelection.of("", [one.hash for one in prompt[1:]]))
    for one in before.blocks:
        # The ranks have deleted the chosen files before the search has come there.
        if one not in prompt[1:]:
            index.found([one])
    assert [one for one in [*prompt, *lost, *kept] if one.key in index] == [prompt[0], *kept]


def test_a_deletion_of_chosen_blocks_leaves_no_empty_directories(tmp_path: Path):
    store = Store(tmp_path)
    blocks = [block(number, f"tenant {number}") for number in range(3)]
    store.write(blocks)
    store.index.delete(BlockSelection.of(None, {blocks[0].hash}))
    # The index does not know these files.
    store.index.turn_off("it was slow")
    store.index.delete(BlockSelection.of(None, {blocks[1].hash}))
    store.step()
    assert store.files() == {store.path(blocks[2], rank) for rank in range(NUM_RANKS)}
    assert store.directories() == of_files(store)


@pytest.mark.parametrize("level", ["group", "owner"])
def test_directories_that_vanish_during_a_deletion_leave_the_disk_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
):
    """The search for blocks removes empty directories meanwhile."""
    store, is_dir = Store(tmp_path), Path.is_dir
    store.write([block(1)])
    for rank in range(NUM_RANKS):
        group = store.path(block(2, "gone"), rank).parent
        (group if level == "group" else group.parent).mkdir(parents=True)
    owner = None if level == "group" else "gone"
    _, deletion = store.index.delete(BlockSelection.of(owner, {block(1).hash}))

    def is_dir_and_goes(path):
        found = is_dir(path)
        if found and path.is_relative_to(store.directory.path) and not any(path.iterdir()):
            path.rmdir()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_dir", is_dir_and_goes)
        store.step()
    assert not store.off
    assert store.index.take_deleted(deletion) is True
    assert len(store.files()) == (0 if owner is None else NUM_RANKS)


def test_files_are_deleted_although_the_disk_is_not_used_any_more(tmp_path: Path):
    store = Store(tmp_path)
    store.write([block(1)])
    store.index.turn_off("it was slow")
    _, deletion = store.index.delete(BlockSelection())
    store.step()
    assert store.index.take_deleted(deletion) is True
    assert not store.files()


def test_names_tell_the_block():
    one = block(7, "tenant")
    owner, group, name = one.path.parts
    assert BlockName.parse(owner, group, name) == one
    assert BlockName.parse(owner, "zz", name) is None
    (behind,) = following(one, [8])
    assert BlockName.parse(*behind.path.parts) == behind
    assert behind.path.name.endswith(f"-{one.hash:016x}")
    for wrong in (f"{name}-", f"{name}-0", f"{name}-{0:016x}", f"{behind.path.name}-1", "x", ""):
        assert BlockName.parse(owner, group, wrong) is None
    assert content(one, 0).shape == content(one, 1).shape
