"""Copies between a paged cache and staging on the CPU, and their reports to the service."""

import asyncio
import dataclasses
import random
import threading

import pytest
import torch

from baton.kvtransfer import frames
from baton.kvtransfer.connector.handoffs.block_copies import LayerRun, LayerRuns, Run
from baton.kvtransfer.connector.handoffs.cpu_device_copies import CpuDeviceCopies, neighbours
from baton.kvtransfer.connector.handoffs.notifier import (
    NOTIFY_BYTES,
    Notifier,
    NotifierThread,
    StagedFrame,
)
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache, page_layout
from baton.kvtransfer.connector.handoffs.rank_handoffs import open_copies
from baton.kvtransfer.engine_port import EnginePort, split_blocks
from baton.kvtransfer.layout import KvLayout
from baton.v1 import kv_transfer_pb2 as pb

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 24, 2, 8, 12
# Physical orders of [layers, blocks, heads, tokens, content]; vLLM's names for them.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]


def make_layout(dtype, tokens=TOKENS):
    size = HEADS * tokens * CONTENT * dtype.itemsize
    axes = "heads,tokens,content"
    return KvLayout("m", "r", str(dtype), LAYERS, HEADS, CONTENT // 2, tokens, size, axes)


def make_cache(order, dtype, parts=1, seed=0):
    """Returns layers [blocks * parts, heads, tokens / parts, content] of random bits, NaNs too."""
    shape = (LAYERS, BLOCKS * parts, HEADS, TOKENS // parts, CONTENT)
    physical = [shape[axis] for axis in ORDERS[order]]
    raw = random.Random(seed).randbytes(torch.Size(physical).numel() * dtype.itemsize)
    memory = torch.frombuffer(bytearray(raw), dtype=dtype).view(physical)
    whole = memory.permute([ORDERS[order].index(axis) for axis in range(5)])
    assert whole.shape == shape
    return {f"layer.{index}": layer for index, layer in enumerate(whole)}


def expected(cache, block_id, parts=1):
    """Returns a block's bytes in the order of staging: heads, tokens, content."""
    rows = cache[block_id * parts : (block_id + 1) * parts]
    return rows.transpose(0, 1).reshape(HEADS, TOKENS, CONTENT).contiguous().view(torch.uint8)


def fragmented(count, seed=1):
    """Returns block IDs with some neighbours and many gaps."""
    ids = list(range(BLOCKS))
    random.Random(seed).shuffle(ids)
    head = sorted(ids[: count // 2])
    return head + ids[count // 2 : count]


def test_pages_are_described_by_their_arrangement_alone():
    """A disk keeps raw pages, so a worker with another arrangement must not use its files."""
    cases = [
        (order, dtype, parts)
        for order in ORDERS
        for dtype in (torch.float32, torch.bfloat16)
        for parts in (1, 2)
    ]
    found = [page_layout(make_cache(*case), BLOCKS) for case in cases]
    assert len(set(found)) == len(cases)
    # The bytes of the cache, where it is in memory, and how large it is, make no difference.
    for order, dtype, parts in cases:
        layers = make_cache(order, dtype, parts, seed=9)
        assert page_layout(layers, BLOCKS) in found
        if order in ("LBHNC", "LBNHC"):
            most = {name: layer[: 7 * parts] for name, layer in layers.items()}
            assert page_layout(most, 7) == page_layout(layers, BLOCKS)


def test_the_number_of_blocks_does_not_change_how_pages_of_two_sizes_are_described():
    """All layers are in one allocation, one after the other."""

    def made(num_blocks):
        memory, begin, layers = torch.zeros(num_blocks * 7 * 4, dtype=torch.uint8), 0, {}
        for name, size in (("a", 8), ("b", 8), ("c", 12)):
            end = begin + num_blocks * size
            layers[name], begin = memory[begin:end].view(num_blocks, 1, 1, size), end
        return layers

    assert page_layout(made(1000), 1000) == page_layout(made(1001), 1001)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [1, 2])
def test_staging_does_not_depend_on_the_memory_layout(order, dtype, parts):
    layout, block_ids = make_layout(dtype), fragmented(11)
    source, target = make_cache(order, dtype, parts), make_cache("LBNHC", dtype, parts, seed=2)
    untouched = {name: layer.clone() for name, layer in target.items()}
    staging = torch.zeros(256 + len(block_ids) * layout.block_bytes, dtype=torch.uint8)
    gathering = open_copies(PagedCache(source, layout), staging)
    scattering = open_copies(PagedCache(target, layout), staging)
    assert gathering.finishes_at_once
    target_ids = block_ids[::-1]
    for layer, name in enumerate(source):
        # In two runs, the second of which goes first in staging.
        first, size = 4, layout.block_bytes
        runs = [Run(0, first, 256 + 7 * size), Run(first, 7, 256)]
        gathering.gather([LayerRuns(layer, gathering.prepare(block_ids), runs)]).wait()
        for at, block_id in enumerate(block_ids[first:] + block_ids[:first]):
            block = staging[256 + at * size : 256 + (at + 1) * size]
            assert torch.equal(block, expected(source[name], block_id, parts).flatten())
        assert not staging[:256].any()

        scattering.scatter([LayerRun(layer, scattering.prepare(target_ids), Run(0, 7, 256))]).wait()
        for at, block_id in enumerate(target_ids[:7]):
            got = expected(target[name], block_id, parts)
            assert torch.equal(got, expected(source[name], block_ids[first + at], parts))
        for block_id in set(range(BLOCKS)) - set(target_ids[:7]):
            got = expected(target[name], block_id, parts)
            assert torch.equal(got, expected(untouched[name], block_id, parts))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [1, 2])
def test_only_the_given_blocks_are_cleared(order, parts):
    cache, layout = make_cache(order, torch.bfloat16, parts), make_layout(torch.bfloat16)
    before = {name: layer.clone() for name, layer in cache.items()}
    copies = open_copies(PagedCache(cache, layout), torch.zeros(8, dtype=torch.uint8))
    cleared = fragmented(5)
    copies.clear(cleared)
    for name, layer in cache.items():
        for block_id in range(BLOCKS):
            got = expected(layer, block_id, parts)
            wanted = expected(before[name], block_id, parts)
            assert torch.equal(got, torch.zeros_like(got) if block_id in cleared else wanted)
    with pytest.raises(ValueError, match="must be below"):
        copies.clear([BLOCKS])


def test_blocks_are_moved_in_the_widest_words_that_divide_them():
    words = {
        dtype: PagedCache(make_cache("LBNHC", dtype), make_layout(dtype)).word for dtype in DTYPES
    }
    assert words[torch.bfloat16] == words[torch.float32] == torch.int64
    assert words[torch.uint8] == torch.int32  # 12 bytes are three words of 4.
    contiguous = PagedCache(make_cache("BLHNC", torch.bfloat16), make_layout(torch.bfloat16))
    assert contiguous.layers[0].shape == (BLOCKS, contiguous.block_words(0))


def test_words_are_narrow_when_the_cache_begins_at_an_odd_address():
    layout = make_layout(torch.bfloat16)
    caches = {}
    for index in range(LAYERS):
        memory = torch.arange(1 + BLOCKS * HEADS * TOKENS * CONTENT).to(torch.int16)
        caches[str(index)] = memory.view(torch.bfloat16)[1:].view(BLOCKS, HEADS, TOKENS, CONTENT)
    cache = PagedCache(caches, layout)
    assert cache.word == torch.int16
    staging = torch.zeros(3 * layout.block_bytes, dtype=torch.uint8)
    copies = CpuDeviceCopies(cache, staging)
    copies.gather([LayerRuns(0, copies.prepare([5, 3, 4]), [Run(0, 3, 0)])]).wait()
    rows = torch.cat([expected(caches["0"], block_id).flatten() for block_id in (5, 3, 4)])
    assert torch.equal(staging, rows)


@pytest.mark.parametrize(
    "shape",
    [
        (2, BLOCKS, TOKENS, HEADS, CONTENT // 2),
        (BLOCKS, 2, TOKENS, HEADS, CONTENT // 2),
        (BLOCKS, TOKENS, HEADS, CONTENT),
        (BLOCKS, HEADS, TOKENS, CONTENT + 2),
        (BLOCKS, HEADS + 1, TOKENS, CONTENT),
        (BLOCKS + 1, HEADS, TOKENS // 2, CONTENT),
        (BLOCKS, HEADS, TOKENS * 2, CONTENT),
        (BLOCKS, HEADS * TOKENS * CONTENT),
    ],
    ids=str,
)
def test_a_cache_of_another_shape_is_refused_by_name_and_shape(shape):
    caches = {f"model.layers.{index}.attn": torch.zeros(shape) for index in range(LAYERS)}
    with pytest.raises(ValueError, match=r"model\.layers\.0\.attn has shape") as error:
        PagedCache(caches, make_layout(torch.float32))
    assert str(list(shape)) in str(error.value)
    assert "[blocks, 2 heads, 8 tokens, content] with 768 bytes per block" in str(error.value)


def test_content_with_gaps_other_layers_and_other_devices_are_refused():
    layout = make_layout(torch.float32)
    gaps = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., ::2]
    with pytest.raises(ValueError, match="strides"):
        PagedCache({str(index): gaps for index in range(LAYERS)}, layout)
    plain = make_cache("LBHNC", torch.float32)
    with pytest.raises(ValueError, match="has 2 layers; the fingerprint has 3"):
        PagedCache(dict(list(plain.items())[:2]), layout)
    on_meta = {name: layer.to("meta") for name, layer in plain.items()}
    with pytest.raises(ValueError, match="is on cpu, meta; Baton needs it on one"):
        PagedCache({**plain, "layer.0": on_meta["layer.0"]}, layout)
    with pytest.raises(ValueError, match="is on meta; Baton hands over from CPUs and CUDA GPUs"):
        open_copies(PagedCache(on_meta, layout), torch.zeros(8, dtype=torch.uint8))


def test_neighbouring_blocks_are_one_copy():
    assert list(neighbours([3, 4, 5, 9, 1, 2])) == [(0, 3, 3), (3, 9, 1), (4, 1, 2)]
    assert list(neighbours([])) == []


class Event:
    """A copy that ends when the test says so."""

    def __init__(self, error=None):
        self._event, self._error = threading.Event(), error

    def set(self):
        self._event.set()

    def wait(self):
        assert self._event.wait(120)
        if self._error is not None:
            raise self._error


def nothing():
    """Prepares no thread."""


@dataclasses.dataclass
class Rank:
    """One rank's frames of a handoff, which a notifier reports."""

    handoff: object
    layout: KvLayout
    number: int

    def filled(self, port, layer, first_block=0, num_blocks=None, write=True):
        layout, all_blocks = self.layout, self.handoff.num_blocks
        num_blocks = all_blocks - first_block if num_blocks is None else num_blocks
        start = layout.offset(self.number, layer, first_block, all_blocks)
        size, offset = num_blocks * layout.block_bytes, self.handoff.offset + start
        if write:
            port.memory[offset : offset + size] = self.handoff.data[start : start + size]
        last = layer == layout.num_layers - 1 and first_block + num_blocks == all_blocks
        return StagedFrame(
            self.handoff.handoff_id, layer, first_block, num_blocks, offset, size, last
        )


@pytest.fixture
async def sending(pair, handoff):
    """An open handoff, and a notifier thread for each of its two ranks."""
    sender, receiver = pair
    one = handoff(4)
    await one.open(sender, receiver.client.address)
    path = sender.client.socket_path
    ports = [EnginePort(path) for _ in range(2)]
    threads = [
        NotifierThread(Notifier(port, rank), port, prepare=nothing)
        for rank, port in enumerate(ports)
    ]
    yield sender, receiver, one, threads
    for thread in threads:
        thread.close()


async def test_frames_are_reported_in_order_once_they_are_copied(sending, layout):
    sender, receiver, one, threads = sending
    events = []
    for number, thread in enumerate(threads):
        rank = Rank(one, layout, number)
        for layer in range(layout.num_layers):
            pieces = [rank.filled(sender.port, layer, first, 1, write=False) for first in range(4)]
            for piece in pieces:
                event = Event()
                thread.filled(event, [piece])
                events.append((event, rank, piece))
        thread.flush()
    # No frame is read before its copy has ended, even if later copies have ended.
    for event, rank, piece in reversed(events):
        rank.filled(sender.port, piece.layer, piece.first_block, 1)
        event.set()
    await sender.sent(one.handoff_id)
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    assert one.load(receiver) == one.data


async def test_small_frames_are_reported_together_and_large_ones_at_once(start):
    worker = await start(layout=None)
    told = []
    notifier = Notifier(_Telling(worker.port, told), 1)
    done = Event()
    done.set()
    half, whole = NOTIFY_BYTES // 2, NOTIFY_BYTES
    frames_of = {1: [half], 2: [half], 3: [100, 100], 4: [whole, whole + 1], 5: [7]}
    for layer, sizes in frames_of.items():
        notifier.filled(
            done, [StagedFrame(bytes(16), layer, 0, 1, 64, size, False) for size in sizes]
        )
    notifier.flush()
    notifier.flush()
    assert [[frame.layer for frame in each] for each in told] == [[1, 2], [3, 3, 4], [4], [5]]
    assert {frame.shard for each in told for frame in each} == {1}
    assert told[0][0].checksum == frames.checksum(worker.port.memory[64 : 64 + half])


class _Telling:
    """A port that records the frames that are reported."""

    def __init__(self, port, told):
        self._port, self._told = port, told

    def __getattr__(self, name):
        return getattr(self._port, name)

    def send_frames(self, frames):
        self._told.append(list(frames))
        return self._port.send_frames(self._told[-1])


async def test_an_aborted_handoff_keeps_its_staging_until_its_ranks_have_stopped(sending, layout):
    """The staging is freed when no copy into it is under way, and not before."""
    sender, _, one, threads = sending
    events = []
    for number, thread in enumerate(threads):
        events.append(Event())
        thread.filled(events[-1], [Rank(one, layout, number).filled(sender.port, 0)])
        thread.abort(one.handoff_id)
    stats = await sender.client.stats()
    assert stats.send_bytes_used > 0
    for event in events:
        event.set()
    for thread in threads:
        thread.close()
    await sender.empty()


async def test_a_copy_that_fails_ends_its_handoff(sending, layout):
    sender, receiver, one, threads = sending
    broken = Event(RuntimeError("CUDA error: an illegal memory access was encountered"))
    broken.set()
    for number, thread in enumerate(threads):
        thread.filled(broken, [Rank(one, layout, number).filled(sender.port, 0)])
        thread.close()
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_a_full_queue_ends_the_thread_after_the_put_timeout(start):
    worker = await start()
    port = EnginePort(worker.client.socket_path)
    thread = NotifierThread(
        Notifier(port, 0), port, prepare=nothing, max_queued=2, put_timeout_s=0.05
    )
    events = [Event() for _ in range(4)]
    for event in events[:3]:
        thread.filled(event, [])
        thread.flush()
    # The thread may not have taken the first batch yet, so two or three batches fit.
    thread.filled(events[3], [])
    thread.flush()
    assert not thread.alive
    thread.filled(events[3], [])
    thread.flush()
    for event in events:
        event.set()
    thread.close()
    assert not port.alive


async def test_the_thread_is_prepared_before_it_waits_for_a_copy(start):
    """On a GPU the thread must choose its device first."""
    worker = await start()
    port = EnginePort(worker.client.socket_path)
    called = []

    class Noting:
        def wait(self):
            called.append(("wait", threading.get_ident()))

    def prepare():
        called.append(("prepare", threading.get_ident()))

    thread = NotifierThread(Notifier(port, 0), port, prepare=prepare)
    thread.filled(Noting(), [])
    thread.flush()
    thread.close()
    assert [name for name, _ in called] == ["prepare", "wait"]
    assert {ident for _, ident in called}.isdisjoint({threading.get_ident()})


async def test_a_thread_that_cannot_be_prepared_hands_over_nothing(start):
    worker = await start()
    port = EnginePort(worker.client.socket_path)

    def prepare():
        raise RuntimeError("CUDA error: no such device")

    thread = NotifierThread(Notifier(port, 0), port, prepare=prepare)
    async with asyncio.timeout(120):
        while thread.alive:
            await asyncio.sleep(0.01)
    thread.flush()
    thread.close()
    assert not port.alive


async def test_a_thread_that_fails_is_not_alive(start):
    worker = await start()
    port = EnginePort(worker.client.socket_path)

    class Failing:
        def wait(self):
            raise ValueError("operation forbidden on released memoryview object")

    thread = NotifierThread(Notifier(port, 0), port, prepare=nothing)
    thread.filled(Failing(), [])
    thread.flush()
    async with asyncio.timeout(120):
        while thread.alive:
            await asyncio.sleep(0.01)
    thread.close()
    # Nothing has waited for the copies, so the memory stays mapped.
    assert port.alive
    port.close()


async def test_close_waits_for_copies_with_a_timeout(start):
    worker = await start()
    port = EnginePort(worker.client.socket_path)
    thread = NotifierThread(Notifier(port, 0), port, prepare=nothing)
    stuck = Event()
    thread.filled(stuck, [])
    thread.flush()
    thread.close(timeout_s=0.05)
    # The memory stays mapped while the copy is under way.
    assert port.alive
    stuck.set()
    thread.close()
    assert not port.alive
    thread.close()


async def test_copies_end_without_a_service(start, layout, handoff):
    worker = await start()
    port = EnginePort(worker.client.socket_path)
    thread = NotifierThread(Notifier(port, 0), port, prepare=nothing)
    one = handoff(4)
    one.offset = 0
    filled = Rank(one, layout, 0).filled(port, 0)
    await worker.client.close()
    events = [Event() for _ in range(3)]
    for event in events:
        thread.filled(event, [filled])
        thread.flush()
        event.set()
    async with asyncio.timeout(120):
        while thread.alive:
            thread.flush()
            await asyncio.sleep(0.01)
    thread.abort(one.handoff_id)
    thread.close()


def test_every_frame_fits_a_gather():
    for dtype in DTYPES:
        layout = make_layout(dtype)
        copies = CpuDeviceCopies(
            PagedCache(make_cache("LBHNC", dtype), layout), torch.zeros(8, dtype=torch.uint8)
        )
        counts = [count for _, count in split_blocks(0, 10_000, layout.block_bytes)]
        assert max(counts) <= copies.max_blocks(0)
