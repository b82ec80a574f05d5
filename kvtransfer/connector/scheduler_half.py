"""Which handoffs an engine pushes and loads in which step; beside vLLM's scheduler."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from baton.kvtransfer.connector.early_loads import EARLY_TOKENS, PREFIX_GONE, EarlyLoads
from baton.kvtransfer.connector.handoff_step import HandoffStep, Load, LoadReport
from baton.kvtransfer.connector.sends import Sends
from baton.kvtransfer.connector.step_work import STEP_WORK, StepCounter
from baton.kvtransfer.connector.unverified import UnverifiedBlocks
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
# Why nothing was loaded of a handoff; unspecified where something was, or nothing was to be.
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
class _Receive:
    """A request that awaits a handoff.

    Attributes:
        request: the engine's.
        handoff_id: of the handoff.
        num_tokens: how many tokens of its prompt, from the first, it has with the handoff.
        skip_tokens: how many of them the handoff leaves out.
        timeout_s: how long it waits for the handoff, from when its first token is known.
        deadline: when that ends, by time.monotonic.
        num_coming: how many tokens it waits to be told, with which it goes on; None: it was told.
        early_tried: whether something had come of the handoff while the request could begin to
            load it early; that is tried once.
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
        """Whether it is here ahead of its first token."""
        return self.num_coming is not None


class _Commit(NamedTuple):
    """A handoff that has come whole.

    Attributes:
        heard_at: when that was heard, by time.monotonic.
        claims: what ranks may read, by shard; empty where that was not claimed ahead.
    """

    heard_at: float
    claims: list[bytes]


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A step that was scheduled and whose output has not come.

    Attributes:
        work: what it computes, as the latency model counts; None when it computes nothing.
        loads: the handoffs that it loads.
        releases: the handoffs that nobody reads once it has finished, and why nobody did.
        takers: by handoff, the request whose load takes over an early one, and how many tokens it
            loads.
    """

    work: list[float] | None
    loads: list[bytes]
    releases: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType]
    takers: dict[bytes, tuple[str, int]]


class SchedulerHalf:
    """Decides which handoffs are pushed and loaded, and in which step.

    vLLM's scheduler calls it, through the connector, and never two methods at a time.

    Args:
        port: this thread's, to the transfer service.
        notes: what the worker's main process tells it.
        layout: of the cache.
    """

    def __init__(self, port: EnginePort, notes: NoteReader, layout: KvLayout) -> None:
        self._port, self._notes, self._layout = port, notes, layout
        # All requests that have not ended.
        self._requests: dict[str, Request] = {}
        self._sends = Sends(port, layout)
        self._receives: dict[str, _Receive] = {}
        # Handoffs that have not ended; the transfer service bounds how many there can be.
        self._committed: dict[bytes, _Commit] = {}
        # Those of which some bytes are here.
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
        # Whether a rank has lost the service.
        self._is_cut_off = False
        # How many requests the engine has seen, and how many its giver says it was given.
        self._num_added = self._num_submitted = 0
        # Whether the last step computed nothing and none is under way: the engine has nothing to do
        # but wait for handoffs, which it does once per step.
        self._may_wait = False
        # Whether the request that was asked about last may run, and has not got blocks.
        self._wants_blocks = False
        # Of the step that is made next.
        self._loads: list[Load] = []
        self._takers: dict[bytes, tuple[str, int]] = {}
        self._releases: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = {}
        self._unverified = UnverifiedBlocks()
        # vLLM may schedule a step while another runs, and finishes them in order.
        self._unfinished: deque[_Unfinished] = deque()
        self._counter = StepCounter()
        port.subscribe()

    def close(self) -> None:
        self._notes.close()

    def bind(self, pool: BlockPool) -> None:
        """Takes the engine's pool of blocks, before the first request."""
        self._pool = pool
        self._early = EarlyLoads(self._layout, pool)

    def add(self, request: Request) -> None:
        """A request was given to the engine."""
        self._num_added += 1
        self._requests[request.request_id] = request
        params = request.kv_transfer_params or {}
        if (send := params.get("baton_send")) is not None:
            self._sends.add(request.request_id, send)
        if (told := params.get("baton_receive")) is not None:
            self._add_receive(request, told)

    def _add_receive(self, request: Request, params: Mapping[str, Any]) -> None:
        receive = self._receives[request.request_id] = _Receive(
            request,
            bytes.fromhex(params["handoff_id"]),
            params["num_tokens"],
            params["skip_tokens"],
            params["timeout_s"],
            time.monotonic() + params["timeout_s"],
            params["num_coming"],
        )
        if receive.num_coming is not None:
            # Without block hashes: whole blocks of the prompt can be found before they come.
            self._extend(request, [_NO_TOKEN] * receive.num_coming)
            self._port.claim_ahead(receive.handoff_id)
            self._early_loads.keep(receive.handoff_id, request, receive.skip_tokens)
        if (tokens := self._tokens_ahead.pop(receive.handoff_id, None)) is not None:
            self._continue(receive, tokens)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens a request loads from its handoff; None: it waits, and is asked again.

        Args:
            request: the engine's, about to run.
            num_computed_tokens: tokens of its prompt that it finds in the prefix cache.
        """
        num_tokens = self._num_loadable_tokens(request, num_computed_tokens)
        self._wants_blocks = num_tokens is not None
        return num_tokens

    def _num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        receive = self._receives.get(request.request_id)
        if receive is None or receive.over:
            return 0
        self._poll()
        if receive.announced:
            self._wait_for_news()
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

    def _wait_for_news(self) -> None:
        """Waits for news of handoffs, should the engine have nothing else to do in this step."""
        if not self._may_wait or self._early_loads.has_work:
            return
        self._may_wait = False
        if self._num_added >= self._num_submitted:
            self._port.wait(_IDLE_WAIT_S, self._notes.sockets)
            self._poll()

    def _load_early(self, receive: _Receive, num_computed_tokens: int) -> None:
        """Begins to load what has come of a handoff, once, and only ahead of the first token."""
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
        """Gives an announced request the tokens that it was announced without.

        As vLLM's streaming sessions add some: Scheduler._update_request_as_session of
        vllm/v1/core/sched/scheduler.py.
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
        """A request runs in the step that is made next.

        Args:
            request: the engine's.
            block_ids: all its blocks.
            num_loaded_tokens: how many tokens it loads from its handoff.
        """
        self._wants_blocks = False
        self._unverified.follow(block_ids)
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
        claims = commit.claims if commit is not None else []
        if commit is not None and claims and time.monotonic() - commit.heard_at >= LONG_HELD_S:
            # Held for the time of a load from now on, lest it expires under this one.
            self._port.claim_ahead(receive.handoff_id)
        self._loads.append(
            Load(
                receive.handoff_id,
                receive.num_tokens - receive.skip_tokens,
                first - receive.skip_tokens // size,
                wanted,
                claims,
                is_early,
            )
        )
        self._unverified.load(wanted, block_ids[first:])

    def distrust(self, invalid_block_ids: set[int]) -> set[int]:
        """Which blocks must not be found through the prefix cache; told when the oldest step ends.

        vLLM enters blocks into its prefix cache when it allocates them, before a load has filled
        them, and takes out only those of requests that still run when the load has failed. Whoever
        gets them next finds nothing in them either: what was computed from wrong bytes may be no
        numbers, and kernels multiply what is behind a block's last token by nothing.

        Args:
            invalid_block_ids: blocks that the step's loads failed to fill.
        """
        untrusted = self._unverified.distrust(invalid_block_ids)
        if untrusted:
            self._early_loads.spoil(untrusted)
        return untrusted

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
        """Says what the ranks are to push and load in a step that vLLM has scheduled."""
        self._unname(output.preempted_req_ids)
        if self._wants_blocks or output.preempted_req_ids:
            # Whoever may run goes before what may come of a handoff. (While the queue's head does
            # not fit nobody behind it is asked, so none of these would get to run either.)
            self._early_loads.yield_blocks()
        self._wants_blocks = False
        pushes = []
        if len(self._sends):
            pushes = list(self._sends.pushes(output, self._unverified.block_ids()))
        step = HandoffStep(
            pushes, self._loads, self._sends.take_given_up(), self._early_loads.take_work()
        )
        work = self._counter.count(output)
        self._unfinished.append(
            _Unfinished(
                work,
                [load.handoff_id for load in step.loads],
                self._releases,
                self._takers,
            )
        )
        self._unverified.step_made()
        self._loads, self._takers, self._releases = [], {}, {}
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
            self._unverified.step_finished()
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

    def finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """A request is over, whose blocks are these: the ranks get nothing more of it.

        What they were given before may still be under way: a step that runs ahead, copies that
        follow a step. So they say themselves when they have stopped writing, from the next step on
        (vLLM makes one after every end of a request).
        """
        self._counter.forget(request.request_id)
        self._requests.pop(request.request_id, None)
        self._unverified.follow(block_ids)
        self._sends.finished(request.request_id)
        receive = self._receives.pop(request.request_id, None)
        if receive is not None and not receive.over:
            self._end(receive, _CANCELLED)

    def reported(self, report: LoadReport, *, is_cut_off: bool = False) -> None:
        """Takes what the ranks say of the oldest unfinished step.

        Args:
            report: what became of its loads.
            is_cut_off: whether a rank has lost the transfer service.
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
        """Loads nothing more of a handoff after the step that is made next, which releases it.

        Args:
            receive: not over.
            not_loaded: why nothing was loaded.
        """
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
