"""How a handoff enters and leaves vLLM: a KVConnectorBase_V1, out of tree.

vLLM makes one connector beside its scheduler and one in every rank. They share nothing but what the
scheduler's half puts into each step's metadata; both speak to the worker's transfer service, which
moves the bytes.

Sending. In the step that computes them, each layer's finished blocks are gathered into the sender's
staging, which belongs to this handoff alone. Nothing reads the paged cache later (on a GPU: nothing
that the next step's kernels do not wait for), so a preemption or a freed block cannot put foreign
bytes into a handoff. What was gathered stays right when the request is preempted and computed
again, so it is never sent twice.

Receiving. While the handoff is not committed, or the first token not known, the scheduler is told
to ask again later (the request waits without blocks). Meanwhile what arrives is loaded into the
prefix cache (early_loads.py). Then the rest is loaded synchronously by the step that first runs the
request, into blocks the scheduler gave to it. Whatever fails (refused, expired, bytes changed) ends
in the engine computing the prompt itself.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec

from baton.kvtransfer import engine_stages
from baton.kvtransfer.block_copies import BlockCopies, PagedCache, Run, open_copies
from baton.kvtransfer.block_loads import Check, EarlyCopies, copy_in, holds
from baton.kvtransfer.cached_blocks import CACHE_CHANGE, CachedBlocks
from baton.kvtransfer.control import EnginePort, split_blocks
from baton.kvtransfer.early_loads import EARLY_TOKENS, EarlyLoads, EarlyReport, EarlyWork
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.notifier import Filled, Notifier, NotifierThread
from baton.kvtransfer.step_work import STEP_WORK, StepCounter
from baton.runtime import affinity
from baton.runtime.orphans import end_with_parent
from baton.v1 import kv_transfer_pb2

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# Handoffs that failed, or whose first token became known, before their request came; the oldest are
# forgotten (their requests then wait for their deadline, or for their end).
_MAX_AHEAD = 4096
# How long an idle engine waits for news of handoffs at a time. Whoever gives it another request
# says so; whoever takes one back waits this long.
_IDLE_WAIT_S = 0.05
_RECEIVING = kv_transfer_pb2.HANDOFF_STATE_RECEIVING
_COMMITTED = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
_Value = TypeVar("_Value")
_OVER = (kv_transfer_pb2.HANDOFF_STATE_RELEASED, kv_transfer_pb2.HANDOFF_STATE_FAILED)


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
    """What the scheduler's half asks of the ranks in one step.

    Attributes:
        ended: handoffs that were not complete and get no more pushes.
    """

    pushes: list[Push] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    early: EarlyWork = field(default_factory=EarlyWork)


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """What the ranks say to the scheduler's half after a step."""

    early: EarlyReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, RankReport)
        self.early.add(other.early)
        return self


class StepStats(KVConnectorStats):
    """What a step computed and cached, on its way to Baton's engine among vLLM's statistics."""

    def is_empty(self) -> bool:
        return not self.data


@dataclass(slots=True)
class _Send:
    handoff_id: bytes
    offset: int
    num_tokens: int
    num_blocks_pushed: int = 0


@dataclass(slots=True)
class _Receive:
    """A request that awaits a handoff.

    Attributes:
        deadline: when to give it up; it counts from when the first token is known.
        announced: it waits to be told with which tokens it goes on.
        early_tried: something had come of it, and was loaded early or never will be.
        num_early_tokens: of its prompt, that an early load has put into the prefix cache.
        over: loaded, given up, or nothing to load; the connector has no more to say.
    """

    request: Request
    handoff_id: bytes
    num_tokens: int
    timeout_s: float
    deadline: float
    announced: bool
    early_tried: bool = False
    num_early_tokens: int = 0
    over: bool = False


class _SchedulerHalf:
    """Decides what is pushed and loaded, and when. Lives in vLLM's engine core process."""

    def __init__(self, port: EnginePort, layout: KvLayout) -> None:
        self._port, self._layout = port, layout
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        # Of handoffs that have not ended; the transfer service bounds how many there can be.
        self._committed: set[bytes] = set()
        # Of those some bytes are here: the epoch.
        self._arrived: dict[bytes, int] = {}
        self._ended_early: OrderedDict[bytes, None] = OrderedDict()
        # First tokens of requests that are not here yet, by handoff.
        self._tokens_ahead: OrderedDict[bytes, list[int]] = OrderedDict()
        self._early: EarlyLoads | None = None
        self._early_tokens: dict[str, int] = {}
        # Requests given to the engine, as it has seen them and as their giver has counted.
        self._num_added = self._num_submitted = 0
        # The last step computed nothing and none is under way: the engine has nothing to do but
        # wait for handoffs, which it does once per step.
        self._idle = self._may_wait = False
        # Since the last step was scheduled, some request was asked about that awaits a handoff.
        self._asked = False
        self._loads: list[Load] = []
        self._ended_sends: list[bytes] = []
        # Loads of the step being scheduled, each with every block the request has from there on.
        self._loading: list[tuple[Load, list[int]]] = []
        # The same of every step scheduled and not finished.
        self._steps_loading: deque[list[tuple[Load, list[int]]]] = deque()
        # Of steps scheduled and not finished: vLLM may schedule one while another runs, and
        # finishes them in order. None for a step whose time is not the model's.
        self._counter = StepCounter()
        self._works: deque[list[float] | None] = deque()
        self._steps_busy: deque[bool] = deque()
        self._cached = CachedBlocks(layout.block_size_tokens)
        port.subscribe()

    def bind(self, pool: BlockPool) -> None:
        """Before the first request."""
        self._early = EarlyLoads(self._layout, pool)

    def add(self, request: Request) -> None:
        self._num_added += 1
        params = request.kv_transfer_params or {}
        if (send := params.get("baton_send")) is not None:
            self._sends[request.request_id] = _Send(
                bytes.fromhex(send["handoff_id"]), send["offset"], send["num_tokens"]
            )
        if (told := params.get("baton_receive")) is not None:
            receive = self._receives[request.request_id] = _Receive(
                request,
                bytes.fromhex(told["handoff_id"]),
                told["num_tokens"],
                told["timeout_s"],
                time.monotonic() + told["timeout_s"],
                told["announced"],
            )
            if (tokens := self._tokens_ahead.pop(receive.handoff_id, None)) is not None:
                self._continue(receive, tokens)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond those computed here; None while that is not known."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.over:
            return 0
        num_early_tokens, self._asked = receive.num_early_tokens, True
        self._poll()
        if self._may_wait and receive.announced and not self._early_loads.has_work:
            self._may_wait = False
            if self._num_added >= self._num_submitted:
                self._port.wait(_IDLE_WAIT_S)
                self._poll()
        self._load_early(receive, num_computed_tokens)
        if receive.announced:
            return None
        loading = self._early_loads.loading(receive.handoff_id)
        if receive.handoff_id in self._committed and (
            loading or receive.num_early_tokens > num_early_tokens
        ):
            if self._idle and time.monotonic() < receive.deadline:
                # Found in the prefix cache after the next step, which takes no time.
                return None
            # Sooner loaded at once than with the step after the next.
            self._early_loads.drop(receive.handoff_id)
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

    def _load_early(self, receive: _Receive, num_computed_tokens: int) -> None:
        """Begins with what has come of a handoff, once, and only ahead of the first token."""
        if receive.early_tried or receive.handoff_id not in self._arrived:
            return
        receive.early_tried = True
        if receive.announced:
            self._early_loads.begin(
                receive.handoff_id,
                receive.request,
                receive.num_tokens,
                num_computed_tokens,
                self._arrived[receive.handoff_id],
                committed=receive.handoff_id in self._committed,
            )

    def _continue(self, receive: _Receive, token_ids: Sequence[int]) -> None:
        """The tokens that a prompt was announced without, as vLLM's streaming sessions add some.

        (Scheduler._update_request_as_session of vllm/v1/core/sched/scheduler.py.)
        """
        request, receive.announced = receive.request, False
        receive.deadline = time.monotonic() + receive.timeout_s
        assert request.prompt_token_ids is not None
        request._all_token_ids.extend(token_ids)
        request.prompt_token_ids.extend(token_ids)
        request.num_prompt_tokens = len(request.prompt_token_ids)
        request.update_block_hashes()

    @property
    def _early_loads(self) -> EarlyLoads:
        assert self._early is not None, "vLLM binds its block pool before the first request"
        return self._early

    @staticmethod
    def _usable_tokens(receive: _Receive, request: Request) -> int:
        # The engine computes at least one token to have something to sample from.
        return min(receive.num_tokens, int(request.num_tokens) - 1)

    def allocated(self, request: Request, block_ids: list[int], num_loaded_tokens: int) -> None:
        """The request runs in this step; it loads so many tokens."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.over:
            return
        if receive.num_early_tokens:
            self._early_tokens[request.request_id] = receive.num_early_tokens
        if num_loaded_tokens == 0:
            self._end(receive)
            return
        self._early_loads.drop(receive.handoff_id)
        receive.over = True
        self._committed.discard(receive.handoff_id)
        usable = self._usable_tokens(receive, request)
        first = (usable - num_loaded_tokens) // self._layout.block_size_tokens
        last = self._layout.num_blocks(usable)
        load = Load(receive.handoff_id, receive.num_tokens, first, block_ids[first:last])
        self._loads.append(load)
        self._loading.append((load, block_ids[first:]))

    def untrusted_block_ids(self, invalid_block_ids: set[int]) -> set[int]:
        """After the oldest step: blocks whose content must not be found through the prefix cache.

        vLLM enters blocks into its prefix cache when it allocates them, before a load has filled
        them, and takes out only those of requests that still exist when the load has failed.
        """
        untrusted: set[int] = set()
        for load, block_ids in self._steps_loading[0] if self._steps_loading else ():
            if not invalid_block_ids.isdisjoint(load.block_ids):
                untrusted.update(block_ids)
        return untrusted

    def step(self, output: SchedulerOutput) -> StepMetadata:
        if not self._asked and not output.num_scheduled_tokens:
            # The queue's head does not fit, and nobody else is asked: not for these blocks.
            self._early_loads.yield_blocks()
        self._asked = False
        metadata = StepMetadata(
            list(self._pushes(output)),
            self._loads,
            self._ended_sends,
            self._early_loads.take_work(),
        )
        self._loads, self._ended_sends = [], []
        self._steps_loading.append(self._loading)
        self._loading = []
        work = self._counter.count(output)
        self._works.append(None if metadata.loads else work)
        self._steps_busy.append(work is not None)
        self._idle = self._may_wait = not any(self._steps_busy)
        return metadata

    def finish_step(self, events: Sequence[KVCacheEvent]) -> dict[str, Any]:
        """What the oldest unfinished step has to tell Baton's engine.

        Nothing of its work when it loaded handoffs, or computed nothing.

        Args:
            events: of the prefix cache since the last step.
        """
        for event in events:
            match event:
                case BlockStored(group_idx=0):
                    self._cached.stored(
                        event.parent_block_hash,
                        event.block_hashes,
                        event.token_ids,
                        event.extra_keys,
                    )
                case BlockRemoved(group_idx=0):
                    self._cached.removed(event.block_hashes)
                case AllBlocksCleared():
                    self._cached.cleared()
        work = self._works.popleft() if self._works else None
        if self._steps_busy:
            self._steps_busy.popleft()
            self._steps_loading.popleft()
        early, self._early_tokens = self._early_tokens or None, {}
        told = {STEP_WORK: work, CACHE_CHANGE: self._cached.take(), EARLY_TOKENS: early}
        return {name: value for name, value in told.items() if value is not None}

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
        """The ranks get nothing more of the request.

        What they were given before may still be under way: a step that runs ahead, copies that
        follow a step. So they say themselves when they have stopped writing, from the next step on
        (vLLM makes one after every end of a request).
        """
        self._counter.forget(request.request_id)
        if (send := self._sends.pop(request.request_id, None)) is not None and (
            send.num_blocks_pushed < self._layout.num_blocks(send.num_tokens)
        ):
            self._port.abort_send(send.handoff_id)
            self._ended_sends.append(send.handoff_id)
        receive = self._receives.pop(request.request_id, None)
        if receive is not None and not receive.over:
            self._end(receive)

    def reported(self, report: EarlyReport) -> None:
        """What the ranks have done of early loads."""
        self._early_loads.reported(report)
        self._end_early_loads()

    def _end_early_loads(self) -> None:
        for request, num_tokens in self._early_loads.take_complete():
            if (receive := self._receives.get(request.request_id)) is not None:
                receive.num_early_tokens = num_tokens

    def _end(self, receive: _Receive) -> None:
        receive.over = True
        self._early_loads.drop(receive.handoff_id)
        self._committed.discard(receive.handoff_id)
        self._arrived.pop(receive.handoff_id, None)
        self._ended_early.pop(receive.handoff_id, None)
        self._port.release(receive.handoff_id, all_ranks=True)

    def _poll(self) -> None:
        for state in self._port.poll():
            handoff_id, committed = state.handoff_id, state.state == _COMMITTED
            if committed:
                self._committed.add(handoff_id)
            else:
                self._committed.discard(handoff_id)
            if committed or (state.state == _RECEIVING and state.num_bytes_received):
                self._arrived[handoff_id] = state.epoch
                self._early_loads.arrived(handoff_id, state.epoch, committed=committed)
            elif state.state in _OVER:
                self._arrived.pop(handoff_id, None)
                self._early_loads.drop(handoff_id)
            if state.state == kv_transfer_pb2.HANDOFF_STATE_FAILED:
                _remember(self._ended_early, handoff_id, None)
        for note in self._port.take_notes():
            self._num_submitted = max(self._num_submitted, note.num_submitted)
            if note.handoff_id:
                self._take_tokens(note.handoff_id, list(note.token_ids))
        self._end_early_loads()

    def _take_tokens(self, handoff_id: bytes, token_ids: list[int]) -> None:
        for receive in self._receives.values():
            if receive.handoff_id == handoff_id:
                if receive.announced:
                    self._continue(receive, token_ids)
                return
        _remember(self._tokens_ahead, handoff_id, token_ids)


def _remember(ahead: OrderedDict[bytes, _Value], handoff_id: bytes, value: _Value) -> None:
    ahead[handoff_id] = value
    if len(ahead) > _MAX_AHEAD:
        ahead.popitem(last=False)


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


class _RankHalf:
    """Copies between the paged cache and staging. Lives in a vLLM rank."""

    def __init__(self, socket_path: str, port: EnginePort, layout: KvLayout) -> None:
        self._socket_path, self._port, self._layout = socket_path, port, layout
        self._rank = get_tensor_model_parallel_rank()
        self._cache: PagedCache | None = None
        # Of the step under way: every block that is pushed, as the copies take them, and the frames
        # of a layer, those together that one gather takes.
        self._blocks: Any = None
        self._groups: list[list[_Piece]] = []
        # Loads of the step under way whose copies may not have ended.
        self._unchecked: list[tuple[bytes, list[Check]]] = []
        self._invalid_block_ids: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError when the cache is not laid out as the worker announced."""
        self._cache = PagedCache(kv_caches, self._layout)
        if self._cache.device.type == "cpu":
            allow_matrix_unit()
        self._port.prefault()
        staging = torch.frombuffer(self._port.memory, dtype=torch.uint8)
        self._copies: BlockCopies = open_copies(self._cache, staging)
        self._early = EarlyCopies(self._port, self._rank, self._layout, self._copies)
        self._notifier: Notifier | NotifierThread
        if self._copies.finishes_at_once:
            self._notifier = Notifier(self._port, self._rank)
        else:
            # A port is one thread's.
            port = EnginePort(self._socket_path)
            self._notifier = NotifierThread(Notifier(port, self._rank), port)

    def begin_step(self, metadata: StepMetadata) -> None:
        for handoff_id in metadata.ended:
            self._notifier.ended(handoff_id)
        self._groups = list(self._grouped(metadata.pushes)) if self._notifier.alive else []
        if self._groups:
            self._blocks = self._copies.prepare(
                [block_id for push in metadata.pushes for block_id in push.block_ids]
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
        if not self._groups:
            return
        layer, layout = self._known_cache.indices[layer_name], self._layout
        ends_step = layer == layout.num_layers - 1
        for group in self._groups:
            filled = []
            for piece in group:
                push = piece.push
                offset = layout.offset(self._rank, layer, piece.first_block, push.num_blocks)
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
        """
        if self._groups:
            self._copies.join()
        self._groups, self._blocks = [], None

    def load(self, metadata: StepMetadata) -> None:
        for load in metadata.loads:
            claimed = self._port.claim(load.handoff_id, self._rank)
            if claimed is None or claimed.num_tokens != load.num_tokens:
                self._invalid_block_ids.update(load.block_ids)
                self._port.release(load.handoff_id, self._rank)
                continue
            checks, num_copied = [], 0
            for check in copy_in(
                self._copies, self._layout, claimed, load.first_block, load.block_ids
            ):
                num_copied += len(check.block_ids)
                if self._copies.finishes_at_once:
                    # The bytes are still in the core's own cache.
                    self._verify(check)
                else:
                    checks.append(check)
            if num_copied != self._layout.num_layers * len(load.block_ids):
                self._invalid_block_ids.update(load.block_ids)
            if self._copies.finishes_at_once:
                self._port.release(load.handoff_id, self._rank)
            else:
                self._unchecked.append((load.handoff_id, checks))
        if metadata.loads:
            # All layers before the first: a layer's new keys are written to the blocks before the
            # engine asks for the layer (`wait_for_layer_load`), and a scatter that came later would
            # undo that.
            self._copies.join()
        if metadata.early:
            self._early.step(metadata.early)

    def _verify(self, check: Check) -> None:
        if not holds(check, self._port):
            self._invalid_block_ids.update(check.block_ids)

    def take_early_report(self) -> EarlyReport:
        """Of early loads, after the step's model has been launched."""
        return self._early.take_report()

    def take_invalid_block_ids(self) -> set[int]:
        """Of the step under way, whose model has been launched and computes meanwhile.

        One frame is verified while the next is copied. What was computed from wrong bytes is thrown
        away by the engine, which hears of them together with the step's output.
        """
        for handoff_id, checks in self._unchecked:
            for check in checks:
                self._verify(check)
            self._port.release(handoff_id, self._rank)
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


def _is_full_attention(spec: KVCacheSpec) -> bool:
    """Of this type and none below it: those keep latents, windows or sinks.

    Without its hybrid cache manager vLLM calls windowed layers full, and says so in two fields.
    """
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
    )


class BatonConnector(KVConnectorBase_V1):
    """The class vLLM loads; each method belongs to one half.

    Raises:
        ValueError: the model's cache is not one group of full attention.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # The worker refuses by the model's configuration; this is what the cache itself says.
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or not _is_full_attention(specs[0]):
            kinds = sorted({type(spec).__name__ for spec in specs})
            raise ValueError(
                f"model {vllm_config.model_config.model} keeps {', '.join(kinds)} caches; Baton "
                "hands over one group of full attention only: serve it with plain vLLM"
            )
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._layout = KvLayout(**extra["layout"])
        self._port = EnginePort(extra["socket"])
        self._scheduler: _SchedulerHalf | None = None
        self._cache_events: list[KVCacheEvent] = []
        self._ranks: _RankHalf | None = None
        # An engine core outlives a killed worker otherwise, and ranks a killed engine core; told to
        # end, it may wait for ever for a rank that is dead.
        if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
            end_with_parent(parent.pid, signal.SIGKILL)
        if role == KVConnectorRole.SCHEDULER:
            # vLLM's scheduler spins while its ranks compute.
            affinity.keep_off(extra["rank_cpus"])
            self._scheduler = _SchedulerHalf(self._port, self._layout)
        else:
            self._socket_path = extra["socket"]
            self._ranks = _RankHalf(self._socket_path, self._port, self._layout)
            self._note_stage(engine_stages.WEIGHTS)

    @property
    def requires_kv_delivery(self) -> bool:
        # A push that a preemption cuts short costs the receiver a recompute, not the request.
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # save_kv_layer must run between the layers, which a full graph would swallow.
        return True

    def shutdown(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
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

    def _note_stage(self, stage: str) -> None:
        if get_tensor_model_parallel_rank() == 0:
            engine_stages.note(self._socket_path, stage)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank_half.register(kv_caches)
        self._note_stage(engine_stages.KV)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._rank_half.begin_step(self._metadata())

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
        self._rank_half.save(layer_name)

    def wait_for_save(self) -> None:
        self._rank_half.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank_half.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._rank_half.take_early_report()
        return RankReport(report) if report else None

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

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        # Asked of both halves; the scheduler's once for each step, when it has finished.
        if self._scheduler is None:
            return None
        self._cache_events = self._known_cache_manager.take_events()
        return StepStats(self._scheduler.finish_step(self._cache_events))

    def take_events(self) -> Iterable[KVCacheEvent]:
        # Asked next. vLLM publishes them if it was told to (kv_events_config), as if nobody had
        # taken them.
        return self._cache_events

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_half.bind(kv_cache_manager.block_pool)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, RankReport):
            self._scheduler_half.reported(told.early)
        invalid = connector_output.invalid_block_ids
        if untrusted := self._scheduler_half.untrusted_block_ids(invalid):
            self._known_cache_manager.evict_blocks(untrusted)

    @property
    def _known_cache_manager(self) -> KVCacheManager:
        assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
        return self._kv_cache_manager

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_half.finished(request)
        return False, None
