"""The requests that have not ended, those that ended recently, and every way a request ends."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from google.rpc import code_pb2

from baton.coordinator import events as ev
from baton.coordinator.budget import latency_budget
from baton.coordinator.core_config import CoreConfig
from baton.coordinator.lanes import LANES, Lanes, lane_config, lane_name
from baton.coordinator.placement import Placement, lane_ttft_s, max_output_tokens
from baton.coordinator.placers import Placers
from baton.coordinator.request import (
    EndedRequest,
    Interruption,
    Request,
    RequestState,
    StateLimits,
    StreamKey,
    Submission,
    WorkerKey,
)
from baton.coordinator.revision import Traffic
from baton.coordinator.stalls import Stall, stalls
from baton.coordinator.stats import CoreStats
from baton.coordinator.tail_sampling import TailSampler
from baton.coordinator.timers import Timers
from baton.coordinator.workers import Worker, WorkerRegistry
from baton.runtime import errors
from baton.runtime.sampling import needs_exact_state
from baton.v1 import cluster_pb2, common_pb2

_RETRY_AFTER_S = 1.0


def _spec(submission: Submission) -> cluster_pb2.RequestSpec:
    """What is the same in all of a request's commands, but its prompt."""
    return cluster_pb2.RequestSpec(
        request_id=submission.request_id,
        sampling=submission.sampling,
        lane=submission.lane,
        # Smaller first: when KV runs out, the engine's victim is a batch request.
        priority=1 if submission.lane == common_pb2.LANE_BATCH else 0,
        traceparent=submission.traceparent,
        tenant=submission.tenant,
    )


def _only_prompt(wanted: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """Of a prefill whose first token is known: nothing ends it, and its token is thrown away."""
    sampling = common_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    if wanted.HasField("prompt_logprobs"):
        sampling.prompt_logprobs = wanted.prompt_logprobs
    return sampling


def _lost_too_often(losses: Sequence[errors.BatonError]) -> errors.BatonError:
    """Of the last one's code; says every cause once, since they may differ."""
    last = common_pb2.RequestError(code=losses[-1].code, details=losses[-1].details())
    told = "; ".join(dict.fromkeys(map(str, losses)))
    last.message = f"{len(losses)} attempts in a row were lost without a new token: {told}"
    return errors.from_message(last)


class RequestBook:
    """Owns every request from admission to its end.

    Effects are appended to `out`, which the core empties; `room_made` says that something ended or
    arrived, so that dispatching is worth a try.

    Args:
        traffic: says which revision a new request gets.
        random_bytes: of handoff ids; injected so that a simulation repeats.
    """

    def __init__(
        self,
        config: CoreConfig,
        workers: WorkerRegistry,
        placer: Placers,
        traffic: Traffic,
        timers: Timers[str | WorkerKey],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._config, self._workers, self._timers = config, workers, timers
        self._placer, self._traffic = placer, traffic
        self._random_bytes = random_bytes
        self._limits = {
            lane: StateLimits(
                queued_s=lane_config(config.lanes, lane).max_queue_s,
                recovering_s=config.max_recovery_s,
            )
            for lane in LANES
        }
        self._requests: dict[str, Request] = {}
        # Dispatched ones, by what their workers call them; a handle is never used again.
        self._by_handle: dict[int, Request] = {}
        self._num_handles = 0
        self._by_session: dict[int, dict[int, Request]] = {}
        self.lanes = Lanes(config.lanes, config.tenant_defaults, config.tenants)
        self.ended: OrderedDict[str, EndedRequest] = OrderedDict()
        self.stats = CoreStats(config.targets)
        self._tail = TailSampler(config.tail_share, self.stats.recent)
        self.out: list[ev.Effect] = []
        # Of the event that is being handled, in `out` unless empty.
        self._deltas: list[tuple[StreamKey, bytes]] = []
        self.room_made = False
        self.closing: errors.Unavailable | None = None

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Mapping[str, Request]:
        """By their ids."""
        return self._requests

    @property
    def by_handle(self) -> Mapping[int, Request]:
        """Those whose attempt goes on, by what their workers call it."""
        return self._by_handle

    def worker(self, key: WorkerKey) -> Worker | None:
        """None when it is not attached."""
        return self._workers.get(key)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def by_stream(self, to: StreamKey) -> Request | None:
        return self._by_session.get(to.session, {}).get(to.stream)

    def of_session(self, session: int) -> list[Request]:
        return list(self._by_session.get(session, {}).values())

    def all(self) -> list[Request]:
        return list(self._requests.values())

    def take_effects(self) -> list[ev.Effect]:
        effects, self.out, self._deltas = self.out, [], []
        return effects

    # ---- In

    def admission_error(self, lane: common_pb2.Lane.ValueType) -> errors.BatonError | None:
        """Why no request would be admitted now, whoever's; None when one would."""
        if self.closing is not None:
            return self.closing
        if len(self._requests) >= self._config.max_running_requests:
            return errors.ResourceExhausted(
                f"{len(self._requests)} requests are running; "
                f"at most {self._config.max_running_requests}",
                reason="TOO_MANY_REQUESTS",
                retry_after_s=_RETRY_AFTER_S,
            )
        max_queued = lane_config(self._config.lanes, lane).max_queued
        if self.lanes.num_queued(lane) >= max_queued:
            return errors.ResourceExhausted(
                f"{self.lanes.num_queued(lane)} requests wait in the {lane_name(lane)} lane; "
                f"at most {max_queued}",
                reason="QUEUE_FULL",
                retry_after_s=_RETRY_AFTER_S,
            )
        return None

    def admit(
        self, submission: Submission, now: float, *, is_taken: bool = False
    ) -> Request | None:
        """Queues a submission; None: it was refused.

        Args:
            submission: checked.
            now: by the core's clock.
            is_taken: a worker goes on with somebody else's request of this id.
        """
        refused = self.admission_error(submission.lane)
        if is_taken:
            refused = errors.AlreadyExists(f"request {submission.request_id} is running")
        older = self._requests.get(submission.request_id)
        if refused is None and older is not None:
            refused = self._succeed(older, submission, now)
        model = self._workers.model
        num_tokens = len(submission.prompt_token_ids) + max_output_tokens(
            submission, model.max_model_len if model is not None else 0
        )
        refused = refused or self.lanes.rate_error(submission.tenant, num_tokens, now)
        revision = self._traffic.revision_of(submission)
        hashes = self._placer.hashes(submission, revision)
        if refused is None:
            refused = self._lateness_error(submission, hashes, revision, now)
            if refused is not None and revision != self._traffic.stable:
                # What is only tried out is no reason to refuse anybody.
                self.stats.moved_to_stable(revision)
                revision = self._traffic.stable
                hashes = self._placer.hashes(submission, revision)
                refused = self._lateness_error(submission, hashes, revision, now)
        if refused is None or isinstance(refused, errors.ResourceExhausted):
            demand = self._placer.demand(submission, hashes, revision)
            self.stats.demand[submission.lane].arrived(*demand)
        if refused is not None:
            if isinstance(refused, errors.ResourceExhausted):
                self.stats.shed(submission.lane, refused.reason, now)
            self.out.append(ev.SendFailed(submission.to, refused))
            return None
        life_s = self._config.max_request_s
        if submission.timeout_s is not None:
            life_s = min(life_s, submission.timeout_s)
        request = Request(
            submission=submission,
            submitted_at=now,
            deadline=submission.arrived_at + life_s,
            state_since=now,
            token_ids=array("I", submission.known_token_ids),
            text_chars=submission.known_text_chars,
            hashes=hashes if len(hashes) else None,
            revision=revision,
        )
        before = self.ended.get(request.id)
        if before is not None:
            request.attempts_before = before.attempt_number
        self._requests[request.id] = request
        self._by_session.setdefault(submission.to.session, {})[submission.to.stream] = request
        self.stats.admitted(request, now)
        self.out.append(ev.SendAccepted(submission.to, request.id, request.num_prompt_tokens))
        self._queue(request, now, num_tokens)
        self._set_timer(request)
        self.room_made = True
        return request

    def adopt(self, request: Request, worker: Worker, attempt: int, now: float) -> None:
        """A worker goes on with an attempt of a queued request that another coordinator sent it."""
        self._advance(request, RequestState.DECODING, now)
        request.attempts_before, request.attempt = attempt - 1, 1
        self._name(request)
        request.dispatched_at = request.decoding_at = now
        request.decode = worker.key
        self.stats.dispatched(request, now, after_start=False)
        self.stats.num_adopted += 1
        self.lanes.dispatched(request, 0)
        self._placer.leaves(request)
        request.revision, request.hashes = worker.revision, None
        self._placer.adopt(request, worker.key)
        worker.assign(request.id, request.num_prompt_tokens + len(request.token_ids))

    def dispatch(self, request: Request, placement: Placement, now: float) -> None:
        """Sends the next attempt of a queued request to its workers."""
        self._advance(request, RequestState.PREFILLING, now)
        request.attempt += 1
        self._name(request)
        request.num_known = len(request.token_ids)
        prefill, decode = placement.prefill, placement.decode
        request.prefill = prefill.worker if prefill is not None else None
        request.decode = decode.worker if decode is not None else None
        if request.dispatched_at is None:
            request.dispatched_at = now
            self.stats.dispatched(request, now, after_start=self._came_later(request))
        request.handoff_id = self._random_bytes(16) if placement.handoff else b""
        request.skip_tokens = placement.skip_tokens
        num_tokens = request.num_prompt_tokens + len(request.token_ids)
        # A lost attempt was no service.
        self.lanes.dispatched(request, num_tokens if request.attempt == 1 else 0)
        self._placer.leaves(request)
        self._placer.assign(request, placement)
        for worker in map(self._workers.get, (request.prefill, request.decode)):
            if worker is not None:
                worker.assign(request.id, num_tokens)
        prefiller = self._workers.get(request.prefill)
        if prefiller is not None:
            self._sent(request, prefiller)
            command = cluster_pb2.PrefillCommand()
            self._specify(command.spec, request, now)
            if request.num_known:
                command.spec.sampling.CopyFrom(_only_prompt(request.submission.sampling))
                command.spec.prompt_token_ids.extend(request.known_prompt(request.num_known))
            if placement.handoff:
                prefiller.sending.add(request.id)
                command.handoff.CopyFrom(self._handoff_plan(request))
            self.out.append(ev.SendCommand(prefiller.key, command))
            self._announce(request, now)
        else:
            self._send_decode(request, now)

    def begin_decode(self, request: Request, now: float) -> None:
        """The first token is known: its decode worker continues after it."""
        self.prefill_over(request)
        self._advance(request, RequestState.HANDING_OFF, now)
        self._send_decode(request, now)

    def prefill_over(self, request: Request) -> None:
        """Nothing more is wanted of the prefill worker but the end of the handoff."""
        request.prefill_done = True
        self._placer.computed(request)
        self._release(request.prefill, request)

    def decoding(self, request: Request, now: float) -> None:
        self._advance(request, RequestState.DECODING, now)
        if request.decoding_at is None:
            request.decoding_at = now
        self.handed_over(request)

    def stalls(self, request: Request) -> tuple[Stall, ...]:
        """Its longest gaps over its target, up to now."""
        worker = self._workers.get(request.decode)
        target_s = self.stats.itl_target_s(request)
        return stalls(request, target_s, worker.slow_steps if worker is not None else ())

    def deltas(self) -> list[tuple[StreamKey, bytes]]:
        """Takes encoded tokens for clients: one effect for all that an event brings."""
        if not self._deltas:
            self.out.append(ev.SendDeltas(self._deltas))
        return self._deltas

    def charge(self, request: Request) -> None:
        """Its tenant pays for the tokens that have come since the last time."""
        self.lanes.served(request, request.num_uncharged)
        request.num_uncharged = 0

    def answered(self, request: Request, worker: WorkerKey) -> None:
        """The worker has said something of this attempt."""
        found = self._workers.get(worker)
        if found is not None:
            was_alone = found.alone
            found.answered(request.id)
            if was_alone:
                self._placer.refresh(found)
                self.room_made = True

    def handed_over(self, request: Request) -> None:
        """The prefill worker's end of the handoff does not matter any more."""
        worker = self._workers.get(request.prefill)
        if worker is not None:
            worker.sending.discard(request.id)

    def recover(
        self, request: Request, worker: WorkerKey, error: errors.BatonError, now: float
    ) -> None:
        """An attempt is lost: what was sent stays, and the request waits for another one.

        Args:
            request: dispatched.
            worker: whose part of it is lost.
            error: why, naming the worker. A request that is lost too often in a row fails with the
                code of the last one, and says every cause.
            now: by the core's clock.
        """
        request.losses.append(error)
        if len(request.losses) >= self._config.max_lost_attempts:
            self.fail(request, _lost_too_often(request.losses), now)
            return
        request.avoid.add(worker)
        self._begin_again(request, RequestState.RECOVERING, common_pb2.STAGE_RECOVERY, now)
        self.stats.recovered(request, now)

    def change_revision(self, request: Request, revision: str) -> None:
        """A waiting request of which nothing has been sent is computed by other workers."""
        assert request.waits
        assert not len(request.token_ids)
        self.stats.moved_to_stable(request.revision)
        self._placer.leaves(request)
        request.revision, request.hashes = revision, None
        self.lanes.changed_revision(request)
        self._placer.waits(request)
        self.room_made = True

    def park(self, request: Request, now: float) -> None:
        """A batch request that runs makes room, and waits for some."""
        request.num_parked += 1
        self._begin_again(request, RequestState.PARKED, common_pb2.STAGE_PARKED, now)
        self.stats.parked(now)

    def move(self, request: Request, now: float) -> None:
        """Its worker is to do something else: it waits for another, and is no worse for that."""
        self._begin_again(request, RequestState.PARKED, common_pb2.STAGE_PARKED, now)
        self.stats.num_moved += 1

    # ---- Out

    def finish(
        self, request: Request, reason: common_pb2.FinishReason.ValueType, stop: str, now: float
    ) -> None:
        """The request came to its natural end."""
        self._advance(request, RequestState.FINISHED, now)
        budget = self._end(request, now, finish_reason=reason)
        self._send_finished(request, reason, stop, budget)

    def cancel(self, request: Request, now: float, *, tell: bool = True) -> None:
        """Ends a request, whatever it is doing.

        Args:
            request: not ended.
            now: by the core's clock.
            tell: False when nobody listens any more.
        """
        self._advance(request, RequestState.CANCELLED, now)
        self._cancel_workers(request)
        budget = self._end(request, now, finish_reason=common_pb2.FINISH_REASON_CANCELLED)
        if tell:
            self._send_finished(request, common_pb2.FINISH_REASON_CANCELLED, "", budget)

    def fail(self, request: Request, error: errors.BatonError, now: float) -> None:
        self._advance(request, RequestState.FAILED, now)
        self._cancel_workers(request)
        self._end(request, now, error=error)
        self.out.append(ev.SendFailed(request.submission.to, error))

    def expire(
        self, request: Request, error: Callable[[Request], errors.BatonError], now: float
    ) -> None:
        """A timer of the request went off: it fails, or the timer is set again.

        Args:
            request: not ended.
            error: of the request when it has waited for too long.
            now: by the core's clock.
        """
        if self._set_timer(request) > now:
            return
        if request.deadline <= now:
            age_s = request.deadline - request.submission.arrived_at
            self.fail(
                request,
                errors.DeadlineExceeded(
                    f"request {request.id} did not end within {age_s:g} s; "
                    f"it was {request.state.name.lower()}"
                ),
                now,
            )
        else:
            self.fail(request, error(request), now)

    def cancel_decode(self, request: Request) -> None:
        """The decode worker is not needed after all: it forgets the handoff."""
        self._send_cancel(request.decode, request)

    def baton_lost(self, request: Request, sender: WorkerKey) -> None:
        """The prefill worker cannot hand it over: its decode worker need not wait for that."""
        if sender == request.prefill and request.decode is not None:
            self.handed_over(request)
            command = cluster_pb2.CancelCommand(
                request_id=request.id, handoff_id=request.handoff_id
            )
            self.out.append(ev.SendCommand(request.decode, command))

    # ---- Inside

    def _advance(self, request: Request, state: RequestState, now: float) -> None:
        request.advance(state, now)
        if not request.ended:
            self._set_timer(request)

    def _set_timer(self, request: Request) -> float:
        """When something must be done about the request, by the core's clock."""
        due = request.due(self._limits[request.submission.lane])
        self._timers.set(request.id, due)
        return due

    def _end(
        self,
        request: Request,
        now: float,
        *,
        finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED,
        error: errors.BatonError | None = None,
    ) -> common_pb2.LatencyBudget:
        """Gives back everything a request holds and remembers it; its state is terminal."""
        self.charge(request)
        self.lanes.ended(request, now)
        self._placer.leaves(request)
        if error is None and finish_reason != common_pb2.FINISH_REASON_CANCELLED:
            self._placer.ended(request)
        self._timers.cancel(request.id)
        self._let_go(request)
        del self._requests[request.id]
        session = self._by_session[request.submission.to.session]
        del session[request.submission.to.stream]
        if not session:
            del self._by_session[request.submission.to.session]
        self.room_made = True
        budget = latency_budget(request, now)
        record = EndedRequest(
            request_id=request.id,
            state=request.state,
            lane=request.submission.lane,
            tenant=request.submission.tenant,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.token_ids),
            attempt=request.attempt,
            attempt_number=request.attempt_number,
            prefill_worker_id=request.prefill[0] if request.prefill is not None else "",
            decode_worker_id=request.decode[0] if request.decode is not None else "",
            arrived_at=request.submission.arrived_at,
            ended_at=now,
            budget=budget,
            finish_reason=finish_reason,
            error_code=error.code if error is not None else 0,
            error=str(error) if error is not None else "",
            session=request.submission.to.session,
            ttft_target_s=self.stats.ttft_target_s(request),
            itl_target_s=self.stats.itl_target_s(request),
            stalls=self.stalls(request),
        )
        kept = self._tail.reason(record, now)
        if kept or request.submission.traceparent:
            self.out.append(ev.TellTrace(record, request.submission.traceparent, kept))
        self.ended.pop(request.id, None)
        self.ended[request.id] = record
        while len(self.ended) > self._config.max_ended_requests:
            self.ended.popitem(last=False)
        if error is not None:
            outcome = code_pb2.Code.Name(error.code).lower()
        else:
            name = common_pb2.FinishReason.Name(finish_reason)
            outcome = name.removeprefix("FINISH_REASON_").lower()
        self.stats.ended(request, record, outcome)
        return budget

    def _send_finished(
        self,
        request: Request,
        reason: common_pb2.FinishReason.ValueType,
        stop: str,
        budget: common_pb2.LatencyBudget,
    ) -> None:
        timings = request.prefill_timings or request.decode_timings
        usage = common_pb2.Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=len(request.token_ids),
            cached_prompt_tokens=timings.num_cached_tokens if timings is not None else 0,
        )
        self.out.append(
            ev.SendFinished(
                request.submission.to, reason, stop, usage, budget, tuple(request.prompt_logprobs)
            )
        )

    def _send_decode(self, request: Request, now: float) -> None:
        worker = self._workers.get(request.decode)
        assert request.decode is not None
        assert worker is not None, "with its decode worker an attempt is lost"
        self._sent(request, worker)
        command = cluster_pb2.DecodeCommand(expected=request.expected)
        self._specify(command.spec, request, now, with_prompt=not request.expected)
        self._add_known(command.spec, request)
        if request.handoff_id and not request.expected:
            command.handoff.CopyFrom(self._handoff_plan(request))
        self.out.append(ev.SendCommand(request.decode, command))

    def _announce(self, request: Request, now: float) -> None:
        """Its decode worker may load what it is handed as it comes, if it makes use of that.

        Not where sampling state is to be replayed from the prompt, nor where nothing may follow.
        """
        worker = self._workers.get(request.decode)
        sampling = request.submission.sampling
        num_coming = 0 if request.num_known else 1
        request.expected = (
            worker is not None
            and bool(request.handoff_id)
            and worker.hello.capacity.loads_early
            and not needs_exact_state(sampling)
            and not (
                sampling.HasField("max_tokens")
                and sampling.max_tokens <= request.num_known + num_coming
            )
        )
        if worker is None or not request.expected:
            return
        command = cluster_pb2.ExpectCommand(num_coming_tokens=num_coming)
        self._specify(command.spec, request, now)
        self._add_known(command.spec, request)
        command.handoff.CopyFrom(self._handoff_plan(request))
        self.out.append(ev.SendCommand(worker.key, command))

    @staticmethod
    def _add_known(spec: cluster_pb2.RequestSpec, request: Request) -> None:
        spec.known_token_ids.extend(request.token_ids)
        spec.known_text_chars = request.text_chars

    def _cancel_workers(self, request: Request) -> None:
        """Both legs, in every state: each ignores what it does not know."""
        self._send_cancel(request.prefill, request)
        self._send_cancel(request.decode, request)

    def _send_cancel(self, key: WorkerKey | None, request: Request) -> None:
        if key is None or self._workers.get(key) is None:
            return
        command = cluster_pb2.CancelCommand(
            request_id=request.id, attempt=request.attempt_number, handoff_id=request.handoff_id
        )
        self.out.append(ev.SendCommand(key, command))

    def _succeed(
        self, older: Request, submission: Submission, now: float
    ) -> errors.BatonError | None:
        """A resumed request replaces its older self, whose session is not known to be lost yet."""
        if (
            not len(submission.known_token_ids)
            or older.submission.tenant != submission.tenant
            or older.submission.to.session == submission.to.session
        ):
            return errors.AlreadyExists(f"request {submission.request_id} is running")
        self.cancel(older, now, tell=False)
        return None

    def _lateness_error(
        self, submission: Submission, hashes: array[int], revision: str, now: float
    ) -> errors.BatonError | None:
        """Why it would come too late, by what is known now; None when it would not."""
        if len(submission.known_token_ids):
            return None
        wanted_s = lane_ttft_s(self._config.lanes, submission)
        if submission.timeout_s is not None:
            wanted_s = min(submission.timeout_s, wanted_s or submission.timeout_s)
        if wanted_s is None:
            return None
        predicted_s = self._placer.predicted_ttft_s(submission, hashes, revision)
        if predicted_s is None:
            return None
        predicted_s += now - submission.arrived_at
        late_s = predicted_s - wanted_s
        if late_s <= 0:
            return None
        return errors.ResourceExhausted(
            f"the first token is predicted in {predicted_s:.3g} s; {wanted_s:.3g} s are wanted",
            reason="TOO_LATE",
            retry_after_s=late_s,
        )

    def _came_later(self, request: Request) -> bool:
        """Whether one of its workers was not there yet when it was admitted."""
        return any(
            worker is not None and worker.attached_at > request.submitted_at
            for worker in map(self._workers.get, (request.prefill, request.decode))
        )

    def _queue(self, request: Request, now: float, num_tokens: int = 0) -> None:
        self.lanes.push(request, now, num_tokens)
        self._placer.waits(request)

    def _begin_again(
        self,
        request: Request,
        state: RequestState,
        stage: common_pb2.Stage.ValueType,
        now: float,
    ) -> None:
        """Takes a dispatched request back into its lane, with the tokens it has."""
        self._cancel_workers(request)
        self._let_go(request)
        request.prefill = request.decode = None
        request.prefill_done, request.handoff_id, request.expected = False, b"", False
        if not request.interruptions or request.interruptions[-1].ended_at is not None:
            request.interruptions.append(Interruption(stage, now))
        self._advance(request, state, now)
        self._queue(request, now)
        self.room_made = True

    def _sent(self, request: Request, worker: Worker) -> None:
        """A worker is told to begin with a request."""
        worker.sent(request.id, alone=request.suspect)
        if request.prefill is None:
            worker.local.add(request.id)
        if request.suspect:
            self._placer.refresh(worker)

    def _name(self, request: Request) -> None:
        """Gives its attempt a handle; `_let_go` takes it back."""
        self._num_handles += 1
        request.handle = self._num_handles
        self._by_handle[request.handle] = request

    def _let_go(self, request: Request) -> None:
        self._by_handle.pop(request.handle, None)
        self.handed_over(request)
        self._placer.released(request)
        self._release(request.prefill, request)
        self._release(request.decode, request)

    def _release(self, key: WorkerKey | None, request: Request) -> None:
        worker = self._workers.get(key)
        if worker is not None and worker.release(request.id):
            self.room_made = True

    def _specify(
        self,
        spec: cluster_pb2.RequestSpec,
        request: Request,
        now: float,
        *,
        with_prompt: bool = True,
    ) -> None:
        submission = request.submission
        if not with_prompt:
            spec.CopyFrom(_spec(submission))
        else:
            if request.spec is None:
                request.spec = _spec(submission)
                request.spec.prompt_token_ids.extend(submission.prompt_token_ids)
            spec.CopyFrom(request.spec)
        spec.attempt, spec.handle = request.attempt_number, request.handle
        spec.timeout.FromMicroseconds(max(1, round((request.deadline - now) * 1e6)))

    def _handoff_plan(self, request: Request) -> cluster_pb2.HandoffPlan:
        decoder = self._workers.get(request.decode)
        plan = cluster_pb2.HandoffPlan(
            handoff_id=request.handoff_id,
            epoch=1,
            target=decoder.hello.kv_address if decoder is not None else "",
            num_tokens=request.num_prompt_tokens + len(request.known_prompt(request.num_known)),
            skip_tokens=request.skip_tokens,
        )
        plan.commit_timeout.FromMicroseconds(round(self._config.handoff_timeout_s * 1e6))
        return plan
