"""Indexes the loads of all workers, to find the least loaded workers of a pool without a scan."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from baton.coordinator.routing.loads.least_loaded import LeastLoaded, Position
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.loads.worker_traits import Latency
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import WorkerKey
from baton.runtime.steps.step_budget import StepTargets

# Largest group of workers that a placement in an elastic cell compares. It also compares the
# workers that hold the prompt's prefix.
_MAX_GROUP_WORKERS = 32


class LoadIndex:
    """Load entries by worker. After changing an entry, the caller must pass it to `update`.

    After a change of its prompts alone, `update_prompts` does the same at a fraction of the cost.

    Args:
        clock: Time of the event that the core handles.
        max_prefill_requests: Limit of prompts assigned to one worker.
        max_decode_requests: Limit of decodes assigned to one worker; the engine's own limit of
            requests per step (max_seqs) applies too. A worker at its limit is full: no index except
            by_parkable contains it.

    Attributes:
        step_targets: Targets of the workers' steps in an elastic cell; None elsewhere.
        entries: Load entries, read-only for callers; `add` and `remove` change them.
        kinds: number of workers by latency model and block size.
        open_prefill, open_decode: bit masks of the workers that can take another request.
        num_prefill_workers: number of workers in the prefill pool, including full workers.
        by_queue: prefill workers ordered by the time when their prefill work is done.
        by_itl: decode workers ordered by seconds per step.
        by_room: decode workers ordered by free KV tokens, most first (stored negated).
        by_itl_apart: like by_itl, but only workers without interactive decodes.
        by_parkable: decode workers (including full workers) with decodes that may be parked,
            ordered by the KV tokens free after parking all of these, most first.
    """

    def __init__(
        self,
        clock: CoreClock,
        max_prefill_requests: int,
        max_decode_requests: int,
        step_targets: StepTargets | None = None,
    ) -> None:
        self.step_targets = step_targets
        self._clock = clock
        self._max_prefills, self._max_decodes = max_prefill_requests, max_decode_requests
        self.entries: dict[WorkerKey, WorkerLoad] = {}
        self.kinds: Counter[tuple[Latency, int]] = Counter()
        self._pools: dict[WorkerKey, Pool] = {}
        self._groups: list[list[WorkerLoad]] = []
        self.open_prefill = self.open_decode = 0
        self.num_prefill_workers = 0
        self.by_queue: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_itl: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_itl_apart: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_room: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_parkable: LeastLoaded[WorkerKey] = LeastLoaded()
        self._by_host: dict[str, LeastLoaded[WorkerKey]] = {}

    def set_step_targets(self, targets: StepTargets) -> None:
        """Changes the step targets of an elastic cell, and the predictions that follow."""
        self.step_targets = targets
        for entry in self.entries.values():
            self.update(entry)

    @property
    def prompt_speed(self) -> float:
        """Speed of all workers that compute prompts together; an idle worker counts 1.

        The workers of the least loaded group stand for all.
        """
        if self.step_targets is None:
            return float(self.num_prefill_workers)
        speeds = [one.prompt_speed for one in self.least_loaded_group() if one.key in self._pools]
        return self.num_prefill_workers * sum(speeds) / len(speeds) if speeds else 0.0

    @property
    def num_groups(self) -> int:
        """Number of groups that a placement in an elastic cell chooses from."""
        return len(self._groups)

    def least_loaded_group(self) -> Sequence[WorkerLoad]:
        """The group with the fewest requests per worker that gets work; empty without workers.

        A placement in an elastic cell compares the workers of one group, because comparing
        hundreds for each request would cost too much.
        """
        if len(self._groups) < 2:
            return self._groups[0] if self._groups else ()
        return min(self._groups, key=self._load_of_group)

    def _load_of_group(self, group: Sequence[WorkerLoad]) -> float:
        num_open = num_requests = 0
        for entry in group:
            num_open += entry.key in self._pools
            num_requests += entry.num_decodes + entry.num_prefills
        return num_requests / num_open if num_open else math.inf

    def _regroup(self) -> None:
        """Divides the workers into groups of about the same size, after a change of members."""
        entries = list(self.entries.values())
        number = -(-len(entries) // _MAX_GROUP_WORKERS)
        self._groups = [entries[index::number] for index in range(number)]

    def get(self, worker: WorkerKey | None) -> WorkerLoad | None:
        """Load of a worker, read-only for placement rules; None: no worker, or an unknown one."""
        return self.entries.get(worker) if worker is not None else None

    def add(self, entry: WorkerLoad) -> None:
        """Adds a worker that is in no pool yet."""
        assert entry.key not in self.entries
        self.entries[entry.key] = entry
        self.kinds[_kind_of(entry)] += 1
        self._regroup()

    def set_pool(self, worker: WorkerKey, pool: Pool | None) -> None:
        """Moves a worker to the pool that it gets work from; None: the worker gets no new work.

        The worker keeps the requests it has.
        """
        self.num_prefill_workers -= self.computes_prompts(self._pools.pop(worker, None))
        if pool is not None:
            self._pools[worker] = pool
            self.num_prefill_workers += self.computes_prompts(pool)
        self.update(self.entries[worker])

    @contextlib.contextmanager
    def closed(self, workers: Iterable[WorkerKey]) -> Iterator[None]:
        """Gives these workers no work inside the `with` block.

        Afterwards, all indexes are as before. If a worker came last among equal workers, a question
        inside the block would change later choices.
        """
        left = [
            (entry, self._pools.get(entry.key), self._positions(entry))
            for worker in dict.fromkeys(workers)
            if (entry := self.entries.get(worker)) is not None
        ]
        for entry, _, _ in left:
            self.set_pool(entry.key, None)
        try:
            yield
        finally:
            for entry, pool, _ in left:
                self.set_pool(entry.key, pool)
            for entry, _, positions in left:
                for index, position in zip(self._indexes(entry), positions, strict=True):
                    index.restore(entry.key, position)

    def _positions(self, entry: WorkerLoad) -> list[Position | None]:
        return [index.position(entry.key) for index in self._indexes(entry)]

    def _indexes(self, entry: WorkerLoad) -> tuple[LeastLoaded[WorkerKey], ...]:
        """The indexes that may contain a worker, always in the same order."""
        on_host = self._by_host.get(entry.traits.host_id, LeastLoaded())
        indexes = (self.by_queue, self.by_itl, self.by_itl_apart, self.by_room, self.by_parkable)
        return (*indexes, on_host)

    def computes_prompts(self, pool: Pool | None) -> bool:
        """Whether the workers of a pool compute prompts; in an elastic cell, those of any pool."""
        return pool is Pool.PREFILL or (pool is not None and self.step_targets is not None)

    def decodes(self, pool: Pool | None) -> bool:
        """Whether the workers of a pool decode; in an elastic cell, those of any pool."""
        return pool is Pool.DECODE or (pool is not None and self.step_targets is not None)

    def pool(self, worker: WorkerKey) -> Pool | None:
        """The pool that a worker gets work from; None: the worker gets no work."""
        return self._pools.get(worker)

    def remove(self, worker: WorkerKey) -> None:
        self.set_pool(worker, None)
        kind = _kind_of(self.entries.pop(worker))
        self.kinds[kind] -= 1
        if not self.kinds[kind]:
            del self.kinds[kind]
        self._regroup()

    def idlest_prefill(self) -> WorkerLoad | None:
        """The prefill worker with the shortest queue; None if all are full."""
        return self.get(self.by_queue.least())

    def most_parkable(self) -> WorkerLoad | None:
        """The decode worker that would have most KV room after parking its batch decodes.

        None if no worker has a decode that may be parked.
        """
        return self.get(self.by_parkable.least())

    def fastest_on(self, host_id: str) -> WorkerKey | None:
        """The decode worker with the shortest step time on a host; None if the host has none."""
        on_host = self._by_host.get(host_id)
        return on_host.least() if on_host is not None else None

    def most_decodes(self, entry: WorkerLoad) -> int:
        """Maximum number of requests on a decode worker, regardless of its KV room."""
        return min(self._max_decodes, entry.traits.max_seqs)

    def update_prompts(self, entry: WorkerLoad) -> None:
        """Updates the indexes after a change of the prompts that are assigned to a worker."""
        worker = entry.key
        takes_prompts = self.computes_prompts(self._pools.get(worker))
        if takes_prompts and entry.num_prefills < self._max_prefills:
            self.open_prefill |= entry.bit
            self.by_queue.set(worker, entry.free_at)
        elif self.open_prefill & entry.bit:
            self.open_prefill ^= entry.bit
            self.by_queue.remove(worker)

    def update(self, entry: WorkerLoad) -> None:
        """Updates all indexes after a change of a worker's load or pool."""
        worker, pool = entry.key, self._pools.get(entry.key)
        if self.step_targets is not None:
            entry.predict_prompt_speed(self.step_targets, self._clock.now)
        self.update_prompts(entry)
        if self.decodes(pool) and entry.decodes.num_parkable:
            self.by_parkable.set(worker, -entry.free_tokens_after_parking)
        else:
            self.by_parkable.remove(worker)
        if self.decodes(pool) and entry.num_decodes < self.most_decodes(entry):
            self.open_decode |= entry.bit
            itl_s = entry.reserved_step_s()
            self.by_itl.set(worker, itl_s)
            if entry.decodes.num_interactive:
                self.by_itl_apart.remove(worker)
            else:
                self.by_itl_apart.set(worker, itl_s)
            self.by_room.set(worker, -entry.free_tokens)
            on_host = self._by_host.get(entry.traits.host_id)
            if on_host is None:
                on_host = self._by_host[entry.traits.host_id] = LeastLoaded()
            on_host.set(worker, itl_s)
        elif self.open_decode & entry.bit:
            self.open_decode ^= entry.bit
            self.by_itl.remove(worker)
            self.by_itl_apart.remove(worker)
            self.by_room.remove(worker)
            on_host = self._by_host[entry.traits.host_id]
            on_host.remove(worker)
            if not on_host:
                del self._by_host[entry.traits.host_id]

    def check_integrity(self) -> None:
        """Raises AssertionError when masks, indexes and entries differ."""
        prefills = decodes = 0
        for worker, entry in self.entries.items():
            entry.check_integrity()
            pool = self._pools.get(worker)
            if self.computes_prompts(pool) and entry.num_prefills < self._max_prefills:
                prefills |= entry.bit
                assert self.by_queue.load(worker) == entry.free_at
            assert (worker in self.by_parkable) == (
                self.decodes(pool) and entry.decodes.num_parkable > 0
            )
            if self.decodes(pool) and entry.num_decodes < self.most_decodes(entry):
                decodes |= entry.bit
                assert worker in self.by_itl
                assert self.by_room.load(worker) == -entry.free_tokens
                assert (worker in self.by_itl_apart) == (entry.decodes.num_interactive == 0)
                assert worker in self._by_host[entry.traits.host_id]
        assert self.kinds == Counter(map(_kind_of, self.entries.values()))
        assert (self.open_prefill, self.open_decode) == (prefills, decodes)
        assert len(self.by_queue) == prefills.bit_count()
        assert len(self.by_itl) == len(self.by_room) == decodes.bit_count()
        assert sum(map(len, self._by_host.values())) == decodes.bit_count()


def _kind_of(entry: WorkerLoad) -> tuple[Latency, int]:
    return entry.traits.latency.of_kind, entry.traits.block_size_tokens
