"""To which workers a request goes: the least loaded of each pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.coordinator.request import Request, Submission
from baton.coordinator.workers import Worker
from baton.runtime.sampling import needs_exact_state


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs.

    Attributes:
        prefill: None: the decode worker computes the prompt.
        decode: None: nothing is left to decode after the first token.
        handoff: whether the prefill worker hands its KV cache over to the decode worker.
    """

    prefill: Worker | None
    decode: Worker | None

    @property
    def handoff(self) -> bool:
        return self.prefill is not None and self.decode is not None


def least_loaded(request: Request, workers: Iterable[Worker], max_requests: int) -> Worker | None:
    """The serving worker with the fewest tokens assigned; of equals the one not used longest.

    One that gave the request up before comes last. A suspect is given a worker that is at work on
    nothing but answered requests, and shares it with none until it has answered itself.

    Args:
        request: to be placed.
        workers: of one pool.
        max_requests: a worker with so many assigned is full.

    Returns:
        None when all are full, or there are none.
    """
    free = [
        worker
        for worker in workers
        if len(worker.assigned) < max_requests
        and not worker.alone
        and not (request.suspect and worker.unanswered)
    ]
    return min(
        free,
        key=lambda worker: (
            worker.key in request.avoid,
            worker.assigned_tokens,
            len(worker.assigned),
            worker.last_dispatch,
            worker.id,
        ),
        default=None,
    )


def handoff_bytes(worker: Worker, num_tokens: int) -> int:
    """Bytes of a prompt's KV cache, all layers and ranks."""
    fingerprint = worker.hello.fingerprint
    block_tokens = fingerprint.block_size_tokens or worker.hello.capacity.block_size_tokens or 1
    num_blocks = -(-num_tokens // block_tokens)
    tp_size = fingerprint.tp_size or 1
    return fingerprint.block_bytes * fingerprint.num_layers * tp_size * num_blocks


def max_output_tokens(submission: Submission, max_model_len: int) -> int:
    """How many tokens the whole output can have: max_tokens, or what the context leaves.

    Args:
        submission: the request.
        max_model_len: 0 while it is not known; then max_tokens counts, 0 without.
    """
    sampling = submission.sampling
    if not max_model_len:
        return sampling.max_tokens
    room = max(0, max_model_len - len(submission.prompt_token_ids))
    return min(sampling.max_tokens, room) if sampling.HasField("max_tokens") else room


def place(
    request: Request,
    prefill: Iterable[Worker],
    decode: Iterable[Worker],
    *,
    max_prefill_requests: int,
    max_decode_requests: int,
) -> Placement | None:
    """Picks workers for the request whose turn it is.

    A request runs unsplit, on the decode worker alone, when its KV cache is larger than the staging
    of either end, when it needs forced tokens and the decode worker cannot force any, or when
    tokens of it are known and no prefill worker is there. A request of one output token runs on the
    prefill worker alone. Known tokens are the decode worker's to replay, with their text: of the
    prefill worker such a request wants the prompt's KV cache only.

    Returns:
        None when a worker it needs is missing or full.
    """
    decoder = least_loaded(request, decode, max_decode_requests)
    prefill = list(prefill)
    if len(request.token_ids) and not prefill:
        return Placement(None, decoder) if decoder is not None else None
    prefiller = least_loaded(request, prefill, max_prefill_requests)
    if prefiller is None:
        return None
    if max_output_tokens(request.submission, prefiller.hello.model.max_model_len) == 1:
        return Placement(prefiller, None)
    if decoder is None:
        return None
    num_bytes = handoff_bytes(prefiller, request.num_prompt_tokens)
    sampling = request.submission.sampling
    if (
        num_bytes > prefiller.hello.capacity.max_send_bytes
        or num_bytes > decoder.hello.capacity.max_receive_bytes
        or (needs_exact_state(sampling) and not decoder.hello.capacity.supports_forced_tokens)
    ):
        return Placement(None, decoder)
    return Placement(prefiller, decoder)
