"""Copies between a rank's paged cache and staging, in the steps that the scheduler's half says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.kvtransfer.connector.block_copies import BlockCopies, Run
from baton.kvtransfer.connector.block_loads import (
    Check,
    EarlyCopies,
    FrameKey,
    copy_in,
    frame_key,
    holds,
    wanted_blocks,
)
from baton.kvtransfer.connector.cuda_copies import CudaCopies
from baton.kvtransfer.connector.handoff_step import HandoffStep, Load, LoadReport, Push
from baton.kvtransfer.connector.host_copies import HostCopies
from baton.kvtransfer.connector.notifier import Filled, Notifier, NotifierThread
from baton.kvtransfer.connector.paged_cache import PagedCache
from baton.kvtransfer.control import Claim, EnginePort, split_blocks
from baton.kvtransfer.layout import KvLayout
from baton.v1 import kv_transfer_pb2


def open_copies(cache: PagedCache, staging: torch.Tensor) -> BlockCopies:
    """The copies for where the cache is.

    Args:
        cache: one rank's.
        staging: the segment, as bytes.

    Raises:
        ValueError: a kind of device that Baton cannot copy from.
    """
    if cache.device.type == "cpu":
        return HostCopies(cache, staging)
    if cache.device.type == "cuda":
        return CudaCopies(cache, staging)
    raise ValueError(f"the cache is on {cache.device}; Baton hands over from CPUs and CUDA GPUs")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One frame of every layer of a push.

    Attributes:
        begin: index of its first block among all the blocks of the step.
        first_block: index within the handoff.
        last: whether it is the push's last.
    """

    push: Push
    begin: int
    first_block: int
    num_blocks: int
    last: bool


class RankHalf:
    """One rank's.

    Args:
        socket_path: of the transfer service.
        port: this thread's, to that service.
        rank: tensor-parallel.
        layout: of the cache.
    """

    def __init__(self, socket_path: str, port: EnginePort, rank: int, layout: KvLayout) -> None:
        self._socket_path, self._port = socket_path, port
        self._layout = layout
        # Of ranks that hold the same the first sends it, and each loads it.
        self._shard, replica = divmod(rank, layout.num_replicas)
        self._sends = replica == 0
        self._cache: PagedCache | None = None
        # Of the step under way: every block that is pushed, as the copies take them, and the frames
        # of a layer, those together that one gather takes.
        self._blocks: Any = None
        self._groups: list[list[_Piece]] = []
        # Layers whose blocks have yet to be gathered in this step, by the engine's names.
        self._unsaved: dict[str, None] = {}
        # Of loads of the step under way, whose copies may not have ended.
        self._unchecked: list[tuple[Load, Check]] = []
        self._invalid_block_ids: set[int] = set()
        self._report = LoadReport()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError when the cache is not laid out as the worker announced."""
        self._cache = PagedCache(kv_caches, self._layout)
        if self._cache.device.type == "cpu":
            allow_matrix_unit()
        self._port.prefault()
        staging = torch.frombuffer(self._port.memory, dtype=torch.uint8)
        self._copies: BlockCopies = open_copies(self._cache, staging)
        self._early = EarlyCopies(self._port, self._shard, self._layout, self._copies)
        self._notifier: Notifier | NotifierThread
        if self._copies.finishes_at_once:
            self._notifier = Notifier(self._port, self._shard)
        else:
            # A port is one thread's.
            port = EnginePort(self._socket_path)
            self._notifier = NotifierThread(Notifier(port, self._shard), port)

    @property
    def alive(self) -> bool:
        """False: this rank has lost the transfer service, and hands over nothing any more."""
        return self._port.alive and self._notifier.alive

    def begin_step(self, step: HandoffStep) -> None:
        if step.early.cleared:
            self._copies.clear(step.early.cleared)
        if not self._sends:
            return
        for handoff_id in step.ended:
            self._notifier.ended(handoff_id)
        self._groups = list(self._grouped(step.pushes)) if self._notifier.alive else []
        if self._groups:
            self._unsaved = dict.fromkeys(self._known_cache.indices)
            self._blocks = self._copies.prepare(
                [block_id for push in step.pushes for block_id in push.block_ids]
            )

    def _grouped(self, pushes: list[Push]) -> Iterator[list[_Piece]]:
        """Frames that fit into one gather each; many short prompts would make many small copies."""
        group: list[_Piece] = []
        begin, room = 0, self._copies.max_blocks
        for push in pushes:
            end = push.first_block + len(push.block_ids)
            for first, count in split_blocks(
                push.first_block, len(push.block_ids), self._layout.block_bytes
            ):
                if group and count > room:
                    yield group
                    group, room = [], self._copies.max_blocks
                group.append(_Piece(push, begin, first, count, first + count == end))
                begin, room = begin + count, room - count
        if group:
            yield group

    def save(self, layer_name: str) -> None:
        """The kernels of one layer have been launched."""
        if not self._groups:
            return
        layer, layout = self._known_cache.indices[layer_name], self._layout
        del self._unsaved[layer_name]
        ends_step = not self._unsaved
        for group in self._groups:
            filled = []
            for piece in group:
                push = piece.push
                offset = layout.offset(self._shard, layer, piece.first_block, push.num_blocks)
                filled.append(
                    Filled(
                        push.handoff_id,
                        layer,
                        piece.first_block,
                        piece.num_blocks,
                        push.offset + offset,
                        piece.num_blocks * layout.block_bytes,
                        last=ends_step and piece.last and push.last,
                    )
                )
            runs = [
                Run(piece.begin, piece.num_blocks, each.offset)
                for piece, each in zip(group, filled, strict=True)
            ]
            self._notifier.filled(self._copies.gather(layer, self._blocks, runs), filled)
        if ends_step:
            self._notifier.flush()

    def end_step(self) -> None:
        """The step's last kernels have been launched.

        vLLM may give the blocks of a request that has ended or was preempted to another one, in a
        step that it launches before the GPU has begun this one: that step's kernels must come after
        the gathers. They need not come after the copies to staging, which read scratch.

        A CUDA graph of the whole model (vLLM's FULL: steps of single tokens, such as the last one
        of a prompt whose others were cached) says nothing of its layers: they are gathered here.
        """
        for layer_name in list(self._unsaved):
            self.save(layer_name)
        if self._groups:
            self._copies.join()
        self._groups, self._blocks = [], None

    def load(self, step: HandoffStep) -> None:
        for load in step.loads:
            there = self._early.take(load)
            claimed = (
                Claim.parse(load.claims[self._shard])
                if load.claims
                else self._port.claim(load.handoff_id, self._shard)
            )
            if claimed is None:
                # It has ended, with a reason of its own, or the service does not answer in time.
                self._fail(load, kv_transfer_pb2.REFUSAL_REASON_EXPIRED, load.block_ids)
            elif claimed.num_tokens != load.num_tokens:
                self._fail(load, kv_transfer_pb2.REFUSAL_REASON_INCOMPLETE, load.block_ids)
            else:
                self._load(load, claimed, there)
        if step.loads:
            # All layers before the first: a layer's new keys are written to the blocks before the
            # engine asks for the layer (`wait_for_layer_load`), and a scatter that came later would
            # undo that.
            self._copies.join()
        if step.early:
            self._early.step(step.early)

    def _load(self, load: Load, claimed: Claim, there: Collection[FrameKey]) -> None:
        """Begins to copy what is wanted and not there."""
        missing, num_early = [], 0
        for frame in claimed.frames:
            if frame_key(claimed, frame) in there:
                num_early += len(wanted_blocks(frame, load.first_block, len(load.block_ids)))
            else:
                missing.append(frame)
        rest, num_copied = replace(claimed, frames=tuple(missing)), 0
        for check in copy_in(self._copies, self._layout, rest, load.first_block, load.block_ids):
            num_copied += len(check.block_ids)
            if self._copies.finishes_at_once:
                # The bytes are still in the core's own cache.
                self._verify(load, check)
            else:
                self._unchecked.append((load, check))
        if num_early + num_copied != self._layout.num_layers * len(load.block_ids):
            self._fail(load, kv_transfer_pb2.REFUSAL_REASON_INCOMPLETE, load.block_ids)
        if load.is_early:
            self._report.num_early_blocks[load.handoff_id] = num_early // self._layout.num_layers

    def _verify(self, load: Load, check: Check) -> None:
        if not holds(check, self._port):
            self._fail(load, kv_transfer_pb2.REFUSAL_REASON_CHECKSUM, check.block_ids)

    def _fail(
        self,
        load: Load,
        why: kv_transfer_pb2.RefusalReason.ValueType,
        block_ids: Sequence[int],
    ) -> None:
        """Blocks that are not what they should be: whoever gets them next finds nothing there."""
        self._report.failed.setdefault(load.handoff_id, why)
        self._invalid_block_ids.update(block_ids)
        self._copies.clear(block_ids)

    def take_report(self) -> LoadReport:
        """Of the step under way, once its wrong blocks have been taken."""
        self._early.end_step()
        report, self._report = self._report, LoadReport()
        return report

    def take_invalid_block_ids(self) -> set[int]:
        """Of the step under way, whose model has been launched and computes meanwhile.

        One frame is verified while the next is copied. What was computed from wrong bytes is thrown
        away by the engine, which hears of them together with the step's output and looks for those
        who have these blocks among the requests that run. They all do: an engine that makes one
        step while another runs preempts nobody whose step is under way, as it has a connector that
        loads (Scheduler._request_blocks_can_be_freed of vllm/v1/core/sched/scheduler.py).
        """
        for load, check in self._unchecked:
            self._verify(load, check)
        self._unchecked.clear()
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def close(self) -> None:
        """Waits, within bounds, for what is under way: it reads and writes staging."""
        if self._cache is not None:
            self._notifier.close()
            self._copies.close()

    @property
    def _known_cache(self) -> PagedCache:
        assert self._cache is not None, "vLLM registers its caches before the first step"
        return self._cache


def allow_matrix_unit() -> None:
    """Asks the kernel to let this process use AMX, where the CPU has it.

    vLLM's attention takes it for granted. It is oneDNN that asks, in the first large matrix
    product; a rank that is handed its prompts may come to attention first, and would be killed.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
