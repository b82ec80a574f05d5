"""How a handoff enters and leaves vLLM: a KVConnectorBase_V1, out of tree.

vLLM makes one connector beside its scheduler and one in every rank. They share nothing but what the
scheduler's half puts into each step's metadata; both speak to the worker's transfer service, which
moves the bytes.

Sending. In the step that computes them, each layer's finished blocks are gathered into the sender's
staging, which belongs to this handoff alone. Nothing reads the paged cache later, so a preemption
or a freed block cannot put foreign bytes into a handoff. What was gathered stays right when the
request is preempted and computed again, so it is never sent twice.

Receiving. While the handoff is not committed, the scheduler is told to ask again later (the request
waits without blocks). Once it is, it is loaded synchronously by the step that first runs the
request, into blocks the scheduler gave to it. Whatever fails (refused, expired, bytes changed) ends
in the engine computing the prompt itself.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec

from baton.kvtransfer.control import (
    FIRST_EPOCH,
    Claim,
    EnginePort,
    checksum,
    filled_frame,
    split_blocks,
)
from baton.kvtransfer.layout import KvLayout
from baton.runtime import affinity
from baton.runtime.orphans import end_with_parent
from baton.v1 import kv_transfer_pb2

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# Handoffs that failed before their request came; the oldest are forgotten (their requests then wait
# for their deadline).
_MAX_ENDED_EARLY = 4096


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks to gather in this step, of every layer.

    Attributes:
        offset: of the handoff's bytes in the segment.
        first_block: index within the handoff of block_ids[0].
        num_blocks: of the whole handoff.
        block_ids: in the engine's cache.
        last: whether the handoff is complete with them.
    """

    handoff_id: bytes
    offset: int
    first_block: int
    num_blocks: int
    block_ids: list[int]
    last: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to copy from committed staging in this step, of every layer.

    Attributes:
        num_tokens: that the handoff must hold.
        first_block: index within the handoff of block_ids[0].
        block_ids: in the engine's cache.
    """

    handoff_id: bytes
    num_tokens: int
    first_block: int
    block_ids: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's half asks of the ranks in one step."""

    pushes: list[Push] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


@dataclass(slots=True)
class _Send:
    handoff_id: bytes
    offset: int
    num_tokens: int
    num_blocks_pushed: int = 0


@dataclass(slots=True)
class _Receive:
    """`over`: loaded, given up, or nothing to load; the connector has no more to say."""

    handoff_id: bytes
    num_tokens: int
    deadline: float
    over: bool = False


class _SchedulerHalf:
    """Decides what is pushed and loaded, and when. Lives in vLLM's engine core process."""

    def __init__(self, port: EnginePort, layout: KvLayout) -> None:
        self._port, self._layout = port, layout
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        # Of handoffs that have not ended; the transfer service bounds how many there can be.
        self._committed: set[bytes] = set()
        self._ended_early: OrderedDict[bytes, None] = OrderedDict()
        self._loads: list[Load] = []
        # Loads of the step under way, each with every block the request has from there on.
        self._loading: list[tuple[Load, list[int]]] = []
        port.subscribe()

    def add(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if (send := params.get("baton_send")) is not None:
            self._sends[request.request_id] = _Send(
                bytes.fromhex(send["handoff_id"]), send["offset"], send["num_tokens"]
            )
        if (receive := params.get("baton_receive")) is not None:
            self._receives[request.request_id] = _Receive(
                bytes.fromhex(receive["handoff_id"]),
                receive["num_tokens"],
                time.monotonic() + receive["timeout_s"],
            )

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond those computed here; None while that is not known."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.over:
            return 0
        self._poll()
        if receive.handoff_id in self._committed:
            return max(0, self._usable_tokens(receive, request) - num_computed_tokens)
        if not (
            receive.handoff_id in self._ended_early
            or not self._port.alive
            or time.monotonic() >= receive.deadline
        ):
            return None
        self._end(receive)
        return 0

    @staticmethod
    def _usable_tokens(receive: _Receive, request: Request) -> int:
        # The engine computes at least one token to have something to sample from.
        return min(receive.num_tokens, int(request.num_tokens) - 1)

    def allocated(self, request: Request, block_ids: list[int], num_loaded_tokens: int) -> None:
        """The request runs in this step; it loads so many tokens."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.over:
            return
        if num_loaded_tokens == 0:
            self._end(receive)
            return
        receive.over = True
        self._committed.discard(receive.handoff_id)
        usable = self._usable_tokens(receive, request)
        first = (usable - num_loaded_tokens) // self._layout.block_size_tokens
        last = self._layout.num_blocks(usable)
        load = Load(receive.handoff_id, receive.num_tokens, first, block_ids[first:last])
        self._loads.append(load)
        self._loading.append((load, block_ids[first:]))

    def untrusted_block_ids(self, invalid_block_ids: set[int]) -> set[int]:
        """After a step: blocks whose content must not be found through the prefix cache.

        vLLM enters blocks into its prefix cache when it allocates them, before a load has filled
        them, and takes out only those of requests that still exist when the load has failed.
        """
        untrusted: set[int] = set()
        for load, block_ids in self._loading:
            if not invalid_block_ids.isdisjoint(load.block_ids):
                untrusted.update(block_ids)
        self._loading.clear()
        return untrusted

    def step(self, output: SchedulerOutput) -> StepMetadata:
        metadata = StepMetadata(list(self._pushes(output)), self._loads)
        self._loads = []
        return metadata

    def _pushes(self, output: SchedulerOutput) -> Iterator[Push]:
        if not self._sends:
            return
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if (send := self._sends.get(request_id)) is None:
                continue
            num_blocks = self._layout.num_blocks(send.num_tokens)
            num_tokens = computed[request_id] + num_scheduled
            # Blocks from the prefix cache never pass through the model: they go with the first.
            num_ready = (
                num_blocks
                if num_tokens >= send.num_tokens
                else num_tokens // self._layout.block_size_tokens
            )
            if num_ready <= send.num_blocks_pushed:
                continue
            first, send.num_blocks_pushed = send.num_blocks_pushed, num_ready
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
            yield Push(
                send.handoff_id,
                send.offset,
                first,
                num_blocks,
                list(block_ids[first:num_ready]),
                last=num_ready == num_blocks,
            )

    def finished(self, request: Request) -> None:
        """No rank touches the request's staging after this."""
        if (send := self._sends.pop(request.request_id, None)) is not None and (
            send.num_blocks_pushed < self._layout.num_blocks(send.num_tokens)
        ):
            self._port.abort_send(send.handoff_id)
        receive = self._receives.pop(request.request_id, None)
        if receive is not None and not receive.over:
            self._end(receive)

    def _end(self, receive: _Receive) -> None:
        receive.over = True
        self._committed.discard(receive.handoff_id)
        self._ended_early.pop(receive.handoff_id, None)
        self._port.release(receive.handoff_id, all_ranks=True)

    def _poll(self) -> None:
        for state in self._port.poll():
            if state.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED:
                self._committed.add(state.handoff_id)
            else:
                self._committed.discard(state.handoff_id)
                if state.state == kv_transfer_pb2.HANDOFF_STATE_FAILED:
                    self._ended_early[state.handoff_id] = None
                    if len(self._ended_early) > _MAX_ENDED_EARLY:
                        self._ended_early.popitem(last=False)


def _runs(block_ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring blocks, each one plain copy: (index in block_ids, first id, length)."""
    begin = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield begin, block_ids[begin], index - begin
            begin = index


class _RankHalf:
    """Copies between the paged cache and staging. Lives in a vLLM rank."""

    def __init__(self, port: EnginePort, layout: KvLayout) -> None:
        self._port, self._layout = port, layout
        self._rank = get_tensor_model_parallel_rank()
        self._staging = torch.frombuffer(port.memory, dtype=torch.uint8)
        self._layers: dict[str, int] = {}
        # Per layer: [num_blocks, block_bytes], a view of the engine's cache.
        self._caches: list[torch.Tensor] = []
        self._invalid_block_ids: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError when the cache is not laid out as the worker announced."""
        layout = self._layout
        if len(kv_caches) != layout.num_layers:
            raise ValueError(
                f"the cache has {len(kv_caches)} layers; announced {layout.num_layers}"
            )
        for name, cache in kv_caches.items():
            num_bytes = cache[0].numel() * cache.element_size()
            if num_bytes != layout.block_bytes or not cache.is_contiguous():
                raise ValueError(
                    f"the cache of {name} has shape {list(cache.shape)}, strides {cache.stride()} "
                    f"and {num_bytes} bytes per block; Baton needs contiguous blocks of "
                    f"{layout.block_bytes} bytes"
                )
            self._layers[name] = len(self._caches)
            self._caches.append(cache.view(torch.uint8).view(cache.shape[0], -1))

    def load(self, metadata: StepMetadata) -> None:
        for load in metadata.loads:
            claimed = self._port.claim(load.handoff_id, self._rank)
            if claimed is not None and claimed.num_tokens == load.num_tokens:
                self._copy_in(load, claimed)
            else:
                self._invalid_block_ids.update(load.block_ids)
            self._port.release(load.handoff_id, self._rank)

    def _copy_in(self, load: Load, claimed: Claim) -> None:
        layout, num_blocks = self._layout, claimed.num_blocks
        last = load.first_block + len(load.block_ids)
        for layer, cache in enumerate(self._caches):
            start = claimed.offset + (layer * num_blocks + load.first_block) * layout.block_bytes
            rows = self._rows(start, len(load.block_ids))
            for at, block_id, count in _runs(load.block_ids):
                cache[block_id : block_id + count].copy_(rows[at : at + count])
        # Checked end to end from the sender's cache, and after the copy: staging that is right now
        # was right while it was copied.
        for frame in claimed.frames:
            first, end = frame.first_block, frame.first_block + frame.num_blocks
            if end <= load.first_block or first >= last:
                continue
            start = claimed.offset + (frame.layer * num_blocks + first) * layout.block_bytes
            size = frame.num_blocks * layout.block_bytes
            if checksum(self._port.memory[start : start + size]) != frame.checksum:
                self._invalid_block_ids.update(
                    load.block_ids[max(0, first - load.first_block) : end - load.first_block]
                )

    def save(self, metadata: StepMetadata, layer_name: str) -> None:
        if not metadata.pushes:
            return
        layer, layout = self._layers[layer_name], self._layout
        frames = []
        for push in metadata.pushes:
            for first, count in split_blocks(
                push.first_block, len(push.block_ids), layout.block_bytes
            ):
                begin = first - push.first_block
                start = push.offset + layout.offset(self._rank, layer, first, push.num_blocks)
                self._gather(layer, push.block_ids[begin : begin + count], start)
                complete = layer == layout.num_layers - 1 and first + count == push.num_blocks
                frames.append(
                    filled_frame(
                        push.handoff_id,
                        FIRST_EPOCH,
                        self._rank,
                        layer,
                        first,
                        count,
                        self._port.memory[start : start + count * layout.block_bytes],
                        last=push.last and complete,
                    )
                )
        self._port.send_frames(frames)

    def _gather(self, layer: int, block_ids: list[int], start: int) -> None:
        cache, rows = self._caches[layer], self._rows(start, len(block_ids))
        for at, block_id, count in _runs(block_ids):
            rows[at : at + count].copy_(cache[block_id : block_id + count])

    def _rows(self, start: int, num_blocks: int) -> torch.Tensor:
        size = num_blocks * self._layout.block_bytes
        return self._staging[start : start + size].view(num_blocks, -1)

    def take_invalid_block_ids(self) -> set[int]:
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid


class BatonConnector(KVConnectorBase_V1):
    """The class vLLM loads; each method belongs to one half.

    Raises:
        ValueError: the model's cache is not one group of full attention.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
            raise ValueError(
                f"model {vllm_config.model_config.model} keeps {', '.join(kinds)} caches; Baton "
                "hands over one group of full attention only: serve it with plain vLLM"
            )
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._layout = KvLayout(**extra["layout"])
        self._port = EnginePort(extra["socket"])
        self._scheduler: _SchedulerHalf | None = None
        self._ranks: _RankHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            # vLLM's engine core outlives a killed worker otherwise, and with it the ranks.
            if (worker := multiprocessing.parent_process()) is not None and worker.pid is not None:
                end_with_parent(worker.pid)
            # vLLM's scheduler spins while its ranks compute.
            affinity.keep_off(extra["rank_cpus"])
            self._scheduler = _SchedulerHalf(self._port, self._layout)
        else:
            self._ranks = _RankHalf(self._port, self._layout)

    @property
    def requires_kv_delivery(self) -> bool:
        # A push that a preemption cuts short costs the receiver a recompute, not the request.
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # save_kv_layer must run between the layers, which a full graph would swallow.
        return True

    def shutdown(self) -> None:
        self._port.close()

    # ---- ranks

    @property
    def _rank_half(self) -> _RankHalf:
        assert self._ranks is not None, "vLLM called a rank's method beside the scheduler"
        return self._ranks

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank_half.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._rank_half.load(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        self._rank_half.save(self._metadata(), layer_name)

    def wait_for_save(self) -> None:
        return

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank_half.take_invalid_block_ids()

    # ---- scheduler

    @property
    def _scheduler_half(self) -> _SchedulerHalf:
        assert self._scheduler is not None, "vLLM called the scheduler's method in a rank"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        self._scheduler_half.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_half.num_loadable_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_half.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler_half.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        invalid = connector_output.invalid_block_ids
        if untrusted := self._scheduler_half.untrusted_block_ids(invalid):
            assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
            self._kv_cache_manager.evict_blocks(untrusted)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_half.finished(request)
        return False, None
