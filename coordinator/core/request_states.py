"""Moves requests between their states and into their lanes, and sets their timers."""

from __future__ import annotations

from baton.coordinator.core.parts import Parts
from baton.coordinator.state.lanes import LANES, lane_config
from baton.coordinator.state.requests import Request, RequestState, StateLimits


class RequestStates:
    """Changes the state of a request together with its timer."""

    def __init__(self, parts: Parts) -> None:
        self._clock = parts.clock
        self._timers, self._lanes, self._placers = parts.timers, parts.lanes, parts.placers
        self._limits = {
            lane: StateLimits(
                queued_s=lane_config(parts.config.lanes, lane).max_queue_s,
                recovering_s=parts.config.max_recovery_s,
            )
            for lane in LANES
        }

    def advance(self, request: Request, state: RequestState) -> None:
        """Moves a request to its next state."""
        request.advance(state, self._clock.now)
        if not request.ended:
            self.set_timer(request)

    def set_timer(self, request: Request) -> float:
        """Sets the request's timer; returns when it is due, by the core's clock."""
        due = request.due(self._limits[request.submission.lane])
        self._timers.set(request.key, due)
        return due

    def queue(self, request: Request, num_tokens: int = 0) -> None:
        """Adds a request to its lane; the arguments are those of Lanes.push."""
        work_s = self._placers.of(request.fleet).predictions.prefill_s(request)
        self._lanes.push(request, num_tokens, work_s)
