"""What a worker's outputs do to a request."""

from __future__ import annotations

from google.rpc import code_pb2

from baton.coordinator.book import RequestBook
from baton.coordinator.request import Request, RequestState, WorkerKey
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

_THE_REQUESTS_OWN = (
    code_pb2.INVALID_ARGUMENT,
    code_pb2.FAILED_PRECONDITION,
    code_pb2.OUT_OF_RANGE,
    code_pb2.UNIMPLEMENTED,
    code_pb2.DEADLINE_EXCEEDED,
)
# A tenant is charged for so many tokens of a request at a time.
_CHARGE_TOKENS = 16
# What an array of 4-byte numbers holds: over an hour.
_MAX_GAP_US = 2**32 - 1
_NATURAL_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class _Step:
    """One engine step of a worker; what its outputs have in common is counted once."""

    __slots__ = ("_gaps", "_num_tokens", "book", "now", "worker")

    def __init__(self, book: RequestBook, worker: WorkerKey, now: float) -> None:
        self.book, self.worker, self.now = book, worker, now
        self._num_tokens = 0
        # By lane and time of the last token, which most requests of a worker share: the gap in
        # microseconds, and how many there are.
        self._gaps: dict[tuple[common_pb2.Lane.ValueType, float], list[int]] = {}

    def served(self, request: Request, num_tokens: int) -> None:
        """The request has so many tokens more."""
        now, lane, last_at = self.now, request.submission.lane, request.last_token_at
        if last_at is None:
            request.first_token_at = now
            ttft_s = now - request.submission.arrived_at
            self.book.stats.lanes[lane].ttft.observe(ttft_s)
            self.book.stats.demand[lane].ttfts_s.append(ttft_s)
        else:
            gap = self._gaps.get((lane, last_at))
            if gap is None:
                gap_us = min(round((now - last_at) * 1e6), _MAX_GAP_US)
                gap = self._gaps[lane, last_at] = [gap_us, 0]
            gap[1] += 1
            request.gaps_us.append(gap[0])
        request.last_token_at = now
        if request.interruptions:
            request.losses, request.suspect = [], False
            if request.interruptions[-1].ended_at is None:
                request.interruptions[-1].ended_at = now
        request.num_uncharged += num_tokens
        if request.num_uncharged >= _CHARGE_TOKENS:
            self.book.charge(request)
        self._num_tokens += num_tokens

    def count(self) -> None:
        """Puts the sums where they belong."""
        stats = self.book.stats
        stats.num_output_tokens += self._num_tokens
        for (lane, last_at), (_, count) in self._gaps.items():
            stats.lanes[lane].itl.observe(self.now - last_at, count)


def apply_step(
    book: RequestBook, worker: WorkerKey, outputs: cluster_pb2.StepOutputs, now: float
) -> None:
    """Applies what one engine step produced. What it costs per token is the coordinator's cost.

    Dropped: outputs of requests that have ended, of older attempts, and of workers that do not
    serve this attempt.
    """
    step = _Step(book, worker, now)
    for output in outputs.outputs:
        request = book.get(output.request_id)
        if request is None or output.attempt != request.attempt_number:
            continue
        if worker == request.decode and (request.prefill is None or request.prefill_done):
            _decode_output(step, request, output)
        elif worker == request.prefill:
            book.answered(request, worker)
            _prefill_output(step, request, output)
    step.count()


def _prefill_output(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> None:
    book, worker, now = step.book, step.worker, step.now
    if output.HasField("finished") and output.finished.prompt_logprobs:
        request.prompt_logprobs = list(output.finished.prompt_logprobs)
    if request.prefill_done:
        return
    if output.HasField("timings") and request.prefill_timings is None:
        request.prefill_timings = _copied(output.timings)
        book.lanes.cached(request, output.timings.num_cached_tokens)
    if output.HasField("failed"):
        _failed(book, request, worker, output.failed, now)
        return
    if request.num_known:
        # Only the prompt's KV cache was wanted.
        book.begin_decode(request, now)
        return
    if not _deliver(step, request, output):
        return
    if output.HasField("finished") and output.finished.reason in _NATURAL_ENDS:
        book.prefill_over(request)
        book.cancel_decode(request)
        book.finish(request, output.finished.reason, output.finished.stop, now)
    elif request.first_token_at is not None and request.decode is not None:
        book.begin_decode(request, now)
    elif output.HasField("finished"):
        what = "without a first token" if request.first_token_at is None else "with no reason"
        error = errors.Internal(f"prefill worker {worker[0]} ended its part {what}")
        book.recover(request, worker, error, now)


def _decode_output(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> None:
    end = output.WhichOneof("end")
    if request.state is not RequestState.DECODING:
        _first_decode_output(step, request, output)
    if end is None:
        _deliver(step, request, output)
        return
    book, worker, now = step.book, step.worker, step.now
    if end == "failed":
        _failed(book, request, worker, output.failed, now)
        return
    if not _deliver(step, request, output):
        return
    finished = output.finished
    if finished.prompt_logprobs:
        request.prompt_logprobs = list(finished.prompt_logprobs)
    if finished.reason in _NATURAL_ENDS:
        book.finish(request, finished.reason, finished.stop, now)
    elif finished.reason == common_pb2.FINISH_REASON_CANCELLED:
        aborted = errors.Unavailable(f"decode worker {worker[0]} aborted the request")
        book.recover(request, worker, aborted, now)
    else:
        error = errors.Internal(f"decode worker {worker[0]} ended with no reason")
        book.recover(request, worker, error, now)


def _first_decode_output(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> None:
    book = step.book
    book.answered(request, step.worker)
    if request.decode_timings is None and output.HasField("timings"):
        request.decode_timings = _copied(output.timings)
        if request.prefill is None:
            book.lanes.cached(request, output.timings.num_cached_tokens)
    if not output.HasField("failed"):
        book.decoding(request, step.now)


def _deliver(step: _Step, request: Request, output: cluster_pb2.RequestOutput) -> bool:
    """Sends an output's tokens on, each exactly once; False when the attempt is lost instead."""
    delta = output.delta
    expected = len(request.token_ids)
    if delta.offset != expected:
        if delta.offset > expected:
            error = errors.Internal(
                f"worker {step.worker[0]} sent tokens from {delta.offset}; {expected} are known: "
                f"{delta.offset - expected} are lost"
            )
            step.book.recover(request, step.worker, error, step.now)
            return False
        overlap = expected - delta.offset
        if overlap >= len(delta.token_ids):
            return True
        # The text is new all the same: a worker leaves out text that was sent.
        delta = common_pb2.TokenDelta(
            offset=expected,
            token_ids=delta.token_ids[overlap:],
            text=delta.text,
            logprobs=delta.logprobs[overlap:],
        )
    token_ids, text = delta.token_ids, delta.text
    num_tokens = len(token_ids)
    if num_tokens == 1:
        request.token_ids.append(token_ids[0])
    elif num_tokens:
        request.token_ids.extend(token_ids)
    elif not text:
        return True
    if num_tokens:
        step.served(request, num_tokens)
    request.text_chars += len(text)
    step.book.send_delta(request, delta)
    return True


def _failed(
    book: RequestBook,
    request: Request,
    worker: WorkerKey,
    failed: common_pb2.RequestError,
    now: float,
) -> None:
    """Another worker may do better, unless the request itself is what is wrong."""
    error = _worker_error(failed, worker[0])
    if error.code in _THE_REQUESTS_OWN:
        book.fail(request, error, now)
    else:
        book.recover(request, worker, error, now)


def _worker_error(failed: common_pb2.RequestError, worker_id: str) -> errors.BatonError:
    if failed.code == code_pb2.OK or failed.code not in code_pb2.Code.values():
        return errors.Internal(
            f"worker {worker_id} failed the request with code {failed.code}: {failed.message}"
        )
    return errors.from_message(failed)


def _copied(timings: cluster_pb2.StageTimings) -> cluster_pb2.StageTimings:
    # A part of a message keeps all of it alive; a request outlives the step it came in.
    copy = cluster_pb2.StageTimings()
    copy.CopyFrom(timings)
    return copy
