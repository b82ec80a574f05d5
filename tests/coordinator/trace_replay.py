"""Replays a real conversation trace on simulated prefill workers, under a virtual clock."""

from __future__ import annotations

import csv
import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_traits import WorkerTraits
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import WorkerKey
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.latency import LatencyModel
from tests.coordinator.fixed_latency import FixedLatency
from tests.coordinator.worker_choices import pool_choices

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation.csv"
BLOCK_TOKENS = 16
# Block size of the trace. Lengths are scaled so that a block of the trace is one KV block.
_TRACE_BLOCK_TOKENS = 512


class TraceRequest(NamedTuple):
    arrival_s: float
    num_tokens: int
    hashes: array[int]

    @property
    def most_cached(self) -> int:
        """Maximum number of cached blocks; the last token is always computed."""
        return (self.num_tokens - 1) // BLOCK_TOKENS


def load_trace() -> list[TraceRequest]:
    found = []
    with TRACE.open() as file:
        for row in csv.DictReader(file):
            tokens: list[int] = []
            for run in row["block_ids"].split():
                first, _, last = run.partition("-")
                for block in range(int(first), int(last or first) + 1):
                    tokens += [block] * BLOCK_TOKENS
            length = max(1, int(row["input_tokens"]) * BLOCK_TOKENS // _TRACE_BLOCK_TOKENS)
            hashes = block_hashes(tokens[:length], BLOCK_TOKENS)
            found.append(TraceRequest(int(row["timestamp_ms"]) / 1e3, length, hashes))
    return found


class LruCache:
    """Cache that evicts the least recently used prompt first, from its last block."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, request: TraceRequest) -> int:
        """Number of the prompt's blocks that are cached; marks them as used."""
        count = 0
        for block in request.hashes[: request.most_cached]:
            if block not in self._blocks:
                break
            count += 1
        for block in reversed(request.hashes[:count]):
            self._blocks.move_to_end(block)
        return count

    def store(self, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Adds blocks; returns the added and the evicted blocks."""
        stored = [block for block in hashes if block not in self._blocks]
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        removed = []
        while len(self._blocks) > self._num_blocks:
            removed.append(self._blocks.popitem(last=False)[0])
        return [block for block in stored if block in self._blocks], removed


@dataclass
class Outcome:
    num_tokens: int = 0
    num_cached_tokens: int = 0
    work_s: dict[WorkerKey, float] = field(default_factory=dict)

    @property
    def cached_share(self) -> float:
        return self.num_cached_tokens / self.num_tokens

    @property
    def imbalance(self) -> float:
        """Largest amount of work of a worker, relative to the mean."""
        return max(self.work_s.values()) * len(self.work_s) / sum(self.work_s.values())


def on_one_worker(trace: Sequence[TraceRequest], num_blocks: int) -> Outcome:
    """Outcome with one cache for all requests in order of arrival."""
    cache, outcome = LruCache(num_blocks), Outcome()
    for request in trace:
        outcome.num_cached_tokens += cache.use(request) * BLOCK_TOKENS
        outcome.num_tokens += request.num_tokens
        cache.store(request.hashes)
    return outcome


def replay(
    trace: Sequence[TraceRequest],
    *,
    num_workers: int,
    num_blocks: int,
    latency: LatencyModel,
) -> Outcome:
    """Outcome with the view, whose workers compute their prompts one after another.

    Args:
        num_blocks: Blocks of each worker's cache; changes are reported at the end of a prompt.
    """
    view, outcome = FleetView(CoreClock(), len(trace), 1), Outcome()
    choices = pool_choices(view)
    workers = [(f"w{number}", 1) for number in range(num_workers)]
    caches = {worker: LruCache(num_blocks) for worker in workers}
    queues: dict[WorkerKey, deque[int]] = {worker: deque() for worker in workers}
    running: dict[WorkerKey, int] = {}
    outcome.work_s = dict.fromkeys(workers, 0.0)
    traits = WorkerTraits(FixedLatency(latency), "host", num_blocks * BLOCK_TOKENS, BLOCK_TOKENS)
    for worker in workers:
        view.add_worker(worker, traits, Pool.PREFILL)
    # (seconds, order, worker that has finished a prompt; None: a request arrives)
    events: list[tuple[float, int, WorkerKey | None]] = [
        (request.arrival_s, number, None) for number, request in enumerate(trace)
    ]

    def start(worker: WorkerKey, now: float) -> None:
        number = running[worker] = queues[worker].popleft()
        num_cached = caches[worker].use(trace[number]) * BLOCK_TOKENS
        work_s = latency.prefill_s(trace[number].num_tokens - num_cached)
        outcome.num_tokens += trace[number].num_tokens
        outcome.num_cached_tokens += num_cached
        outcome.work_s[worker] += work_s
        heapq.heappush(events, (now + work_s, number, worker))

    while events:
        now, number, worker = heapq.heappop(events)
        request = trace[number]
        if worker is None:
            match = view.match(request.hashes)
            choice = choices.choose_prefill(match, request.num_tokens)
            assert choice is not None
            view.assign_prefill(str(number), choice, request.hashes)
            queues[choice.worker].append(number)
            if choice.worker not in running:
                start(choice.worker, now)
            continue
        stored, removed = caches[worker].store(request.hashes)
        view.index.removed(worker, removed)
        view.index.stored(worker, stored)
        view.release(str(number), worker, None)
        del running[worker]
        if queues[worker]:
            start(worker, now)
    view.check_integrity()
    return outcome
