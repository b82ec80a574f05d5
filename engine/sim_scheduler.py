"""The simulated engine's scheduler: which requests the next step computes, and how many tokens.

It does continuous batching with chunked prefill, like vLLM: a step computes the missing tokens of
its requests, limited in tokens and in requests. Without free blocks the request with the lowest
priority is preempted and computed again later.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.engine.base import EngineRequest
from baton.engine.sim_blocks import BlockPool
from baton.engine.sim_handoff import HandoffSend
from baton.engine.sim_text import OutputText
from baton.engine.sim_tokens import TokenChain
from baton.runtime.block_hashes import block_hashes, root_of


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
        num_cached_blocks: Blocks that were put into the prefix cache.
        run: Number of preemptions; work of an earlier run is void.
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
    run: int = 0
    live: bool = True
    first_run_at: float | None = None
    handoff_wait_s: float | None = None
    num_handoff_tokens: int = 0
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0
    reported: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.num_computed

    def block_hashes(self, num_tokens: int, block_size_tokens: int) -> array[int]:
        """Returns the hashes of the full blocks of the first `num_tokens` tokens."""
        num_blocks = num_tokens // block_size_tokens
        if len(self.hashes) < num_blocks:
            begin = len(self.hashes) * block_size_tokens
            rest = self.tokens[begin : num_blocks * block_size_tokens]
            parent = self.hashes[-1] if self.hashes else root_of(self.request.adapter)
            self.hashes.extend(block_hashes(rest, block_size_tokens, parent))
        return self.hashes[:num_blocks]


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step."""

    request: LiveRequest
    run: int
    num_tokens: int
    is_decode: bool

    @property
    def valid(self) -> bool:
        """Whether the request was neither aborted nor preempted since the step was scheduled."""
        return self.request.live and self.request.run == self.run


@dataclass(slots=True)
class Scheduler:
    """Owns the order of the requests, and their blocks.

    Attributes:
        caching_block_tokens: Block size of the prefix cache in tokens; 0 without prefix caching.
        is_ready: Returns whether a waiting request may start. A request that waits for its handoff
            may not, and does not delay the requests behind it.
        on_start: Called when a request has got its blocks, before its missing tokens are counted.
    """

    blocks: BlockPool
    max_num_seqs: int
    max_num_batched_tokens: int
    is_ready: Callable[[LiveRequest], bool]
    on_start: Callable[[LiveRequest], None]
    caching_block_tokens: int = 0
    running: list[LiveRequest] = field(default_factory=list)
    _waiting: list[tuple[tuple[int, int], LiveRequest]] = field(default_factory=list)

    @property
    def waiting(self) -> Iterator[LiveRequest]:
        return (request for _, request in self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: LiveRequest) -> None:
        heapq.heappush(self._waiting, (request.order, request))

    def remove(self, request: LiveRequest) -> None:
        """Removes a request and frees its blocks."""
        request.live = False
        if request in self.running:
            self.running.remove(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)
        self.blocks.free(request.id)

    def preempt(self, request: LiveRequest) -> None:
        """Takes a running request's blocks; it starts over when there is room."""
        self.running.remove(request)
        self.blocks.free(request.id)
        request.run += 1
        request.num_computed = request.num_computed_here = request.num_cached_blocks = 0
        self.add(request)

    def schedule(self) -> list[Work]:
        """Returns the next step's work; empty if nothing can run now."""
        budget, work = self.max_num_batched_tokens, list[Work]()
        preempted = False
        for request in sorted(self.running, key=lambda running: running.order):
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
        return work if preempted else work + self._admit(budget)

    def _admit(self, budget: int) -> list[Work]:
        """Starts waiting requests in order, until a ready request finds no room."""
        work, put_back = list[Work](), list[tuple[tuple[int, int], LiveRequest]]()
        while self._waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            entry = heapq.heappop(self._waiting)
            request = entry[1]
            if not self.is_ready(request):
                put_back.append(entry)
                continue
            if not self._take_blocks(request):
                put_back.append(entry)
                break
            self.on_start(request)
            if not request.live:  # Its handoff was wrong; the engine has reported that.
                self.blocks.free(request.id)
                continue
            self.running.append(request)
            num_tokens = min(request.num_missing, budget)
            budget -= num_tokens
            work.append(self._work(request, num_tokens))
        for entry in put_back:
            heapq.heappush(self._waiting, entry)
        return work

    def _take_blocks(self, request: LiveRequest) -> bool:
        """Allocates a request's blocks, including those in the prefix cache."""
        size, hashes = self.caching_block_tokens, array("Q")
        # As in vLLM, a request for prompt logprobs computes its whole prompt.
        reads = request.request.known_token_ids or not request.request.sampling.HasField(
            "prompt_logprobs"
        )
        if size and reads:
            # The last token is always computed, because the next token is sampled from its logits.
            hashes = request.block_hashes(len(request.tokens) - 1, size)
        cached = self.blocks.start(request.id, len(request.tokens), hashes)
        if cached is None:
            return False
        request.num_computed = cached * size
        request.num_cached_blocks = cached
        num_prompt_tokens = len(request.request.prompt_token_ids)
        request.num_cached_tokens = min(request.num_computed, num_prompt_tokens)
        return True

    def cache_blocks(self, request: LiveRequest) -> None:
        """Puts a request's full computed blocks into the prefix cache."""
        size = self.caching_block_tokens
        if size and request.num_computed // size > request.num_cached_blocks:
            hashes = request.block_hashes(request.num_computed, size)
            first, request.num_cached_blocks = request.num_cached_blocks, len(hashes)
            self.blocks.cache(request.id, first, hashes[first:])

    @staticmethod
    def _work(request: LiveRequest, num_tokens: int) -> Work:
        is_decode = num_tokens == 1 and request.num_missing == 1 and request.num_computed > 0
        return Work(request, request.run, num_tokens, is_decode)
