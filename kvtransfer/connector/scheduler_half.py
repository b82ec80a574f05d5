"""Which handoffs an engine pushes and loads in which step; beside vLLM's scheduler."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from baton.kvtransfer.connector.early_loads import EARLY_TOKENS, PREFIX_GONE, EarlyLoads
from baton.kvtransfer.connector.handoff_step import HandoffStep, Load, LoadReport, Push
from baton.kvtransfer.connector.step_work import STEP_WORK, StepCounter
from baton.kvtransfer.control import EnginePort
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.notes import NoteReader
from baton.kvtransfer.receiving import LONG_HELD_S
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
# Why nothing is loaded of a handoff, if anything was to be.
_LOADED = kv_transfer_pb2.REFUSAL_REASON_UNSPECIFIED
_EXPIRED = kv_transfer_pb2.REFUSAL_REASON_EXPIRED
_CANCELLED = kv_transfer_pb2.REFUSAL_REASON_CANCELLED
# Of SchedulerStats.kv_connector_stats: this engine has lost its transfer service for good.
CUT_OFF = "baton_cut_off"
# In place of tokens that are not known yet.
_NO_TOKEN = 0
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
        num_coming: it waits to be told with which tokens it goes on, so many; None: it does not.
        early_tried: something had come of it, and was loaded early or never will be.
        over: loaded, given up, or nothing to load; the connector has no more to say.
    """

    request: Request
    handoff_id: bytes
    num_tokens: int
    skip_tokens: int
    timeout_s: float
    deadline: float
    num_coming: int | None
    early_tried: bool = False
    over: bool = False

    @property
    def announced(self) -> bool:
        return self.num_coming is not None


class _Commit(NamedTuple):
    """Of a handoff.

    Attributes:
        heard_at: by time.monotonic.
        claims: of each shard, where they were claimed ahead.
    """

    heard_at: float
    claims: list[bytes]


class _Loading(NamedTuple):
    """What a step loads.

    Attributes:
        block_ids: that are filled.
        affected: every block whose content is wrong if one of those is.
    """

    block_ids: Collection[int]
    affected: Collection[int]


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A step that was scheduled and whose output has not come.

    Attributes:
        work: what it computes, as the latency model counts; None when it computes nothing.
        loads: handoffs that it loads.
        releases: handoffs of which nothing is read once it has finished, and why nothing was.
        takers: whose loads take over early ones, and how many tokens they load; by handoff.
    """

    work: list[float] | None
    loads: list[bytes]
    loading: list[_Loading]
    releases: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType]
    takers: dict[bytes, tuple[str, int]]


class SchedulerHalf:
    """Decides what is pushed and loaded, and when.

    Args:
        port: this thread's, to the transfer service.
        notes: from the worker's main process.
        layout: of the cache.
    """

    def __init__(self, port: EnginePort, notes: NoteReader, layout: KvLayout) -> None:
        self._port, self._notes, self._layout = port, notes, layout
        # All that have not ended.
        self._requests: dict[str, Request] = {}
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        # Of handoffs that have not ended; the transfer service bounds how many there can be.
        self._committed: dict[bytes, _Commit] = {}
        # Of those some bytes are here.
        self._arrived: set[bytes] = set()
        self._ended_early: OrderedDict[bytes, None] = OrderedDict()
        # First tokens of requests that are not here yet, by handoff.
        self._tokens_ahead: OrderedDict[bytes, list[int]] = OrderedDict()
        self._early: EarlyLoads | None = None
        self._early_tokens: dict[str, int] = {}
        # Loads of the oldest unfinished step that failed in some rank, and why.
        self._failed_loads: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = {}
        # Requests that wait to be taken back.
        self._gone: set[str] = set()
        # A rank has lost the service.
        self._is_cut_off = False
        # Requests given to the engine, as it has seen them and as their giver has counted.
        self._num_added = self._num_submitted = 0
        # The last step computed nothing and none is under way: the engine has nothing to do but
        # wait for handoffs, which it does once per step.
        self._may_wait = False
        # The request that was asked about last may run, and has not got blocks.
        self._wants_blocks = False
        # Of the step that is made next.
        self._loads: list[Load] = []
        self._takers: dict[bytes, tuple[str, int]] = {}
        self._ended_sends: list[bytes] = []
        self._releases: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = {}
        self._loading: list[_Loading] = []
        # vLLM may schedule a step while another runs, and finishes them in order.
        self._unfinished: deque[_Unfinished] = deque()
        self._counter = StepCounter()
        port.subscribe()

    def close(self) -> None:
        self._notes.close()

    def bind(self, pool: BlockPool) -> None:
        """Before the first request."""
        self._pool = pool
        self._early = EarlyLoads(self._layout, pool)

    def add(self, request: Request) -> None:
        self._num_added += 1
        self._requests[request.request_id] = request
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
                told["num_coming"],
            )
            if receive.num_coming is not None:
                # Without block hashes: whole blocks of the prompt can be found before they come.
                self._extend(request, [_NO_TOKEN] * receive.num_coming)
                self._port.claim_ahead(receive.handoff_id)
                self._early_loads.keep(receive.handoff_id, request, receive.skip_tokens)
            if (tokens := self._tokens_ahead.pop(receive.handoff_id, None)) is not None:
                self._continue(receive, tokens)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond those computed here; None while that is not known."""
        num_tokens = self._num_loadable_tokens(request, num_computed_tokens)
        self._wants_blocks = num_tokens is not None
        return num_tokens

    def _num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        receive = self._receives.get(request.request_id)
        if receive is None or receive.over:
            return 0
        self._poll()
        if self._may_wait and receive.announced and not self._early_loads.has_work:
            self._may_wait = False
            if self._num_added >= self._num_submitted:
                self._port.wait(_IDLE_WAIT_S, self._notes.sockets)
                self._poll()
        self._load_early(receive, num_computed_tokens)
        if receive.announced:
            return None
        if num_computed_tokens < receive.skip_tokens:
            # What it leaves out is not in the prefix cache any more: it is to be given back.
            self._gone.add(request.request_id)
            return None
        if receive.handoff_id in self._committed:
            self._early_loads.offer(receive.handoff_id, num_computed_tokens)
            return max(0, self._usable_tokens(receive, request) - num_computed_tokens)
        if receive.handoff_id not in self._ended_early and self._port.alive:
            if time.monotonic() < receive.deadline:
                return None
            self._port.release(receive.handoff_id, all_ranks=True, not_loaded=_EXPIRED)
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
            )

    def _continue(self, receive: _Receive, token_ids: Sequence[int]) -> None:
        """The tokens that a prompt was announced without, as vLLM's streaming sessions add some.

        (Scheduler._update_request_as_session of vllm/v1/core/sched/scheduler.py.)
        """
        request = receive.request
        assert request.prompt_token_ids is not None
        assert len(token_ids) == receive.num_coming, "the engine tells what it announced"
        receive.num_coming, receive.deadline = None, time.monotonic() + receive.timeout_s
        num_known = request.num_tokens - len(token_ids)
        del request._all_token_ids[num_known:], request.prompt_token_ids[num_known:]
        self._extend(request, token_ids)
        request.update_block_hashes()

    @staticmethod
    def _extend(request: Request, token_ids: Sequence[int]) -> None:
        assert request.prompt_token_ids is not None
        request._all_token_ids.extend(token_ids)
        request.prompt_token_ids.extend(token_ids)
        request.num_prompt_tokens = len(request.prompt_token_ids)

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
        self._wants_blocks = False
        self._follow(block_ids)
        receive = self._receives.get(request.request_id)
        if receive is None or receive.over:
            return
        if num_loaded_tokens == 0:
            self._end(receive)
            return
        usable, size = self._usable_tokens(receive, request), self._layout.block_size_tokens
        first = (usable - num_loaded_tokens) // size
        wanted = block_ids[first : self._layout.num_blocks(usable)]
        is_early = self._early_loads.take(receive.handoff_id, wanted)
        if is_early:
            self._takers[receive.handoff_id] = request.request_id, num_loaded_tokens
        receive.over = True
        commit = self._committed.pop(receive.handoff_id, None)
        if commit is not None and commit.claims:
            self._begin_claimed(receive.handoff_id, commit)
        load = Load(
            receive.handoff_id,
            receive.num_tokens - receive.skip_tokens,
            first - receive.skip_tokens // size,
            wanted,
            commit.claims if commit is not None else [],
            is_early,
        )
        self._loads.append(load)
        self._loading.append(_Loading(load.block_ids, block_ids[first:]))

    def _begin_claimed(self, handoff_id: bytes, commit: _Commit) -> None:
        """The ranks load what was claimed ahead for them."""
        if time.monotonic() - commit.heard_at >= LONG_HELD_S:
            self._port.claim_ahead(handoff_id)

    def distrust(self, invalid_block_ids: set[int]) -> set[int]:
        """After the oldest step: blocks whose content must not be found through the prefix cache.

        vLLM enters blocks into its prefix cache when it allocates them, before a load has filled
        them, and takes out only those of requests that still run when the load has failed. Whoever
        gets them next finds nothing in them either: what was computed from wrong bytes may be no
        numbers, and kernels multiply what is behind a block's last token by nothing.
        """
        untrusted: set[int] = set()
        for step in self._unfinished:
            for loading in step.loading:
                if not (invalid_block_ids | untrusted).isdisjoint(loading.block_ids):
                    untrusted.update(loading.affected)
        if untrusted:
            self._early_loads.spoil(untrusted)
        return untrusted

    def _follow(self, block_ids: Sequence[int]) -> None:
        """What a request computes after blocks that are being filled is wrong if they are."""
        for loading in self._unverified():
            filled = set[int]().union(*(one.affected for one in loading))
            found = [at for at, block_id in enumerate(block_ids) if block_id in filled]
            if found:
                loading.append(_Loading([block_ids[at] for at in found], block_ids[found[0] :]))

    def _unverified(self) -> list[list[_Loading]]:
        """Of each step that loads something and has not finished, the one being made included."""
        steps = [self._loading, *(step.loading for step in self._unfinished)]
        return [loading for loading in steps if loading]

    def _unname(self, preempted_ids: Collection[str]) -> None:
        """Takes out of the prefix cache what this very schedule gave, and took back again.

        vLLM names a request's blocks when it allocates them, and may preempt it in favour of one
        further down its list: then nobody computes them (vllm-project/vllm#43569).
        """
        size = self._layout.block_size_tokens
        for request_id in preempted_ids:
            if (request := self._requests.get(request_id)) is None:
                continue
            # Drafts that were refused are not among its tokens, and its last has not been run.
            num_computed = min(self._counter.num_computed(request_id), request.num_tokens - 1)
            for name in request.block_hashes[num_computed // size :]:
                while found := self._pool.get_cached_block(name, [0]):
                    self._pool.evict_blocks({found[0].block_id})

    def step(self, output: SchedulerOutput) -> HandoffStep:
        self._unname(output.preempted_req_ids)
        if self._wants_blocks or output.preempted_req_ids:
            # Whoever may run goes before what may come of a handoff. (While the queue's head does
            # not fit nobody behind it is asked, so none of these would get to run either.)
            self._early_loads.yield_blocks()
        self._wants_blocks = False
        step = HandoffStep(
            list(self._pushes(output)),
            self._loads,
            self._ended_sends,
            self._early_loads.take_work(),
        )
        work = self._counter.count(output)
        self._unfinished.append(
            _Unfinished(
                work,
                [load.handoff_id for load in step.loads],
                self._loading,
                self._releases,
                self._takers,
            )
        )
        self._loads, self._takers, self._ended_sends = [], {}, []
        self._loading, self._releases = [], {}
        self._may_wait = all(one.work is None for one in self._unfinished)
        return step

    def finish_step(self) -> dict[str, Any]:
        """What the oldest unfinished step has to tell Baton's engine.

        Nothing of its work when it loaded handoffs, whose time is not the model's, or computed
        nothing.
        """
        told: dict[str, Any] = {}
        if self._unfinished:
            step = self._unfinished.popleft()
            if step.work is not None and not step.loads:
                told[STEP_WORK] = step.work
            # With the next step, and vLLM makes one: what follows from the end of a handoff, in
            # four processes, would hold up the tokens of this one. It may be under way already, and
            # the last: made for a request that was taken back while this one ran.
            following = self._unfinished[0].releases if self._unfinished else self._releases
            following |= dict.fromkeys(step.loads, _LOADED) | self._failed_loads
            self._failed_loads = {}
            for handoff_id, not_loaded in step.releases.items():
                self._port.release(handoff_id, all_ranks=True, not_loaded=not_loaded)
        if self._early is not None:
            self._early.clear_spoilt()
        if self._early_tokens:
            told[EARLY_TOKENS], self._early_tokens = self._early_tokens, {}
        if self._gone:
            told[PREFIX_GONE], self._gone = list(self._gone), set()
        if self._is_cut_off or not self._port.alive:
            told[CUT_OFF] = True
        if self._receives:
            # What came while the step ran is copied by the next, whoever that asks about.
            self._poll()
        return told

    def _pushes(self, output: SchedulerOutput) -> Iterator[Push]:
        if not self._sends:
            return
        # Whoever gets what is sent takes it for right: of a load that is known when its step ends.
        doubtful = {
            block_id
            for loading in self._unverified()
            for one in loading
            for block_id in one.affected
        }
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
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
            if not doubtful.isdisjoint(block_ids):
                self._give_up(self._sends.pop(request_id))
                continue
            first, send.next_block = send.next_block, num_ready
            yield Push(
                send.handoff_id,
                send.offset,
                first - send.skip_blocks,
                num_blocks - send.skip_blocks,
                list(block_ids[first:num_ready]),
                last=num_ready == num_blocks,
            )

    def finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """The ranks get nothing more of the request, whose blocks are these.

        What they were given before may still be under way: a step that runs ahead, copies that
        follow a step. So they say themselves when they have stopped writing, from the next step on
        (vLLM makes one after every end of a request).
        """
        self._counter.forget(request.request_id)
        self._requests.pop(request.request_id, None)
        self._follow(block_ids)
        if (send := self._sends.pop(request.request_id, None)) is not None and (
            send.next_block < self._layout.num_blocks(send.num_tokens)
        ):
            self._give_up(send)
        receive = self._receives.pop(request.request_id, None)
        if receive is not None and not receive.over:
            self._end(receive, _CANCELLED)

    def _give_up(self, send: _Send) -> None:
        self._port.abort_send(send.handoff_id)
        self._ended_sends.append(send.handoff_id)

    def reported(self, report: LoadReport, *, is_cut_off: bool = False) -> None:
        """What the ranks say of the oldest unfinished step.

        Args:
            report: of its loads.
            is_cut_off: one of them has lost the transfer service.
        """
        self._is_cut_off = self._is_cut_off or is_cut_off
        self._failed_loads = report.failed
        takers = self._unfinished[0].takers if self._unfinished else {}
        for handoff_id, num_blocks in report.num_early_blocks.items():
            if (taker := takers.get(handoff_id)) is not None and num_blocks:
                request_id, num_tokens = taker
                num_early = num_blocks * self._layout.block_size_tokens
                self._early_tokens[request_id] = min(num_tokens, num_early)

    def _end(
        self,
        receive: _Receive,
        not_loaded: kv_transfer_pb2.RefusalReason.ValueType = _LOADED,
    ) -> None:
        """Nothing more is loaded of it after the step that is made next."""
        receive.over = True
        self._early_loads.drop(receive.handoff_id)
        self._committed.pop(receive.handoff_id, None)
        self._arrived.discard(receive.handoff_id)
        self._ended_early.pop(receive.handoff_id, None)
        self._releases[receive.handoff_id] = not_loaded

    def _poll(self) -> None:
        for state in self._port.poll():
            handoff_id, claims = state.handoff_id, state.claims
            if committed := state.state == _COMMITTED or bool(claims):
                self._committed[handoff_id] = _Commit(
                    time.monotonic(), [claim.SerializeToString() for claim in claims]
                )
            else:
                self._committed.pop(handoff_id, None)
            if committed or (state.state == _RECEIVING and state.num_bytes_received):
                self._arrived.add(handoff_id)
                self._early_loads.arrived(handoff_id)
            elif state.state in _OVER:
                self._arrived.discard(handoff_id)
                self._early_loads.drop(handoff_id)
            if state.state == kv_transfer_pb2.HANDOFF_STATE_FAILED:
                _remember(self._ended_early, handoff_id, None)
        for note in self._notes.take():
            # Less than before where one has failed before it came here.
            self._num_submitted = note.num_submitted
            if note.handoff_id:
                self._take_tokens(note.handoff_id, list(note.token_ids))

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
