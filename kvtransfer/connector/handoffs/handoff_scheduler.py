"""Decides which handoffs an engine sends and loads in which step; runs beside vLLM's scheduler."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kvtransfer.connector.handoffs.handoff_step import HandoffStep, Load, LoadReport, Part
from baton.kvtransfer.connector.handoffs.kept_prefixes import KeptPrefixes
from baton.kvtransfer.connector.handoffs.receives import Receive, Receives
from baton.kvtransfer.connector.handoffs.sends import Sends
from baton.kvtransfer.connector.handoffs.unverified import UnverifiedBlocks
from baton.kvtransfer.connector.handoffs.wrong_blocks import WrongBlocks
from baton.kvtransfer.connector.request_params import RequestParams
from baton.kvtransfer.connector.step_report import StepReport
from baton.kvtransfer.connector.step_work import StepCounter, StepWork, num_computed_tokens
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv.kv_groups import NULL_BLOCK
from baton.v1 import kv_transfer_pb2

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# Reasons in a release: why nothing of a handoff was loaded. UNSPECIFIED: it was loaded, or there
# was nothing to load.
_LOADED = kv_transfer_pb2.REFUSAL_REASON_UNSPECIFIED
_EXPIRED = kv_transfer_pb2.REFUSAL_REASON_EXPIRED
_CANCELLED = kv_transfer_pb2.REFUSAL_REASON_CANCELLED

# Bytes that one step clears in a rank, at most, to keep the gap in streams short: 64 MiB take 7 ms
# on one core of a CPU, and less than 0.1 ms on a GPU.
_CLEARED_BYTES = 64 * 2**20
# Large caches are cleared in this number of steps, with more bytes in each step, because a worker
# has to delete its blocks within a limit (runtime/kv/cache_drops.py), and a step with prompts may
# take 0.6 s.
_MOST_CLEARING_STEPS = 64


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A step that was scheduled and whose output has not come.

    Attributes:
        work: The step's work as the latency model counts it; None when it computes nothing, or
            its time says nothing about the model.
        loads: Handoffs that the step loads before it ends.
        releases: Handoffs to release when the step has ended, with the reason why they were not
            loaded.
    """

    work: StepWork | None
    loads: list[bytes]
    releases: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType]


class HandoffScheduler:
    """Decides which blocks are saved for handoffs and loaded from them, and in which step.

    vLLM's scheduler calls it through the connector, one method at a time.

    Args:
        port: This thread's connection to the transfer service.
        layout: Layout of the KV cache.
        copies_in_steps: Whether the ranks copy handoffs in the time of the steps: on a CPU.

    Attributes:
        requests_wait: Whether requests wait for their loads, with their blocks, while other
            requests run; otherwise the step that first runs a request loads its handoff. False for
            caches with states, because vLLM copies a state when it runs the request.
    """

    def __init__(
        self, port: EnginePort, layout: KvLayout, *, copies_in_steps: bool = False
    ) -> None:
        self._port, self._layout, self._copies_in_steps = port, layout, copies_in_steps
        self.requests_wait = not layout.has_states
        # Every request that has not ended, by the engine's request id.
        self._requests: dict[str, Request] = {}
        self._sends = Sends(port, layout)
        self._receives = Receives(port)
        # Loads of the oldest unfinished step that failed in a rank, with the reason.
        self._failed_loads: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = {}
        # Requests that must find their whole prompt in the cache, except the last token.
        self._only_cached: set[str] = set()
        # Requests without the pixels of their images: number of prompt tokens, from the first, that
        # they cannot compute.
        self._needed: dict[str, int] = {}
        # Requests that wait until Baton's engine aborts them, because their prefix is gone. With
        # each, the number of tokens to report (see StepReport.gone).
        self._gone: dict[str, int] = {}
        # True once a rank has lost the transfer service.
        self._is_cut_off = False
        # Loads that requests wait for, by the engine's request id, until all ranks have loaded
        # them; and why ranks could not.
        self._waited: dict[str, Load] = {}
        self._waited_failed: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = {}
        # Loads and releases of the step that is made next.
        self._loads: list[Load] = []
        self._releases: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = {}
        self._unverified = UnverifiedBlocks(layout.tables)
        # vLLM may schedule a step while another one runs, and finishes steps in order.
        self._unfinished: deque[_Unfinished] = deque()
        self._counter = StepCounter()

    def bind(self, pool: BlockPool) -> None:
        """Takes the engine's block pool; vLLM calls this before the first request."""
        self._pool = pool
        self._wrong = WrongBlocks(pool)
        groups = self._layout.groups
        block_bytes = sum(group.num_layers * group.block_bytes for group in groups)
        self._cleared_per_step = max(
            _CLEARED_BYTES // block_bytes, math.ceil(len(pool.blocks) / _MOST_CLEARING_STEPS)
        )
        self._kept = KeptPrefixes(pool, self._layout.tables)

    def add(self, request: Request) -> None:
        """Takes a request that was given to the engine."""
        self._requests[request.request_id] = request
        params = RequestParams(request.kv_transfer_params)
        if (send := params.send) is not None:
            self._sends.add(request.request_id, send)
        if (receive := params.receive) is not None:
            made = self._receives.add(request.request_id, receive, time.monotonic())
            if made.is_fetch and made.skip_tokens:
                self._kept.keep(request, made.skip_tokens, made.deadline)
        if params.only_cached:
            self._only_cached.add(request.request_id)
        if num_needed := params.num_needed_tokens:
            self._needed[request.request_id] = num_needed

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Returns how many tokens a request loads from its handoff; None: it waits, ask again.

        vLLM asks again after a preemption and after every allocation that failed. Asking again is
        harmless: a committed handoff stays until `allocated`. A handoff that cannot be loaded any
        more is released here.

        Args:
            request: The engine's request, which is about to run.
            num_computed_tokens: Tokens of its prompt that are in the prefix cache.
        """
        receive = self._receives.waiting(request.request_id)
        if receive is None:
            return 0
        self._receives.poll()
        now = time.monotonic()
        if receive.only_waits:
            receive.over = self._receives.is_ended(receive, now)
            return 0 if receive.over else None
        if num_computed_tokens < receive.skip_tokens:
            # The prefix cache has lost what the handoff leaves out.
            if receive.is_fetch:
                self._end(receive, _CANCELLED)
                return 0
            # Baton's engine must abort the request.
            self._gone[request.request_id] = 0
            return None
        if self._receives.has_come(receive):
            if self._is_loadable(receive, request):
                return max(0, self._usable_tokens(receive, request) - num_computed_tokens)
        elif self._receives.may_come(receive):
            if now < receive.deadline:
                return None
            self._port.release(receive.handoff_id, all_shards=True, not_loaded=_EXPIRED)
        self._end(receive)
        return 0

    def is_on_its_way(self, request_id: str) -> bool:
        """Returns whether a request waits for a handoff that has neither come nor failed.

        `num_loadable_tokens` then returns None, whatever the prefix cache has.
        """
        receive = self._receives.waiting(request_id)
        if receive is None:
            return False
        self._receives.poll()
        return self._receives.is_on_its_way(receive, time.monotonic())

    def end_if_uncached(self, request: Request, num_held_tokens: int) -> bool:
        """Ends a request that must not run, because it lacks blocks that it cannot compute.

        Baton's engine hears of it after the step (StepReport.gone), and aborts the request. If the
        request serves a fetch and has saved nothing, its send ends here; see Sends.leave.

        Args:
            request: The engine's request, which is about to run.
            num_held_tokens: Tokens of its prompt, from the first, in the prefix cache, in host
                memory and in its handoff.

        Returns:
            Whether the request was ended.
        """
        if num_held_tokens < self._needed.get(request.request_id, 0):
            self._gone[request.request_id] = 0
            return True
        if request.request_id not in self._only_cached:
            return False
        if num_held_tokens >= request.num_tokens - 1:
            return False
        is_left = self._sends.leave(request.request_id)
        self._gone[request.request_id] = num_held_tokens if is_left else 0
        return True

    def receives(self, request_id: str) -> bool:
        """Returns whether a request still waits for a handoff, or loads it next."""
        return self._receives.waiting(request_id) is not None

    @staticmethod
    def _usable_tokens(receive: Receive, request: Request) -> int:
        # The engine computes at least one token, because it samples from that token's logits.
        return min(receive.num_tokens, int(request.num_tokens) - 1)

    def _is_loadable(self, receive: Receive, request: Request) -> bool:
        """Returns whether the blocks of a committed handoff are those that the request needs.

        A handoff holds the window that its last token and the next one need, and the state after
        its last token. A request whose first token is forced computes the last token again.
        """
        num_missing = receive.num_tokens - self._usable_tokens(receive, request)
        return not self._layout.own_groups or num_missing <= (0 if self._layout.has_states else 1)

    def allocated(
        self, request: Request, tables: Sequence[list[int]], num_loaded_tokens: int
    ) -> Sequence[int]:
        """Takes the blocks of a request that runs in the step that is made next.

        Args:
            request: The engine's request.
            tables: All blocks of the request, by block table.
            num_loaded_tokens: Number of tokens that the request loads from its handoff.

        Returns:
            The blocks that the load of the handoff fills.
        """
        self._unverified.follow(tables)
        receive = self._receives.waiting(request.request_id)
        if receive is None:
            return ()
        if num_loaded_tokens == 0:
            self._end(receive)
            return ()
        usable = self._usable_tokens(receive, request)
        first_token = usable - num_loaded_tokens
        load = Load(
            receive.handoff_id,
            receive.num_tokens - receive.skip_tokens,
            tuple(self._parts(tables, first_token, usable, receive.skip_tokens)),
            request.request_id if self.requests_wait else "",
            receive.num_shards,
            receive.has_draft,
            is_stream=not receive.is_fetch and request.priority <= 0,
        )
        self._receives.end(receive)
        if receive.is_fetch:
            # The request has the blocks now.
            self._kept.let_go(request.request_id)
        self._loads.append(load)
        if load.waiting_id:
            self._waited[request.request_id] = load
        else:
            self._unverified.load(load.block_ids, tables, first_token)
        return load.block_ids

    def _parts(
        self, tables: Sequence[list[int]], first_token: int, end_token: int, skip_tokens: int
    ) -> Iterator[Part]:
        """Yields for each block table the blocks that hold a range of tokens.

        Blocks before a window are left out: the request does not have them. A state goes to the
        block of the last token and to the one after it, if the next token begins a new block: vLLM
        copies the state from one to the other before the load.
        """
        for table, block_ids in zip(self._layout.tables, tables, strict=True):
            size = table.block_size_tokens
            if table.kind == "state":
                kept = block_ids[(end_token - 1) // size :]
                yield Part(0, [block_id for block_id in kept if block_id != NULL_BLOCK])
                continue
            first, end = first_token // size, -(-end_token // size)
            while first < end and block_ids[first] == NULL_BLOCK:
                first += 1
            yield Part(first - skip_tokens // size, block_ids[first:end])

    def distrust(self, invalid_block_ids: set[int]) -> set[int]:
        """Returns the blocks to take out of the prefix cache when the oldest step ends.

        vLLM puts blocks into its prefix cache when it allocates them, before a load has filled
        them. After a failed load it takes out only the blocks of requests that still run. The
        returned blocks are also cleared before another request gets them (WrongBlocks).

        Args:
            invalid_block_ids: Blocks that the step's loads failed to fill.
        """
        untrusted = self._unverified.distrust(invalid_block_ids)
        self._wrong.add(untrusted)
        return untrusted

    def clear(self, block_ids: Collection[int]) -> Set[int]:
        """Clears blocks that were taken out of the prefix cache; those in use, when they are free.

        The next steps clear a part each. A step clears all blocks that its requests get, except
        those that vLLM fills first: these are cleared when they are free again.

        Args:
            block_ids: Blocks of the engine's cache.

        Returns:
            Those that are free now. A block leaves the set when a step clears it.
        """
        return self._wrong.add_free(block_ids)

    @property
    def has_work(self) -> bool:
        """Whether free blocks are not cleared yet, for which the engine must go on stepping."""
        return self._wrong.has_free

    def _uncache_uncomputed(self, preempted_ids: Collection[str]) -> None:
        """Takes blocks of preempted requests that no step computed out of the prefix cache.

        vLLM puts a request's blocks into the prefix cache when it allocates them, and may preempt
        the request in the same schedule, in favour of a request further down its list: then no
        step computes these blocks (vllm-project/vllm#43569).
        """
        for request_id in preempted_ids:
            if (request := self._requests.get(request_id)) is None:
                continue
            # Rejected draft tokens are not among its tokens, and its last token has not been run.
            num_computed = min(self._counter.num_computed(request_id), request.num_tokens - 1)
            for table in self._layout.tables:
                if table.block_size_tokens % self._pool.hash_block_size:
                    # States of models without prefix caching, which have no names.
                    continue
                # vLLM names a block by the hash at its end.
                per_block = table.block_size_tokens // self._pool.hash_block_size
                first = num_computed // table.block_size_tokens
                for block_hash in request.block_hashes[(first + 1) * per_block - 1 :: per_block]:
                    while found := self._pool.get_cached_block(block_hash, [table.table]):
                        self._pool.evict_blocks({found[0].block_id})

    def step(self, output: SchedulerOutput) -> HandoffStep:
        """Returns what the ranks save, load and clear in a step that vLLM has scheduled."""
        self._uncache_uncomputed(output.preempted_req_ids)
        if self._kept:
            self._kept.expire(time.monotonic())
        saves = []
        if len(self._sends):
            saves = list(self._sends.saves(output, self._unverified.block_ids()))
        cleared = list[int]()
        if self._wrong.has_free:
            cleared = self._wrong.take(self._cleared_per_step, self._filled_early(output))
        step = HandoffStep(saves, self._loads, self._sends.take_given_up(), cleared)
        work = self._counter.count(output)
        if self._copies_in_steps and any(load.is_stream for load in self._waited.values()):
            # Copies for a stream may take most of the step.
            work = None
        if step.cleared:
            # Clearing the blocks may take long.
            work = None
        self._unfinished.append(
            _Unfinished(
                work,
                [load.handoff_id for load in step.loads if not load.waiting_id],
                self._releases,
            )
        )
        self._unverified.step_made()
        self._loads, self._releases = [], {}
        return step

    def _filled_early(self, output: SchedulerOutput) -> set[int]:
        """Returns the blocks that vLLM may fill in a step before the ranks get the step's orders.

        vLLM copies a state to its next block, and a shared block to a private one, before it gives
        the orders to the connector.
        """
        filled = set[int]()
        if self._layout.has_states:
            for request_id, num_computed in num_computed_tokens(output).items():
                if not num_computed:
                    # The request has no state yet.
                    continue
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                for table, block_ids in zip(self._layout.tables, tables, strict=True):
                    if table.kind == "state":
                        filled.update(block_ids)
            # The ranks load handoffs after they have cleared blocks.
            filled.difference_update(*(load.block_ids for load in self._loads))
        filled.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        return filled

    def latest_step_work(self) -> StepWork | None:
        """Returns the work of the step that was made last.

        None if the step loads handoffs, clears blocks or computes nothing: its time says nothing
        about the model.
        """
        latest = self._unfinished[-1] if self._unfinished else None
        return latest.work if latest is not None and not latest.loads else None

    def finish_step(self) -> StepReport:
        """Ends the oldest unfinished step; returns the report on it, for other parts to add to."""
        report = StepReport()
        if self._unfinished:
            step = self._unfinished.popleft()
            self._unverified.step_finished()
            if step.work is not None and not step.loads:
                report.work = step.work
            # The releases go out with the following step's end, which vLLM always makes: what
            # follows from a release, in four processes, would delay the tokens of this step.
            following = self._unfinished[0].releases if self._unfinished else self._releases
            following |= dict.fromkeys(step.loads, _LOADED) | self._failed_loads
            self._failed_loads = {}
            for handoff_id, not_loaded in step.releases.items():
                self._port.release(handoff_id, all_shards=True, not_loaded=not_loaded)
        self._wrong.release_free()
        report.gone, self._gone = self._gone, {}
        report.is_cut_off = self._is_cut_off or not self._port.alive
        return report

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Takes the end of a request that had these blocks: the ranks save nothing more of it.

        Saves of earlier steps may still be under way: a step that runs ahead, or copies that end
        after their step. The ranks tell the service themselves when they have stopped writing, in
        the next step, which vLLM makes after every end of a request.
        """
        self._counter.forget(request.request_id)
        self._requests.pop(request.request_id, None)
        self._unverified.follow(tables)
        self._sends.finished(request.request_id)
        self._only_cached.discard(request.request_id)
        self._needed.pop(request.request_id, None)
        receive = self._receives.remove(request.request_id)
        if receive is not None:
            self._end(receive, _CANCELLED)

    def reported(self, report: LoadReport, *, is_cut_off: bool = False) -> None:
        """Takes the ranks' report on the oldest unfinished step.

        Args:
            report: How the step's loads went.
            is_cut_off: True if a rank has lost the transfer service.
        """
        self._is_cut_off = self._is_cut_off or is_cut_off
        waited = {load.handoff_id for load in self._waited.values()}
        for handoff_id, why in report.failed.items():
            failed = self._waited_failed if handoff_id in waited else self._failed_loads
            failed[handoff_id] = why

    def loaded(self, request_ids: Collection[str]) -> None:
        """Takes the requests whose loads have ended in all ranks, after `reported`.

        Args:
            request_ids: vLLM's IDs of requests; others than those that wait are ignored.
        """
        for request_id in self._waited.keys() & request_ids:
            handoff_id = self._waited.pop(request_id).handoff_id
            why = self._waited_failed.pop(handoff_id, _LOADED)
            self._port.release(handoff_id, all_shards=True, not_loaded=why)

    def _end(
        self,
        receive: Receive,
        not_loaded: kv_transfer_pb2.RefusalReason.ValueType = _LOADED,
    ) -> None:
        """Loads nothing of a handoff; the step that is made next releases it.

        Args:
            receive: A receive that is not over.
            not_loaded: Why nothing was loaded.
        """
        self._receives.end(receive)
        self._kept.let_go(receive.request_id)
        if receive.only_waits:
            return
        self._releases[receive.handoff_id] = not_loaded
