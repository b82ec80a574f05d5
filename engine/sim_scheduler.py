"""Chooses which requests the simulated engine's next step computes, and how many tokens.

It does continuous batching with chunked prefill, like vLLM: a step computes the missing tokens of
its requests, limited in tokens and in requests. Without free blocks the request with the lowest
priority is preempted and computed again later. With step targets, prompts get their tokens by the
policy of runtime/steps/step_budget.py; otherwise first come, first served.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.engine.base import EngineRequest
from baton.engine.sim_blocks import BlockPool
from baton.engine.sim_handoff import HandoffSend
from baton.engine.sim_host_tier import HostTier
from baton.engine.sim_text import OutputText
from baton.engine.sim_tokens import TokenChain
from baton.runtime.kv.fetches import MAX_KEPT_SHARE
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.runtime.prompts.prompt_images import block_keys
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import (
    Prompt,
    StepTargets,
    StreamPace,
    Streams,
    prompt_order,
    prompt_tokens,
)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that the simulated engine holds.

    Attributes:
        order: (priority, arrival number); a smaller value runs first and is preempted last.
        max_output_tokens: Most output tokens, including known ones.
        tokens: Prompt, known and generated tokens.
        hashes: Hashes of the first full blocks of `tokens`, as far as they were needed.
        num_computed: Tokens whose KV the engine holds.
        num_computed_here: The part of num_computed that came neither from a handoff nor from the
            cache.
        num_cached_tokens: Prompt tokens that the prefix cache gave at the last start.
        num_host_tokens: Prompt tokens that were loaded from host memory at the last start.
        num_cached_blocks: Blocks that were put into the prefix cache.
        num_stored_blocks: Blocks that were copied to host memory.
        num_expected_cached_blocks: Blocks that the prefix cache or host memory probably holds for a
            waiting request.
        has_blocks: Whether a waiting request holds its blocks, because it has loaded some of them.
        num_preemptions: Number of preemptions; work scheduled before the last of them is void.
        pace: Compares its tokens with the ITL target; None before its first decode step here.
        receive_deadline: Deadline of the handoff, by time.monotonic. None without a handoff, and
            once the handoff is loaded or failed.
    """

    request: EngineRequest
    order: tuple[int, int]
    max_output_tokens: int
    tokens: list[int]
    chain: TokenChain
    text: OutputText
    submitted_at: float
    send: HandoffSend | None
    receive_deadline: float | None
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    num_computed: int = 0
    num_computed_here: int = 0
    num_expected_cached_blocks: int = 0
    num_preemptions: int = 0
    pace: StreamPace | None = None
    live: bool = True
    first_run_at: float | None = None
    handoff_wait_s: float | None = None
    num_handoff_tokens: int = 0
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0
    num_host_tokens: int = 0
    num_stored_blocks: int = 0
    has_blocks: bool = False
    reported: bool = False

    @property
    def id(self) -> str:
        return self.request.engine_request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes one token that follows computed ones."""
        return self.num_missing == 1 and self.num_computed > 0

    def pace_at(self, now: float, targets: StepTargets) -> StreamPace | None:
        """How this stream compares with its ITL target; None: batch streams have no target."""
        if self.order[0] > 0:
            return None
        if self.pace is None:
            # After a handoff, the gap since the first token counts too.
            begin = self.submitted_at if self.request.loads_whole_prompt else now
            self.pace = StreamPace(begin, len(self.tokens), self.request.itl_s)
        self.pace.advance(targets, now, len(self.tokens))
        return self.pace

    @property
    def is_coming(self) -> bool:
        """Whether this is an interactive stream whose KV cache comes from a prefill worker."""
        is_waiting = self.receive_deadline is not None
        return self.request.loads_whole_prompt and is_waiting and self.order[0] <= 0

    def block_hashes(self, num_tokens: int, block_size_tokens: int) -> array[int]:
        """Returns the hashes of the full blocks of the first `num_tokens` tokens."""
        num_blocks = num_tokens // block_size_tokens
        if len(self.hashes) < num_blocks:
            begin = len(self.hashes) * block_size_tokens
            rest = self.tokens[begin : num_blocks * block_size_tokens]
            root = root_of(self.request.adapter, self.request.cache_salt)
            parent = self.hashes[-1] if self.hashes else root
            images = self.request.images
            keys = block_keys(images, begin, len(rest), block_size_tokens) if images else []
            self.hashes.extend(block_hashes(rest, block_size_tokens, parent, keys))
        return self.hashes[:num_blocks]


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step.

    Attributes:
        num_preemptions: The request's preemptions before the step was scheduled.
    """

    request: LiveRequest
    num_preemptions: int
    num_tokens: int
    is_decode: bool

    @property
    def valid(self) -> bool:
        """Whether the request was neither aborted nor preempted since the step was scheduled."""
        return self.request.live and self.request.num_preemptions == self.num_preemptions


@dataclass(frozen=True, slots=True)
class _Load:
    """A request whose blocks come from host memory; it holds its blocks meanwhile.

    Attributes:
        num_blocks: Blocks in the prefix cache and from host memory together.
        ends_at: When the load ends, by time.monotonic.
    """

    request: LiveRequest
    num_blocks: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class _Policy:
    """The policy of runtime/steps/step_budget.py for the step that begins at `now`."""

    model: LatencyModel
    targets: StepTargets
    now: float

    def ordered(
        self, prompts: Iterable[tuple[Prompt, LiveRequest]]
    ) -> list[tuple[Prompt, LiveRequest]]:
        return sorted(prompts, key=lambda one: prompt_order(one[0], self.model))

    def grants(
        self,
        work: Sequence[Work],
        coming: Iterable[LiveRequest],
        prompts: Iterable[tuple[Prompt, LiveRequest]],
        max_tokens: int,
    ) -> list[tuple[LiveRequest, int]]:
        """Distributes prompt tokens beside the decodes in `work`, in the policy's order."""
        decodes = [item.request for item in work]
        paces = [request.pace_at(self.now, self.targets) for request in decodes]
        paces += [StreamPace.coming(self.now, request.request.itl_s) for request in coming]
        streams = Streams.of(
            len(decodes),
            sum(len(request.tokens) for request in decodes),
            [pace for pace in paces if pace is not None],
            self.targets,
        )
        ordered = self.ordered(prompts)
        counts = prompt_tokens(
            self.model, self.targets, streams, [prompt for prompt, _ in ordered], max_tokens
        )
        return [(request, count) for (_, request), count in zip(ordered, counts, strict=True)]


@dataclass(slots=True)
class Scheduler:
    """Owns the order of the requests, and their blocks.

    Attributes:
        caching_block_tokens: Block size of the prefix cache in tokens; 0 without prefix caching.
        end_wait: Ends a waiting request's wait for its handoff, if the wait is over, and returns
            whether the request may start. A request that still waits does not delay later ones.
        on_start: Called when a request has got its blocks, before its missing tokens are counted.
        model: Predicts the time of a step; None: steps have no limit.
        targets: Targets of a step's time; None: steps have no limit.
        host: KV store in host memory; None: there is none.
        load_block_s: Seconds to load one block from host memory.
    """

    blocks: BlockPool
    max_num_seqs: int
    max_num_batched_tokens: int
    end_wait: Callable[[LiveRequest], bool]
    on_start: Callable[[LiveRequest], None]
    caching_block_tokens: int = 0
    model: LatencyModel | None = None
    targets: StepTargets | None = None
    host: HostTier | None = None
    load_block_s: float = 0.0
    running: list[LiveRequest] = field(default_factory=list)
    _waiting: list[tuple[tuple[int, int], LiveRequest]] = field(default_factory=list)
    # In order of their ends: one load follows the other.
    _loads: dict[str, _Load] = field(default_factory=dict)
    # Numbers of blocks that are held for waiting requests, by request ID.
    _kept: dict[str, int] = field(default_factory=dict)
    # Blocks loaded from host memory since the last `take_loaded`.
    _num_loaded: int = 0
    _now: float = 0.0
    # Salts of blocks with one, by hash.
    _salts: dict[int, str] = field(default_factory=dict)

    @property
    def waiting(self) -> Iterator[LiveRequest]:
        return (request for _, request in self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loads)

    @property
    def next_load_at(self) -> float | None:
        """When the next load from host memory ends, by time.monotonic; None: there is none."""
        first = next(iter(self._loads.values()), None)
        return first.ends_at if first is not None else None

    def add(self, request: LiveRequest) -> None:
        heapq.heappush(self._waiting, (request.order, request))

    def keep_prefix(self, request: LiveRequest, num_tokens: int) -> None:
        """Holds the first blocks of a request that waits for a fetch of the blocks after them.

        As in kvtransfer/connector/handoffs/kept_prefixes.py: only if the prefix cache has all of
        them, and not more than a part of the cache.
        """
        hashes = self._usable_hashes(request)[: num_tokens // (self.caching_block_tokens or 1)]
        num_kept = sum(self._kept.values()) + len(hashes)
        if not hashes or num_kept > MAX_KEPT_SHARE * self.blocks.num_blocks:
            return
        if self.blocks.keep(_kept_name(request), hashes):
            self._kept[request.id] = len(hashes)

    def release_prefix(self, request: LiveRequest) -> None:
        """Frees the blocks that are held for a request; idempotent."""
        if self._kept.pop(request.id, None) is not None:
            self.blocks.free(_kept_name(request))

    def remove(self, request: LiveRequest) -> None:
        """Removes a request and frees its blocks."""
        request.live = False
        if request in self.running:
            self.running.remove(request)
        elif self._loads.pop(request.id, None) is not None:
            assert self.host is not None
            self.host.end_load(request.id)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)
        self.blocks.free(request.id)

    def preempt(self, request: LiveRequest) -> None:
        """Takes a running request's blocks; it starts over when there is room."""
        self.running.remove(request)
        self.blocks.free(request.id)
        request.num_preemptions += 1
        request.num_computed = request.num_computed_here = request.num_cached_blocks = 0
        request.num_expected_cached_blocks = request.num_stored_blocks = 0
        request.has_blocks = False
        self.add(request)

    def schedule(self, now: float) -> list[Work]:
        """Returns the next step's work at `now`, by time.monotonic; empty if nothing can run."""
        self._now = now
        self._end_loads()
        if self.model is not None and self.targets is not None:
            return self._schedule_by_targets(_Policy(self.model, self.targets, now))
        work, may_start = self._compute(self.running)
        if not may_start:
            return work
        return work + self._admit(self.max_num_batched_tokens - _num_tokens(work))

    def _compute(self, requests: Iterable[LiveRequest]) -> tuple[list[Work], bool]:
        """Gives running requests their missing tokens; preempts where there are no free blocks.

        Returns:
            The work, and whether waiting requests may start: not if a request was preempted,
            unless no other one is left that will free blocks.
        """
        budget, work, preempted = self.max_num_batched_tokens, list[Work](), False
        for request in sorted(requests, key=lambda running: running.order):
            if budget == 0:
                break
            if request not in self.running:
                continue
            num_tokens = min(request.num_missing, budget)
            while not self.blocks.grow(request.id, request.num_computed + num_tokens):
                victim = max(self.running, key=lambda running: running.order)
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                budget -= num_tokens
                work.append(self._work(request, num_tokens))
        return work, not (preempted and self.running)

    def _schedule_by_targets(self, policy: _Policy) -> list[Work]:
        """Decodes first, then prompt tokens as long as the step's predicted time allows."""
        work, may_start = self._compute(
            [request for request in self.running if request.is_decoding]
        )
        if may_start:
            work += self._start_by_targets(policy, work)
        prompts = self._running_prompts(policy)
        grants = policy.grants(work, self._coming(), prompts, self.max_num_batched_tokens)
        # A prompt has held the blocks of all its tokens since its start.
        return work + [self._work(request, grant) for request, grant in grants if grant]

    def _start_by_targets(self, policy: _Policy, work: Sequence[Work]) -> list[Work]:
        """Starts the waiting requests that get tokens in this step.

        A request that has only one token to compute, for example after its handoff, starts as soon
        as it has a place, like a stream that decodes. A request that has loaded its blocks also
        starts without tokens, and gets a place first: a prompt without room may need its blocks.

        Returns:
            The work of the started requests that decode.
        """
        num_places = self.max_num_seqs - len(self.running)
        budget = self.max_num_batched_tokens - len(work)
        if num_places <= 0 or budget <= 0 or not self._waiting:
            return []
        waiting = policy.ordered(
            (self._prompt(request, policy.now, self._num_expected(request)), request)
            for request in self.waiting
            if self.end_wait(request)
        )
        # Only requests that can get a place take part in the distribution.
        waiting.sort(key=lambda one: not one[1].has_blocks)
        waiting = waiting[:num_places]
        prompts = waiting + self._running_prompts(policy)
        started, is_full = list[Work](), False
        num_left = {request.id: prompt.num_left for prompt, request in waiting}
        for request, grant in policy.grants(
            work, self._coming(), prompts, self.max_num_batched_tokens
        ):
            if request.id not in num_left:
                continue
            if not (grant or request.has_blocks or num_left[request.id] == 1):
                continue
            if len(started) == budget:
                break
            if is_full and not request.has_blocks:
                continue
            if not self._take_blocks(request):
                is_full = True
                continue
            self._waiting.remove((request.order, request))
            heapq.heapify(self._waiting)
            if request.id in self._loads:
                continue
            if self._start(request) and request.is_decoding:
                started.append(self._work(request, 1))
        return started

    def _coming(self) -> list[LiveRequest]:
        return [request for request in self.waiting if request.is_coming]

    def _running_prompts(self, policy: _Policy) -> list[tuple[Prompt, LiveRequest]]:
        return [
            (self._prompt(request, policy.now, request.num_missing, running=True), request)
            for request in self.running
            if not request.is_decoding
        ]

    @staticmethod
    def _prompt(
        request: LiveRequest, now: float, num_left: int, *, running: bool = False
    ) -> Prompt:
        waited_s = now - request.submitted_at
        # A stream that was preempted is not late: its first token is out.
        due_in_s = math.inf if request.num_output_tokens else request.request.due_in_s - waited_s
        return Prompt(
            num_done=request.num_computed_here,
            num_left=num_left,
            priority=request.order[0],
            waited_s=waited_s,
            running=running,
            due_in_s=due_in_s,
        )

    def _num_expected(self, request: LiveRequest) -> int:
        """Number of tokens that a waiting request will probably have to compute."""
        receive = request.request.receive
        if request.receive_deadline is not None and receive is not None:
            return max(1, len(request.tokens) - receive.num_tokens)
        if request.has_blocks:
            return request.num_missing
        hashes = self._usable_hashes(request)
        while request.num_expected_cached_blocks < len(hashes) and self._holds(
            hashes[request.num_expected_cached_blocks]
        ):
            request.num_expected_cached_blocks += 1
        num_cached = request.num_expected_cached_blocks * self.caching_block_tokens
        return len(request.tokens) - num_cached

    def _admit(self, budget: int) -> list[Work]:
        """Starts waiting requests in order, until a ready request finds no room.

        Requests that have loaded their blocks start nevertheless: the one without room may need
        their blocks.
        """
        work, put_back = list[Work](), list[tuple[tuple[int, int], LiveRequest]]()
        is_full = False
        while self._waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            entry = heapq.heappop(self._waiting)
            request = entry[1]
            if not self.end_wait(request) or (is_full and not request.has_blocks):
                put_back.append(entry)
                continue
            if not self._take_blocks(request):
                put_back.append(entry)
                is_full = True
                continue
            if request.id in self._loads or not self._start(request):
                continue
            num_tokens = min(request.num_missing, budget)
            budget -= num_tokens
            work.append(self._work(request, num_tokens))
        for entry in put_back:
            heapq.heappush(self._waiting, entry)
        return work

    def _start(self, request: LiveRequest) -> bool:
        """Lets a request run that has its blocks; False if its handoff was wrong."""
        self.on_start(request)
        if not request.live:  # The engine has reported the wrong handoff.
            self.blocks.free(request.id)
            return False
        self.running.append(request)
        return True

    def _usable_hashes(self, request: LiveRequest) -> array[int]:
        """Hashes of the blocks that a request may take from the prefix cache."""
        size = self.caching_block_tokens
        # As in vLLM, a request for prompt logprobs computes its whole prompt.
        if not size or request.request.returns_prompt_logprobs:
            return array("Q")
        # The last token is always computed, because the next token is sampled from its logits.
        return request.block_hashes(len(request.tokens) - 1, size)

    def _take_blocks(self, request: LiveRequest) -> bool:
        """Allocates a request's blocks, including those in the prefix cache.

        If host memory holds the blocks that follow them, the request begins to load these blocks
        and must not start yet.

        Returns:
            False if there is no room; nothing has changed then.
        """
        if request.has_blocks:
            request.has_blocks = False
            return True
        size, hashes = self.caching_block_tokens, self._usable_hashes(request)
        cached = self.blocks.start(request.id, len(request.tokens), hashes)
        if cached is None:
            return False
        request.num_computed = cached * size
        request.num_cached_blocks = cached
        num_prompt_tokens = len(request.request.prompt_token_ids)
        request.num_cached_tokens = min(request.num_computed, num_prompt_tokens)
        request.num_host_tokens = 0
        # A handoff brings all blocks that are missing.
        if self.host is not None and request.receive_deadline is None:
            self._begin_load(request, self.host, hashes, cached)
        return True

    def _holds(self, block_hash: int) -> bool:
        """Whether a block is in the prefix cache or in host memory."""
        return self.blocks.is_cached(block_hash) or (
            self.host is not None and self.host.holds(block_hash)
        )

    def _begin_load(
        self, request: LiveRequest, host: HostTier, hashes: Sequence[int], num_cached: int
    ) -> None:
        """Loads the blocks that follow the first `num_cached` blocks, if host memory holds any."""
        num_held = host.num_held(hashes, num_cached)
        host.touch(hashes[: num_cached + num_held])
        if not num_held:
            return
        host.begin_load(request.id, hashes[num_cached : num_cached + num_held])
        begins_at = max([self._now, *(load.ends_at for load in self._loads.values())])
        self._loads[request.id] = _Load(
            request, num_cached + num_held, begins_at + num_held * self.load_block_s
        )

    def _end_loads(self) -> None:
        """Lets requests whose loads have ended wait for their start, with their blocks."""
        size = self.caching_block_tokens
        for load in [one for one in self._loads.values() if one.ends_at <= self._now]:
            request = load.request
            assert self.host is not None
            del self._loads[request.id]
            self.host.end_load(request.id)
            self._num_loaded += load.num_blocks - request.num_cached_blocks
            hashes = request.block_hashes(load.num_blocks * size, size)
            first, request.num_cached_blocks = request.num_cached_blocks, load.num_blocks
            self.blocks.cache(request.id, first, hashes[first:])
            request.num_computed = load.num_blocks * size
            num_prompt_tokens = len(request.request.prompt_token_ids)
            held = min(request.num_computed, num_prompt_tokens)
            request.num_host_tokens = held - request.num_cached_tokens
            request.has_blocks = True
            self.add(request)

    def take_loaded(self) -> int:
        """Returns how many blocks were loaded from host memory since the last call."""
        loaded, self._num_loaded = self._num_loaded, 0
        return loaded

    def cache_blocks(self, request: LiveRequest) -> None:
        """Puts a request's full computed blocks into the prefix cache and into host memory."""
        size = self.caching_block_tokens
        if not size:
            return
        num_full = request.num_computed // size
        if num_full > request.num_cached_blocks:
            hashes = request.block_hashes(request.num_computed, size)
            first, request.num_cached_blocks = request.num_cached_blocks, num_full
            self.blocks.cache(request.id, first, hashes[first:])
            self._note_salt(request, hashes[first:])
        if self.host is not None and num_full > request.num_stored_blocks:
            hashes = request.block_hashes(request.num_computed, size)
            first, request.num_stored_blocks = request.num_stored_blocks, num_full
            self.host.store(hashes, first)

    def delete(
        self, cache_salt: str | None, block_hashes: Collection[int] | None
    ) -> tuple[int, int]:
        """Deletes blocks that no request holds from the prefix cache and from host memory.

        Args:
            cache_salt: Only blocks of requests with this salt; None: all blocks.
            block_hashes: Only blocks with these hashes; None: with any hash.

        Returns:
            How many blocks were deleted in each.
        """
        only = frozenset(block_hashes) if block_hashes is not None else None

        def is_meant(block_hash: int) -> bool:
            has_salt = cache_salt is None or self._salts.get(block_hash, "") == cache_salt
            return has_salt and (only is None or block_hash in only)

        num_host = self.host.delete(is_meant) if self.host is not None else 0
        return self.blocks.delete(is_meant), num_host

    def _note_salt(self, request: LiveRequest, hashes: Sequence[int]) -> None:
        if not (salt := request.request.cache_salt):
            return
        self._salts.update(dict.fromkeys(hashes, salt))
        num_host_blocks = self.host.num_blocks if self.host is not None else 0
        if len(self._salts) > 2 * (self.blocks.num_blocks + num_host_blocks):
            self._salts = {one: salt for one, salt in self._salts.items() if self._holds(one)}

    @staticmethod
    def _work(request: LiveRequest, num_tokens: int) -> Work:
        is_decode = num_tokens == 1 and request.is_decoding
        return Work(request, request.num_preemptions, num_tokens, is_decode)


def _kept_name(request: LiveRequest) -> str:
    return f"kept for {request.id}"


def _num_tokens(work: Iterable[Work]) -> int:
    return sum(item.num_tokens for item in work)
