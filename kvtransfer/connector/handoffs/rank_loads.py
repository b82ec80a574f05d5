"""Loads committed handoffs into a rank's paged cache, and verifies every byte after its copy.

There are two kinds of loads. A request that waits (`Load.waiting_id`) has its blocks already and
runs in a later step, so that the streams of the steps meanwhile get their tokens in time: a GPU
copies beside these steps, and on a CPU each of them copies a bounded part. Other loads belong to
the step that runs their request: its model waits for the copies, and its output for the
verification.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial

from baton.kvtransfer.connector.handoffs.block_copies import BlockCopies
from baton.kvtransfer.connector.handoffs.block_loads import Check, copy_in, holds
from baton.kvtransfer.connector.handoffs.handoff_step import Load, LoadReport
from baton.kvtransfer.engine_port import Claim, EnginePort, PendingClaim
from baton.kvtransfer.head_ranges import HeadRange, head_ranges, sources
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv.kv_groups import KvGroup
from baton.v1 import kv_transfer_pb2

_CHECKSUM = kv_transfer_pb2.REFUSAL_REASON_CHECKSUM
_EXPIRED = kv_transfer_pb2.REFUSAL_REASON_EXPIRED
_INCOMPLETE = kv_transfer_pb2.REFUSAL_REASON_INCOMPLETE
# Longest time until the transfer service has granted a claim, in seconds.
CLAIM_TIMEOUT_S = 2.0
# Longest time that a step waits for the claims of requests that wait for their loads. An answer
# takes less than a millisecond, unless the service does not run.
_STEP_CLAIM_WAIT_S = 0.02


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


@dataclass(frozen=True, slots=True)
class _PendingShard:
    """A shard that may not be claimed yet; fields as in _Shard."""

    layout: KvLayout
    claim: PendingClaim
    heads: Mapping[KvGroup, HeadRange]


@dataclass(slots=True)
class _Waited:
    """A load that a request waits for.

    It is first claimed, then copied and verified; then it has ended.

    Attributes:
        load: The load.
        pending: The claims; None before the first of them is made, empty when they are over.
        claims_until: When claims without an answer are given up, by time.monotonic.
        shards: The claimed shards.
        to_copy: On a CPU, copies the next frame; None before the claims are over, and when nothing
            is left to copy.
        num_left: On a CPU, number of blocks that are left to copy, of all layers.
        checks: On a GPU, the frames that are being copied.
        results: For each of them, whether its bytes are right.
        landed: Ends when the blocks have changed; None if nothing is copied beside the steps.
        failed: Why the load has failed; None if it is known only from the results.
    """

    load: Load
    pending: list[_PendingShard] | None = None
    claims_until: float = 0.0
    shards: list[_Shard] = field(default_factory=list)
    to_copy: Iterator[Check] | None = None
    num_left: int = 0
    checks: list[Check] = field(default_factory=list)
    results: list[Future[bool]] = field(default_factory=list)
    landed: Future[None] | None = None
    failed: kv_transfer_pb2.RefusalReason.ValueType | None = None

    @property
    def ended(self) -> bool:
        """Whether it is claimed, and all its copies and verifications have ended."""
        if self.pending is None or self.pending or self.to_copy is not None:
            return False
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
        clock: time.monotonic.
    """

    def __init__(
        self,
        port: EnginePort,
        layout: KvLayout,
        shard: int,
        layers: Collection[int],
        copies: BlockCopies,
        threads: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._layout, self._shard = port, layout, shard
        self._layers = frozenset(layers)
        self._without_draft = layout.without_draft()
        self._copies, self._threads, self._clock = copies, threads, clock
        self._verify = partial(holds, memory=port.memory)
        # Loads of the step under way whose copies may not have ended.
        self._unchecked: list[tuple[Load, Check]] = []
        self._waited: list[_Waited] = []
        self._invalid_block_ids: set[int] = set()
        self._report = LoadReport()

    def begin(self, loads: Sequence[Load]) -> None:
        """Claims a step's loads and begins to copy them into the cache.

        On a CPU, `copy_waited` claims and copies the loads that requests wait for.
        """
        waited = []
        for load in loads:
            if self._layout.draft_groups and not load.has_draft:
                # The draft must not read what an earlier request left in these blocks.
                self._copies.clear_draft(load.block_ids)
            if load.waiting_id:
                waited.append(_Waited(load))
            else:
                self._begin_at_once(load)
        if len(waited) < len(loads):
            # Every layer is loaded before the first layer runs: the engine writes a layer's new
            # keys to the blocks before it calls `wait_for_layer_load`, and a later scatter would
            # undo that.
            self._copies.join_scatters()
        self._waited += waited
        if not self._copies.finishes_at_once:
            self.copy_waited(0)

    def _begin_at_once(self, load: Load) -> None:
        """Begins a load that belongs to the step."""
        pending, deadline = self._claim(load), self._clock() + CLAIM_TIMEOUT_S
        for one in pending:
            one.claim.wait(max(0.0, deadline - self._clock()))
            one.claim.give_up()
        shards, failed = self._claimed(load, pending)
        if failed is not None:
            self._fail(load, failed, load.block_ids)
        else:
            self._load(load, shards)

    def copy_waited(self, most_bytes: int, stream_bytes: int = 0) -> int:
        """Goes on with the loads that requests wait for: streams first, then in order of arrival.

        Args:
            most_bytes: Bytes after which a CPU copies no further frame in this step. A GPU copies
                all bytes beside the steps.
            stream_bytes: The same for loads of streams, if it is more.

        Returns:
            Bytes that this thread has copied.
        """
        wait_until = self._clock() + _STEP_CLAIM_WAIT_S
        streams = [one for one in self._waited if one.load.is_stream]
        others = [one for one in self._waited if not one.load.is_stream]
        num_bytes = self._go_on(streams, max(most_bytes, stream_bytes), wait_until)
        # Streams leave the others at least half of the usual bytes.
        left_bytes = max(most_bytes - num_bytes, most_bytes // 2)
        return num_bytes + self._go_on(others, left_bytes, wait_until)

    def _go_on(self, waited: Sequence[_Waited], most_bytes: int, wait_until: float) -> int:
        """Goes on with these loads in their order; returns the bytes that this thread has copied.

        Args:
            waited: The loads.
            most_bytes: As in `copy_waited`.
            wait_until: As in `_try_to_claim`.
        """
        num_bytes = 0
        for one in waited:
            if self._copies.finishes_at_once and num_bytes >= most_bytes:
                # A claim expires, so it is made when the copy can begin.
                break
            if one.pending is None or one.pending:
                self._try_to_claim(one, wait_until)
            if one.to_copy is not None:
                num_bytes += self._copy_part(one, most_bytes - num_bytes)
        return num_bytes

    def _try_to_claim(self, one: _Waited, wait_until: float) -> None:
        """Makes a load's claims, or looks for their answers; then begins the copies.

        Args:
            one: A load whose claims are not over.
            wait_until: How long it may wait for the answers to new claims, by time.monotonic.
        """
        now = self._clock()
        if one.pending is None:
            one.pending, one.claims_until = self._claim(one.load), now + CLAIM_TIMEOUT_S
        else:
            wait_until = now
        for each in one.pending:
            if each.claim.wait(max(0.0, wait_until - self._clock())):
                continue
            if now < one.claims_until:
                return
            each.claim.give_up()
        one.shards, one.failed = self._claimed(one.load, one.pending)
        one.pending = []
        if one.failed is None and self._copies.finishes_at_once:
            one.to_copy = self._copied(one.load, one.shards)
            one.num_left = self._num_wanted(one.load, one.shards)
        elif one.failed is None:
            self._copy_beside(one)

    def _copy_part(self, one: _Waited, most_bytes: int) -> int:
        """Copies and verifies frames in this thread; returns their bytes.

        Verifying at once is cheap: the bytes are still in the core's cache.
        """
        assert one.to_copy is not None
        num_bytes = 0
        while one.num_left and num_bytes < most_bytes:
            if (check := next(one.to_copy, None)) is None:
                one.failed = _INCOMPLETE
            elif not self._verify(check):
                one.failed = _CHECKSUM
            else:
                one.num_left -= len(check.block_ids)
                num_bytes += check.num_bytes
                continue
            break
        if one.failed is not None or not one.num_left:
            one.to_copy = None
        return num_bytes

    def _copy_beside(self, one: _Waited) -> None:
        """Begins all copies of a load beside the steps."""
        for check in self._copied(one.load, one.shards):
            one.checks.append(check)
            # Frames are verified while the next copies are launched.
            one.results.append(self._threads.submit(self._verify, check))
        one.landed = self._threads.submit(self._copies.landing().wait)
        if _num_blocks(one.checks) != self._num_wanted(one.load, one.shards):
            one.failed = _INCOMPLETE

    def _claim(self, load: Load) -> list[_PendingShard]:
        """Begins to claim the sender's shards that have heads of this rank."""
        layout = self._loaded_layout(load)
        sender = layout.split_into(load.num_shards or layout.num_shards)
        return [
            _PendingShard(
                sender,
                self._port.begin_claim(load.handoff_id, source),
                head_ranges(layout, self._shard, sender, source),
            )
            for source in sources(self._shard, layout.num_shards, sender.num_shards)
        ]

    def _claimed(
        self, load: Load, pending: Sequence[_PendingShard]
    ) -> tuple[list[_Shard], kv_transfer_pb2.RefusalReason.ValueType | None]:
        """Returns the claimed shards; or says why the load fails."""
        shards = []
        for one in pending:
            if (claimed := one.claim.claim) is None:
                # The handoff has ended, with its own reason, or the service does not answer.
                return [], _EXPIRED
            if claimed.num_tokens != load.num_tokens:
                return [], _INCOMPLETE
            # Other stages load the other layers.
            frames = tuple(frame for frame in claimed.frames if frame.layer in self._layers)
            shards.append(_Shard(one.layout, replace(claimed, frames=frames), one.heads))
        return shards, None

    def _loaded_layout(self, load: Load) -> KvLayout:
        """Returns the layout of this cache with the layers that a load fills."""
        return self._layout if load.has_draft else self._without_draft

    def _copied(self, load: Load, shards: Sequence[_Shard]) -> Iterator[Check]:
        """Begins the copies of the wanted blocks; yields one check per frame."""
        for shard in shards:
            yield from copy_in(self._copies, shard.layout, shard.claimed, load.parts, shard.heads)

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
        if _num_blocks(checks) != self._num_wanted(load, shards):
            self._fail(load, _INCOMPLETE, load.block_ids)

    def _num_wanted(self, load: Load, shards: Sequence[_Shard]) -> int:
        """Returns how many blocks a load wants, of all layers; the claims may lack some."""
        wanted = [len(part.block_ids) for part in load.parts]
        layout = self._loaded_layout(load)
        # A draft's layers come last.
        layers = [layer for layer in self._layers if layer < layout.num_all_layers]
        num_wanted = sum(wanted[layout.group_of(layer).table] for layer in layers)
        return len(shards) * num_wanted

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


def _num_blocks(checks: Sequence[Check]) -> int:
    """Returns the number of blocks of these frames, of all layers."""
    return sum(len(check.block_ids) for check in checks)
