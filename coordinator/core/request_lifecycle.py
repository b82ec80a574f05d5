"""Moves requests through their states, from admission through attempts to the end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

from baton.coordinator.core.admission_check import AdmissionCheck, AdmissionResult
from baton.coordinator.core.assignments import Assignments
from baton.coordinator.core.commands import Commands
from baton.coordinator.core.effects import Effects
from baton.coordinator.core.endings import ended_request, outcome
from baton.coordinator.core.fetches import Fetches
from baton.coordinator.lanes.admission import Admission
from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.rollouts.traffic import Traffic
from baton.coordinator.routing.choices import Placement
from baton.coordinator.routing.placers import Placers
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES, lane_config
from baton.coordinator.state.latency_targets import LatencyTargets
from baton.coordinator.state.recent_deltas import RecentDeltas
from baton.coordinator.state.request_table import RequestTable
from baton.coordinator.state.requests import (
    Interruption,
    PromptSources,
    Request,
    RequestState,
    StateLimits,
    Submission,
    WorkerKey,
)
from baton.coordinator.state.session_blocks import SessionBlocks
from baton.coordinator.state.slow_steps import SlowStep, Stall
from baton.coordinator.state.timers import Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.coordinator.telemetry.budget import stages_until
from baton.coordinator.telemetry.stalls import stalls
from baton.coordinator.telemetry.stats import CoreStats
from baton.coordinator.telemetry.tail_sampling import TailSampler
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

# Number of output tokens of a request that a tenant is charged for at a time.
CHARGE_TOKENS = 16


def _lost_too_often(losses: Sequence[errors.BatonError]) -> errors.BatonError:
    """Returns one error for all lost attempts: the code of the last one, and each cause once."""
    last = common_pb2.RequestError(code=losses[-1].code, details=losses[-1].details())
    causes = "; ".join(dict.fromkeys(map(str, losses)))
    last.message = f"{len(losses)} attempts in a row were lost without a new token: {causes}"
    return errors.from_message(last)


class RequestLifecycle:
    """Owns every request from its admission to its end, and moves it from state to state.

    Args:
        config: Limits and times.
        targets: Latency targets of requests that name none.
        workers: Attached workers.
        placers: Choose workers for requests and count the load on them.
        traffic: Chooses the fleet of a new request.
        timers: The core's timers; each request has one.
        effects: Collects the messages for clients and workers.
        random_bytes: Makes handoff ids; injected so that a simulation is reproducible.
        room_freed: See the attribute.

    Attributes:
        requests: Requests that have not ended, and the latest that have.
        lanes: Waiting requests in their order, and the tenants' accounts.
        admission: Decides whether requests are admitted.
        targets: As given.
        stats: Counters.
        fetches: Prefixes that workers send to the prefill workers of requests.
        session_blocks: KV blocks of the latest sessions.
        effects: As given.
        room_freed: Called when a waiting request may find a worker now: a request has arrived or
            ended, or a worker can take more.
    """

    def __init__(
        self,
        config: CoreConfig,
        targets: LatencyTargets,
        workers: WorkerRegistry,
        placers: Placers,
        traffic: Traffic,
        timers: Timers,
        effects: Effects,
        random_bytes: Callable[[int], bytes],
        room_freed: Callable[[], None],
    ) -> None:
        self._config, self._workers, self._timers = config, workers, timers
        self._placers, self._random_bytes = placers, random_bytes
        self.effects, self.targets = effects, targets
        self._limits = {
            lane: StateLimits(
                queued_s=lane_config(config.lanes, lane).max_queue_s,
                recovering_s=config.max_recovery_s,
            )
            for lane in LANES
        }
        self.requests = RequestTable(config.max_ended_requests, config.max_running_requests)
        self.lanes = Lanes(config.lanes, config.tenant_defaults, config.tenants)
        self.stats = CoreStats()
        self._tail = TailSampler(config.tail_share, self.stats.recent)
        self.room_freed = room_freed
        self.admission = Admission(config, self.lanes, placers)
        self._admission_check = AdmissionCheck(
            self.requests,
            targets,
            workers,
            placers,
            traffic,
            self.lanes,
            self.admission,
            self.stats,
        )
        self._assignments = Assignments(workers, placers)
        self._commands = Commands(config, workers, effects.add)
        self.fetches = Fetches(self._commands, placers, random_bytes)
        self.session_blocks = SessionBlocks()

    def worker(self, key: WorkerKey) -> Worker | None:
        """Returns the attached worker of a key, or None."""
        return self._workers.get(key)

    def gap_target_s(self, lane: common_pb2.Lane.ValueType) -> float | None:
        """Target of a single gap between a lane's tokens; None: the lane has no ITL target."""
        itl_s = self.targets.of_lane(lane).itl_s
        if itl_s is None or lane != common_pb2.LANE_INTERACTIVE:
            return itl_s
        return max(itl_s, self._placers.longest_gap_s or 0.0)

    # ---- Admission and attempts

    def admit(
        self, submission: Submission, now: float, *, may_still_run: bool = False
    ) -> Request | None:
        """Checks a submission and queues it, or refuses it with the reason.

        A request that was accepted before is not refused for its cost when its client resumes it.

        Args:
            submission: A new or resumed submission.
            now: Time by the core's clock.
            may_still_run: Whether a worker may still run the request for an earlier coordinator.

        Returns:
            The queued request; None if it was refused or has taken over a running output.
        """
        older = self.requests.get(submission.key)
        if older is not None and self._takes_over(older, submission):
            return None
        try:
            result = self._admission_check.check(
                submission, older, now, may_still_run=may_still_run
            )
        except errors.BatonError as error:
            self.effects.failed(submission, error)
            return None
        if older is not None:
            self._replace(older, now)
        request = self._new_request(submission, result, now)
        self.requests.add(request)
        self.stats.admitted(request, now)
        self.effects.accepted(request)
        self._queue(request, now, result.num_tokens)
        self._set_timer(request)
        self.room_freed()
        return request

    def adopt(self, request: Request, worker: Worker, attempt: int, now: float) -> None:
        """Takes over an attempt that a worker runs for an earlier coordinator.

        Args:
            request: A waiting request, or one whose new attempt is cancelled now.
            worker: The worker that runs the attempt.
            attempt: Number of the attempt on the worker.
            now: Time by the core's clock.
        """
        if not request.waits:
            self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_RECOVERY, now)
        self._advance(request, RequestState.DECODING, now)
        request.attempts_before, request.attempt = attempt - 1, 1
        request.prompt_sources = None
        self.requests.begin_attempt(request)
        request.decode, request.decoding_at = worker.key, now
        self._keep_deltas(request, worker)
        if request.dispatched_at is None:
            request.dispatched_at = now
            self.stats.dispatched(request, now, after_start=False)
        self.stats.num_adopted += 1
        if request.fleet is not worker.fleet:
            self.requests.move(request, worker.fleet)
            self.lanes.changed_fleet(request)
            self._limit_output(request, now)
        request.hashes = None
        self.lanes.dispatched(request, 0)
        self._assignments.adopt(request, worker)

    def limit_outputs(self, fleet: Fleet, now: float) -> None:
        """Cuts max_tokens of requests that came before the fleet's first worker, at its context.

        Their digests are then those that the requests have for workers and for clients that resume
        them. Requests with an attempt keep the parameters that their worker knows.
        """
        for request in self.requests.all():
            if request.fleet is fleet and not request.attempt:
                self._limit_output(request, now)

    def _limit_output(self, request: Request, now: float) -> None:
        max_model_len, before = request.fleet.workers.max_model_len, request.submission
        request.submission = before.cut_to(max_model_len)
        if request.submission is not before:
            self.lanes.reserve_only(request, max_model_len, now)

    def prompt_computed(
        self, request: Request, timings: cluster_pb2.StageTimings, now: float
    ) -> None:
        """Records from which sources the KV cache of a prompt came; once per attempt.

        Args:
            request: The request.
            timings: First timings of the attempt from the worker that computed the prompt.
            now: Time by the core's clock.
        """
        if request.prompt_sources is not None:
            return
        sources = PromptSources.of(timings, request.num_prompt_tokens)
        request.prompt_sources = sources
        if request.num_cached_prompt_tokens is None:
            request.num_cached_prompt_tokens = sources.num_cached
        if self.fetches.end(request):
            self.stats.fetch_ended(loaded=sources.fetched > 0)
        self.lanes.cached(request, sources.num_cached)
        self.stats.prompt_computed(sources, now)

    def dispatch(self, request: Request, placement: Placement, now: float) -> None:
        """Sends the next attempt of a queued request to its workers."""
        self._advance(request, RequestState.PREFILLING, now)
        request.attempt += 1
        request.prompt_sources = None
        self.requests.begin_attempt(request)
        request.num_known = len(request.token_ids)
        request.prefill = None if placement.is_local else placement.prefill.worker
        request.decode = placement.decode.worker if placement.decode is not None else None
        prefiller, decoder = self._workers.get(request.prefill), self._workers.get(request.decode)
        workers = [worker for worker in (prefiller, decoder) if worker is not None]
        if request.dispatched_at is None:
            request.dispatched_at = now
            newest_at = max(worker.attached_at for worker in workers)
            self.stats.dispatched(request, now, after_start=newest_at > request.submitted_at)
        request.handoff_id = self._random_bytes(16) if placement.handoff else b""
        request.skip_tokens = placement.skip_tokens
        view = self._placers.of(request.fleet).view
        request.placement_prediction = placement.prediction._replace(
            speeds=view.predicted_speeds(placement)
        )
        num_tokens = request.num_tokens
        # The tenant is charged only for the first attempt.
        is_owed = self.lanes.dispatched(request, num_tokens if request.attempt == 1 else 0)
        self._assignments.assign(request, placement, num_tokens, can_be_parked=not is_owed)
        self._add_session_blocks(request)
        self._keep_deltas(request, decoder)
        self.fetches.begin(request, placement, now)
        if prefiller is None:
            self._send_decode(request, now)
            return
        self._assignments.sent(request, prefiller)
        if placement.handoff:
            self._assignments.begin_handoff(request, prefiller)
        self._commands.prefill(request, prefiller.key, now)

    def begin_decode(self, request: Request, now: float) -> None:
        """Tells the decode worker to continue after the first token, which is known now."""
        self.prefill_done(request, now)
        self._advance(request, RequestState.HANDING_OFF, now)
        self._send_decode(request, now)

    def prefill_done(self, request: Request, now: float) -> None:
        """Records that the prompt is computed. The prefill worker may still send the handoff."""
        request.prefill_done, request.prompt_done_at = True, now
        if self._assignments.prefill_done(request):
            self.room_freed()

    def decoding(self, request: Request, now: float) -> None:
        """Records the first output of the decode worker."""
        self._advance(request, RequestState.DECODING, now)
        request.decoding_at = now
        if request.prefill is None:
            # The decode worker has computed the prompt, so it has room for the next one.
            self._assignments.prefill_done(request)
            self.room_freed()
        self.handed_over(request)

    def stalls(self, request: Request) -> tuple[Stall, ...]:
        """Returns the longest gaps between a request's tokens that exceed its target, up to now."""
        return stalls(request, self.targets.itl_s(request.submission), self._slow_steps)

    def charge(self, request: Request) -> None:
        """Charges the tenant for the tokens since the last charge and reserves KV room for more."""
        self._charge_tokens(request)
        self._placers.of(request.fleet).grows(request, CHARGE_TOKENS)

    def answered(self, request: Request, worker: WorkerKey) -> None:
        """Records that a worker has answered the request's command with its first report."""
        if self._assignments.answered(request, worker):
            self.room_freed()

    def handed_over(self, request: Request) -> None:
        """Records that the prefill worker need not send the handoff any longer."""
        self._assignments.handed_over(request)

    def recover(
        self, request: Request, worker: WorkerKey, error: errors.BatonError, now: float
    ) -> None:
        """Queues a request again after its attempt was lost; the client keeps its tokens.

        After max_lost_attempts losses in a row the request fails with the code of the last loss and
        with every cause in the message.

        Args:
            request: A dispatched request.
            worker: The worker that lost its part of the request.
            error: The reason, with the worker's name.
            now: Time by the core's clock.
        """
        request.losses.append(error)
        if len(request.losses) >= self._config.max_lost_attempts:
            self.fail(request, _lost_too_often(request.losses), now)
            return
        request.avoid[worker] = None
        self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_RECOVERY, now)
        self.stats.recovered(request, now)

    def worker_left(self, request: Request, now: float) -> None:
        """Queues a request again whose worker stopped as it was asked to; no attempt was lost."""
        self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_PARKED, now)
        self.stats.num_moved += 1

    def change_fleet(self, request: Request, fleet: Fleet, now: float) -> None:
        """Moves a waiting request without any output to another fleet."""
        assert request.waits
        assert not len(request.token_ids)
        self.stats.moved_to_stable(request.fleet)
        self.requests.move(request, fleet)
        self.lanes.changed_fleet(request)
        self._limit_output(request, now)
        self.room_freed()

    def forget(self, fleet: Fleet) -> None:
        """Drops the accounts and predictions of a fleet that has no requests."""
        self.lanes.forget(fleet)
        self.admission.forget(fleet)

    def park(self, request: Request, now: float) -> None:
        """Parks a running batch request: it leaves its workers and waits for another turn."""
        request.num_parked += 1
        self._begin_again(request, RequestState.PARKED, common_pb2.STAGE_PARKED, now)
        self.stats.parked(now)

    def recover_parked(self, request: Request, now: float) -> None:
        """Moves a parked request to RECOVERING, because no worker is left that could take it."""
        self._advance(request, RequestState.RECOVERING, now)

    def move(self, request: Request, now: float, placement: Placement | None = None) -> None:
        """Takes a request off a worker that flips or whose revision ends; no attempt is lost.

        Args:
            request: A dispatched request.
            now: Time by the core's clock.
            placement: The workers that it is sent to at once; None: it waits for its turn.
        """
        self._begin_again(request, RequestState.PARKED, common_pb2.STAGE_PARKED, now)
        self.stats.num_moved += 1
        if placement is not None:
            self.dispatch(request, placement, now)

    def hand_over_again(self, request: Request, now: float) -> None:
        """Queues a request again whose decode worker lacks blocks that it cannot compute.

        Its handoff left out a prefix that was evicted meanwhile, or did not bring its images. The
        next handoff leaves out nothing, and the next decode worker gets the images. The request is
        placed again, so its decode worker may also compute the prompt. This is not a lost attempt.
        """
        request.hands_over_all = True
        self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_RECOVERY, now)
        self.stats.num_prefixes_gone += 1

    # ---- Ends

    def finish(
        self, request: Request, reason: common_pb2.FinishReason.ValueType, stop: str, now: float
    ) -> None:
        """Ends a request whose output is complete.

        Args:
            request: A request that has not ended.
            reason: The finish reason.
            stop: Stop string or token id that ended the output; empty: none.
            now: Time by the core's clock.
        """
        self._advance(request, RequestState.FINISHED, now)
        budget = self._end(request, now, finish_reason=reason)
        self.effects.finished(request, reason, stop, budget)

    def cancel(self, request: Request, now: float) -> None:
        """Cancels a request in any state, and tells its client.

        Args:
            request: A request that has not ended.
            now: Time by the core's clock.
        """
        budget = self._cancel(request, now)
        self.effects.finished(request, common_pb2.FINISH_REASON_CANCELLED, "", budget)

    def session_lost(self, request: Request, now: float) -> None:
        """Cancels a request in any state whose client session was lost; it may be resumed."""
        self._cancel(request, now, session_lost=True)

    def fail(self, request: Request, error: errors.BatonError, now: float) -> None:
        """Fails a request in any state and tells its client why."""
        self._advance(request, RequestState.FAILED, now)
        self._commands.cancel(request)
        self._end(request, now, error=error)
        self.effects.failed(request.submission, error)

    def expire(
        self, request: Request, error: Callable[[Request], errors.BatonError], now: float
    ) -> None:
        """Handles a request's timer: fails the request, or sets the timer again.

        Args:
            request: A request that has not ended.
            error: Makes the error of a request that has waited for too long.
            now: Time by the core's clock.
        """
        if self._set_timer(request) > now:
            return
        if request.deadline <= now:
            self.fail(request, self._overdue(request), now)
        else:
            self.fail(request, error(request), now)

    def cancel_decode(self, request: Request) -> None:
        """Tells the decode worker to drop the handoff: the request ended with its first token."""
        self._commands.cancel_at(request.decode, request)

    def handoff_failed(self, request: Request, sender: WorkerKey) -> None:
        """Tells the decode worker not to wait for a handoff that the prefill worker cannot send."""
        if sender == request.prefill and request.decode is not None:
            self.handed_over(request)
            self._commands.handoff_failed(request)

    def check_integrity(self) -> None:
        """Raises AssertionError when a request is in no table, or a resource has no owner."""
        requests = {request.key: request for request in self.requests.all()}
        attempts = [request for request in requests.values() if not request.waits]
        assert not any(request.ended for request in requests.values())
        assert self.requests.by_handle == {request.handle: request for request in attempts}
        assert len(self.lanes) == len(requests) - len(attempts)
        passed_through = [request for request in attempts if request.pass_through_from is not None]
        assert all(request.state is RequestState.DECODING for request in passed_through)
        assert all(request.pass_through_from == request.decode for request in passed_through)
        self.lanes.check_integrity()
        self.session_blocks.check_integrity()
        self._assignments.check_integrity(requests)
        self.fetches.check_integrity(iter(requests.values()))

    # ---- Private methods

    def _new_request(self, submission: Submission, result: AdmissionResult, now: float) -> Request:
        forecast, before = result.forecast, self.requests.ended(submission.key)
        prediction = None
        if forecast is not None and forecast.is_informative:
            prediction = forecast.prediction
        return Request(
            submission=submission,
            submitted_at=now,
            deadline=self._deadline(submission),
            state_since=now,
            token_ids=array("I", submission.known_token_ids),
            text_chars=submission.known_text_chars,
            hashes=result.hashes if len(result.hashes) else None,
            fleet=result.fleet,
            prediction=prediction,
            is_resumed=result.is_resumed,
            attempts_before=before.attempt_number if before is not None else 0,
            due_at=self._due_at(submission),
            growth_s=self.targets.ttft_growth_s(submission),
        )

    def _due_at(self, submission: Submission) -> float:
        """Returns when the first token is due, by the core's clock; infinite without a target."""
        target_s = self.targets.ttft_s(submission)
        return math.inf if target_s is None else submission.arrived_at + target_s

    def _deadline(self, submission: Submission) -> float:
        """Returns when a request must end, by the core's clock."""
        life_s = self._config.max_request_s
        if submission.timeout_s is not None:
            life_s = min(life_s, submission.timeout_s)
        return submission.arrived_at + life_s

    def _overdue(self, request: Request) -> errors.BatonError:
        """Returns the error of a request whose deadline has passed."""
        submission = request.submission
        age_s = request.deadline - submission.arrived_at
        message = (
            f"request {request.id} did not end within {age_s:g} s; "
            f"it was {request.state.name.lower()}"
        )
        has_own = (
            submission.timeout_s is not None and submission.timeout_s <= self._config.max_request_s
        )
        if has_own or request.state is not RequestState.PARKED:
            return errors.DeadlineExceeded(message)
        # It lacked room, not time: when the cell is less busy, the same request may succeed.
        return errors.ResourceExhausted(message, reason="QUEUE_TIMEOUT", retry_after_s=1.0)

    @staticmethod
    def _keep_deltas(request: Request, decoder: Worker | None) -> None:
        """Starts to keep an output's deltas if no worker but `decoder` can continue the output."""
        if decoder is None or decoder.can_replay(request.submission.sampling):
            return
        if request.recent_deltas is None:
            request.recent_deltas = RecentDeltas()

    def _charge_tokens(self, request: Request) -> None:
        """Charges the tenant for the output tokens since the last charge."""
        num_tokens = len(request.token_ids)
        self.lanes.served(request, num_tokens - request.num_charged)
        request.num_charged = num_tokens

    def _add_session_blocks(self, request: Request) -> None:
        """Adds a request's KV blocks to those of its session, when it begins and when it ends."""
        submission = request.submission
        if (session := submission.session) is not None:
            hashes = self._placers.of(request.fleet).prompts.hashes_with_output(request)
            self.session_blocks.add(session, hashes)

    def _send_decode(self, request: Request, now: float) -> None:
        worker = self._workers.get(request.decode)
        assert worker is not None, "an attempt ends when its decode worker is removed"
        self._assignments.sent(request, worker)
        self._commands.decode(request, now)

    def _advance(self, request: Request, state: RequestState, now: float) -> None:
        request.advance(state, now)
        if not request.ended:
            self._set_timer(request)

    def _set_timer(self, request: Request) -> float:
        """Sets the request's timer; returns when it is due, by the core's clock."""
        due = request.due(self._limits[request.submission.lane])
        self._timers.set(request.key, due)
        return due

    def _cancel(
        self, request: Request, now: float, *, session_lost: bool = False
    ) -> common_pb2.LatencyBudget:
        self._advance(request, RequestState.CANCELLED, now)
        self._commands.cancel(request)
        reason = common_pb2.FINISH_REASON_CANCELLED
        return self._end(request, now, finish_reason=reason, session_lost=session_lost)

    def _end(
        self,
        request: Request,
        now: float,
        *,
        finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED,
        error: errors.BatonError | None = None,
        session_lost: bool = False,
    ) -> common_pb2.LatencyBudget:
        """Releases everything that an ended request holds, and remembers its record."""
        self._charge_tokens(request)
        self.lanes.ended(request, now)
        if error is None and finish_reason != common_pb2.FINISH_REASON_CANCELLED:
            self._placers.of(request.fleet).ended(request)
        self.admission.ended(request, now)
        if request.attempt:
            self._add_session_blocks(request)
        self._timers.cancel(request.key)
        self._release_attempt(request)
        self.requests.remove(request)
        self.room_freed()
        stalls = self.stalls(request)
        record = ended_request(
            request, now, self.targets, stalls, finish_reason, error, session_lost=session_lost
        )
        kept = self._tail.reason(record, now)
        if kept or request.submission.traceparent:
            self.effects.add(ev.ExportTrace(record, request.submission.traceparent, kept))
        self.requests.remember(request, record)
        self.stats.ended(request, record, outcome(record))
        return record.budget

    def _takes_over(self, older: Request, submission: Submission) -> bool:
        """Connects a resuming client to the running output of its request, if that is necessary.

        It is necessary if no other worker could continue the output. The recent deltas then supply
        the tokens that the client has not received.

        Returns:
            Whether the client was connected.
        """
        if self.admission.closing is not None or not older.is_resumed_by(submission):
            return False
        if (lacking := older.lacking(submission)) is None:
            return False
        self._tell_resumed(older)
        self.requests.redirect(older, submission.to)
        self.effects.accepted(older)
        self.effects.deltas().extend((submission.to, encoded) for encoded in lacking)
        # The worker knows the older deadline.
        older.deadline = min(older.deadline, self._deadline(submission))
        self._set_timer(older)
        return True

    def _replace(self, older: Request, now: float) -> None:
        """Cancels the running request that a submission resumes; its session may still be open."""
        self._cancel(older, now)
        self._tell_resumed(older)

    def _tell_resumed(self, older: Request) -> None:
        """Fails the older stream of a resumed request, so that its reader learns the reason."""
        reason = f"request {older.id} was resumed over another connection and continues there"
        self.effects.failed(older.submission, errors.Aborted(reason))

    def _queue(self, request: Request, now: float, num_tokens: int = 0) -> None:
        work_s = self._placers.of(request.fleet).predictions.prefill_s(request)
        self.lanes.push(request, now, num_tokens, work_s)

    def _slow_steps(self, key: WorkerKey | None) -> Sequence[SlowStep]:
        worker = self._workers.get(key)
        return worker.slow_steps if worker is not None else ()

    def _begin_again(
        self,
        request: Request,
        state: RequestState,
        stage: common_pb2.Stage.ValueType,
        now: float,
    ) -> None:
        """Ends a request's attempt and queues the request again with the tokens that it has."""
        if not request.interruptions or request.interruptions[-1].ended_at is not None:
            request.past_stages = stages_until(request, now)
            before = request.decode, request.handoff_id
            request.interruptions.append(Interruption(stage, now, *before))
        self._commands.cancel(request)
        self._release_attempt(request)
        request.prefill = request.decode = request.pass_through_from = None
        request.prefill_done, request.handoff_id = False, b""
        request.prefill_timings = request.decode_timings = request.exposed_us = None
        request.prompt_done_at = request.decoding_at = None
        self._advance(request, state, now)
        self._queue(request, now)
        self.room_freed()

    def _release_attempt(self, request: Request) -> None:
        """Releases the workers, the fetch and the handle of a request's attempt."""
        self.fetches.end(request)
        self.requests.end_attempt(request)
        if self._assignments.release(request):
            self.room_freed()
