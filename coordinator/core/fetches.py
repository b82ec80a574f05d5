"""Owns the fetches: a worker (the holder) sends the cached beginning of a prompt to another worker.

The other worker (the prefill worker) computes the rest of the prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.coordinator.core.parts import Parts
from baton.coordinator.routing.choices import Fetch, Placement
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.request_needs import RequestNeeds
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import Request, WorkerKey
from baton.runtime.durations import duration
from baton.v1 import cluster_pb2, kv_transfer_pb2

# Number of fetches that are remembered after their end, for reports that come later.
_MAX_ENDED = 4096


class _Route(NamedTuple):
    """The workers of a fetch, which are of one fleet: from `holder` to `prefill`."""

    fleet: Fleet
    holder: WorkerKey
    prefill: WorkerKey

    @property
    def pair(self) -> tuple[WorkerKey, WorkerKey]:
        return self.holder, self.prefill


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch of one request, until its end.

    Attributes:
        request: The request that loads the fetched blocks.
        route: The worker that holds the blocks, and the worker that computes the request's prompt.
        choice: The fetch as routing has chosen it.
        hashes: Hashes of the prompt's blocks.
        blocks: Indices of the blocks that are fetched.
        num_bytes: Size of the fetched blocks.
        ends_at: Time by the core's clock when the prefill worker stops waiting for it.
        is_sent: Whether the holder has sent the blocks, or need not send them any more.
        failed: Whether the blocks will not be loaded.
    """

    request: Request
    route: _Route
    choice: Fetch
    hashes: Sequence[int]
    blocks: range
    num_bytes: int
    ends_at: float
    is_sent: bool = False
    failed: bool = False

    def num_shared(self, hashes: Sequence[int]) -> int:
        """Returns how many of the blocks that are fetched a prompt has at the same place."""
        # Hashes are chained: they are equal up to some block and never after it.
        blocks = range(self.blocks.start, min(self.blocks.stop, len(hashes)))
        return bisect_left(blocks, True, key=lambda at: hashes[at] != self.hashes[at])

    def left_s(self, now: float) -> float:
        """Predicted seconds until its blocks are loaded; of a late fetch, as long as it is late."""
        elapsed_s = now - (self.ends_at - self.choice.timeout_s)
        return abs(self.choice.fetch_s - elapsed_s)


class Fetches:
    """Owns each fetch from the request's dispatch until its prompt is computed.

    A fetch is an ordinary handoff of blocks that its sender has cached. The prefill worker waits
    for it without KV blocks, for a limited time, and computes the blocks that do not arrive. Other
    requests of this worker with the same prefix wait for the same fetch, unless they would compute
    the blocks that they share with it sooner.
    """

    def __init__(self, parts: Parts) -> None:
        self._clock = parts.clock
        self._commands, self._placers = parts.commands, parts.placers
        self._random_bytes = parts.random_bytes
        self._fetches: dict[bytes, _Fetch] = {}
        self._by_prefill: dict[WorkerKey, dict[bytes, _Fetch]] = {}
        # Only the routes: requests and their prompts are too large to be kept for late reports.
        self._ended: OrderedDict[bytes, _Route] = OrderedDict()

    def begin(self, request: Request, placement: Placement) -> None:
        """Begins the fetch of a request that is being dispatched, or shares a fetch under way."""
        now = self._clock.now
        request.fetch = None
        hashes = self._placers.of(request.fleet).prompts.hashes_of(request)
        worker, choice = placement.prefill.worker, placement.prefill.fetch
        if choice is not None:
            self._begin(request, worker, choice, hashes)
            return
        if not RequestNeeds.may_fetch(request):
            return
        for handoff_id, fetch in self._by_prefill.get(worker, {}).items():
            if fetch.failed or fetch.ends_at <= now:
                continue
            saved_s, left_s = self._saved_s(fetch, hashes), fetch.left_s(now)
            # A prompt that shares only a system prompt would be later if it waited.
            if saved_s > left_s:
                timeout_s = min(fetch.ends_at - now, max(saved_s, 2 * left_s))
                request.fetch = cluster_pb2.FetchPlan(
                    handoff_id=handoff_id, timeout=duration(timeout_s)
                )
                return

    def _saved_s(self, fetch: _Fetch, hashes: Sequence[int]) -> float:
        """Returns how long the worker would compute those fetched blocks that a prompt has too."""
        entry = self._view(fetch.route).loads.get(fetch.route.prefill)
        if entry is None:
            return 0.0
        num_tokens = fetch.num_shared(hashes) * entry.traits.block_size_tokens
        return entry.traits.latency.model.chunk_s(0, num_tokens)

    def _begin(
        self,
        request: Request,
        prefill: WorkerKey,
        choice: Fetch,
        hashes: Sequence[int],
    ) -> None:
        entry = self._placers.of(request.fleet).view.loads.get(prefill)
        assert entry is not None, "the prefill worker was just chosen"
        size = entry.traits.block_size_tokens
        handoff_id = self._random_bytes(16)
        request.fetch = cluster_pb2.FetchPlan(
            handoff_id=handoff_id,
            num_tokens=choice.num_tokens,
            skip_tokens=choice.skip_tokens,
            timeout=duration(choice.timeout_s),
            host_tokens=choice.host_tokens,
        )
        fetch = _Fetch(
            request,
            _Route(request.fleet, choice.holder, prefill),
            choice,
            hashes,
            range(choice.skip_tokens // size, choice.num_tokens // size),
            choice.num_sent_tokens * entry.traits.kv_bytes_per_token,
            self._clock.now + choice.timeout_s,
        )
        self._fetches[handoff_id] = fetch
        self._by_prefill.setdefault(prefill, {})[handoff_id] = fetch
        self._commands.send_prefix(request, choice.holder, prefill, choice.least_tokens)

    def end(self, request: Request) -> bool:
        """Ends the fetch of a request whose prompt is computed or that leaves its workers.

        Idempotent.

        Returns:
            Whether the request had a fetch of its own.
        """
        plan, request.fetch = request.fetch, None
        fetch = self._fetches.get(plan.handoff_id) if plan is not None else None
        # A request may also have waited for the fetch of another one.
        if plan is None or fetch is None or fetch.request is not request:
            return False
        del self._fetches[plan.handoff_id]
        prefill = fetch.route.prefill
        of_worker = self._by_prefill[prefill]
        del of_worker[plan.handoff_id]
        if not of_worker:
            del self._by_prefill[prefill]
        self._stop(fetch, plan.handoff_id)
        self._ended[plan.handoff_id] = fetch.route
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return True

    def reported(self, worker: WorkerKey, report: cluster_pb2.HandoffReport) -> bool:
        """Applies a report on a handoff; returns whether the handoff is a fetch."""
        handoff_id = report.handoff_id
        fetch = self._fetches.get(handoff_id)
        route = fetch.route if fetch is not None else self._ended.get(handoff_id)
        if route is None:
            return False
        if report.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED:
            if fetch is not None:
                fetch.is_sent = True
            # The first bytes leave when the receiver has opened the handoff and the holder's step
            # has filled staging; the time before that is not the network's.
            seconds = (report.exposed_us - max(0, report.open_us - report.fill_us)) / 1e6
            view, pair = self._view(route), route.pair
            # The report has fewer bytes than planned if the holder lacked blocks.
            view.transfers.observe(pair, report.num_bytes, seconds, near=view.near(*pair))
        elif (
            report.state == kv_transfer_pb2.HANDOFF_STATE_FAILED
            and fetch is not None
            and not fetch.failed
        ):
            self._fail(fetch, handoff_id, from_holder=worker == route.holder)
        return True

    def lost(self, worker: WorkerKey) -> None:
        """Tells the prefill workers not to wait for a worker that is lost or does not respond."""
        for handoff_id, fetch in self._fetches.items():
            if fetch.route.holder == worker and not (fetch.is_sent or fetch.failed):
                self._fail(fetch, handoff_id, from_holder=True)

    def _fail(self, fetch: _Fetch, handoff_id: bytes, *, from_holder: bool) -> None:
        """Records that a fetch will not be loaded, and tells the worker that does not know it."""
        fetch.failed = True
        if from_holder:
            fetch.is_sent = True
            self._commands.drop_handoff(fetch.route.prefill, fetch.request, handoff_id)
        else:
            self._stop(fetch, handoff_id)

    def _stop(self, fetch: _Fetch, handoff_id: bytes) -> None:
        """Tells the holder of a fetch that its blocks are not needed, unless it has sent them."""
        if fetch.is_sent:
            return
        fetch.is_sent = True
        self._commands.cancel_prefix(fetch.route.holder, handoff_id)
        view, pair = self._view(fetch.route), fetch.route.pair
        if self._clock.now >= fetch.ends_at:
            view.transfers.observe_timeout(
                pair, fetch.num_bytes, fetch.choice.timeout_s, near=view.near(*pair)
            )

    def _view(self, route: _Route) -> FleetView:
        return self._placers.of(route.fleet).view

    def check_integrity(self, requests: Iterator[Request]) -> None:
        """Raises AssertionError when a fetch has no request, or is not that of its request.

        Args:
            requests: All requests that have not ended.
        """
        live = {id(request) for request in requests}
        for handoff_id, fetch in self._fetches.items():
            assert id(fetch.request) in live
            assert fetch.request.fetch is not None
            assert fetch.request.fetch.handoff_id == handoff_id
            assert fetch.request.fleet is fetch.route.fleet
            assert self._by_prefill[fetch.route.prefill][handoff_id] is fetch
        assert sum(map(len, self._by_prefill.values())) == len(self._fetches)
