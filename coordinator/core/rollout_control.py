"""Passes events to the rollouts, and ends or moves requests as a rollout has decided."""

from __future__ import annotations

from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.core.request_fleets import RequestFleets
from baton.coordinator.rollouts.retiring import gone_error
from baton.coordinator.rollouts.rollout import Rollouts
from baton.coordinator.rollouts.traffic import fits
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import Request
from baton.coordinator.state.workers import Worker

# Longest wait in the stable fleet of a request that has waited for the canary for too long.
_LAST_TRY_S = 1.0


class RolloutControl:
    """Advances the rollouts after each event that may change them.

    Args:
        parts: The shared parts of the core.
        rollouts: Decide which fleets get requests, and which leave.
        attempts: Moves requests off their workers.
        ends: Ends requests.
        request_fleets: Moves requests to another fleet.
    """

    def __init__(
        self,
        parts: Parts,
        rollouts: Rollouts,
        attempts: Attempts,
        ends: RequestEnds,
        request_fleets: RequestFleets,
    ) -> None:
        self._clock, self._timers = parts.clock, parts.timers
        self._requests, self._workers = parts.requests, parts.workers
        self._room_freed = parts.room_freed
        self._rollouts, self._attempts, self._ends = rollouts, attempts, ends
        self._request_fleets = request_fleets
        # WorkerRegistry.num_changes when the rollouts were advanced last.
        self._num_changes_seen = 0

    def start(self, event: ev.RolloutRequested) -> None:
        """Starts a rollout."""
        self._rollouts.start(event)
        self.advance()

    def set_share(self, event: ev.ShareRequested) -> None:
        """Changes the canary's share of new sessions."""
        self._rollouts.set_share(event.share)

    def promote(self, event: ev.PromotionRequested) -> None:
        """Promotes the canary as soon as it has enough workers."""
        self._rollouts.promote(event.drain_s)
        self.advance()

    def abort(self, event: ev.AbortRequested) -> None:
        """Aborts the rollout."""
        self._rollouts.abort(event.drain_s, event.why)
        self.advance()

    def attached(self, worker: Worker, *, returns: bool) -> None:
        """Handles an attached worker.

        Args:
            worker: The worker.
            returns: Whether it served another coordinator before.
        """
        if self._rollouts.attached(worker, returns=returns):
            self._move_waiting()

    def launcher_ready(self) -> None:
        """Handles a launcher that is ready to start workers."""
        self._rollouts.launcher_ready()
        self._move_waiting()

    def leaves_canary(self, request: Request) -> bool:
        """Moves a request that has waited for the canary for too long to the stable fleet.

        There it has _LAST_TRY_S to find room.

        Returns:
            Whether the request was moved: it has no output, and the stable fleet can compute it.
        """
        stable = self._rollouts.traffic.stable
        model = stable.workers.model
        if (
            request.has_begun
            or request.fleet is stable
            or model is None
            or not fits(request.submission, model)
        ):
            return False
        self._request_fleets.move_to_stable(request, stable)
        self._timers.set(request.key, min(request.deadline, self._clock.now + _LAST_TRY_S))
        return True

    def after_event(self) -> None:
        """Advances the rollouts if workers came, left or changed the work that they take."""
        if self._num_changes_seen != self._workers.num_changes:
            self._num_changes_seen = self._workers.num_changes
            if self._rollouts:
                self.advance()

    def advance(self) -> None:
        """Advances the rollouts, and ends or moves requests of the fleets that changed."""
        self._num_changes_seen = self._workers.num_changes
        self._end_overdue()
        self._rollouts.advance()
        self._move_waiting()

    def _end_overdue(self) -> None:
        """Takes the requests of fleets that must have left by now off their workers.

        A request with output fails. A request that runs without output waits again: another fleet
        may compute it.
        """
        overdue = self._rollouts.retiring.overdue(self._clock.now)
        for request in self._requests.all() if overdue else ():
            if request.fleet not in overdue:
                continue
            if len(request.token_ids):
                self._ends.fail(request, gone_error(request.fleet))
            elif not request.waits:
                self._attempts.move(request)

    def _move_waiting(self) -> None:
        """Moves requests that wait without output to the stable fleet if their fleet is closed.

        A request that the stable fleet cannot compute (unknown adapter, too long prompt) stays in
        its fleet while that fleet has workers.
        """
        traffic = self._rollouts.traffic
        model = traffic.stable.workers.model
        for request in self._requests.all():
            if (
                not request.has_begun
                and not traffic.gets_new(request.fleet)
                and (fits(request.submission, model) or self._rollouts.is_gone(request.fleet))
            ):
                self._request_fleets.move_to_stable(request, traffic.stable)
        # Requests that wait for a fleet without workers fail in the next round of dispatching.
        self._room_freed()
