"""Dispatch: sends waiting requests to workers, and parks batch requests to make room."""

from __future__ import annotations

import math
from functools import partial

from baton.coordinator.core.adoption import Adoption
from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.core.reservations import Reservations
from baton.coordinator.rollouts.retiring import gone_error
from baton.coordinator.rollouts.rollout import Rollouts
from baton.coordinator.routing.choices import NoPlacement, Placement
from baton.coordinator.routing.placement import Placer
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import lane_config
from baton.coordinator.state.pools import ROLE_OF
from baton.coordinator.state.requests import Request, RequestState
from baton.coordinator.state.timers import CoreTimer
from baton.coordinator.state.workers import Worker
from baton.runtime import errors
from baton.v1 import common_pb2

# Number of times that a batch request is parked while others can be parked instead. Each time its
# prefix may be evicted, so that its prompt is computed again.
_MAX_PARKED = 8
# Shortest delay of the ROOM timer in seconds, against rounding errors.
_LEAST_WAIT_S = 0.001


class Dispatcher:
    """Matches waiting requests with workers that have room for them."""

    def __init__(
        self,
        parts: Parts,
        attempts: Attempts,
        ends: RequestEnds,
        adoption: Adoption,
        rollouts: Rollouts,
    ) -> None:
        self._clock = parts.clock
        self._config, self._workers, self._placers = parts.config, parts.workers, parts.placers
        self._requests, self._lanes, self._stats = parts.requests, parts.lanes, parts.stats
        self._timers, self._attempts, self._ends = parts.timers, attempts, ends
        self._adoption, self._rollouts = adoption, rollouts
        self._reservations = Reservations(parts.config, parts.workers, parts.placers)

    @property
    def num_timers(self) -> int:
        """Number of timers that are set: one while room is predicted."""
        return int(CoreTimer.ROOM in self._timers)

    def dispatch(self) -> bool:
        """Sends requests in the order of the lanes to workers that have room for them.

        Returns:
            Whether another round is due: batch requests were parked, which freed room.
        """
        now = self._clock.now
        room_at = math.inf
        # The first interrupted request of each fleet that could not be placed.
        interrupted = dict[Fleet, Request]()
        for request in self._lanes.candidates() if len(self._lanes) else ():
            if not request.goes_first and request.fleet in interrupted:
                # Other interrupted requests have been tried. New ones leave it some room.
                self._reservations.reserve_beside(interrupted.pop(request.fleet))
            if self._settled(request) or self._adoption.may_return(request):
                continue
            if self._rollouts.is_gone(request.fleet):
                if request.attempt or not self._adoption.may_find(request.key):
                    self._ends.fail(request, gone_error(request.fleet))
                continue
            placer = self._placers.of(request.fleet)
            placement = placer.place(request)
            if placement is NoPlacement.LATE:
                placer.becomes_late(request)
                self._lanes.defer(request)
                continue
            if self._made_room(placer, request, placement):
                placement = placer.place(request)
            if placement is NoPlacement.FULL and self._made_decode_room(placer, request):
                placement = placer.place(request)
            if isinstance(placement, NoPlacement):
                room_at = min(room_at, placer.room_at(request))
                if placement is NoPlacement.FULL and self._is_of_stable_pools(request):
                    self._stats.demand[request.submission.lane].decode_full_at = now
                if request.goes_first:
                    interrupted.setdefault(request.fleet, request)
                elif self._lanes.is_due(request):
                    self._reservations.reserve(request)
                if self._never_fits_beside(placer, request):
                    self._lanes.skip(request.fleet)
                # The request keeps its turn: `candidates` now skips the rest of its queue.
                continue
            problem = self._resume_error(request, placement)
            if problem is not None:
                self._ends.fail(request, problem)
            else:
                request.was_held |= self._has_waited_for_decode(request)
                self._attempts.dispatch(request, placement)
        self._reservations.end_round()
        if room_at < math.inf:
            self._timers.set(CoreTimer.ROOM, max(room_at, now + _LEAST_WAIT_S))
        else:
            self._timers.cancel(CoreTimer.ROOM)
        return self._park()

    def queue_error(self, request: Request) -> errors.BatonError:
        """Returns why a request has waited for too long."""
        waited_s = lane_config(self._config.lanes, request.submission.lane).max_queue_s
        if request.state is RequestState.RECOVERING:
            waited_s = max(self._config.max_recovery_s, request.waits_until - request.state_since)
        waited = f"waited {waited_s:g} s"
        if request.losses:
            waited = f"{waited} after {request.losses[-1]}"
        fleet, fleets = request.fleet, self._workers.fleets
        there = {pool.value: fleet.workers.able(role) for pool, role in ROLE_OF.items()}
        if fleet is not fleets.stable:
            waited = (
                f"revision {fleet.name!r} began its output, and no other can continue it: {waited}"
                if len(request.token_ids)
                else f"{waited} for revision {fleet.name!r}"
            )
        elif not all(one.num_serving for one in there.values()) and (
            others := [one.name for one in fleets if one is not fleet and len(one.workers)]
        ):
            waited = f"revision {fleet.name!r} is the stable one, attached are {others}: {waited}"
        if empty := [name for name, one in there.items() if not one.num_attached]:
            return errors.Unavailable(f"no {' and no '.join(empty)} worker is attached: {waited}")
        if idle := [name for name, one in there.items() if not one.num_serving]:
            return errors.Unavailable(f"no {' and no '.join(idle)} worker is serving: {waited}")
        cause = self._lanes.reached_limit(request) or "every worker is busy"
        return errors.ResourceExhausted(
            f"{cause}: {waited}", reason="QUEUE_TIMEOUT", retry_after_s=1.0
        )

    # ---- Private methods

    def _has_waited_for_decode(self, request: Request) -> bool:
        """Returns whether only room on a decode worker was lacking while the request waited.

        More prefill workers would not have helped it.
        """
        full_at = self._stats.demand[request.submission.lane].decode_full_at
        return self._is_of_stable_pools(request) and full_at >= request.submitted_at

    def _is_of_stable_pools(self, request: Request) -> bool:
        """Returns whether the request is for stable workers of fixed roles.

        In an elastic cell, prompts need the same room as outputs.
        """
        return request.fleet is self._workers.fleets.stable and not self._config.elastic

    def _never_fits_beside(self, placer: Placer, request: Request) -> bool:
        """Returns whether the request would never find room while other requests take it."""
        workers = request.fleet.workers
        if request.suspect and any(one.serving and one.ledger.unanswered for one in workers):
            # A suspect needs a worker without unanswered requests. If new requests went to all
            # workers meanwhile, there would never be one.
            return True
        if request.goes_first:
            is_first = self._has_batch_prompt(request) and placer.has_room(request)
        else:
            is_first = self._lanes.is_due(request)
        # Each time room becomes free, an interactive prompt would take it.
        return is_first and placer.takes_only_interactive(request)

    def _has_batch_prompt(self, request: Request) -> bool:
        long_prompt_tokens = self._config.lanes.long_prompt_tokens
        return request.submission.ordered_in(long_prompt_tokens) == common_pb2.LANE_BATCH

    def _made_room(
        self, placer: Placer, request: Request, placement: Placement | NoPlacement
    ) -> bool:
        """Parks a batch prompt if that makes room for the request; returns whether it did."""
        if self._has_batch_prompt(request):
            return False
        found = placer.batch_prompts.to_park(placement)
        batch = self._requests.get(found) if found is not None else None
        if batch is None or batch.num_parked >= _MAX_PARKED:
            return False
        self._attempts.park(batch)
        return True

    def _made_decode_room(self, placer: Placer, request: Request) -> bool:
        """Parks batch outputs if that makes room for the request; returns whether it did."""
        wanted = placer.room_wanted(request)
        worker = self._workers.get(wanted.worker) if wanted is not None else None
        entry = placer.view.loads.get(worker.key) if worker is not None else None
        if wanted is None or worker is None or entry is None:
            return False
        batch = sorted(self._parkable(worker), key=partial(_parking_cost, worker))
        by_key, parked = {one.key: one for one in batch}, list[Request]()
        for key, num_tokens in entry.decodes.room_of_parking(by_key):
            parked.append(by_key[key])
            if num_tokens >= wanted.num_tokens and len(parked) >= wanted.num_requests:
                break
        else:
            return False
        for one in parked:
            self._attempts.park(one)
        return True

    def _parkable(self, worker: Worker) -> list[Request]:
        """Returns the batch outputs of a worker that can be parked."""
        return [
            request
            for key in worker.ledger
            if (request := self._requests.get(key)) is not None
            and request.submission.lane == common_pb2.LANE_BATCH
            and request.state is RequestState.DECODING
            and worker.can_resume(request)
        ]

    def _park(self) -> bool:
        """Parks batch outputs on workers whose new interactive outputs would miss their ITL target.

        Returns:
            Whether any was parked.
        """
        has_parked = False
        while self._placers.crowded:
            crowded, _ = self._placers.crowded.popitem()
            worker = self._workers.get(crowded)
            while worker is not None and self._placers.of(worker.fleet).is_crowded(worker.key):
                batch = self._parkable(worker)
                if not batch:
                    break
                self._attempts.park(min(batch, key=partial(_parking_cost, worker)))
                has_parked = True
        return has_parked

    def _resume_error(self, request: Request, placement: Placement) -> errors.BatonError | None:
        """Returns why a request cannot continue after its known tokens; None if it can."""
        decoder = self._workers.get(placement.decode.worker) if placement.decode else None
        if decoder is None or decoder.can_resume(request):
            return None
        return errors.FailedPrecondition(
            "this request cannot be resumed: its seed, penalties, bad words or grammar "
            f"need forced tokens, which worker {decoder.id} does not support"
        )

    def _settled(self, request: Request) -> bool:
        """Ends a request that needs no worker: it is complete, or its prompt is too long."""
        sampling, num_known = request.submission.sampling, len(request.token_ids)
        max_len = request.fleet.workers.max_model_len
        if max_len and request.num_prompt_tokens >= max_len:
            allowed = f"at most {max_len - 1} tokens, one less than the context"
            error = errors.InvalidArgument("prompt", f"{request.num_prompt_tokens} tokens", allowed)
            self._ends.fail(request, error)
            return True
        # The client lost its connection between the last token and Finished.
        if request.submission.known_stop is not None and not request.attempt:
            stop = request.submission.known_stop
            self._ends.finish(request, common_pb2.FINISH_REASON_STOP, stop)
            return True
        if num_known and (
            (sampling.HasField("max_tokens") and num_known >= sampling.max_tokens)
            or (max_len and request.num_prompt_tokens + num_known >= max_len)
        ):
            self._ends.finish(request, common_pb2.FINISH_REASON_LENGTH, "")
            return True
        return False


def _parking_cost(worker: Worker, request: Request) -> tuple[int, int]:
    """Sort key of the batch outputs of a worker; smaller values are parked first.

    Requests that were parked too often come last. The shortest of the others come first, because
    they are the cheapest to compute again.
    """
    num_too_often = max(0, request.num_parked + 1 - _MAX_PARKED)
    return num_too_often, worker.ledger.num_tokens_of(request.key)
