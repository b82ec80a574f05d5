"""Deletes KV blocks from every tier of one engine, for an operator.

The order comes as a request of one token, because requests are what Baton's process can send to
vLLM's scheduler at any time. Every rank overwrites the bytes in host memory and in the free blocks
of the device, and deletes the files. A request that runs keeps its blocks; they are overwritten
when it ends, and what it computes later may be stored again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from baton.kvtransfer.connector.handoffs.handoff_scheduler import HandoffScheduler
from baton.kvtransfer.connector.request_params import RequestParams
from baton.kvtransfer.connector.step_report import Dropped, StepReport
from baton.kvtransfer.connector.tiers.cached_blocks import CachedBlocks
from baton.kvtransfer.connector.tiers.host_tier import HostTier
from baton.kvtransfer.disk.orders import BlockSelection

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Drop:
    """An order under way.

    Attributes:
        num_blocks: Blocks deleted on the device, in host memory and on disk.
        uncleared: Free blocks of the device that no step has cleared yet; shrinks by itself
            (HandoffScheduler.clear).
        deletion: Number of the order to the disks; None: there is no disk.
        num_missing: Ranks that have not overwritten everything.
        begun: True once the ranks were told of the order's last block.
    """

    num_blocks: tuple[int, int, int]
    uncleared: Set[int]
    deletion: int | None
    num_missing: int
    begun: bool = False


@dataclass(slots=True)
class Clearing:
    """Orders that ranks carry out first in a step.

    Attributes:
        slots: Blocks of host memory to overwrite.
        ended: Orders whose last block is among these, or was in an earlier step.
    """

    slots: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class CacheDrops:
    """The orders of one engine; runs beside vLLM's scheduler.

    Args:
        cached: Knows the owners of blocks.
        handoffs: Clears blocks of the device.
        host: Host memory, with the disk below it; None: there is none.
        num_ranks: Number of ranks.
    """

    def __init__(
        self,
        cached: CachedBlocks,
        handoffs: HandoffScheduler,
        host: HostTier | None,
        num_ranks: int,
    ) -> None:
        self._cached, self._handoffs, self._host = cached, handoffs, host
        self._num_ranks = num_ranks
        self._drops: dict[int, _Drop] = {}

    def add(self, request: Request, manager: KVCacheManager) -> None:
        """Takes a request that was given to the engine, and carries out the order that it carries.

        Args:
            request: Any request.
            manager: Owns the device's blocks.
        """
        if (order := RequestParams(request.kv_transfer_params).drop) is None:
            return
        on_disk = self._host.parents_on_disk() if self._host is not None else ()
        selection = BlockSelection.of(order.cache_salt, order.block_hashes).with_followers(
            itertools.chain(self._cached.parents(), on_disk)
        )
        num_host = num_disk = 0
        deletion = None
        # The owners of blocks in host memory are known until the device's report follows.
        if self._host is not None:
            num_host, num_disk, deletion = self._host.delete(selection)
        num_device, uncleared = self._delete_on_device(selection, manager)
        blocks = num_device, num_host, num_disk
        self._drops[order.drop_id] = _Drop(blocks, uncleared, deletion, self._num_ranks)

    def _delete_on_device(
        self, selection: BlockSelection, manager: KVCacheManager
    ) -> tuple[int, Set[int]]:
        """Deletes blocks from the prefix cache.

        Returns:
            How many, and the blocks to clear; see _Drop.uncleared.
        """
        found, unnamed = set(), set()
        for block in manager.block_pool.blocks:
            if block.block_hash is None:
                # A free block may have the end of a prompt or of an answer.
                if not block.ref_cnt and not block.is_null:
                    unnamed.add(block.block_id)
                continue
            name = maybe_convert_block_hash(get_block_hash(block.block_hash))
            if self._cached.is_selected(name, selection):
                found.add(block.block_id)
        manager.evict_blocks(found)
        return len(found), self._handoffs.clear(found | unnamed)

    @property
    def has_work(self) -> bool:
        """Whether orders are under way, for which the engine must go on stepping."""
        return bool(self._drops)

    def step(self) -> Clearing:
        """Returns what ranks do first in the step that is made next.

        Called after HandoffScheduler.step, which takes the device's blocks of that step.
        """
        # Blocks that were in use may be free only after their order has ended.
        clearing = Clearing(self._host.take_uncleared() if self._host is not None else [])
        if self._drops and (self._host is None or not self._host.is_deleting):
            for drop_id, drop in self._drops.items():
                if not drop.begun and not drop.uncleared:
                    drop.begun = True
                    clearing.ended.append(drop_id)
        return clearing

    def reported(self, ended: Sequence[int]) -> None:
        """Takes the orders of which a rank has overwritten the last block; once per rank."""
        for drop_id in ended:
            self._drops[drop_id].num_missing -= 1

    def add_to(self, report: StepReport) -> None:
        """Adds the orders that have ended."""
        for drop_id, drop in list(self._drops.items()):
            if drop.num_missing:
                continue
            is_deleted = self._host is None or self._host.take_deleted(drop.deletion)
            if is_deleted is not None:
                del self._drops[drop_id]
                report.dropped[drop_id] = Dropped(*drop.num_blocks, has_files_left=not is_deleted)
