"""Which handoffs an engine pushes and loads in which step; beside vLLM's scheduler."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from baton.kvtransfer.control import EnginePort
from baton.kvtransfer.early_loads import EARLY_TOKENS, EarlyLoads, EarlyReport
from baton.kvtransfer.handoff_step import HandoffStep, Load, Push
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.step_work import STEP_WORK, StepCounter
from baton.v1 import kv_transfer_pb2

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
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


@dataclass(slots=True)
class _Send:
    """A request whose blocks are pushed.

    Attributes:
        num_tokens: of the prompt, from the first.
        skip_blocks: of them, from the first, that are left out.
        next_block: of the prompt, to be pushed next.
    """

    handoff_id: bytes
    offset: int
    num_tokens: int
    skip_blocks: int
    next_block: int


@dataclass(slots=True)
class _Receive:
    """A request that awaits a handoff.

    Attributes:
        num_tokens: of its prompt, from the first, that it has with the handoff.
        skip_tokens: of them, that the handoff leaves out.
        deadline: when to give it up; it counts from when the first token is known.
        announced: it waits to be told with which tokens it goes on.
        early_tried: something had come of it, and was loaded early or never will be.
        num_early_tokens: of its prompt, that an early load has put into the prefix cache.
        over: loaded, given up, or nothing to load; the connector has no more to say.
    """

    request: Request
    handoff_id: bytes
    num_tokens: int
    skip_tokens: int
    timeout_s: float
    deadline: float
    announced: bool
    early_tried: bool = False
    num_early_tokens: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A step that was scheduled and whose output has not come.

    Attributes:
        work: what it computes, as the latency model counts; None when it computes nothing.
        loading: its loads, each with every block the request has from there on.
    """

    work: list[float] | None
    loading: list[tuple[Load, list[int]]]


class SchedulerHalf:
    """Decides what is pushed and loaded, and when.

    Args:
        port: this thread's, to the transfer service.
        layout: of the cache.
    """

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
        # Of the step being scheduled.
        self._loading: list[tuple[Load, list[int]]] = []
        # vLLM may schedule a step while another runs, and finishes them in order.
        self._unfinished: deque[_Unfinished] = deque()
        self._counter = StepCounter()
        port.subscribe()

    def bind(self, pool: BlockPool) -> None:
        """Before the first request."""
        self._early = EarlyLoads(self._layout, pool)

    def add(self, request: Request) -> None:
        self._num_added += 1
        params = request.kv_transfer_params or {}
        if (send := params.get("baton_send")) is not None:
            skip_blocks = send["skip_tokens"] // self._layout.block_size_tokens
            self._sends[request.request_id] = _Send(
                bytes.fromhex(send["handoff_id"]),
                send["offset"],
                send["num_tokens"],
                skip_blocks,
                skip_blocks,
            )
        if (told := params.get("baton_receive")) is not None:
            receive = self._receives[request.request_id] = _Receive(
                request,
                bytes.fromhex(told["handoff_id"]),
                told["num_tokens"],
                told["skip_tokens"],
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
        # What it leaves out is not in the prefix cache, or not any more.
        useless = num_computed_tokens < receive.skip_tokens
        if receive.handoff_id in self._committed and not useless:
            return max(0, self._usable_tokens(receive, request) - num_computed_tokens)
        if not (
            useless
            or receive.handoff_id in self._ended_early
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
        if receive.announced and num_computed_tokens >= receive.skip_tokens:
            self._early_loads.begin(
                receive.handoff_id,
                receive.request,
                receive.num_tokens,
                receive.skip_tokens,
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
        load = Load(
            receive.handoff_id,
            receive.num_tokens - receive.skip_tokens,
            first - receive.skip_tokens // self._layout.block_size_tokens,
            block_ids[first:last],
        )
        self._loads.append(load)
        self._loading.append((load, block_ids[first:]))

    def untrusted_block_ids(self, invalid_block_ids: set[int]) -> set[int]:
        """After the oldest step: blocks whose content must not be found through the prefix cache.

        vLLM enters blocks into its prefix cache when it allocates them, before a load has filled
        them, and takes out only those of requests that still exist when the load has failed.
        """
        untrusted: set[int] = set()
        for load, block_ids in self._unfinished[0].loading if self._unfinished else ():
            if not invalid_block_ids.isdisjoint(load.block_ids):
                untrusted.update(block_ids)
        return untrusted

    def step(self, output: SchedulerOutput) -> HandoffStep:
        if not self._asked and not output.num_scheduled_tokens:
            # The queue's head does not fit, and nobody else is asked: not for these blocks.
            self._early_loads.yield_blocks()
        self._asked = False
        step = HandoffStep(
            list(self._pushes(output)),
            self._loads,
            self._ended_sends,
            self._early_loads.take_work(),
        )
        self._loads, self._ended_sends = [], []
        self._unfinished.append(_Unfinished(self._counter.count(output), self._loading))
        self._loading = []
        self._idle = self._may_wait = all(one.work is None for one in self._unfinished)
        return step

    def finish_step(self) -> dict[str, Any]:
        """What the oldest unfinished step has to tell Baton's engine.

        Nothing of its work when it loaded handoffs, whose time is not the model's, or computed
        nothing.
        """
        told: dict[str, Any] = {}
        if self._unfinished:
            step = self._unfinished.popleft()
            if step.work is not None and not step.loading:
                told[STEP_WORK] = step.work
        if self._early_tokens:
            told[EARLY_TOKENS], self._early_tokens = self._early_tokens, {}
        return told

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
            if num_ready <= send.next_block:
                continue
            first, send.next_block = send.next_block, num_ready
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
            yield Push(
                send.handoff_id,
                send.offset,
                first - send.skip_blocks,
                num_blocks - send.skip_blocks,
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
            send.next_block < self._layout.num_blocks(send.num_tokens)
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
