"""Early loads beside vLLM's own block pool: what each case found."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from baton.kvtransfer.connector.early_loads import EarlyLoads
from baton.kvtransfer.layout import KvLayout

BLOCK, NUM_BLOCKS = 16, 40
LAYOUT = KvLayout("m", "r", "float32", 1, 1, 8, BLOCK, 1024, "heads,tokens,content")
ID = bytes(16)


def new_manager(*, caching: bool) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 1024, BLOCK, BLOCK, enable_caching=caching)


def request_of(token_ids: list[int], name: str = "r") -> Request:
    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=4)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, token_ids, sampling, None, block_hasher=hasher)


def allocated(manager: KVCacheManager, request: Request, num_loaded: int) -> list[int]:
    """The ids of all its blocks; it loads so many tokens beyond those cached, and computes one."""
    found, num_cached, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 1, num_cached, found, 0, num_loaded) is not None
    return list(manager.get_blocks(request.request_id).get_block_ids()[0])


def offered(num_tokens: int, *, caching: bool) -> dict[str, object]:
    """The request gets blocks when some have been used, and given back in another order."""
    manager = new_manager(caching=caching)
    early = EarlyLoads(LAYOUT, manager.block_pool)
    for name, length in (("a", 50), ("b", 90)):
        allocated(manager, one := request_of(list(range(length)), name), length - 1)
        manager.free(one)
    request = request_of([1000 + token for token in range(num_tokens + 1)])
    early.begin(ID, request, num_tokens, 0, 0)
    (told,) = early.take_work().begun
    early.offer(ID, 0)
    wanted = allocated(manager, request, num_tokens)[: LAYOUT.num_blocks(num_tokens)]
    is_same = early.take(ID, wanted)
    manager.free(request)
    num_held = NUM_BLOCKS - 1 - manager.block_pool.get_num_free_blocks()
    return {"filled": told.block_ids, "got": wanted, "is_same": is_same, "num_held": num_held}


def computed_by_another(*, caching: bool) -> dict[str, object]:
    """Another request computes the first two blocks of the prompt meanwhile."""
    manager, prompt = new_manager(caching=caching), list(range(5 * BLOCK + 7))
    early, request = EarlyLoads(LAYOUT, manager.block_pool), request_of([*prompt, 7])
    early.begin(ID, request, len(prompt), 0, 0)
    (told,) = early.take_work().begun
    other = request_of([*prompt[: 2 * BLOCK], 1, 2], "other")
    allocated(manager, other, 2 * BLOCK + 1)
    num_cached = manager.get_computed_blocks(request)[1]
    early.offer(ID, num_cached)
    first = num_cached // BLOCK
    wanted = allocated(manager, request, len(prompt) - num_cached)[first:]
    is_same = early.take(ID, wanted)
    manager.free(request)
    manager.free(other)
    num_held = NUM_BLOCKS - 1 - manager.block_pool.get_num_free_blocks()
    cleared = early.take_work().cleared
    return {
        "filled": told.block_ids[first:],
        "got": wanted,
        "is_same": is_same,
        "num_held": num_held,
        "num_cached": num_cached,
        "num_cleared": len(cleared),
    }


def spoilt(*, caching: bool) -> dict[str, object]:
    """A load has failed of which another request, that goes on, has only what is right."""
    manager, prompt = new_manager(caching=caching), list(range(5 * BLOCK + 7))
    early, pool = EarlyLoads(LAYOUT, manager.block_pool), manager.block_pool
    failed, other = request_of(prompt), request_of([*prompt[: 2 * BLOCK], 1, 2], "other")
    wrong = set(allocated(manager, failed, len(prompt) - 1))
    shared = wrong & set(allocated(manager, other, 1))
    manager.free(failed)
    manager.evict_blocks(wrong)
    early.spoil(wrong)
    early.clear_spoilt()
    first = set(early.take_work().cleared)
    # Somebody else gets all that there is, and fills some of it.
    heir = request_of([1000 + at for at in range(pool.get_num_free_blocks() * BLOCK)], "heir")
    inherited = wrong & set(allocated(manager, heir, heir.num_tokens - 1))
    manager.free(other)
    early.clear_spoilt()
    then = set(early.take_work().cleared)
    manager.free(heir)
    early.clear_spoilt()
    return {
        "is_shared": len(shared) == (2 if caching else 0),
        "first": first == wrong - shared,
        "inherited": inherited == first,
        "then": then == shared,
        "rest": early.has_work,
    }


def main() -> dict[str, Any]:
    return {
        "true" if caching else "false": {
            "offered": [
                offered(num_tokens, caching=caching)
                for num_tokens in (3, BLOCK, 5 * BLOCK, 5 * BLOCK + 7)
            ],
            "computed": computed_by_another(caching=caching),
            "spoilt": spoilt(caching=caching),
        }
        for caching in (True, False)
    }
