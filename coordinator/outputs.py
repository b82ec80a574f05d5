"""What a worker's outputs do to a request."""

from __future__ import annotations

from google.rpc import code_pb2

from baton.coordinator import events as ev
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
_NATURAL_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


def apply_output(
    book: RequestBook, worker: WorkerKey, output: cluster_pb2.RequestOutput, now: float
) -> None:
    """Applies one request's share of one engine step.

    Dropped: outputs of requests that have ended, of older attempts, and of workers that do not
    serve this attempt.
    """
    request = book.get(output.request_id)
    if request is None or output.attempt != request.attempt_number:
        return
    if worker == request.prefill:
        book.answered(request, worker)
        _prefill_output(book, request, worker, output, now)
    elif worker == request.decode and (request.prefill is None or request.prefill_done):
        book.answered(request, worker)
        _decode_output(book, request, worker, output, now)


def _prefill_output(
    book: RequestBook,
    request: Request,
    worker: WorkerKey,
    output: cluster_pb2.RequestOutput,
    now: float,
) -> None:
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
    if not _deliver(book, request, worker, output, now):
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


def _decode_output(
    book: RequestBook,
    request: Request,
    worker: WorkerKey,
    output: cluster_pb2.RequestOutput,
    now: float,
) -> None:
    if output.HasField("timings") and request.decode_timings is None:
        request.decode_timings = _copied(output.timings)
        if request.prefill is None:
            book.lanes.cached(request, output.timings.num_cached_tokens)
    if output.HasField("failed"):
        _failed(book, request, worker, output.failed, now)
        return
    if request.state is not RequestState.DECODING:
        book.decoding(request, now)
    if not _deliver(book, request, worker, output, now):
        return
    if output.HasField("finished"):
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


def _deliver(
    book: RequestBook,
    request: Request,
    worker: WorkerKey,
    output: cluster_pb2.RequestOutput,
    now: float,
) -> bool:
    """Sends an output's tokens on, each exactly once; False when the attempt is lost instead."""
    if not output.HasField("delta"):
        return True
    delta = output.delta
    expected, num_tokens = len(request.token_ids), len(delta.token_ids)
    if delta.offset > expected:
        error = errors.Internal(
            f"worker {worker[0]} sent tokens from {delta.offset}; {expected} are known: "
            f"{delta.offset - expected} are lost"
        )
        book.recover(request, worker, error, now)
        return False
    overlap = expected - delta.offset
    if overlap:
        if overlap >= num_tokens:
            return True
        # The text is new all the same: a worker leaves out text that was sent.
        delta = common_pb2.TokenDelta(
            offset=expected,
            token_ids=delta.token_ids[overlap:],
            text=delta.text,
            logprobs=delta.logprobs[overlap:],
        )
        num_tokens -= overlap
    if num_tokens:
        request.token_ids.extend(delta.token_ids)
        lane = book.stats.lanes[request.submission.lane]
        if request.last_token_at is not None:
            gap_s = now - request.last_token_at
            request.gaps.add(round(gap_s * 1e6))
            lane.itl.observe(gap_s)
        else:
            request.first_token_at = now
            lane.ttft.observe(now - request.submission.arrived_at)
        request.last_token_at = now
        request.losses, request.suspect = [], False
        if request.interruptions and request.interruptions[-1].ended_at is None:
            request.interruptions[-1].ended_at = now
        book.lanes.served(request, num_tokens)
        book.stats.num_output_tokens += num_tokens
    elif not delta.text:
        return True
    request.text_chars += len(delta.text)
    book.out.append(ev.SendDelta(request.submission.to, delta))
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
