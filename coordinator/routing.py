"""Which worker gets a request: its cached prefix against the work that is queued there.

Every cost is in seconds, and every choice looks at a few candidates only: those that hold the
longest prefixes, the session's last, and the least loaded. So a decision costs the same with ten
workers and with a thousand. The core decides which requests may run, and when; this module only
knows where.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from baton.coordinator.least_loaded import LeastLoaded
from baton.coordinator.prefix_index import PrefixIndex, PrefixMatch
from baton.coordinator.request import WorkerKey
from baton.coordinator.worker_load import WorkerLoad, WorkerTraits


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Attributes are per worker unless they say otherwise.

    Attributes:
        max_prefill_requests, max_decode_requests: assigned at a time.
        num_holders: candidates with the longest prefixes, per choice.
        num_least_loaded: candidates with the least load, per choice.
        work_weight: how much more a second of computing costs than a second of waiting. Waiting
            delays this request; computing what another worker holds delays those behind it too,
            and pushes other prefixes out of the cache.
        network_bytes_per_s, memory_bytes_per_s: a handoff's speed between hosts and within one.
        max_sessions: remembered in all; the longest unused are forgotten.
    """

    max_prefill_requests: int = 256
    max_decode_requests: int = 256
    num_holders: int = 4
    num_least_loaded: int = 2
    work_weight: float = 1.0
    network_bytes_per_s: float = 1e9
    memory_bytes_per_s: float = 5e9
    max_sessions: int = 65536


class PrefillChoice(NamedTuple):
    """Where a prompt is computed.

    Attributes:
        predicted_s: until its first token: what is queued there, and its own work.
        work_s: its own work: what `assign_prefill` counts.
        num_cached_tokens: of the prompt, expected in the worker's cache.
        reason: in words.
    """

    worker: WorkerKey
    predicted_s: float
    work_s: float
    num_cached_tokens: int
    reason: str


class DecodeChoice(NamedTuple):
    """Where a request is decoded.

    Attributes:
        predicted_s: one decode step there, with this request.
        num_kv_tokens: room it needs: what `assign_decode` counts.
        num_cached_tokens: of the prompt, held there already: they need not be sent.
        reason: in words.
    """

    worker: WorkerKey
    predicted_s: float
    num_kv_tokens: int
    num_cached_tokens: int
    reason: str


class Pool(Enum):
    """What a worker is given. Prompts that run unsplit are computed by the decode pool."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class _Session:
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None


class Router:
    """Owns the load entries of all workers, the prefix index and the sessions.

    Whoever uses it assigns what it chose, reports what it hears, and releases every request once.

    Attributes:
        index: fed with the workers' cache events.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self.index = PrefixIndex(config.num_holders)
        self._workers: dict[WorkerKey, WorkerLoad] = {}
        self._pools: dict[WorkerKey, Pool] = {}
        # Masks of the workers that take one more request, and the same by load: seconds queued;
        # seconds per step; KV tokens left, negated; seconds per step on each host.
        self._open_prefill = self._open_decode = 0
        self._by_queue: LeastLoaded[WorkerKey] = LeastLoaded()
        self._by_itl: LeastLoaded[WorkerKey] = LeastLoaded()
        self._by_room: LeastLoaded[WorkerKey] = LeastLoaded()
        self._by_host: dict[str, LeastLoaded[WorkerKey]] = {}
        self._prefilling: dict[str, WorkerKey] = {}
        self._decoding: dict[str, WorkerKey] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    # ---- Members.

    def add_worker(self, worker: WorkerKey, traits: WorkerTraits, pool: Pool | None) -> None:
        """A worker whose cache is empty, or not known yet; pool as in `set_pool`."""
        assert worker not in self._workers
        self.index.add(worker, traits.kv_tokens // traits.block_size_tokens)
        self._workers[worker] = WorkerLoad(worker, traits)
        self.set_pool(worker, pool)

    def set_pool(self, worker: WorkerKey, pool: Pool | None) -> None:
        """What a worker is given from now on; None for nothing. It keeps what it has."""
        if pool is None:
            self._pools.pop(worker, None)
        else:
            self._pools[worker] = pool
        self._file(self._workers[worker])

    def remove_worker(self, worker: WorkerKey) -> None:
        """A worker that is gone. Its requests are still to be released. Idempotent."""
        entry = self._workers.get(worker)
        if entry is None:
            return
        self.set_pool(worker, None)
        self.index.forget(worker)
        del self._workers[worker]

    def load(self, worker: WorkerKey) -> WorkerLoad | None:
        """What is assigned to a worker; to be read only."""
        return self._workers.get(worker)

    def report_kv(self, worker: WorkerKey, kv_tokens_used: int) -> None:
        """What a worker's load report says that its requests hold."""
        if (entry := self._workers.get(worker)) is not None:
            entry.report(kv_tokens_used)
            self._file(entry)

    # ---- Requests.

    def match(self, prompt_hashes: Sequence[int]) -> PrefixMatch:
        """Who holds how much of a prompt; good until the next change."""
        return self.index.match(prompt_hashes)

    def assign_prefill(
        self, request_id: str, choice: PrefillChoice, prompt_hashes: Sequence[int], session: str
    ) -> None:
        """The prompt goes where it was chosen to; "" is no session."""
        entry = self._workers[choice.worker]
        entry.assign_prefill(request_id, choice.work_s)
        self._prefilling[request_id] = choice.worker
        self.index.expect(request_id, choice.worker, prompt_hashes)
        self._file(entry)
        if session:
            self._session(session).prefill = choice.worker

    def assign_decode(self, request_id: str, choice: DecodeChoice, session: str) -> None:
        entry = self._workers[choice.worker]
        entry.assign_decode(request_id, choice.num_kv_tokens)
        self._decoding[request_id] = choice.worker
        self._file(entry)
        if session:
            self._session(session).decode = choice.worker

    def first_token(self, request_id: str) -> None:
        """The prompt is computed. Its worker's cache events came before this. Idempotent."""
        self._end_prefill(request_id)
        entry = self._workers.get(self._decoding.get(request_id, ("", 0)))
        if entry is not None:
            entry.arrive(request_id)

    def release(self, request_id: str) -> None:
        """The request has ended, or leaves its workers. Idempotent."""
        self._end_prefill(request_id)
        entry = self._workers.get(self._decoding.pop(request_id, ("", 0)))
        if entry is not None:
            entry.end_decode(request_id)
            self._file(entry)

    def _end_prefill(self, request_id: str) -> None:
        entry = self._workers.get(self._prefilling.pop(request_id, ("", 0)))
        self.index.settle(request_id)
        if entry is not None:
            entry.end_prefill(request_id)
            self._file(entry)

    def _session(self, session: str) -> _Session:
        found = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._config.max_sessions:
            self._sessions.popitem(last=False)
        return found

    # ---- Choices.

    def choose_prefill(
        self, match: PrefixMatch, num_tokens: int, session: str = ""
    ) -> PrefillChoice | None:
        """The least predicted finish, work counted `work_weight` more; None when all are full.

        Of equals the session's last worker, then the longest prefix, then the least loaded.

        Args:
            match: of the prompt.
            num_tokens: of the prompt.
            session: "" for none.
        """
        config, last = self._config, self._sessions.get(session)
        sticky = last.prefill if last is not None else None
        holders = match.longest(config.num_holders, self._open_prefill)
        candidates: dict[WorkerKey, int] = {}
        if sticky is not None and sticky in self._by_queue:
            candidates[sticky] = match.blocks_of(sticky)
        candidates.update(holders)
        for worker in self._by_queue.least(config.num_least_loaded):
            if worker not in candidates:
                candidates[worker] = match.blocks_of(worker)
        best: PrefillChoice | None = None
        least = 0.0
        for worker, num_blocks in candidates.items():
            entry = self._workers[worker]
            block_size = entry.traits.block_size_tokens
            # The last token is always computed: the first output token comes from it.
            cached = min(num_blocks, (num_tokens - 1) // block_size) * block_size
            work_s = entry.traits.latency.prefill_s(num_tokens - cached)
            cost = entry.queued_s + work_s * (1 + config.work_weight)
            if best is None or cost < least:
                least = cost
                best = PrefillChoice(worker, entry.queued_s + work_s, work_s, cached, "")
        return best and best._replace(
            reason=f"{best.num_cached_tokens} of {num_tokens} tokens cached, "
            f"{best.predicted_s - best.work_s:.3f} s queued, {best.work_s:.3f} s of work"
            f"{', the last of its session' if best.worker == sticky else ''}; "
            f"best of {len(candidates)} candidates"
        )

    def choose_decode(
        self,
        match: PrefixMatch,
        num_tokens: int,
        num_output_tokens: int,
        *,
        prefill: WorkerKey | None = None,
        session: str = "",
    ) -> DecodeChoice | None:
        """The least time for the whole output, what is left of the handoff included.

        Args:
            match: of the prompt.
            num_tokens: of the prompt, and of known output.
            num_output_tokens: expected beyond them (OutputLengths).
            prefill: where the prompt is computed; None: on the decode worker itself.
            session: "" for none.

        Returns:
            None when no worker has room for prompt and expected output.
        """
        config, last = self._config, self._sessions.get(session)
        sticky = last.decode if last is not None else None
        source = self._workers.get(prefill) if prefill is not None else None
        host_id = source.traits.host_id if source is not None else None
        candidates: dict[WorkerKey, int] = {}
        if sticky is not None and sticky in self._by_itl:
            candidates[sticky] = match.blocks_of(sticky)
        candidates.update(match.longest(config.num_holders, self._open_decode))
        for worker in self._least_decoding(host_id):
            if worker not in candidates:
                candidates[worker] = match.blocks_of(worker)
        best: DecodeChoice | None = None
        least = 0.0
        for worker, num_blocks in candidates.items():
            entry = self._workers[worker]
            traits = entry.traits
            needed = entry.whole_blocks(num_tokens + num_output_tokens)
            if needed > entry.free_tokens:
                continue
            cached = min(num_blocks * traits.block_size_tokens, num_tokens)
            itl_s = entry.itl_with_s(1, needed)
            cost = itl_s * num_output_tokens
            if source is not None:
                near = traits.host_id == host_id
                speed = config.memory_bytes_per_s if near else config.network_bytes_per_s
                cost += (num_tokens - cached) * source.traits.kv_bytes_per_token / speed
            else:
                cost += traits.latency.prefill_s(max(1, num_tokens - cached))
            if best is None or cost < least:
                least, best = cost, DecodeChoice(worker, itl_s, needed, cached, "")
        if best is None:
            return None
        entry = self._workers[best.worker]
        same_host = ", the prefill worker's host" if entry.traits.host_id == host_id else ""
        return best._replace(
            reason=f"{best.predicted_s * 1e3:.1f} ms per step with {entry.num_decodes} others, "
            f"{best.num_kv_tokens} of {entry.free_tokens} free KV tokens, "
            f"{best.num_cached_tokens} of {num_tokens} tokens held{same_host}"
            f"{', the last of its session' if best.worker == sticky else ''}; "
            f"best of {len(candidates)} candidates"
        )

    def _least_decoding(self, host_id: str | None) -> Iterable[WorkerKey]:
        """The fastest, the one with most room (without which none has any), the near ones."""
        count = self._config.num_least_loaded
        near = self._by_host.get(host_id) if host_id is not None else None
        return (
            *self._by_itl.least(count),
            *self._by_room.least(1),
            *(near.least(1) if near is not None else ()),
        )

    # ---- Indexes.

    def _file(self, entry: WorkerLoad) -> None:
        """Puts a worker where its load belongs."""
        worker, pool, bit = entry.key, self._pools.get(entry.key), self.index.bit(entry.key)
        if pool is Pool.PREFILL and entry.num_prefills < self._config.max_prefill_requests:
            self._open_prefill |= bit
            self._by_queue.set(worker, entry.queued_s)
        else:
            self._open_prefill &= ~bit
            self._by_queue.remove(worker)
        on_host = self._by_host.setdefault(entry.traits.host_id, LeastLoaded())
        if pool is Pool.DECODE and entry.num_decodes < self._config.max_decode_requests:
            self._open_decode |= bit
            itl_s = entry.itl_s
            self._by_itl.set(worker, itl_s)
            self._by_room.set(worker, -entry.free_tokens)
            on_host.set(worker, itl_s)
        else:
            self._open_decode &= ~bit
            self._by_itl.remove(worker)
            self._by_room.remove(worker)
            on_host.remove(worker)
            if not on_host:
                del self._by_host[entry.traits.host_id]

    def check_integrity(self) -> None:
        """Raises AssertionError when sums, masks or owners differ from what they stand for."""
        self.index.check_integrity()
        for entry in self._workers.values():
            entry.check_integrity()
        counts = [(one.num_prefills, one.num_decodes) for one in self._workers.values()]
        assert sum(prefills for prefills, _ in counts) <= len(self._prefilling)
        assert sum(decodes for _, decodes in counts) <= len(self._decoding)
