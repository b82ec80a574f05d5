"""Applies the outputs of workers' engine steps to requests."""

from __future__ import annotations

from google.rpc import code_pb2

from baton.coordinator.core.assignments import Assignments
from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.core.token_charges import CHARGE_TOKENS, TokenCharges
from baton.coordinator.core.token_gaps import TokenGaps
from baton.coordinator.state.requests import Request, RequestKey, RequestState, StreamKey, WorkerKey
from baton.coordinator.state.slow_steps import Cause, SlowStep
from baton.coordinator.telemetry.budget import ttft_stages
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

# Codes of errors that the request itself causes: another worker would fail it too.
_REQUEST_ERRORS = (
    code_pb2.INVALID_ARGUMENT,
    code_pb2.FAILED_PRECONDITION,
    code_pb2.OUT_OF_RANGE,
    code_pb2.UNIMPLEMENTED,
    code_pb2.DEADLINE_EXCEEDED,
)
# Largest gap that a request's array of 4-byte numbers holds: more than an hour.
_MAX_GAP_US = 2**32 - 1
_NATURAL_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class Outputs:
    """Passes the outputs of workers to the requests that they belong to.

    Args:
        parts: The shared parts of the core.
        attempts: Follows, recovers and moves attempts.
        assignments: The workers of requests.
        ends: Ends requests.
        charges: Charges tenants for output tokens.
        gaps: Finds the target of a gap between tokens.
    """

    def __init__(
        self,
        parts: Parts,
        attempts: Attempts,
        assignments: Assignments,
        ends: RequestEnds,
        charges: TokenCharges,
        gaps: TokenGaps,
    ) -> None:
        self._clock = parts.clock
        self.requests, self.workers, self.effects = parts.requests, parts.workers, parts.effects
        self.admission, self.targets, self.stats = parts.admission, parts.targets, parts.stats
        self.attempts, self.assignments, self.ends = attempts, assignments, ends
        self.charges, self.gaps = charges, gaps

    def apply_step(self, worker: WorkerKey, step: cluster_pb2.StepOutputs) -> None:
        """Applies the outputs of one engine step.

        Outputs of requests that have ended, of older attempts, and of workers that do not run the
        attempt are dropped.
        """
        applied = _Step(self, worker, self._clock.now)
        if step.HasField("tokens"):
            applied.take_tokens(step.tokens)
        for output in step.outputs:
            request = self.requests.get(RequestKey(output.request_id))
            if request is not None and output.attempt == request.attempt_number:
                _apply_output(applied, request, output)
        applied.count()


class _Step:
    """One engine step of a worker. It counts outputs with equal gaps together, to save time."""

    __slots__ = (
        "_gaps",
        "_joined",
        "_num_requests",
        "_num_tokens",
        "now",
        "outputs",
        "worker",
    )

    def __init__(self, outputs: Outputs, worker: WorkerKey, now: float) -> None:
        self.outputs, self.worker, self.now = outputs, worker, now
        # Requests that got tokens in this step, and their tokens by lane. With speculative
        # decoding, a request may get several.
        self._num_requests = 0
        self._num_tokens: dict[common_pb2.Lane.ValueType, int] = {}
        # Requests whose first output from this worker is in this step.
        self._joined: list[Request] = []
        # By lane and time of the last token: the gap in microseconds, and the number of such gaps.
        self._gaps: dict[tuple[common_pb2.Lane.ValueType, float], list[int]] = {}

    def take_tokens(self, tokens: cluster_pb2.StepTokens) -> None:
        """Passes on outputs of one token each. Nearly all tokens go through this loop."""
        find, worker, now = self.outputs.requests.by_handle.get, self.worker, self.now
        # Most requests of a worker share the gap, so the last gap is kept in local variables.
        last_at, lane, gap, num_counted = -1.0, common_pb2.LANE_UNSPECIFIED, [0, 0], 0
        deltas: list[tuple[StreamKey, bytes]] = []
        num_tokens = 0
        # Copies to lists, because iterating over a repeated protobuf field is slow.
        for handle, offset, token_id, num_chars, encoded in zip(
            tokens.handles[:],
            tokens.offsets[:],
            tokens.token_ids[:],
            tokens.num_text_chars[:],
            tokens.deltas[:],
            strict=True,
        ):
            request = find(handle)
            if request is None:
                continue
            known = request.token_ids
            if request.pass_through_from is not worker or offset != len(known):
                delta = common_pb2.TokenDelta.FromString(encoded)
                _apply_output(self, request, cluster_pb2.RequestOutput(delta=delta))
                continue
            known.append(token_id)
            request.text_chars += num_chars
            submission = request.submission
            if not deltas:
                deltas = self.outputs.effects.deltas()
            deltas.append((submission.to, encoded))
            # This repeats `_count_tokens`, because a call per token would be slow.
            if request.last_token_at != last_at or submission.lane != lane:
                gap[1] += num_tokens - num_counted
                self._add_tokens(lane, num_tokens - num_counted)
                assert request.last_token_at is not None
                last_at, lane, num_counted = request.last_token_at, submission.lane, num_tokens
                gap = self._gap_since(lane, last_at)
            request.gaps_us.append(gap[0])
            request.last_token_at = now
            num_tokens += 1
            if not offset % CHARGE_TOKENS:
                self.outputs.charges.charge(request)
        gap[1] += num_tokens - num_counted
        self._num_requests += num_tokens
        self._add_tokens(lane, num_tokens - num_counted)

    def deliver(self, request: Request, delta: common_pb2.TokenDelta) -> bool:
        """Passes on an output, each token exactly once; returns False if the attempt is lost."""
        expected = len(request.token_ids)
        if delta.offset > expected:
            error = errors.Internal(
                f"worker {self.worker[0]} sent tokens from {delta.offset}; {expected} are known: "
                f"{delta.offset - expected} are lost"
            )
            self.outputs.attempts.recover(request, self.worker, error)
            return False
        if delta.offset < expected:
            overlap = expected - delta.offset
            if overlap >= len(delta.token_ids):
                return True
            # The text is still new: a worker leaves out text that was sent before.
            delta = common_pb2.TokenDelta(
                offset=expected,
                token_ids=delta.token_ids[overlap:],
                text=delta.text,
                logprobs=delta.logprobs[overlap:],
            )
        num_tokens = len(delta.token_ids)
        if not num_tokens and not delta.text:
            return True
        if request.last_token_at is None:
            delta.revision = request.fleet.name
        request.token_ids.extend(delta.token_ids)
        request.text_chars += len(delta.text)
        encoded = delta.SerializeToString()
        self.outputs.effects.deltas().append((request.submission.to, encoded))
        if request.recent_deltas is not None:
            request.recent_deltas.add(encoded)
        if num_tokens:
            self._count_tokens(request, num_tokens)
            if request.interruptions:
                request.losses, request.suspect = [], False
                if request.interruptions[-1].ended_at is None:
                    request.interruptions[-1].ended_at = self.now
            if request.state is RequestState.DECODING and request.recent_deltas is None:
                request.pass_through_from = self.worker
        return True

    def _count_tokens(self, request: Request, num_tokens: int) -> None:
        """Updates the latencies and the tenant's charge for a request's new tokens."""
        lane, last_at = request.submission.lane, request.last_token_at
        request.last_token_at = self.now
        if last_at is None:
            request.first_token_at = self.now
            self.outputs.admission.first_token(request)
            if not len(request.submission.known_token_ids):
                # The first token of a resumed output came before.
                stages = ttft_stages(request, self.now)
                target_s = self.outputs.targets.ttft_s(request.submission)
                self.outputs.stats.first_token(request, self.now, stages, target_s)
        else:
            gap = self._gap_since(lane, last_at)
            gap[1] += 1
            request.gaps_us.append(gap[0])
        self._num_requests += 1
        self._add_tokens(lane, num_tokens)
        if len(request.token_ids) - request.num_charged >= CHARGE_TOKENS:
            self.outputs.charges.charge(request)

    def _add_tokens(self, lane: common_pb2.Lane.ValueType, count: int) -> None:
        if count:
            self._num_tokens[lane] = self._num_tokens.get(lane, 0) + count

    def count(self) -> None:
        """Adds the step's sums to the statistics."""
        stats, is_slow = self.outputs.stats, False
        if not self._num_tokens:
            return
        recent = stats.recent.at(self.now)
        for lane, num_tokens in self._num_tokens.items():
            stats.num_output_tokens += num_tokens
            recent.lanes[lane].num_output_tokens += num_tokens
        fleet_stats = None
        if stats.compared and (worker := self.outputs.workers.get(self.worker)) is not None:
            fleet_stats = stats.compared.get(worker.fleet)
        for (lane, last_at), (_, count) in self._gaps.items():
            gap_s = self.now - last_at
            if fleet_stats is not None:
                fleet_stats.lanes[lane].itl.observe(gap_s, count)
            stats.lanes[lane].itl.observe(gap_s, count)
            recent.lanes[lane].itl.observe(gap_s, count)
            target_s = self.outputs.targets.of_lane(lane).itl_s
            is_slow |= target_s is not None and gap_s > target_s
            if (gap_target_s := self.outputs.gaps.target_s(lane)) is not None:
                stats.lanes[lane].gap_ratio.observe(gap_s / gap_target_s, count)
        if is_slow:
            self._remember()

    def joins(self, request: Request) -> None:
        """Notes that the request's first output from this worker is in this step."""
        self._joined.append(request)

    def _remember(self) -> None:
        """Records the cause of a slow step, for the stalls of its requests."""
        worker = self.outputs.workers.get(self.worker)
        if worker is None:
            return
        cause, by = Cause.BATCH, None
        for request in self._joined:
            timings = request.decode_timings
            handed = bool(request.handoff_id) and (
                timings is None
                or timings.num_handoff_tokens > 0
                # The prompt was in the prefix cache.
                or 2 * timings.num_cached_tokens > request.num_prompt_tokens
            )
            if not handed:
                cause, by = Cause.PREFILL, request
                break
            cause, by = Cause.JOINED, request
        if by is None and (local_prompt := worker.ledger.local_prompt) is not None:
            cause, by = Cause.PREFILL, self.outputs.requests.get(local_prompt)
        worker.slow_steps.append(
            SlowStep(
                self.now,
                cause,
                by.key if by is not None else None,
                by.num_prompt_tokens if by is not None else 0,
                self._num_requests,
            )
        )

    def _gap_since(self, lane: common_pb2.Lane.ValueType, last_at: float) -> list[int]:
        gap = self._gaps.get((lane, last_at))
        if gap is None:
            gap_us = min(round((self.now - last_at) * 1e6), _MAX_GAP_US)
            gap = self._gaps[lane, last_at] = [gap_us, 0]
        return gap


def _apply_output(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> None:
    worker = step.worker
    if worker == request.decode and (request.prefill is None or request.prefill_done):
        _decode_output(step, request, output)
    elif worker == request.prefill:
        step.outputs.assignments.answered(request, worker)
        _prefill_output(step, request, output)


def _prefill_output(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> None:
    outputs, worker = step.outputs, step.worker
    if output.HasField("finished") and output.finished.prompt_logprobs:
        request.prompt_logprobs = list(output.finished.prompt_logprobs)
    if request.prefill_done:
        return
    if output.HasField("timings"):
        if request.prefill_timings is None:
            request.prefill_timings = _copied(output.timings)
        outputs.attempts.prompt_computed(request, output.timings)
    if output.HasField("failed"):
        _failed(outputs, request, worker, output.failed)
        return
    if request.num_known:
        # The prefill was only needed for the KV cache.
        outputs.attempts.begin_decode(request)
        return
    if not step.deliver(request, output.delta):
        return
    if output.HasField("finished") and output.finished.reason in _NATURAL_ENDS:
        outputs.attempts.prefill_done(request)
        outputs.attempts.cancel_decode(request)
        outputs.ends.finish(request, output.finished.reason, output.finished.stop)
    elif request.first_token_at is not None and request.decode is not None:
        outputs.attempts.begin_decode(request)
    elif output.HasField("finished"):
        what = "without a first token" if request.first_token_at is None else "with no reason"
        error = errors.Internal(f"prefill worker {worker[0]} ended its part {what}")
        outputs.attempts.recover(request, worker, error)


def _decode_output(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> None:
    end = output.WhichOneof("end")
    if end == "prefix_gone":
        step.outputs.assignments.answered(request, step.worker)
        step.outputs.attempts.hand_over_again(request)
        return
    if request.state is not RequestState.DECODING:
        _first_decode_output(step, request, output)
    if end is None:
        step.deliver(request, output.delta)
        return
    outputs, worker = step.outputs, step.worker
    if end == "failed":
        _failed(outputs, request, worker, output.failed)
        return
    if not step.deliver(request, output.delta):
        return
    finished = output.finished
    if finished.prompt_logprobs:
        request.prompt_logprobs = list(finished.prompt_logprobs)
    if finished.reason in _NATURAL_ENDS:
        outputs.ends.finish(request, finished.reason, finished.stop)
    elif finished.reason == common_pb2.FINISH_REASON_CANCELLED:
        aborted = errors.Unavailable(f"decode worker {worker[0]} aborted the request")
        outputs.attempts.recover(request, worker, aborted)
    else:
        error = errors.Internal(f"decode worker {worker[0]} ended with no reason")
        outputs.attempts.recover(request, worker, error)


def _first_decode_output(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> None:
    outputs = step.outputs
    step.joins(request)
    outputs.assignments.answered(request, step.worker)
    if output.HasField("timings"):
        timings, sources = output.timings, request.prompt_sources
        request.decode_timings = _copied(timings)
        if request.prefill is None:
            outputs.attempts.prompt_computed(request, timings)
        elif sources is not None:
            request.prompt_sources = sources._replace(handoff=timings.num_handoff_tokens)
    if not output.HasField("failed"):
        outputs.attempts.decoding(request)


def _failed(
    outputs: Outputs,
    request: Request,
    worker: WorkerKey,
    failed: common_pb2.RequestError,
) -> None:
    """Fails a request with an error of its own; recovers a request that its worker failed."""
    error = _worker_error(failed, worker[0])
    if error.code in _REQUEST_ERRORS:
        outputs.ends.fail(request, error)
    else:
        outputs.attempts.recover(request, worker, error)


def _worker_error(failed: common_pb2.RequestError, worker_id: str) -> errors.BatonError:
    if failed.code == code_pb2.OK or failed.code not in code_pb2.Code.values():
        return errors.Internal(
            f"worker {worker_id} failed the request with code {failed.code}: {failed.message}"
        )
    return errors.from_message(failed)


def _copied(timings: cluster_pb2.StageTimings) -> cluster_pb2.StageTimings:
    # A submessage keeps the whole message in memory, and the request lives longer than the step.
    copy = cluster_pb2.StageTimings()
    copy.CopyFrom(timings)
    return copy
