"""The attempts of requests: begins them, follows them to the output, moves and recovers them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.coordinator.core.assignments import Assignments
from baton.coordinator.core.fetches import Fetches
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.core.request_fleets import RequestFleets
from baton.coordinator.core.request_states import RequestStates
from baton.coordinator.routing.choices import Placement
from baton.coordinator.state.recent_deltas import RecentDeltas
from baton.coordinator.state.requests import (
    Interruption,
    PromptSources,
    Request,
    RequestState,
    WorkerKey,
)
from baton.coordinator.state.workers import Worker
from baton.coordinator.telemetry.budget import stages_until
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2


def _lost_too_often(losses: Sequence[errors.BatonError]) -> errors.BatonError:
    """Returns one error for all lost attempts: the code of the last one, and each cause once."""
    last = common_pb2.RequestError(code=losses[-1].code, details=losses[-1].details())
    causes = "; ".join(dict.fromkeys(map(str, losses)))
    last.message = f"{len(losses)} attempts in a row were lost without a new token: {causes}"
    return errors.from_message(last)


class Attempts:
    """Owns the attempt of each dispatched request, until the request ends or waits again.

    Args:
        parts: The shared parts of the core.
        states: Change the states of requests.
        fleets: Changes the fleets of requests.
        fetches: Prefixes that workers send to the prefill workers of requests.
        assignments: The workers of requests.
        ends: Fails requests that lost too many attempts.
    """

    def __init__(
        self,
        parts: Parts,
        states: RequestStates,
        fleets: RequestFleets,
        fetches: Fetches,
        assignments: Assignments,
        ends: RequestEnds,
    ) -> None:
        self._clock = parts.clock
        self._config, self._workers, self._placers = parts.config, parts.workers, parts.placers
        self._requests, self._lanes, self._stats = parts.requests, parts.lanes, parts.stats
        self._random_bytes, self._room_freed = parts.random_bytes, parts.room_freed
        self._commands = parts.commands
        self._states, self._fleets, self._fetches = states, fleets, fetches
        self._assignments, self._ends = assignments, ends

    def dispatch(self, request: Request, placement: Placement) -> None:
        """Sends the next attempt of a queued request to its workers."""
        now = self._clock.now
        self._states.advance(request, RequestState.PREFILLING)
        request.attempt += 1
        request.prompt_sources = None
        self._requests.begin_attempt(request)
        request.num_known = len(request.token_ids)
        request.prefill = None if placement.is_local else placement.prefill.worker
        request.decode = placement.decode.worker if placement.decode is not None else None
        prefiller, decoder = self._workers.get(request.prefill), self._workers.get(request.decode)
        workers = [worker for worker in (prefiller, decoder) if worker is not None]
        if request.dispatched_at is None:
            request.dispatched_at = now
            newest_at = max(worker.attached_at for worker in workers)
            self._stats.dispatched(request, now, after_start=newest_at > request.submitted_at)
        request.handoff_id = self._random_bytes(16) if placement.handoff else b""
        request.skip_tokens = placement.skip_tokens
        view = self._placers.of(request.fleet).view
        request.placement_prediction = placement.prediction._replace(
            speeds=view.predicted_speeds(placement)
        )
        num_tokens = request.num_tokens
        # The tenant is charged only for the first attempt.
        is_owed = self._lanes.dispatched(request, num_tokens if request.attempt == 1 else 0)
        self._assignments.assign(request, placement, num_tokens, can_be_parked=not is_owed)
        self._keep_deltas(request, decoder)
        self._fetches.begin(request, placement)
        if prefiller is None:
            self._send_decode(request)
            return
        self._assignments.sent(request, prefiller)
        if placement.handoff:
            self._assignments.begin_handoff(request, prefiller)
        self._commands.prefill(request, prefiller.key)

    def adopt(self, request: Request, worker: Worker, attempt: int) -> None:
        """Takes over an attempt that a worker runs for an earlier coordinator.

        Args:
            request: A waiting request, or one whose new attempt is cancelled now.
            worker: The worker that runs the attempt.
            attempt: Number of the attempt on the worker.
        """
        now = self._clock.now
        if not request.waits:
            self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_RECOVERY)
        self._states.advance(request, RequestState.DECODING)
        request.attempts_before, request.attempt = attempt - 1, 1
        request.prompt_sources = None
        self._requests.begin_attempt(request)
        request.decode, request.decoding_at = worker.key, now
        self._keep_deltas(request, worker)
        if request.dispatched_at is None:
            request.dispatched_at = now
            self._stats.dispatched(request, now, after_start=False)
        self._stats.num_adopted += 1
        if request.fleet is not worker.fleet:
            self._fleets.change(request, worker.fleet)
        request.hashes = None
        self._lanes.dispatched(request, 0)
        self._assignments.adopt(request, worker)

    def prompt_computed(self, request: Request, timings: cluster_pb2.StageTimings) -> None:
        """Records from which sources the KV cache of a prompt came; once per attempt.

        Args:
            request: The request.
            timings: First timings of the attempt from the worker that computed the prompt.
        """
        if request.prompt_sources is not None:
            return
        sources = PromptSources.of(timings, request.num_prompt_tokens)
        request.prompt_sources = sources
        if request.num_cached_prompt_tokens is None:
            request.num_cached_prompt_tokens = sources.num_cached
        if self._fetches.end(request):
            self._stats.fetch_ended(loaded=sources.fetched > 0)
        self._lanes.cached(request, sources.num_cached)
        self._stats.prompt_computed(sources, self._clock.now)

    def begin_decode(self, request: Request) -> None:
        """Tells the decode worker to continue after the first token, which is known now."""
        self.prefill_done(request)
        self._states.advance(request, RequestState.HANDING_OFF)
        self._send_decode(request)

    def prefill_done(self, request: Request) -> None:
        """Records that the prompt is computed. The prefill worker may still send the handoff."""
        request.prefill_done, request.prompt_done_at = True, self._clock.now
        self._assignments.prefill_done(request)

    def decoding(self, request: Request) -> None:
        """Records the first output of the decode worker."""
        self._states.advance(request, RequestState.DECODING)
        request.decoding_at = self._clock.now
        if request.prefill is None:
            # The decode worker has computed the prompt, so it has room for the next one.
            self._assignments.prefill_done(request)
            self._room_freed()
        self._assignments.end_handoff(request)

    def cancel_decode(self, request: Request) -> None:
        """Tells the decode worker to drop the handoff: the request ended with its first token."""
        self._commands.cancel_at(request.decode, request)

    def handoff_failed(self, request: Request, sender: WorkerKey) -> None:
        """Tells the decode worker not to wait for a handoff that the prefill worker cannot send."""
        if sender == request.prefill and request.decode is not None:
            self._assignments.end_handoff(request)
            self._commands.handoff_failed(request)

    # ---- Attempts that end before their request

    def recover(self, request: Request, worker: WorkerKey, error: errors.BatonError) -> None:
        """Queues a request again after its attempt was lost; the client keeps its tokens.

        After max_lost_attempts losses in a row the request fails with the code of the last loss and
        with every cause in the message.

        Args:
            request: A dispatched request.
            worker: The worker that lost its part of the request.
            error: The reason, with the worker's name.
        """
        request.losses.append(error)
        if len(request.losses) >= self._config.max_lost_attempts:
            self._ends.fail(request, _lost_too_often(request.losses))
            return
        request.avoid[worker] = None
        self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_RECOVERY)
        self._stats.recovered(request, self._clock.now)

    def worker_left(self, request: Request) -> None:
        """Queues a request again whose worker left as it was asked to; no attempt was lost.

        The request is not PARKED, because it may wait only as long as RecoveryTimeout allows.
        """
        self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_PARKED)
        self._stats.num_moved += 1

    def park(self, request: Request) -> None:
        """Parks a running batch request to make room for interactive requests."""
        request.num_parked += 1
        self._begin_again(request, RequestState.PARKED, common_pb2.STAGE_PARKED)
        self._stats.parked(self._clock.now)

    def recover_parked(self, request: Request) -> None:
        """Moves a parked request to RECOVERING, because no worker is left that could take it."""
        self._states.advance(request, RequestState.RECOVERING)

    def move(self, request: Request, placement: Placement | None = None) -> None:
        """Parks a request of a worker that flips or whose revision ends; no attempt is lost.

        Args:
            request: A dispatched request.
            placement: The workers that it is sent to at once; None: it stays parked for its turn.
        """
        self._begin_again(request, RequestState.PARKED, common_pb2.STAGE_PARKED)
        self._stats.num_moved += 1
        if placement is not None:
            self.dispatch(request, placement)

    def hand_over_again(self, request: Request) -> None:
        """Queues a request again whose decode worker lacks blocks that it cannot compute.

        Its handoff left out a prefix that was evicted meanwhile, or did not bring its images. The
        next handoff leaves out nothing, and the next decode worker gets the images. The request is
        placed again, so its decode worker may also compute the prompt. This is not a lost attempt.
        """
        request.hands_over_all = True
        self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_RECOVERY)
        self._stats.num_prefixes_gone += 1

    def check_integrity(self) -> None:
        """Raises AssertionError when an attempt differs from the state of its request."""
        requests = self._requests.all()
        attempts = [request for request in requests if not request.waits]
        assert not any(request.ended for request in requests)
        assert self._requests.by_handle == {request.handle: request for request in attempts}
        assert len(self._lanes) == len(requests) - len(attempts)
        passed_through = [request for request in attempts if request.pass_through_from is not None]
        assert all(request.state is RequestState.DECODING for request in passed_through)
        assert all(request.pass_through_from == request.decode for request in passed_through)

    # ---- Private methods

    @staticmethod
    def _keep_deltas(request: Request, decoder: Worker | None) -> None:
        """Starts to keep an output's deltas if no worker but `decoder` can continue the output."""
        if decoder is None or decoder.can_replay(request.submission.sampling):
            return
        if request.recent_deltas is None:
            request.recent_deltas = RecentDeltas()

    def _send_decode(self, request: Request) -> None:
        worker = self._workers.get(request.decode)
        assert worker is not None, "an attempt ends when its decode worker is removed"
        self._assignments.sent(request, worker)
        self._commands.decode(request)

    def _begin_again(
        self,
        request: Request,
        state: RequestState,
        stage: common_pb2.Stage.ValueType,
    ) -> None:
        """Ends a request's attempt and queues the request again with the tokens that it has."""
        now = self._clock.now
        if not request.interruptions or request.interruptions[-1].ended_at is not None:
            request.past_stages = stages_until(request, now)
            before = request.decode, request.handoff_id
            request.interruptions.append(Interruption(stage, now, *before))
        self._commands.cancel(request)
        self._assignments.release(request)
        request.prefill = request.decode = request.pass_through_from = None
        request.prefill_done, request.handoff_id = False, b""
        request.prefill_timings = request.decode_timings = request.exposed_us = None
        request.prompt_done_at = request.decoding_at = None
        self._states.advance(request, state)
        self._states.queue(request)
        self._room_freed()
