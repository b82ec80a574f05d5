"""Loads committed handoffs into a rank's paged cache, and verifies every byte after its copy.

There are two kinds of loads. A request that waits (`Load.waiting_id`) has its blocks already and
runs in a later step: no step waits for the copy, and the streams of the steps meanwhile get their
tokens in time. Other loads belong to the step that runs their request: its model waits for the
copies, and its output for the verification.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial

from baton.kvtransfer.connector.block_copies import BlockCopies
from baton.kvtransfer.connector.block_loads import Check, copy_in, holds
from baton.kvtransfer.connector.handoff_step import Load, LoadReport
from baton.kvtransfer.control import Claim, EnginePort
from baton.kvtransfer.head_ranges import HeadRange, head_ranges, sources
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv_groups import KvGroup
from baton.v1 import kv_transfer_pb2

_CHECKSUM = kv_transfer_pb2.REFUSAL_REASON_CHECKSUM
_EXPIRED = kv_transfer_pb2.REFUSAL_REASON_EXPIRED
_INCOMPLETE = kv_transfer_pb2.REFUSAL_REASON_INCOMPLETE


@dataclass(frozen=True, slots=True)
class _Shard:
    """A claimed shard of a sender.

    Attributes:
        layout: Layout of the sender's cache.
        claimed: The claimed staging, with the frames of this rank's layers.
        heads: The heads of this rank, for each group of layers; empty: all heads.
    """

    layout: KvLayout
    claimed: Claim
    heads: Mapping[KvGroup, HeadRange]


@dataclass(slots=True)
class _Waited:
    """A load that a request waits for.

    Attributes:
        load: The load.
        checks: Its copied frames.
        results: For each of them, whether its bytes are right.
        landed: Ends when the blocks have changed; None if nothing is copied.
        failed: Why the load has failed; None if it is known only from the results.
    """

    load: Load
    checks: list[Check] = field(default_factory=list)
    results: list[Future[bool]] = field(default_factory=list)
    landed: Future[None] | None = None
    failed: kv_transfer_pb2.RefusalReason.ValueType | None = None

    @property
    def ended(self) -> bool:
        """Whether all its copies and verifications have ended."""
        return all(one.done() for one in (*self.results, self.landed) if one is not None)


class RankLoads:
    """The loads of one rank; only the rank's thread calls it.

    Args:
        port: The rank's connection to the transfer service.
        layout: Layout of the KV cache.
        shard: Shard that the rank holds.
        layers: Indices of the layers that the rank holds.
        copies: The rank's copies.
        threads: Wait for copies and compute checksums.
    """

    def __init__(
        self,
        port: EnginePort,
        layout: KvLayout,
        shard: int,
        layers: Collection[int],
        copies: BlockCopies,
        threads: Executor,
    ) -> None:
        self._port, self._layout, self._shard = port, layout, shard
        self._layers = frozenset(layers)
        self._without_draft = layout.without_draft()
        self._copies, self._threads = copies, threads
        self._verify = partial(holds, memory=port.memory)
        # Loads of the step under way whose copies may not have ended.
        self._unchecked: list[tuple[Load, Check]] = []
        self._waited: list[_Waited] = []
        self._invalid_block_ids: set[int] = set()
        self._report = LoadReport()

    def begin(self, loads: Sequence[Load]) -> None:
        """Claims a step's loads and begins to copy them into the cache."""
        for load in loads:
            shards, failed = self._claimed(load)
            if self._layout.draft_groups and not load.has_draft:
                # The draft must not read what an earlier request left in these blocks.
                self._copies.clear_draft(load.block_ids)
            if load.waiting_id:
                self._waited.append(self._begun(load, shards, failed))
            elif failed is not None:
                self._fail(load, failed, load.block_ids)
            else:
                self._load(load, shards)
        if not all(load.waiting_id for load in loads):
            # Every layer is loaded before the first layer runs: the engine writes a layer's new
            # keys to the blocks before it calls `wait_for_layer_load`, and a later scatter would
            # undo that.
            self._copies.join_scatters()

    def _claimed(
        self, load: Load
    ) -> tuple[list[_Shard], kv_transfer_pb2.RefusalReason.ValueType | None]:
        """Claims the sender's shards that have heads of this rank; or says why the load fails."""
        layout = self._loaded_layout(load)
        sender = layout.split_into(load.num_shards or layout.num_shards)
        shards = []
        for source in sources(self._shard, layout.num_shards, sender.num_shards):
            claimed = self._port.claim(load.handoff_id, source)
            if claimed is None:
                # The handoff has ended, with its own reason, or the service does not answer.
                return [], _EXPIRED
            if claimed.num_tokens != load.num_tokens:
                return [], _INCOMPLETE
            # Other stages load the other layers.
            frames = tuple(frame for frame in claimed.frames if frame.layer in self._layers)
            heads = head_ranges(layout, self._shard, sender, source)
            shards.append(_Shard(sender, replace(claimed, frames=frames), heads))
        return shards, None

    def _loaded_layout(self, load: Load) -> KvLayout:
        """Returns the layout of this cache with the layers that a load fills."""
        return self._layout if load.has_draft else self._without_draft

    def _copied(self, load: Load, shards: Sequence[_Shard]) -> Iterator[Check]:
        """Begins the copies of the wanted blocks; yields one check per frame."""
        for shard in shards:
            yield from copy_in(self._copies, shard.layout, shard.claimed, load.parts, shard.heads)

    def _begun(
        self,
        load: Load,
        shards: Sequence[_Shard],
        failed: kv_transfer_pb2.RefusalReason.ValueType | None,
    ) -> _Waited:
        """Begins the copies of a load that a request waits for."""
        if failed is not None:
            return _Waited(load, failed=failed)
        checks = list(self._copied(load, shards))
        return _Waited(
            load,
            checks,
            [self._threads.submit(self._verify, check) for check in checks],
            self._threads.submit(self._copies.landing().wait),
            None if self._is_whole(load, shards, checks) else _INCOMPLETE,
        )

    def _load(self, load: Load, shards: Sequence[_Shard]) -> None:
        """Begins the copies of a load that belongs to the step."""
        checks = []
        for check in self._copied(load, shards):
            checks.append(check)
            if not self._copies.finishes_at_once:
                self._unchecked.append((load, check))
            elif not self._verify(check):
                # Verifying at once is cheap: the bytes are still in the core's cache.
                self._fail(load, _CHECKSUM, check.block_ids)
        if not self._is_whole(load, shards, checks):
            self._fail(load, _INCOMPLETE, load.block_ids)

    def _is_whole(self, load: Load, shards: Sequence[_Shard], checks: Sequence[Check]) -> bool:
        """Returns whether the claims had frames of all blocks that the load wants."""
        wanted = [len(part.block_ids) for part in load.parts]
        layout = self._loaded_layout(load)
        # A draft's layers come last.
        layers = [layer for layer in self._layers if layer < layout.num_all_layers]
        num_wanted = sum(wanted[layout.group_of(layer).table] for layer in layers)
        return sum(len(check.block_ids) for check in checks) == len(shards) * num_wanted

    def _fail(
        self,
        load: Load,
        why: kv_transfer_pb2.RefusalReason.ValueType,
        block_ids: Sequence[int],
    ) -> None:
        """Reports a failed load and clears its wrong blocks for the next request that gets them."""
        self._report.failed.setdefault(load.handoff_id, why)
        if not load.waiting_id:
            self._invalid_block_ids.update(block_ids)
        self._copies.clear(block_ids)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads have ended, and those of them whose loads have failed.

        The blocks of a failed load are cleared, and none of them was in the prefix cache: vLLM puts
        them there when it hears of the end.

        Raises:
            RuntimeError: A copy has failed, as all later work of this GPU will.
        """
        ended, self._waited = (
            [one for one in self._waited if one.ended],
            [one for one in self._waited if not one.ended],
        )
        failed = set()
        for one in ended:
            if one.landed is not None:
                one.landed.result()
            if one.failed is not None:
                self._fail(one.load, one.failed, one.load.block_ids)
            for check, result in zip(one.checks, one.results, strict=True):
                if not result.result():
                    self._fail(one.load, _CHECKSUM, check.block_ids)
            if one.load.handoff_id in self._report.failed:
                failed.add(one.load.waiting_id)
        return {one.load.waiting_id for one in ended}, failed

    def take_report(self) -> LoadReport:
        """Returns which loads have failed; call `take_invalid_block_ids` and `take_ended` first."""
        report, self._report = self._report, LoadReport()
        return report

    def take_invalid_block_ids(self) -> set[int]:
        """Verifies the loads of the step while its model computes; returns the wrong blocks' ids.

        Frames are verified while the next ones are copied, by several threads: one core reads a few
        GB/s, and the step's other streams wait for the result. The engine hears of the wrong blocks
        together with the step's output, and throws away what running requests computed from them.
        Every affected request is still running: with a connector that loads, vLLM preempts no
        request whose step is under way (Scheduler._request_blocks_can_be_freed of
        vllm/v1/core/sched/scheduler.py).
        """
        unchecked, self._unchecked = self._unchecked, []
        if unchecked:
            results = self._threads.map(self._verify, [check for _, check in unchecked])
            for (load, check), is_right in zip(unchecked, results, strict=True):
                if not is_right:
                    self._fail(load, _CHECKSUM, check.block_ids)
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid
