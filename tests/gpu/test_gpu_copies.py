"""Copies between a GPU's paged cache and staging: correct bytes in order, without host waits."""

import contextlib
import mmap
import os
import random
import threading

import pytest
import torch

from baton.kvtransfer.connector.handoffs.block_copies import LayerRun, LayerRuns, Run
from baton.kvtransfer.connector.handoffs.cpu_device_copies import CpuDeviceCopies
from baton.kvtransfer.connector.handoffs.cuda_device_copies import CudaDeviceCopies, scratch_bytes
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache
from baton.kvtransfer.connector.handoffs.rank_handoffs import open_copies
from baton.kvtransfer.layout import KvLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 256, 4, 16, 128
# Physical orders of [layers, blocks, heads, tokens, content], by vLLM's names.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8]
# Cycles that keep the GPU busy while everything else is launched, at any clock rate.
SPIN_CYCLES = 400_000_000
BASE = 4096


def make_layout(dtype):
    size = HEADS * TOKENS * CONTENT * dtype.itemsize
    axes = "heads,tokens,content"
    return KvLayout("m", "r", str(dtype), LAYERS, HEADS, CONTENT // 2, TOKENS, size, axes)


def make_cache(order, dtype, parts=1, seed=0):
    """Returns random GPU caches, per layer [blocks * parts, heads, tokens / parts, content]."""
    shape = (LAYERS, BLOCKS * parts, HEADS, TOKENS // parts, CONTENT)
    physical = [shape[axis] for axis in ORDERS[order]]
    generator = torch.Generator("cuda").manual_seed(seed)
    num_bytes = torch.Size(physical).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=generator)
    whole = raw.view(dtype).view(physical)
    whole = whole.permute([ORDERS[order].index(axis) for axis in range(5)])
    assert whole.shape == shape
    return {f"layer.{index}": layer for index, layer in enumerate(whole)}


def on_host(cache):
    """Returns the same cache with the same strides in host memory."""
    copies = {}
    for name, layer in cache.items():
        copies[name] = torch.empty_strided(layer.shape, layer.stride(), dtype=layer.dtype)
        copies[name].copy_(layer)
    return copies


def fragmented(count, seed=1):
    """Returns block IDs with some neighbours and many gaps."""
    ids = list(range(BLOCKS))
    random.Random(seed).shuffle(ids)
    return sorted(ids[: count // 2]) + ids[count // 2 : count]


@contextlib.contextmanager
def no_host_waits():
    """Makes torch raise when the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def staging():
    """Shared memory like the transfer service's segment."""
    path = f"/dev/shm/baton-test-{os.getpid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, 64 * 2**20)
        shared = mmap.mmap(file, 0)
    finally:
        os.close(file)
        os.unlink(path)
    return torch.frombuffer(memoryview(shared), dtype=torch.uint8)


@pytest.fixture(params=[True, False], ids=["pinned", "bounced"])
def make_copies(request, staging):
    """Creates copies over staging, pinned or not, and closes them."""
    made = []

    def make(cache, **options):
        layout = make_layout(next(iter(cache.values())).dtype)
        copies = CudaDeviceCopies(PagedCache(cache, layout), staging, pin=request.param, **options)
        assert copies.pinned == request.param
        made.append(copies)
        return copies

    yield make
    for copies in made:
        copies.close()
        copies.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_same_bytes_as_on_the_host(order, dtype, parts, make_copies, staging):
    """From some blocks to staging, and from there to others."""
    layout, block_ids = make_layout(dtype), fragmented(202)
    source_ids, target_ids = block_ids[:101], block_ids[101:]
    cache, size = make_cache(order, dtype, parts), layout.block_bytes
    expected_cache, expected_staging = on_host(cache), torch.zeros_like(staging)
    reference = CpuDeviceCopies(PagedCache(expected_cache, layout), expected_staging)
    # The rings wrap around, and a scatter has more blocks than a slot holds.
    copies = make_copies(cache, num_slots=2, slot_bytes=61 * size + size // 2)
    assert copies.max_blocks(0) == 61
    for layer in range(LAYERS):
        base = BASE + layer * 101 * size
        # The first two change places in staging.
        gathers = [
            [Run(0, 20, base + 30 * size), Run(20, 30, base)],
            [Run(50, 51, base + 50 * size)],
        ]
        blocks = copies.prepare(source_ids)
        for runs in gathers:
            reference.gather([LayerRuns(layer, source_ids, runs)])
            copies.gather([LayerRuns(layer, blocks, runs)]).wait()
        whole = Run(0, 101, base)
        reference.scatter([LayerRun(layer, target_ids, whole)])
        copies.scatter([LayerRun(layer, copies.prepare(target_ids), whole)]).wait()
    copies.join_scatters()
    assert torch.equal(staging, expected_staging)
    reference.clear(target_ids[:7])
    copies.clear(target_ids[:7])
    for name, layer in cache.items():
        got, wanted = layer.cpu().contiguous(), expected_cache[name].contiguous()
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_open_copies_pins_the_segment(staging):
    copies = open_copies(
        PagedCache(make_cache("LBNHC", torch.bfloat16), make_layout(torch.bfloat16)), staging
    )
    assert isinstance(copies, CudaDeviceCopies)
    assert not copies.finishes_at_once
    assert copies.pinned
    assert staging.is_pinned()
    copies.close()
    assert not staging.is_pinned()


def test_a_refused_registration_leaves_no_error_behind(staging):
    layout = make_layout(torch.bfloat16)
    cache = make_cache("LBNHC", torch.bfloat16)
    first = CudaDeviceCopies(PagedCache(cache, layout), staging)
    # CUDA always refuses to register the same memory twice.
    second = CudaDeviceCopies(PagedCache(cache, layout), staging)
    assert (first.pinned, second.pinned) == (True, False)
    assert (first.gathers_wait, second.gathers_wait) == (False, True)
    assert torch.ones(8, device="cuda").sum().item() == 8
    second.close()
    assert staging.is_pinned()
    first.close()


# torch warns of this debug mode when it is first set.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("stream", ["default", "own"])
def test_the_host_waits_for_nothing_while_it_launches_a_step(staging, stream):
    """Gathers and scatters are only queued: a model that computes meanwhile is not waited for."""
    layout, cache = make_layout(torch.bfloat16), make_cache("LBNHC", torch.bfloat16)
    copies = CudaDeviceCopies(PagedCache(cache, layout), staging, num_slots=2)
    block_ids = fragmented(200)
    own = torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()
    whole, half = Run(0, 200, BASE), Run(100, 100, BASE)
    # The first use loads kernels and allocates pinned memory, which makes the host wait.
    blocks = copies.prepare(block_ids)
    copies.gather([LayerRuns(0, blocks, [half])]).wait()
    copies.scatter([LayerRun(0, blocks, whole)]).wait()
    with torch.cuda.stream(own), no_host_waits():
        torch.cuda._sleep(SPIN_CYCLES)
        computing = torch.cuda.current_stream().record_event()
        blocks = copies.prepare(block_ids)
        # This is more than the rings hold.
        under_way = [copies.scatter([LayerRun(layer, blocks, whole)]) for layer in range(LAYERS)]
        copies.join_scatters()
        under_way += [copies.gather([LayerRuns(layer, blocks, [half])]) for layer in range(LAYERS)]
        copies.join_gathers()
        joined = torch.cuda.current_stream().record_event()
        assert not computing.query()
    for copy in under_way:
        copy.wait()
    joined.synchronize()
    copies.close()


def test_a_gather_runs_between_its_step_and_the_next(make_copies, staging):
    """The next step overwrites the blocks at once; what was gathered is this step's."""
    cache = make_cache("LBNHC", torch.bfloat16)
    copies, block_ids = make_copies(cache, num_slots=4), fragmented(100)
    size = make_layout(torch.bfloat16).block_bytes
    for step in range(1, 9):
        torch.cuda._sleep(SPIN_CYCLES // 20)
        blocks, under_way = copies.prepare(block_ids), []
        for layer, rows in enumerate(cache.values()):
            torch.cuda._sleep(SPIN_CYCLES // 100)
            rows.fill_(16 * step + layer)
            run = Run(0, 100, BASE + layer * 100 * size)
            under_way.append(copies.gather([LayerRuns(layer, blocks, [run])]))
        copies.join_gathers()
        for rows in cache.values():
            rows.fill_(-1)
        for layer, copy in enumerate(under_way):
            copy.wait()
            start = BASE + layer * 100 * size
            got = staging[start : start + 100 * size].view(torch.bfloat16)
            assert bool((got == 16 * step + layer).all()), (step, layer)


def test_a_scatter_runs_between_the_steps_around_it(make_copies, staging):
    cache = make_cache("LBNHC", torch.bfloat16)
    size = make_layout(torch.bfloat16).block_bytes
    copies = make_copies(cache, num_slots=4, slot_bytes=7 * size)
    block_ids = fragmented(100)
    for step in range(1, 9):
        for layer in range(LAYERS):
            start = BASE + layer * 100 * size
            staging[start : start + 100 * size].view(torch.bfloat16).fill_(16 * step + layer)
        # An earlier step still writes the blocks.
        torch.cuda._sleep(SPIN_CYCLES // 20)
        for rows in cache.values():
            rows.fill_(-1)
        blocks = copies.prepare(block_ids)
        under_way = [
            copies.scatter([LayerRun(layer, blocks, Run(0, 100, BASE + layer * 100 * size))])
            for layer in range(LAYERS)
        ]
        copies.join_scatters()
        loaded = [rows[block_ids] for rows in cache.values()]
        # Staging is free when the copies have ended, whatever the model does.
        for copy in under_way:
            copy.wait()
        staging[BASE : BASE + LAYERS * 100 * size].fill_(0)
        for layer, rows in enumerate(loaded):
            assert bool((rows == 16 * step + layer).all()), (step, layer)


def test_the_scratch_takes_the_memory_that_vllm_leaves(make_copies):
    cache, size = make_cache("LBNHC", torch.bfloat16), make_layout(torch.bfloat16).block_bytes
    before = torch.cuda.memory_allocated()
    make_copies(cache)
    assert torch.cuda.memory_allocated() - before == scratch_bytes(size)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees one GPU")
def test_a_thread_that_waits_for_copies_uses_the_gpu_of_its_rank(make_copies):
    with torch.cuda.device(1):
        copies = make_copies(make_cache("LBNHC", torch.bfloat16))
    used = []

    def wait():
        copies.bind_thread()
        used.append(torch.cuda.current_device())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(30)
    assert used == [1]


def test_another_thread_can_wait_for_a_copy(make_copies, staging):
    """As the notifier does, while the rank launches on."""
    cache = make_cache("LBNHC", torch.bfloat16)
    copies, block_ids = make_copies(cache, num_slots=2), fragmented(64)
    size = make_layout(torch.bfloat16).block_bytes
    wrong, threads = [], []

    def wait(copy, start, value):
        copies.bind_thread()
        copy.wait()
        got = staging[start : start + 64 * size].view(torch.bfloat16)
        if not bool((got == value).all()):
            wrong.append((start, value))

    with torch.inference_mode():
        for step in range(32):
            layer, start = step % LAYERS, BASE + step % 16 * 64 * size
            if step >= 16:
                # Another reader of this part of staging.
                threads[step - 16].join(30)
            cache[f"layer.{layer}"].fill_(step)
            copy = copies.gather([LayerRuns(layer, copies.prepare(block_ids), [Run(0, 64, start)])])
            copies.join_gathers()
            threads.append(threading.Thread(target=wait, args=(copy, start, step)))
            threads[-1].start()
    for thread in threads:
        thread.join(30)
    assert not wrong
