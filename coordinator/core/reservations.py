"""Reservations: KV room on decode workers that other requests must leave to one that needs much.

A request that needs much KV room could wait for ever: others would take each block that becomes
free. Once the batch lane is owed the tokens of its next request, a worker therefore gets no output
that would take this room. The same holds for an interrupted request, while other workers can take
the outputs of new requests.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.placers import Placers
from baton.coordinator.routing.request_needs import RequestNeeds
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import Request, RequestKey, WorkerKey
from baton.coordinator.state.workers import WorkerRegistry

# Key of a reservation among the decodes of its worker; no request has a key with this character.
_KEY = RequestKey("\0reserved")


class _Reservation(NamedTuple):
    """KV room of a decode worker that is reserved for a request."""

    request: RequestKey
    worker: WorkerKey


class Reservations:
    """Owns the reservations of one round of dispatching, at most one in each fleet.

    The room counts as taken only during the round, so that load and predictions do not change.

    Interactive requests lose little to the batch lane. A reservation begins when the lane is owed
    at least the tokens of the request's prompt. While the worker's outputs end one by one, half of
    the reserved room is unused on average. With a share of s for the batch lane, that is at most
    about s / (2 - 2 s) of the KV room of all workers: where outputs take longer to end, owed tokens
    also grow more slowly.
    """

    def __init__(self, config: CoreConfig, workers: WorkerRegistry, placers: Placers) -> None:
        self._config, self._workers, self._placers = config, workers, placers
        self._reserved: dict[Fleet, _Reservation] = {}
        # The reservations of the last round that had any.
        self._latest: dict[Fleet, _Reservation] = {}

    def reserve_beside(self, request: Request) -> None:
        """Like `reserve`, for an interrupted request, if others have another decode worker."""
        view = self._placers.of(request.fleet).view
        if view.loads.open_decode.bit_count() > 1:
            self.reserve(request)

    def reserve(self, request: Request) -> None:
        """Reserves room for a request that was not placed, if it lacks KV room.

        Does nothing if another request of its fleet has a reservation in this round.

        The same worker is reserved in each round, also once it has the room: the request may wait
        for something else then.

        Args:
            request: The request.
        """
        fleet = request.fleet
        if fleet in self._reserved:
            return
        view = self._placers.of(fleet).view
        needs = RequestNeeds(self._config, fleet.workers, self._placers.outputs)
        if needs.most_output_tokens(request.submission) == 1:
            return
        num_tokens = request.num_tokens + needs.more_output_tokens(request)
        latest = self._latest.get(fleet)
        entry = None
        if latest is not None and latest.request == request.key:
            entry = view.loads.get(latest.worker)
        if entry is None or not view.takes_decodes(entry):
            entry = _with_most_room(view, num_tokens)
            if entry is None or view.has_room(entry, num_tokens):
                return
        if (worker := self._workers.get(entry.key)) is not None:
            self._reserved[fleet] = _Reservation(request.key, entry.key)
            self._placers.hold(_KEY, worker, entry.in_blocks(num_tokens))

    def end_round(self) -> None:
        """Frees the reserved room."""
        for fleet, reservation in self._reserved.items():
            self._placers.release_held(_KEY, fleet, reservation.worker)
        if self._reserved:
            self._latest, self._reserved = self._reserved, {}


def _with_most_room(view: FleetView, num_tokens: int) -> WorkerLoad | None:
    """Returns the decode worker with most free room among those that can hold this many tokens.

    If all are too small, it is the one with most room: its engine then refuses the request.
    """
    loads = view.loads
    found = loads.get(loads.by_room.least())
    if found is None or found.traits.kv_tokens >= num_tokens:
        return found
    large = [
        one
        for one in loads.entries.values()
        if one.traits.kv_tokens >= num_tokens and view.takes_decodes(one)
    ]
    return max(large, key=lambda one: one.free_tokens, default=found)
