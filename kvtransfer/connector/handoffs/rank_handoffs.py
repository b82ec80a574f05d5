"""Copies blocks between a rank's paged cache and staging, as each step's orders say."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.kvtransfer.connector.handoffs.block_copies import BlockCopies, LayerRuns, Run
from baton.kvtransfer.connector.handoffs.cpu_device_copies import CpuDeviceCopies
from baton.kvtransfer.connector.handoffs.cuda_device_copies import CudaDeviceCopies
from baton.kvtransfer.connector.handoffs.handoff_step import HandoffStep, LoadReport, Save
from baton.kvtransfer.connector.handoffs.notifier import Notifier, NotifierThread, StagedFrame
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache
from baton.kvtransfer.connector.handoffs.rank_loads import RankLoads
from baton.kvtransfer.engine_port import EnginePort, split_blocks
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.pipeline_stages import PipelineStage
from baton.runtime.kv.kv_groups import KvGroup

# Threads that verify loads: one computes checksums of some 7 GB/s, and a bus brings 50. A send uses
# one thread for them: more took the interpreter lock from the model's launches too often.
_NUM_THREADS = 8

logger = logging.getLogger(__name__)


def open_copies(cache: PagedCache, staging: torch.Tensor) -> BlockCopies:
    """Returns the copies for the device that holds the cache.

    Args:
        cache: One rank's cache.
        staging: The segment, as bytes.

    Raises:
        ValueError: Baton cannot copy from this kind of device.
    """
    if cache.device.type == "cpu":
        return CpuDeviceCopies(cache, staging)
    if cache.device.type == "cuda":
        return CudaDeviceCopies(cache, staging)
    raise ValueError(f"the cache is on {cache.device}; Baton hands over from CPUs and CUDA GPUs")


@dataclass(frozen=True, slots=True)
class _Piece:
    """The blocks of one frame per layer of a save.

    Attributes:
        save: The save that the blocks belong to.
        begin: Index of the first block among all blocks of its table that the step saves.
        first_block: Index of the first block within the handoff.
        num_blocks: Number of blocks in the frame.
        last: True if this is the save's last piece.
    """

    save: Save
    begin: int
    first_block: int
    num_blocks: int
    last: bool


@dataclass(slots=True)
class _NextGather:
    """Small pieces of one or several layers that go into one gather.

    Attributes:
        runs: The blocks to gather, for each batch of pieces of a layer.
        pieces: All pieces.
        frames: The frame of each piece.
        num_bytes: Bytes of all pieces.
    """

    runs: list[LayerRuns] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    frames: list[StagedFrame] = field(default_factory=list)
    num_bytes: int = 0


class RankHandoffs:
    """Carries out HandoffScheduler's orders in one rank; the connector owns it.

    Args:
        socket_path: Control socket of the transfer service.
        port: This thread's connection to that service.
        rank: Tensor-parallel rank.
        layout: Layout of the KV cache of all ranks.
        stage: Pipeline stage of the rank; None: the only one.
    """

    def __init__(
        self,
        socket_path: str,
        port: EnginePort,
        rank: int,
        layout: KvLayout,
        stage: PipelineStage | None = None,
    ) -> None:
        self._socket_path, self._port = socket_path, port
        self._layout, self._stage = layout, stage or PipelineStage(0, range(layout.num_all_layers))
        # When several ranks hold the same shard, the first one sends it, and each one loads it.
        self._shard, replica = divmod(rank, layout.num_replicas)
        self._is_sender = replica == 0
        self._cache: PagedCache | None = None
        # For the step under way: its saves; each table's blocks in the form the copies take; and
        # for each group of layers the frames of one layer, in batches of which each goes into one
        # gather.
        self._saves: list[Save] = []
        self._blocks: dict[int, Any] = {}
        self._batches: dict[KvGroup, list[list[_Piece]]] = {}
        self._held = _NextGather()
        # Incomplete handoffs of which this rank sends nothing more.
        self._given_up: set[bytes] = set()
        # Layers, by the engine's names, whose blocks this step has not gathered yet.
        self._unsaved: dict[str, None] = {}

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the rank's caches, in the order of its stage's layers.

        Raises:
            ValueError: Their layout is not the fingerprint's.
        """
        self._cache = PagedCache(kv_caches, self._layout, self._stage.layers)
        if self._cache.device.type == "cpu":
            allow_matrix_unit()
        self._port.prefault()
        staging = torch.frombuffer(self._port.memory, dtype=torch.uint8)
        self._copies: BlockCopies = open_copies(self._cache, staging)
        # Wait for copies and compute checksums.
        self._threads = ThreadPoolExecutor(
            _NUM_THREADS, "baton-copies", initializer=self._copies.bind_thread
        )
        layers = self._stage.layers
        self._loads = RankLoads(
            self._port, self._layout, self._shard, layers, self._copies, self._threads
        )
        self._notifier: Notifier | NotifierThread
        if self._copies.finishes_at_once:
            self._notifier = Notifier(self._port, self._shard, self._stage.index)
        else:
            # Only one thread may use a port.
            port = EnginePort(self._socket_path)
            self._notifier = NotifierThread(
                Notifier(port, self._shard, self._stage.index),
                port,
                prepare=self._copies.bind_thread,
            )

    @property
    def alive(self) -> bool:
        """False once this rank has lost the transfer service; it then hands over nothing."""
        return self._port.alive and self._notifier.alive

    def begin_step(self, step: HandoffStep) -> None:
        """Clears wrong blocks and prepares the step's saves."""
        if step.cleared:
            self._copies.clear(step.cleared)
        if not self._is_sender:
            return
        for handoff_id in step.ended:
            self._given_up.discard(handoff_id)
            self._notifier.abort(handoff_id)
        saves = [save for save in step.saves if save.handoff_id not in self._given_up]
        self._given_up -= {save.handoff_id for save in step.saves if save.last}
        if not saves or not self._notifier.alive:
            return
        self._saves, self._unsaved = saves, dict.fromkeys(self._known_cache.indices)
        for table in self._layout.tables:
            parts = [save.parts[table.table] for save in saves]
            block_ids = [block_id for part in parts for block_id in part.block_ids]
            if block_ids:
                self._blocks[table.table] = self._copies.prepare(block_ids)

    def _batched(self, group: KvGroup, layer: int) -> Iterator[list[_Piece]]:
        """Yields batches of frames that fit into one gather each, to avoid many small copies.

        Args:
            group: A group of layers.
            layer: One of its layers.
        """
        batch: list[_Piece] = []
        begin, most = 0, self._copies.max_blocks(layer)
        room = most
        for save in self._saves:
            part = save.parts[group.table]
            end = part.first_block + len(part.block_ids)
            for first, count in split_blocks(
                part.first_block, len(part.block_ids), group.block_bytes, most * group.block_bytes
            ):
                if batch and count > room:
                    yield batch
                    batch, room = [], most
                batch.append(_Piece(save, begin, first, count, first + count == end))
                begin, room = begin + count, room - count
        if batch:
            yield batch

    def save(self, layer_name: str) -> None:
        """Gathers the step's blocks of one layer, whose kernels have just been launched.

        Layers that use another layer's cache have nothing of their own to gather. A draft may run
        several times in a step: `end_step` gathers its layers.
        """
        if layer_name in self._unsaved:
            layer = self._known_cache.indices[layer_name]
            if not self._known_cache.groups[layer].is_draft:
                self._gather(layer_name, layer)

    def _gather(self, layer_name: str, layer: int) -> None:
        """Gathers the step's blocks of one layer, perhaps together with those of later layers."""
        del self._unsaved[layer_name]
        ends_step, group = not self._unsaved, self._known_cache.groups[layer]
        batches = self._batches_of(group, layer)
        if batches and not self._fits(_num_bytes(batches[0], group)):
            # If handoffs are given up with the earlier layers, this layer is divided again.
            batches = batches if self._gather_held() else self._batches_of(group, layer)
        for batch in batches:
            if not self._hold(batch, group, layer, ends_step=ends_step):
                break
        if ends_step:
            self._gather_held()
            self._notifier.flush()

    def _fits(self, num_bytes: int) -> bool:
        """Returns whether the next gather may take so many bytes more."""
        return self._held.num_bytes + num_bytes <= self._copies.joined_bytes

    def _hold(self, batch: list[_Piece], group: KvGroup, layer: int, *, ends_step: bool) -> bool:
        """Adds a batch to the next gather, and begins each gather that is large enough.

        Args:
            batch: Pieces of one layer.
            group: The layer's group.
            layer: Index of the layer.
            ends_step: Whether this is the step's last layer.

        Returns:
            False if a gather was not possible, and its handoffs are given up.
        """
        num_bytes = _num_bytes(batch, group)
        if not self._fits(num_bytes) and not self._gather_held():
            return False
        frames = [self._frame(piece, group, layer, ends_step=ends_step) for piece in batch]
        runs = _joined(
            (
                Run(piece.begin, piece.num_blocks, frame.offset)
                for piece, frame in zip(batch, frames, strict=True)
            ),
            group.block_bytes,
        )
        held = self._held
        held.runs.append(LayerRuns(layer, self._blocks[group.table], runs))
        held.pieces += batch
        held.frames += frames
        held.num_bytes += num_bytes
        return held.num_bytes < self._copies.joined_bytes or self._gather_held()

    def _frame(self, piece: _Piece, group: KvGroup, layer: int, *, ends_step: bool) -> StagedFrame:
        """Returns the frame of a piece in one layer."""
        save = piece.save
        offset = self._layout.offset(self._shard, layer, piece.first_block, save.num_blocks)
        return StagedFrame(
            save.handoff_id,
            layer,
            piece.first_block,
            piece.num_blocks,
            save.offset + offset,
            piece.num_blocks * group.block_bytes,
            last=ends_step and piece.last and save.last,
        )

    def _batches_of(self, group: KvGroup, layer: int) -> list[list[_Piece]]:
        if group not in self._batches:
            self._batches[group] = list(self._batched(group, layer))
        return self._batches[group]

    def _gather_held(self) -> bool:
        """Gathers the held pieces; returns False if their handoffs are given up."""
        held, self._held = self._held, _NextGather()
        if not held.runs:
            return True
        try:
            copy = self._copies.gather(held.runs)
        except TimeoutError as error:
            self._give_up(min((piece.save for piece in held.pieces), key=self._saves.index), error)
            return False
        self._notifier.filled(copy, held.frames)
        if self._copies.gathers_wait:
            # A later gather of this step needs the buffer that the notifier's thread frees.
            self._notifier.flush()
        return True

    def _give_up(self, first_save: Save, why: Exception) -> None:
        """Stops the handoffs of the step's saves from one on; the engine goes on.

        Nothing more of these handoffs is written, because their staging may soon belong to others.
        """
        first = self._saves.index(first_save)
        stopped, self._saves = self._saves[first:], self._saves[:first]
        logger.error("%s: this rank gives %d handoffs up", why, len(stopped))
        for save in stopped:
            self._notifier.end_writing(save.handoff_id)
        self._given_up |= {save.handoff_id for save in stopped if not save.last}
        # Batches are made again; prepared blocks are in the order of the saves.
        self._batches.clear()

    def end_step(self) -> None:
        """Finishes the step's gathers after the last kernels have been launched.

        vLLM may give the blocks of a request that has ended or was preempted to another request, in
        a step that it launches before the GPU has begun this one. That step's kernels must come
        after the gathers. They need not come after the copies to staging, which read scratch.

        A CUDA graph of the whole model (vLLM's FULL mode: steps of single tokens, such as the last
        token of a prompt whose other tokens were cached) does not call `save` per layer: this
        method gathers those layers. So it does a draft's, which runs when the step's tokens have
        been sampled: with speculation, vLLM ends the step after that.
        """
        for layer_name in list(self._unsaved):
            self._gather(layer_name, self._known_cache.indices[layer_name])
        if self._blocks:
            self._copies.join_gathers()
        self._saves, self._blocks, self._batches, self._unsaved = [], {}, {}, {}

    def load(self, step: HandoffStep) -> None:
        """Begins the step's loads."""
        self._loads.begin(step.loads)

    def copy_waited(self, most_bytes: int, stream_bytes: int = 0) -> int:
        """Goes on with the loads that requests wait for; see RankLoads."""
        return self._loads.copy_waited(most_bytes, stream_bytes)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads have ended, and those whose loads have failed."""
        return self._loads.take_ended()

    def take_invalid_block_ids(self) -> set[int]:
        """Returns the blocks that the step's own loads failed to fill; waits for these loads."""
        return self._loads.take_invalid_block_ids()

    def take_report(self) -> LoadReport:
        """Returns which loads have failed; call `take_invalid_block_ids` and `take_ended` first."""
        return self._loads.take_report()

    def close(self) -> None:
        """Waits, within bounds, for copies under way, because they read and write staging."""
        if self._cache is not None:
            self._notifier.close()
            self._threads.shutdown()
            self._copies.close()

    @property
    def _known_cache(self) -> PagedCache:
        assert self._cache is not None, "vLLM registers its caches before the first step"
        return self._cache


def _num_bytes(batch: Iterable[_Piece], group: KvGroup) -> int:
    return sum(piece.num_blocks for piece in batch) * group.block_bytes


def _joined(runs: Iterable[Run], block_bytes: int) -> list[Run]:
    """Joins runs that are neighbours both in the prepared block IDs and in staging."""
    joined: list[Run] = []
    for run in runs:
        if joined:
            before = joined[-1]
            num_blocks = before.num_blocks
            end = before.begin + num_blocks, before.offset + num_blocks * block_bytes
            if end == (run.begin, run.offset):
                joined[-1] = Run(before.begin, num_blocks + run.num_blocks, before.offset)
                continue
        joined.append(run)
    return joined


def allow_matrix_unit() -> None:
    """Asks the kernel to let this process use AMX, if the CPU has AMX.

    vLLM's attention uses AMX without asking. Normally oneDNN asks, in the first large matrix
    product. A rank that loads its prompts from handoffs may run attention before any such product,
    and the kernel would kill it.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
