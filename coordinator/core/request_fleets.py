"""Moves requests between fleets, and adapts them to their fleet."""

from __future__ import annotations

from baton.coordinator.core.parts import Parts
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import Request


class RequestFleets:
    """Changes the fleets of requests, and limits requests to the context of their fleet."""

    def __init__(self, parts: Parts) -> None:
        self._requests, self._lanes, self._stats = parts.requests, parts.lanes, parts.stats
        self._admission, self._room_freed = parts.admission, parts.room_freed

    def change(self, request: Request, fleet: Fleet) -> None:
        """Moves a request that still waits in its lane to another fleet."""
        self._requests.move(request, fleet)
        # It was for the other fleet, so its error must not correct predictions for this one.
        request.prediction = None
        self._lanes.changed_fleet(request)
        self._limit_output(request)

    def move_to_stable(self, request: Request, stable: Fleet) -> None:
        """Moves a waiting request without any output to the stable fleet."""
        assert request.waits
        assert not len(request.token_ids)
        self._stats.moved_to_stable(request.fleet)
        self.change(request, stable)
        self._room_freed()

    def limit_outputs(self, fleet: Fleet) -> None:
        """Cuts max_tokens of requests that came before the fleet's first worker, at its context.

        Their digests are then those that the requests have for workers and for clients that resume
        them. Requests with an attempt keep the parameters that their worker knows.
        """
        for request in self._requests.all():
            if request.fleet is fleet and not request.attempt:
                self._limit_output(request)

    def forget(self, fleet: Fleet) -> None:
        """Drops the accounts and predictions of a fleet that has no requests."""
        self._lanes.forget(fleet)
        self._admission.forget(fleet)

    def _limit_output(self, request: Request) -> None:
        max_model_len, before = request.fleet.workers.max_model_len, request.submission
        request.submission = before.cut_to(max_model_len)
        if request.submission is not before:
            self._lanes.reserve_only(request, max_model_len)
