"""Copies to and from host memory on CPUs: a step makes a bounded part of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

# Importing torch and vLLM warns of what they do.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LAYERS, PAGE_BYTES, NUM_BLOCKS = 2, 2**19, 40
# Blocks of 1 MiB: a step copies 8, or 64 when it computes nothing.
PER_STEP = 8


class Copies:
    """Copies between a cache with random bytes and host memory."""

    made: ClassVar[list[Copies]] = []

    def __init__(self) -> None:
        import torch
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
        )

        from baton.kvtransfer.connector.tiers.cpu_tier_copies import CpuTierCopies

        self.cache = [
            torch.randint(-128, 128, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8)
            for _ in range(LAYERS)
        ]
        refs = [CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(LAYERS)]
        tensors = [CanonicalKVCacheTensor(one, PAGE_BYTES) for one in self.cache]
        self.worker = CpuTierCopies(CanonicalKVCaches(tensors, [refs]), NUM_BLOCKS)
        self.before = [one.clone().numpy() for one in self.cache]
        self.made.append(self)

    def give(self, job_id: int, cached: range, stored: range, *, is_store: bool) -> None:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        device = GPULoadStoreSpec(list(cached), [len(cached)], [0])
        host = CPULoadStoreSpec(list(stored))
        if is_store:
            assert self.worker.submit_store(job_id, device, host)
        else:
            assert self.worker.submit_load(job_id, host, device)

    def step(self) -> dict[int, Any]:
        return {one.job_id: one for one in self.worker.get_finished()}

    def num_stored(self, cached: range, stored: range) -> int:
        """How many blocks are the same in the cache as it was and in host memory."""
        pairs = zip(self.before, self.worker.memory, strict=True)
        same = [
            [(cache[c] == memory[s]).all() for c, s in zip(cached, stored, strict=True)]
            for cache, memory in pairs
        ]
        return sum(all(layers) for layers in zip(*same, strict=True))


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    while Copies.made:
        Copies.made.pop().worker.shutdown()


def test_a_step_copies_a_part_of_a_long_prompt() -> None:
    copies = Copies()
    cached, stored = range(20), range(5, 25)
    copies.give(1, cached, stored, is_store=True)
    assert copies.num_stored(cached, stored) == 0
    for num_done in (PER_STEP, 2 * PER_STEP):
        assert not copies.step()
        assert copies.num_stored(cached, stored) == num_done
    ended = copies.step()[1]
    assert (ended.success, ended.transfer_size) == (True, len(cached) * LAYERS * PAGE_BYTES)
    assert ended.transfer_time > 0
    # The blocks come back from host memory to other places.
    copies.give(2, range(20, 40), stored, is_store=False)
    while not copies.step():
        pass
    for cache, before in zip(copies.cache, copies.before, strict=True):
        assert (cache.numpy()[20:] == before[:20]).all()


def test_short_copies_end_in_their_step_and_share_its_bytes() -> None:
    copies = Copies()
    copies.give(1, range(3), range(3), is_store=True)
    copies.give(2, range(3, 6), range(3, 6), is_store=True)
    copies.give(3, range(6, 10), range(6, 10), is_store=True)
    assert copies.step().keys() == {1, 2}
    assert copies.num_stored(range(10), range(10)) == PER_STEP
    assert copies.step().keys() == {3}


def test_a_step_without_streams_copies_more() -> None:
    from baton.kvtransfer.connector.tiers.cpu_tier_copies import step_bytes

    copies = Copies()
    copies.worker.most_bytes = step_bytes(0.0, is_idle=True)
    copies.give(1, range(NUM_BLOCKS), range(NUM_BLOCKS), is_store=True)
    assert copies.step().keys() == {1}
    assert copies.num_stored(range(NUM_BLOCKS), range(NUM_BLOCKS)) == NUM_BLOCKS


@pytest.mark.parametrize(("step_s", "num_blocks"), [(0.01, PER_STEP), (0.1, 20), (1.0, 200)])
def test_a_step_that_takes_longer_copies_more(step_s: float, num_blocks: int) -> None:
    from baton.kvtransfer.connector.tiers.cpu_tier_copies import step_bytes

    assert step_bytes(step_s, is_idle=False) == num_blocks * LAYERS * PAGE_BYTES


def test_a_load_that_a_stream_waits_for_gets_all_the_time_that_the_step_has_left() -> None:
    from baton.kvtransfer.connector.tiers.cpu_tier_copies import COPIED_BYTES_PER_S, stream_bytes

    left = stream_bytes(0.02, 0.05)
    assert left == pytest.approx(0.03 * COPIED_BYTES_PER_S, abs=1)
    assert stream_bytes(0.06, 0.05) == stream_bytes(0.02, 0.0) == 0


def test_blocks_that_get_new_owners_are_copied_first() -> None:
    copies = Copies()
    copies.give(1, range(20), range(20), is_store=True)
    copies.give(2, range(20, 40), range(20, 40), is_store=True)
    copies.worker.wait({2, 7})
    for cache in copies.cache:
        cache[20:] = 0
    assert copies.num_stored(range(20, 40), range(20, 40)) == 20
    assert copies.step().keys() == {2}
    copies.step()
    assert copies.step().keys() == {1}
