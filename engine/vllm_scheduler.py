"""Extends vLLM's schedulers: the ITL target bounds each step, and short prompts come first.

vLLM's own scheduler gives the tokens of a step to its running requests in the order of a list, then
to waiting requests, up to a fixed number. A long prompt then delays all streams by a whole step,
and a short prompt waits until the long one is computed. The classes here decide before each step
how many tokens each prompt gets (engine/step_planner.py, runtime/steps/step_budget.py). They impose
this on vLLM by the order of `running` and of `waiting`, by `max_num_scheduled_tokens`, and by hooks
that bound the tokens of a single prompt. vLLM still does everything else in the step: blocks,
preemption, the prefix cache, handoffs and speculation. At start, engine/vllm_scheduler_class.py
checks that vLLM has the names used here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from baton.engine.step_planner import StepPlanner
from baton.engine.vllm_adapter_slots import AdapterSlots
from baton.engine.vllm_block_room import LOOKUP_AGAIN_S, BlockRoom
from baton.engine.vllm_load_failures import TableLoadFailures
from baton.engine.vllm_step_plan import Candidate, StepPlan, StepRequests, WaitingRequests
from baton.engine.vllm_step_targets import TargetsReader
from baton.engine.warm_up import is_warm_up
from baton.kvtransfer.connector.request_params import RequestParams, read_itl_s
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import Prompt, StreamPace, Streams, prompt_order

# Key in kv_connector_extra_config; the value has the keys "socket" (the transfer service's control
# socket) and "prior" (LatencyModel's fields).
STEPS = "steps"

# Share of the time for prompts that they get while ranks copy handoffs in the steps.
_SHARE_BESIDE_LOADS = 0.5
# Statuses of waiting requests that compute their prompt next.
_COMPUTES_PROMPT = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class BatonScheduler(TableLoadFailures, Scheduler):
    """Decides before each step which prompts get how many tokens; then vLLM makes the step.

    Attributes:
        planner: The engine's latency model and targets.
    """

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extra = self.vllm_config.kv_transfer_config.kv_connector_extra_config
        steps = extra[STEPS]
        prior = LatencyModel(**steps["prior"])
        self.planner = StepPlanner(prior, TargetsReader(steps["socket"]).read)
        self._max_step_tokens = self.max_num_scheduled_tokens
        # This replaces vLLM's queue for the policy "priority", which sorts requests itself.
        # Preemption does not use the queue.
        self.waiting = FCFSRequestQueue()
        self._plan = StepPlan()
        # Requests with a grant in the latest plan to which vLLM gave no token: they wait for
        # blocks, or for room in the encoder cache, which holds images.
        self._stalled: frozenset[str] = frozenset()
        # Those of them for which the cache had too few free blocks after that step, and those that
        # wait for room for their next image.
        self._lack_blocks: frozenset[str] = frozenset()
        self._lack_images: set[str] = set()
        # Waiting requests that vLLM tried to start in the latest step.
        self._tried: set[Request] = set()
        self._room = BlockRoom(self.kv_cache_manager, self.connector, self.requests)
        # Adapters of the running requests in the latest step, and the waiting requests that vLLM
        # skipped there for want of a slot.
        self._slots = AdapterSlots(None)
        self._lack_slot: set[Request] = set()
        # When vLLM was last to ask for a request's handoff.
        self._asked_at: dict[str, float] = {}
        self._warms_up = True

    # ---- Methods of vLLM's scheduler

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.planner.begin(time.monotonic(), self.requests)
        # The first step with another request has a limit: it is the first one that is measured.
        self._warms_up = self._warms_up and all(map(is_warm_up, self.requests))
        self._make_plan()
        self._lack_slot.clear()
        self._tried.clear()
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = self._max_step_tokens
            self.waiting.extend(self._plan.hidden)
        self._stalled = self._found_stalled(output.num_scheduled_tokens)
        self._lack_blocks = frozenset(filter(self._lacks_blocks, self._stalled))
        self._lack_images &= self._stalled
        # Requests without an adapter slot wait for no event.
        self.deferred_waiting -= self._lack_slot
        # The time of a warm-up step says nothing: it includes compilation.
        work = None if self._warms_up else self.connector.latest_step_work()
        self.planner.made(output, work)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.planner.ended(scheduler_output, time.monotonic())
        return super().update_from_output(scheduler_output, model_runner_output)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        self._tried.add(request)
        # The plan cannot foresee everything that vLLM starts: requests that wait for events, too.
        # vLLM calls this only in steps without a preemption, and adds requests to `running` that it
        # has started.
        self._slots.count_started(self.running)
        if not self._slots.has(request):
            self._lack_slot.add(request)
            return False
        return bool(super()._handle_blocked_waiting_request(request))

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Cuts a chunk at a block's end, where vLLM keeps a recurrent state for the prefix cache.

        vLLM calls it only for models with such states. The chunk is bounded by the plan before it
        is cut: in the other order, a chunk could end after a boundary without the boundary's state.
        """
        num_new_tokens = self._bound_chunk(request, num_new_tokens)
        # vLLM computes no part of a block that the largest chunk would hold. Here that number is
        # the step's plan for all requests, and the share of one of them may be less than a block.
        # With 0, vLLM always computes parts, and continues up to the next boundary.
        planned, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, 0
        try:
            found = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = planned
        return int(found)

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kw: Any
    ) -> Any:
        # Images behind the chunk must not take room in the encoder cache yet.
        num_new_tokens = self._bound_chunk(request, num_new_tokens)
        found = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kw
        )
        if num_new_tokens:
            # vLLM computes the tokens before an image that has no room.
            change = self._lack_images.discard if found[1] else self._lack_images.add
            change(request.request_id)
        return found

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        num_new_tokens = self._bound_chunk(request, num_new_tokens)
        found = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return int(found)

    def _bound_chunk(self, request: Request, num_new_tokens: int) -> int:
        """Returns the number of tokens of a prompt's chunk, bounded by the plan of the step."""
        if request.request_id in self._plan.withheld:
            return 0
        granted = self._plan.grants.get(request.request_id)
        if granted is None:
            return num_new_tokens
        # vLLM pads the first decode of a request to 1 + drafts, and must get all or nothing.
        return min(num_new_tokens, max(granted, 1 + int(self.num_spec_tokens)))

    # ---- The plan of a step

    def _make_plan(self) -> None:
        """Plans the next step, and makes vLLM follow the plan."""
        now = time.time()
        requests = self._divide(now)
        streams = self._streams(requests, now)
        self._plan = self._distribute(requests, streams)
        self._impose(requests, self._plan)

    def _divide(self, now: float) -> StepRequests:
        """Divides the requests by what the next step does with them; `now` is by time.time."""
        self._room.begin_step()
        # Prompts that have been loaded hold blocks, as running ones do.
        self._slots = AdapterSlots.of(self.lora_config, self.running)
        slots = self._slots.copy()
        num_places = max(0, self.max_num_active_reqs - len(self.running))
        all_loaded = [one for one in self.kv_holding_waiting if self._is_loaded(one)]
        placed = list(itertools.islice(filter(slots.take, all_loaded), num_places))
        prompts = [self._candidate(one, now) for one in self.running if _is_prompt(one)]
        loaded = [self._candidate(one, now) for one in placed]
        waiting = self._divide_waiting(now, slots, num_places - len(loaded))
        # A prompt that now has enough blocks gets its whole share at once.
        lack_blocks = self._lack_blocks - self._lack_images
        self._stalled -= {one for one in lack_blocks if not self._lacks_blocks(one)}
        waiting = self._block_behind_stalled(placed, waiting)
        may_come = (
            one for one in (*waiting.awaiting, *waiting.hidden) if self._awaits_handoff(one)
        )
        return StepRequests(
            streams=[one for one in self.running if not _is_prompt(one)],
            prompts=prompts,
            loaded=loaded,
            unplaced=list(set(all_loaded).difference(placed)),
            waiting=waiting,
            coming=[
                one
                for one in (*self.kv_holding_waiting, *may_come)
                if one.priority <= 0 and _is_handed_over(one)
            ],
            slots=slots,
        )

    def _divide_waiting(self, now: float, slots: AdapterSlots, num_places: int) -> WaitingRequests:
        """Divides the requests of `waiting`, without regard to stalled requests.

        Args:
            now: The time, by time.time.
            slots: The adapters of running and of loaded requests; this counts those of prompts that
                may start.
            num_places: Number of requests that may start, beside the loaded ones.
        """
        arrivals: list[Candidate] = []
        awaiting: list[Request] = []
        hidden: list[Request] = []
        for request in self.waiting:
            grammar = _grammar(request)
            if isinstance(grammar, Exception):
                # vLLM itself ends it only once it has a place for the request.
                self.grammar_compile_error_reqs.add(request.request_id)
                hidden.append(request)
                continue
            if not slots.has(request):
                hidden.append(request)
                continue
            if grammar is not None:
                # vLLM has skipped it until now. It is a prompt like others, even if it gets no
                # token in this step; vLLM itself would forget that only when it starts.
                self.deferred_waiting.discard(request)
            if not self._waits_for_event(request):
                arrivals.append(self._candidate(request, now))
            elif self._take_turn_to_ask(request, now):
                awaiting.append(request)
            else:
                hidden.append(request)
        awaiting.sort(key=_age)
        arrivals.sort(key=_rank)
        # Like vLLM, go on with later prompts after one that has no slot.
        hidden += [one.request for one in arrivals if not slots.take(one.request)]
        arrivals = [one for one in arrivals if slots.has(one.request)]
        count = self._num_fitting(arrivals[:num_places])
        blocked = [one.request for one in arrivals[count:]]
        return WaitingRequests(arrivals[:count], awaiting, blocked, hidden)

    def _block_behind_stalled(
        self, loaded: Iterable[Request], waiting: WaitingRequests
    ) -> WaitingRequests:
        """Blocks the prompts that must not start before a stalled request.

        vLLM starts no request behind a stalled one. Only prompts without images go before a prompt
        that waits for room for its image (see `_order_waiting`); `_num_fitting` keeps its blocks.

        Args:
            loaded: Loaded requests, which vLLM starts before the others.
            waiting: Other waiting requests.
        """
        behind: set[Request] = set()
        is_behind = any(one.request_id in self._stalled for one in loaded)
        is_behind_image = False
        for request in _in_lanes(waiting.awaiting, map(_request, waiting.arrivals)):
            if is_behind or (is_behind_image and request.has_encoder_inputs):
                behind.add(request)
            if request.request_id in self._lack_images:
                is_behind_image = True
            elif request.request_id in self._stalled:
                is_behind = True
        blocked = [one.request for one in waiting.arrivals if one.request in behind]
        return waiting._replace(
            arrivals=[one for one in waiting.arrivals if one.request not in behind],
            blocked=[*waiting.blocked, *blocked],
        )

    def _streams(self, requests: StepRequests, now: float) -> Streams:
        """Streams of the step, and those whose handoffs are on their way or being loaded."""
        num_tokens = num_kv_tokens = 0
        paces = [StreamPace.coming(now, _itl_s(one)) for one in requests.coming]
        for request in requests.streams:
            # Placeholders stand for tokens of steps under way (asynchronous scheduling).
            pending = request.num_output_placeholders
            missing_tokens = request.num_tokens_with_spec + pending - request.num_computed_tokens
            num_tokens += max(1, missing_tokens)
            num_kv_tokens += request.num_computed_tokens + 1
            # Batch streams have no ITL target.
            if request.priority <= 0:
                # A step under way has a placeholder for each draft too, and the model may reject
                # all drafts. So count one token per step.
                num_steps = -(-pending // (1 + self.num_spec_tokens))
                num_outputs = request.num_output_tokens + num_steps
                waited_s = 0.0
                if not num_outputs and _is_handed_over(request):
                    # The prefill worker made the first token just before this request arrived.
                    waited_s = max(0.0, now - request.arrival_time)
                paces.append(
                    self.planner.pace(request.request_id, num_outputs, waited_s, _itl_s(request))
                )
        num_streams = len(requests.streams)
        num_drafts = num_tokens - num_streams
        targets = self.planner.targets
        return Streams.of(num_streams, num_kv_tokens, paces, targets, num_drafts)

    def _distribute(self, requests: StepRequests, streams: Streams) -> StepPlan:
        """Gives the tokens of the step to the prompts, beside its streams."""
        waiting = requests.waiting
        candidates = (*requests.prompts, *requests.loaded, *waiting.arrivals)
        prompts = sorted((one for one in candidates if one.name not in self._stalled), key=_rank)
        # A stalled prompt gets one token until it progresses. With more, it would take the time of
        # prompts that can progress, and that may hold what it waits for.
        stalled = [one.name for one in candidates if one.name in self._stalled]
        one_token = [*(one.request_id for one in waiting.awaiting), *stalled]
        # vLLM asks requests for their handoff only while tokens are left in the step.
        per_request = 1 + self.num_spec_tokens
        room = max(0, self._max_step_tokens - streams.num_tokens)
        reserve = min(room // 2 if prompts else room, per_request * len(one_token))
        limit_s = streams.limit_s if 0 < streams.limit_s < math.inf else 0.0
        copies = limit_s > 0 and self._copies_handoffs(requests)
        max_chunk = self._max_chunk(requests)
        counts = self.planner.tokens(
            streams,
            [one.prompt._replace(max_chunk=max_chunk) for one in prompts],
            self._max_step_tokens - reserve,
            limit=not self._warms_up,
            share=_SHARE_BESIDE_LOADS if copies else 1.0,
        )
        granted = {one.name: count for one, count in zip(prompts, counts, strict=True)}
        # vLLM starts nothing after a loaded prompt that gets no token.
        granted |= {
            one.name: max(1, granted[one.name]) for one in requests.loaded if one.name in granted
        }
        withheld = {name for name, count in granted.items() if not count}
        withheld.update(one.request_id for one in (*waiting.blocked, *requests.unplaced))
        grants = {name: count for name, count in granted.items() if count}
        # vLLM pads a prompt's last token to 1 + drafts, and starts nothing with less than that.
        num_granted = sum(max(per_request, count) for count in grants.values())
        total = streams.num_tokens + num_granted + reserve
        return StepPlan(
            total=max(1, min(total, self._max_step_tokens)),
            grants=grants | dict.fromkeys(one_token, per_request),
            withheld=frozenset(withheld),
            hidden=waiting.hidden,
            limit_s=limit_s,
        )

    def _max_chunk(self, requests: StepRequests) -> int | None:
        """Most tokens of one prompt that vLLM computes in the step; None: it has no such limit.

        This is the limit of Scheduler.schedule by `long_prefill_token_threshold`. A prompt must not
        get more tokens of the plan, because others could use them.
        """
        threshold = int(self.scheduler_config.long_prefill_token_threshold)
        waiting = requests.waiting
        num_requests = len(self.running) + len(self.kv_holding_waiting)
        num_requests += len(waiting.arrivals) + len(waiting.awaiting) + len(waiting.blocked)
        if not threshold or num_requests <= 1:
            return None
        if self.adaptive_long_prefill_threshold:
            threshold = max(threshold, self.scheduler_config.max_num_batched_tokens // num_requests)
        return threshold

    def _copies_handoffs(self, requests: StepRequests) -> bool:
        """Whether the ranks copy handoffs of streams in the time of the step."""
        return bool(self.connector.copies_in_steps) and any(
            self._loads_handoff(one, requests.slots) for one in requests.coming
        )

    def _impose(self, requests: StepRequests, plan: StepPlan) -> None:
        """Makes vLLM follow the plan; `_bound_chunk` bounds the tokens of single requests."""
        self.max_num_scheduled_tokens = plan.total
        self.connector.limit_step(plan.limit_s)
        # vLLM adds the requests again that wait for an event (see _is_stalled).
        loaded = (one.request for one in requests.loaded)
        awaiting = requests.waiting.awaiting
        self.deferred_waiting.difference_update(loaded, requests.unplaced, awaiting)
        # In place: vLLM keeps references to this list.
        prompts = (one.request for one in sorted(requests.prompts, key=_rank))
        self.running[:] = [*requests.streams, *prompts]
        self._order_waiting(requests.waiting, plan.withheld)

    def _order_waiting(self, waiting: WaitingRequests, withheld: frozenset[str]) -> None:
        """Orders the waiting requests; vLLM starts none after the first that gets no token."""
        starts = [one.request for one in waiting.arrivals if one.name not in withheld]
        rest = [one.request for one in waiting.arrivals if one.name in withheld]
        queue = _in_lanes(waiting.awaiting, starts)
        lack_images = [one for one in queue if one.request_id in self._lack_images]
        queue = [one for one in queue if one.request_id not in self._lack_images]
        # These go last: vLLM stops at one without room. But it would not try to start one behind a
        # prompt that waits for blocks.
        stalled = (index for index, one in enumerate(queue) if one.request_id in self._stalled)
        index = next(stalled, len(queue))
        self.waiting.clear()
        self.waiting.extend([*queue[:index], *lack_images, *queue[index:], *rest, *waiting.blocked])

    # ---- What the plan needs to know of single requests

    def _candidate(self, request: Request, now: float) -> Candidate:
        num_done = request.num_computed_tokens
        # A prompt that was loaded holds blocks before it runs.
        running = num_done > 0
        if not running:
            num_done = self._room.num_cached(request, now)
        # A stream that was preempted is not late: its first token is out.
        due_at = math.inf
        if not request.num_output_tokens:
            due_at = RequestParams(request.kv_transfer_params).due_at
        prompt = Prompt(
            # Attention to cached tokens costs like attention to computed ones.
            num_done=num_done,
            num_left=max(1, request.num_tokens - num_done),
            priority=request.priority,
            waited_s=max(0.0, now - request.arrival_time),
            running=running,
            due_in_s=due_at - now,
        )
        return Candidate(request, prompt, prompt_order(prompt, self.planner.model))

    def _found_stalled(self, num_scheduled_tokens: Mapping[str, int]) -> frozenset[str]:
        """Requests with a grant that vLLM neither gave tokens nor deferred."""
        return frozenset(
            name
            for name in self._plan.grants
            if name not in num_scheduled_tokens and self._is_stalled(self.requests[name])
        )

    def _is_stalled(self, request: Request) -> bool:
        """Whether a request without tokens in the latest step waits for blocks or for an image."""
        name = request.request_id
        if name in self._lack_images:
            return True
        # vLLM preempts a running prompt, or others, for its blocks.
        if request.status == RequestStatus.RUNNING or request in self.deferred_waiting:
            return False
        # vLLM does not try to start requests in a step with a preemption, without a place for
        # another request, or behind a request that it could not start.
        return request in self._tried or self._lacks_blocks(name)

    def _lacks_blocks(self, name: str) -> bool:
        """Whether the cache probably has too few free blocks for a request."""
        request = self.requests.get(name)
        return request is not None and self._room.num_taken(request) > self._room.num_free

    def _waits_for_event(self, request: Request) -> bool:
        """Whether a waiting request waits for its handoff, or for anything but its prompt's turn.

        A request whose grammar is compiled does not wait for the grammar any more.
        """
        return (
            request in self.deferred_waiting
            or _is_handed_over(request)
            or self._awaits_handoff(request)
            or not (request.status in _COMPUTES_PROMPT or _grammar(request) is not None)
        )

    def _awaits_handoff(self, request: Request) -> bool:
        return bool(self.connector.awaits_handoff(request.request_id))

    def _is_loaded(self, request: Request) -> bool:
        """Whether a request of `kv_holding_waiting` has loaded its blocks.

        vLLM takes it from `finished_recving_kv_req_ids` when it first tries to start it, also if
        the request then has to wait, for example because the cache is full.
        """
        return (
            request.request_id in self.finished_recving_kv_req_ids
            or request.status in _COMPUTES_PROMPT
        )

    def _loads_handoff(self, request: Request, slots: AdapterSlots) -> bool:
        """Whether the ranks copy a request's handoff in the next step, if its streams have time."""
        if request in self.kv_holding_waiting:
            return not self._is_loaded(request)
        return (
            slots.has(request)
            and not self.connector.is_on_its_way(request.request_id)
            and self._room.num_blocks(request.num_tokens) <= self._room.num_free
        )

    def _take_turn_to_ask(self, request: Request, now: float) -> bool:
        """Decides whether vLLM asks in this step for what a request waits for, and notes it.

        vLLM looks up the whole prompt in the prefix cache before it asks for a handoff: 4 ms for
        8,192 cached blocks. For a handoff that is on its way it asks once a second, because the
        cache may lose the blocks that the handoff leaves out.
        """
        name = request.request_id
        if not self.connector.is_on_its_way(name):
            self._asked_at.pop(name, None)
            return True
        if now - self._asked_at.get(name, 0.0) <= LOOKUP_AGAIN_S:
            return False
        if len(self._asked_at) > 2 * len(self.requests):
            self._asked_at = {one: at for one, at in self._asked_at.items() if one in self.requests}
        self._asked_at[name] = now
        return True

    def _num_fitting(self, arrivals: Sequence[Candidate]) -> int:
        """Number of prompts, from the first one on, that may start now.

        A prompt waits if an older running prompt needs its blocks: vLLM would preempt the prompt,
        and compute it again. All later prompts wait too, because it might otherwise never get room.
        """
        older = [one for one in self.running if _is_prompt(one)]
        if not older:
            return len(arrivals)
        num_free = self._room.num_free
        for index, one in enumerate(arrivals):
            num_reserved = sum(
                self._room.num_blocks(other.num_tokens - other.num_computed_tokens)
                for other in older
                if _age(other) < _age(one.request)
            )
            num_free -= self._room.num_taken(one.request)
            if num_free < num_reserved:
                return index
        return len(arrivals)


def _is_prompt(request: Request) -> bool:
    """Whether a request computes its prompt (after a preemption: its tokens so far)."""
    num_computed = request.num_computed_tokens
    return bool(num_computed < request.num_tokens - 1 or not num_computed)


def _in_lanes(awaiting: Iterable[Request], starts: Iterable[Request]) -> list[Request]:
    """Orders waiting requests by lane.

    An awaiting request computes one token, so it goes before the prompts of its lane.
    """
    return sorted([*awaiting, *starts], key=lambda one: one.priority)


def _itl_s(request: Request) -> float | None:
    """ITL target that a request named, in seconds; None: it named none."""
    return read_itl_s(request.kv_transfer_params)


def _is_handed_over(request: Request) -> bool:
    """Whether a request starts from its whole prompt's handoff and was not preempted since."""
    params = RequestParams(request.kv_transfer_params)
    return not request.num_preemptions and params.loads_whole_prompt


def _grammar(request: Request) -> Any:
    """The grammar that a request waited for: None, the grammar, or why it did not compile.

    It is None too for requests that do not wait for a grammar.
    """
    if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return None
    wanted = request.structured_output_request
    return wanted.grammar if wanted is not None else None


def _age(request: Request) -> tuple[int, float]:
    """Sort key: vLLM preempts the request with the largest one."""
    return request.priority, request.arrival_time


def _request(one: Candidate) -> Request:
    return one.request


def _rank(one: Candidate) -> tuple[float, ...]:
    return one.rank


class BatonAsyncScheduler(BatonScheduler, AsyncScheduler):
    """BatonScheduler for steps that overlap (GPUs).

    vLLM makes steps overlap only if its scheduler is an AsyncScheduler.
    """
