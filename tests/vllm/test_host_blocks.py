"""The table of blocks in host memory: what the disk and an operator's deletion do to it."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.kvtransfer.connector.tiers.cached_blocks import CachedBlocks
from baton.kvtransfer.disk import block_file
from baton.kvtransfer.disk import directory as disk_directory
from baton.kvtransfer.disk.block_file import Identity
from baton.kvtransfer.disk.directory import DiskDirectory, rank_directory
from baton.kvtransfer.disk.index import DiskIndex
from baton.kvtransfer.disk.orders import (
    BlockName,
    BlockSelection,
    DeleteSelected,
    DiskReport,
    Load,
    Write,
    owner_of,
)
from baton.runtime.prompts.block_hashes import block_hashes, root_of

# Importing torch and vLLM warns of what they do.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK, NUM_BLOCKS = 4, 16
SEARCH = BlockSelection.of("search", None)


class Table:
    """A table whose copies and files the test makes up.

    Args:
        disk_blocks: Number of blocks on disk; 0: no disk.
    """

    def __init__(self, disk_blocks: int = 64) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        from baton.kvtransfer.connector.tiers.host_memory import HostBlocks

        self.reports = CachedBlocks(BLOCK)
        self.now_s = 0.0
        self.disk = DiskIndex(disk_blocks, 4, 1, lambda: self.now_s) if disk_blocks else None
        self.blocks = HostBlocks(NUM_BLOCKS, self.reports, self.disk)
        self.found = LookupResult
        self.context = ReqContext("r")

    def keys(self, count: int, salt: str = "", begin: int = 0) -> list[Any]:
        """Computes the blocks of a prompt on the device; returns their keys."""
        from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
        from vllm.v1.kv_offload.base import make_offload_key

        texts = [f"{salt} {begin + n}".encode() for n in range(count)]
        hashes = [hashlib.sha256(text).digest() for text in texts]
        names = [maybe_convert_block_hash(BlockHash(one)) for one in hashes]
        tokens = list(range(begin * BLOCK, (begin + count) * BLOCK))
        extra = [[salt] if salt else None, *[None] * (count - 1)]
        self.reports.stored(None, names, tokens, extra)
        return [make_offload_key(one, 0) for one in hashes]

    def store(self, keys: Sequence[Any]) -> list[int]:
        """Stores blocks; returns their places in host memory."""
        output = self.blocks.prepare_store(keys, self.context)
        assert output is not None
        self.blocks.complete_store(keys, self.context)
        return [int(slot) for slot in output.store_spec.block_ids]

    def host_tier(self) -> Any:
        """Returns the tier of these blocks, without vLLM's half beside the scheduler."""
        from baton.kvtransfer.connector.tiers.host_tier import HostTier

        memory: Any = SimpleNamespace(
            get_manager=lambda: self.blocks,
            config=SimpleNamespace(parallel=SimpleNamespace(world_size=1)),
        )
        disk: Any = SimpleNamespace(index=self.disk)
        scheduler: Any = None
        return HostTier(memory, scheduler, 1, disk)

    def lookup(self, keys: Sequence[Any]) -> list[Any]:
        return [self.blocks.lookup(key, self.context) for key in keys]

    def orders(self) -> list[Any]:
        assert self.disk is not None
        return self.disk.take_orders()

    def report(self, orders: Sequence[Any], *, done: bool = True) -> None:
        """Reports that the rank has carried out these orders."""
        ended = [(one.order_id, done) for one in orders if not hasattr(one, "blocks")]
        self.blocks.disk_reported(DiskReport(ended))

    @property
    def num_free(self) -> int:
        return self.blocks._get_num_free_chunks()


def written(table: Table, count: int = 4, salt: str = "") -> list[Any]:
    """Stores blocks that the disk then has."""
    keys = table.keys(count, salt)
    table.store(keys)
    orders = table.orders()
    assert [type(one) for one in orders] == [Write] * count
    table.report(orders)
    return keys


def test_a_block_that_is_being_written_is_not_evicted() -> None:
    table = Table()
    kept = table.keys(4)
    table.store(kept)
    orders = table.orders()
    assert len(orders) == 4
    table.store(table.keys(12, begin=100))
    assert table.blocks.prepare_store(table.keys(13, begin=200), table.context) is None
    assert table.lookup(kept) == [table.found.HIT] * 4
    table.report(orders)
    assert table.blocks.prepare_store(table.keys(13, begin=200), table.context) is not None


def test_a_busy_disk_gets_what_it_has_not_taken_when_the_request_ends() -> None:
    table = Table()
    keys = table.keys(6)
    table.store(keys)
    first = table.orders()
    assert len(first) == 4
    table.report(first)
    table.blocks.used(keys)
    assert [one.block.key for one in table.orders()] == keys[4:]


@pytest.mark.parametrize("done", [True, False])
def test_evicted_blocks_come_back_from_disk(done: bool) -> None:
    table = Table()
    keys = written(table)
    table.store(table.keys(16, begin=100))
    table.orders()
    assert table.lookup(keys) == [table.found.MISS] * 4
    assert table.blocks.load_from_disk(keys, table.context) == set(keys)
    loads = [one for one in table.orders() if isinstance(one, Load)]
    assert table.lookup(keys) == [table.found.HIT_PENDING] * 4
    assert table.blocks.load_from_disk(keys, table.context) == set()
    table.report(loads, done=done)
    assert table.lookup(keys) == [table.found.HIT if done else table.found.MISS] * 4
    # The block that a wrong file would have filled is free again.
    assert table.num_free == (0 if done else 4)


def test_a_request_does_not_wait_for_a_disk_that_was_turned_off() -> None:
    table = Table()
    keys = written(table)
    table.store(table.keys(16, begin=100))
    table.orders()
    table.blocks.load_from_disk(keys, table.context)
    loads = [one for one in table.orders() if isinstance(one, Load)]
    assert table.disk is not None
    table.disk.turn_off("it hangs")
    assert table.lookup(keys) == [table.found.MISS] * 4
    # The rank may still write to these places.
    assert table.num_free == 0
    table.report(loads)
    assert table.num_free == 4


def on_disk(table: Table, count: int) -> list[Any]:
    """Returns the keys of a prompt of which only the disk has the blocks."""
    keys = []
    for begin in range(0, count, 4):
        part = table.keys(4, begin=begin)
        table.store(part)
        table.report(table.orders())
        keys += part
    table.store(table.keys(16, begin=1000))
    table.report(table.orders())
    assert table.lookup(keys) == [table.found.MISS] * count
    return keys


def test_a_prompt_waits_while_the_loads_of_others_take_all_places() -> None:
    """It would compute at once what the disk has."""
    from baton.kvtransfer.connector.tiers.disk_loads import DiskLoads

    table = Table()
    keys = on_disk(table, 8)
    first, second = DiskLoads(), DiskLoads()
    # A quarter of 16 blocks may be on its way.
    assert not first.load(table.blocks, keys[:4], table.context, 0.0)
    assert second.load(table.blocks, keys[4:], table.context, 1.0)
    loads = [one for one in table.orders() if isinstance(one, Load)]
    assert [one.block.key for one in loads] == keys[:4]
    table.report(loads)
    assert not second.load(table.blocks, keys[4:], table.context, 2.0)
    assert [one.block.key for one in table.orders()] == keys[4:]


def test_a_prompt_that_has_waited_for_long_computes_its_blocks() -> None:
    from baton.kvtransfer.connector.tiers.disk_loads import DiskLoads

    table = Table()
    keys = on_disk(table, 8)
    assert not DiskLoads().load(table.blocks, keys[:4], table.context, 0.0)
    second = DiskLoads()
    assert second.load(table.blocks, keys[4:], table.context, 100.0)
    assert second.load(table.blocks, keys[4:], table.context, 109.0)
    assert not second.load(table.blocks, keys[4:], table.context, 110.0)
    # No prompt waits for a disk that is off.
    third = DiskLoads()
    assert third.load(table.blocks, keys[4:], table.context, 110.0)
    assert table.disk is not None
    table.disk.turn_off("it hangs")
    assert not third.load(table.blocks, keys[4:], table.context, 111.0)


def test_a_long_prompt_is_loaded_in_many_parts() -> None:
    """Places become free one by one."""
    from baton.kvtransfer.connector.tiers.disk_loads import DiskLoads

    table = Table()
    keys = on_disk(table, 12)
    prompt, under_way = DiskLoads(), deque[Load]()
    for _ in keys:
        prompt.load(table.blocks, keys, table.context, 0.0)
        under_way += [one for one in table.orders() if isinstance(one, Load)]
        table.report([under_way.popleft()])
    assert table.lookup(keys) == [table.found.HIT] * 12
    assert prompt.keys == set(keys)


def test_a_prompt_does_not_load_the_same_blocks_again_and_again() -> None:
    """Host memory evicts them before the prompt can run."""
    from baton.kvtransfer.connector.tiers.disk_loads import DiskLoads

    table = Table()
    keys = on_disk(table, 4)
    prompt, num_loads = DiskLoads(), 0
    for begin in range(2000, 2200, 20):
        assert not prompt.load(table.blocks, keys, table.context, 0.0)
        orders = table.orders()
        num_loads += sum(isinstance(one, Load) for one in orders)
        table.report(orders)
        table.store(table.keys(16, begin=begin))
        table.report(table.orders())
    assert num_loads == 4 * 4


def test_emptied_host_memory_does_not_give_away_what_a_rank_uses() -> None:
    table = Table()
    table.store(table.keys(4))
    orders = table.orders()
    table.blocks.reset_cache()
    used = {one.slot for one in orders}
    assert used.isdisjoint(table.store(table.keys(12, begin=100)))
    table.report(orders)
    assert set(table.store(table.keys(4, begin=200))) == used


@pytest.mark.parametrize("disk_blocks", [0, 64])
def test_blocks_of_an_owner_are_deleted(disk_blocks: int) -> None:
    table = Table(disk_blocks)
    kept, gone = table.keys(3), table.keys(3, "search")
    table.store(kept)
    slots = table.store(gone)
    if table.disk is not None:
        table.report(table.orders())
    assert table.blocks.delete(SEARCH) == 3
    assert table.lookup(gone) == [table.found.MISS] * 3
    assert table.lookup(kept) == [table.found.HIT] * 3
    assert table.blocks.is_deleting
    # Other blocks get these places only after ranks have overwritten them.
    assert table.num_free == NUM_BLOCKS - 6
    assert set(table.blocks.take_uncleared()) == set(slots)
    assert not table.blocks.is_deleting
    assert table.num_free == NUM_BLOCKS - 3
    assert table.blocks.delete(BlockSelection()) == 3


def test_chosen_blocks_are_deleted() -> None:
    table = Table(0)
    keys = table.keys(3, "search")
    table.store(keys)
    hashes = block_hashes(range(3 * BLOCK), BLOCK, root_of("", "search"))
    assert table.blocks.delete(BlockSelection.of("search", [])) == 0
    assert table.blocks.delete(BlockSelection.of("chat", hashes[1:])) == 0
    assert table.blocks.delete(BlockSelection.of("search", hashes[1:])) == 2
    assert table.lookup(keys) == [table.found.HIT, table.found.MISS, table.found.MISS]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_every_policy_of_eviction_lists_its_blocks(policy: str) -> None:
    from baton.kvtransfer.connector.tiers.host_memory import HostBlocks

    table = Table(0)
    table.blocks = HostBlocks(NUM_BLOCKS, table.reports, None, policy)
    assert table.blocks.missing == []
    keys = table.keys(3)
    table.store(keys)
    # A block that is used again goes to another list of "arc".
    table.blocks.touch(keys[:1], table.context)
    assert table.blocks.delete(BlockSelection()) == 3
    assert table.lookup(keys) == [table.found.MISS] * 3


def test_a_vllm_with_other_private_names_is_refused_by_name() -> None:
    from baton.kvtransfer.connector.tiers.host_memory import host_layers

    class Renamed:
        """A worker of a vLLM that keeps its memory elsewhere."""

    with pytest.raises(ValueError, match=r"lacks Renamed\._store_handler\.dst_tensors, which"):
        host_layers(Renamed())
    table = Table(0)
    del table.blocks._policy.chunks
    assert table.blocks.missing == ["LRUCachePolicy.chunks"]


def test_blocks_in_use_are_deleted_when_they_are_not() -> None:
    table = Table()
    read, stored = table.keys(2, "search"), table.keys(2, "search", begin=50)
    slots = table.store(read)
    table.report(table.orders())
    table.blocks.prepare_load(read, table.context)
    output = table.blocks.prepare_store(stored, table.context)
    assert output is not None
    assert table.blocks.delete(SEARCH) == 4
    assert table.lookup([*read, *stored]) == [table.found.MISS] * 4
    assert table.blocks.take_uncleared() == []
    assert table.blocks.is_deleting
    table.blocks.complete_load(read, table.context)
    assert set(table.blocks.take_uncleared()) == set(slots)
    table.blocks.complete_store(stored, table.context)
    assert len(table.blocks.take_uncleared()) == 2
    assert not table.blocks.is_deleting
    # Nothing of it goes to disk.
    assert table.orders() == []


def test_blocks_on_their_way_to_and_from_disk_are_deleted_too() -> None:
    table = Table()
    loaded = written(table, 4, "search")
    table.store(table.keys(16, begin=100))
    table.report(table.orders())
    table.blocks.load_from_disk(loaded[:2], table.context)
    on_their_way = table.keys(2, "search", begin=50)
    table.store(on_their_way)
    orders = table.orders()
    assert {type(one) for one in orders} == {Load, Write}
    assert table.disk is not None
    assert table.blocks.delete(SEARCH) == 4
    num_on_disk, deletion = table.disk.delete(SEARCH)
    assert num_on_disk == 4
    (order,) = table.orders()
    assert isinstance(order, DeleteSelected)
    table.report(orders)
    assert len(table.blocks.take_uncleared()) == 4
    assert not table.blocks.is_deleting
    assert table.disk.take_deleted(deletion) is None
    table.report([order])
    assert table.disk.take_deleted(deletion) is True
    assert not any(key in table.disk for key in [*loaded, *on_their_way])


@pytest.mark.parametrize("seconds_per_group", [0, 40])
def test_nothing_is_written_before_the_blocks_of_an_earlier_worker_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_per_group: int
) -> None:
    from baton.kvtransfer.connector.tiers import disk_tier

    clock = itertools.count(0, seconds_per_group)
    monkeypatch.setattr(disk_directory, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(disk_tier, "_FOUND_PER_STEP", 2)
    namespace, payload = bytes(32), 512
    directory = DiskDirectory.open(tmp_path, namespace, 1)
    rank = rank_directory(directory.path, 0)
    for n in range(5):
        one = BlockName(bytes([n] * 36), n, owner_of(""))
        identity, pages = Identity(namespace, one.key, 0), [memoryview(bytearray(payload))]
        block_file.write(rank / one.path, rank / "written", identity, pages)
    index = DiskIndex(4, 4, 1, lambda: 0.0)
    tier = disk_tier.DiskTier(index, directory.path, 1, payload)
    while index.is_searching:
        assert not index.accepts(b"another block")
        tier.take_orders()
    assert len(index) == 4
    assert index.accepts(b"another block")
    directory.close()


def test_files_of_another_arrangement_of_the_bytes_are_wrong(tmp_path: Path) -> None:
    """As after a start with another VLLM_KV_CACHE_LAYOUT: every other property is the same."""
    from baton.kvtransfer.connector.tiers import disk_tier

    directory = DiskDirectory.open(tmp_path, bytes(32), 1)
    extra = disk_tier.disk_options(directory.path, bytes(32), 2**20)
    one = BlockName(bytes([1] * 36), 1, owner_of(""))

    def run(order: Load | Write, layout: str) -> DiskReport:
        copies = _copies()
        rank = disk_tier.make_rank_disk(extra, 0, copies, layout)
        assert rank is not None
        rank.submit([order])
        rank.close(60)
        copies.shutdown()
        report = rank.take_report()
        assert report is not None
        return report

    assert run(Write(1, one, 0), "heads, tokens").ended == [(1, True)]
    assert run(Load(2, one, 1), "heads, tokens").ended == [(2, True)]
    report = run(Load(3, one, 1), "tokens, heads")
    assert (report.ended, report.num_wrong) == ([(3, False)], 1)
    directory.close()


def _copies() -> Any:
    """Returns vLLM's half in a rank of one layer."""
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    from baton.kvtransfer.connector.tiers.cpu_tier_copies import CpuTierCopies

    tensor = CanonicalKVCacheTensor(torch.zeros((2, 512), dtype=torch.int8), 512)
    return CpuTierCopies(CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 512)]]), 2)


@pytest.mark.parametrize("hung", [Load, Write])
def test_a_deletion_does_not_wait_for_a_disk_that_hangs(hung: type) -> None:
    from baton.kvtransfer.connector.request_params import DropOrder, encode
    from baton.kvtransfer.connector.step_report import Dropped, StepReport
    from baton.kvtransfer.connector.tiers.cache_drops import CacheDrops

    table = Table()
    assert table.disk is not None
    loaded = written(table, 4, "search")
    table.store(table.keys(16, begin=100))
    table.report(table.orders())
    if hung is Load:
        table.blocks.load_from_disk(loaded[:2], table.context)
    else:
        table.store(table.keys(2, "search", begin=50))
    orders = table.orders()
    assert {type(one) for one in orders} == {hung}
    cleared: list[int] = []
    # The device has no blocks.
    device: Any = SimpleNamespace(clear=lambda _: set(), evict_blocks=lambda _: None)
    device.block_pool = SimpleNamespace(blocks=[])
    drops = CacheDrops(table.reports, device, table.host_tier(), num_ranks=1)
    request: Any = SimpleNamespace(kv_transfer_params=encode(drop=DropOrder(7, "search")))
    drops.add(request, device)
    (deletion,) = table.orders()
    report = StepReport()
    for _ in range(30):
        if hung is Load:
            # The disk deletes, and loads nothing.
            table.blocks.disk_reported(DiskReport(has_deleted=True))
        table.now_s += 1
        table.disk.check_time()
        clearing = drops.step()
        cleared += clearing.slots
        drops.reported(clearing.ended)
        drops.add_to(report)
    assert report.dropped == {7: Dropped(0, 2, 4, has_files_left=True)}
    assert not drops.has_work
    # Ranks may still use these places.
    slots = table.disk.slots
    assert len(slots) == 2
    assert slots.isdisjoint(cleared)
    # The disk comes back: the bytes are overwritten although the order has ended.
    table.report([*orders, deletion])
    assert set(drops.step().slots) == slots
    assert not table.blocks.is_deleting


def test_a_deletion_waits_until_its_blocks_on_the_device_are_cleared() -> None:
    from baton.kvtransfer.connector.request_params import DropOrder, encode
    from baton.kvtransfer.connector.step_report import Dropped, StepReport
    from baton.kvtransfer.connector.tiers.cache_drops import CacheDrops

    table = Table()
    free = [
        SimpleNamespace(block_id=block_id, block_hash=None, ref_cnt=0, is_null=not block_id)
        for block_id in range(4)
    ]
    uncleared: dict[frozenset[int], set[int]] = {}

    def clear(block_ids: set[int]) -> set[int]:
        return uncleared.setdefault(frozenset(block_ids), set(block_ids))

    device: Any = SimpleNamespace(clear=clear, evict_blocks=lambda _: None)
    device.block_pool = SimpleNamespace(blocks=free)
    drops = CacheDrops(table.reports, device, None, num_ranks=1)
    request: Any = SimpleNamespace(kv_transfer_params=encode(drop=DropOrder(7)))
    drops.add(request, device)
    report = StepReport()
    (left,) = uncleared.values()
    assert left == {1, 2, 3}
    for _ in range(3):
        assert drops.step().ended == []
        assert drops.has_work
        left.pop()
    clearing = drops.step()
    assert clearing.ended == [7]
    assert drops.step().ended == []
    drops.reported(clearing.ended)
    drops.add_to(report)
    assert report.dropped == {7: Dropped(0, 0, 0, has_files_left=False)}
    assert not drops.has_work
