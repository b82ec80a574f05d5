"""All workers' loads, filed so that the least loaded of a pool are found without a scan."""

from __future__ import annotations

from baton.coordinator.routing.least_loaded import LeastLoaded
from baton.coordinator.routing.worker_load import WorkerLoad
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import WorkerKey


class LoadIndex:
    """Load entries by worker. Whoever changes an entry calls `file` with it.

    Args:
        max_prefill_requests, max_decode_requests: a worker with so many assigned, or with as many
            decodes as its engine has in its steps, is full, and found by no index but by_yielding.

    Attributes:
        entries: to be read; `add` and `remove` change it.
        open_prefill, open_decode: masks of the workers that take one more request.
        num_prefill_workers: in the prefill pool, full ones included.
        by_queue: of the prefill pool, by when their prefill work is done.
        by_itl, by_room: of the decode pool, by seconds per step and by KV tokens left, negated.
        by_itl_apart: as by_itl, of those whose outputs are all batch requests'.
        by_yielding: of the decode pool, full ones included, those with decodes that can be told to
            make room: by the KV tokens that would be left without these, negated.
    """

    def __init__(self, max_prefill_requests: int, max_decode_requests: int) -> None:
        self._max_prefills, self._max_decodes = max_prefill_requests, max_decode_requests
        self.entries: dict[WorkerKey, WorkerLoad] = {}
        self._pools: dict[WorkerKey, Pool] = {}
        self.open_prefill = self.open_decode = 0
        self.num_prefill_workers = 0
        self.by_queue: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_itl: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_itl_apart: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_room: LeastLoaded[WorkerKey] = LeastLoaded()
        self.by_yielding: LeastLoaded[WorkerKey] = LeastLoaded()
        self._by_host: dict[str, LeastLoaded[WorkerKey]] = {}

    def get(self, worker: WorkerKey | None) -> WorkerLoad | None:
        return self.entries.get(worker) if worker is not None else None

    def add(self, entry: WorkerLoad) -> None:
        """A worker that is in no pool yet."""
        assert entry.key not in self.entries
        self.entries[entry.key] = entry

    def set_pool(self, worker: WorkerKey, pool: Pool | None) -> None:
        """What a worker is given from now on; None for nothing."""
        self.num_prefill_workers -= self._pools.pop(worker, None) is Pool.PREFILL
        if pool is not None:
            self._pools[worker] = pool
            self.num_prefill_workers += pool is Pool.PREFILL
        self.file(self.entries[worker])

    def pool(self, worker: WorkerKey) -> Pool | None:
        """What a worker is given now."""
        return self._pools.get(worker)

    def remove(self, worker: WorkerKey) -> None:
        self.set_pool(worker, None)
        del self.entries[worker]

    def fastest_on(self, host_id: str) -> WorkerKey | None:
        """The decode worker on this host with the least seconds per step, if there is one."""
        on_host = self._by_host.get(host_id)
        return on_host.least() if on_host is not None else None

    def most_decodes(self, entry: WorkerLoad) -> int:
        """How many requests a decode worker may have at a time, whatever KV room it has."""
        return min(self._max_decodes, entry.traits.max_seqs)

    def file(self, entry: WorkerLoad) -> None:
        """Puts a worker where its load belongs."""
        worker, pool = entry.key, self._pools.get(entry.key)
        if pool is Pool.PREFILL and entry.num_prefills < self._max_prefills:
            self.open_prefill |= entry.bit
            self.by_queue.set(worker, entry.free_at)
        elif self.open_prefill & entry.bit:
            self.open_prefill ^= entry.bit
            self.by_queue.remove(worker)
        if pool is Pool.DECODE and entry.yielding_tokens:
            self.by_yielding.set(worker, -entry.free_tokens - entry.yielding_tokens)
        else:
            self.by_yielding.remove(worker)
        if pool is Pool.DECODE and entry.num_decodes < self.most_decodes(entry):
            self.open_decode |= entry.bit
            itl_s = entry.itl_with_s(0, 0)
            self.by_itl.set(worker, itl_s)
            if entry.num_urgent:
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
            if pool is Pool.PREFILL and entry.num_prefills < self._max_prefills:
                prefills |= entry.bit
                assert worker in self.by_queue
            assert (worker in self.by_yielding) == (
                pool is Pool.DECODE and entry.yielding_tokens > 0
            )
            if pool is Pool.DECODE and entry.num_decodes < self.most_decodes(entry):
                decodes |= entry.bit
                assert worker in self.by_itl
                assert worker in self.by_room
                assert (worker in self.by_itl_apart) == (entry.num_urgent == 0)
                assert worker in self._by_host[entry.traits.host_id]
        assert (self.open_prefill, self.open_decode) == (prefills, decodes)
        assert len(self.by_queue) == prefills.bit_count()
        assert len(self.by_itl) == len(self.by_room) == decodes.bit_count()
        assert sum(map(len, self._by_host.values())) == decodes.bit_count()
