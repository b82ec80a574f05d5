"""What the coordinator knows of one request, and the states it goes through."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType

from baton.coordinator.state.recent_deltas import RecentDeltas
from baton.runtime.errors import BatonError
from baton.runtime.names import DEFAULT_TENANT, request_name
from baton.runtime.sampling import needs_exact_state
from baton.v1 import admin_pb2, cluster_pb2, common_pb2

if TYPE_CHECKING:
    from baton.coordinator.state.fleets import Fleet
    from baton.coordinator.state.slow_steps import Stall

WorkerKey = tuple[str, int]
"""Worker id and incarnation: one process."""
RequestKey = NewType("RequestKey", str)
"""What a request is called here and by workers: runtime/names.py, request_name."""


class RequestState(Enum):
    """admin.proto's RequestState; the values are its numbers."""

    QUEUED = admin_pb2.REQUEST_STATE_QUEUED
    PREFILLING = admin_pb2.REQUEST_STATE_PREFILLING
    HANDING_OFF = admin_pb2.REQUEST_STATE_HANDING_OFF
    DECODING = admin_pb2.REQUEST_STATE_DECODING
    FINISHED = admin_pb2.REQUEST_STATE_FINISHED
    FAILED = admin_pb2.REQUEST_STATE_FAILED
    CANCELLED = admin_pb2.REQUEST_STATE_CANCELLED
    RECOVERING = admin_pb2.REQUEST_STATE_RECOVERING
    PARKED = admin_pb2.REQUEST_STATE_PARKED

    # Enum's own hashes the name, in Python; members are compared by identity anyway.
    __hash__ = object.__hash__


_ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # A worker may go on with what another coordinator had sent it.
    RequestState.QUEUED: _ENDED | {RequestState.PREFILLING, RequestState.DECODING},
    # Unsplit requests go straight on to DECODING: their decode worker computes the prompt.
    RequestState.PREFILLING: _ENDED
    | {
        RequestState.HANDING_OFF,
        RequestState.DECODING,
        RequestState.RECOVERING,
        RequestState.PARKED,
    },
    RequestState.HANDING_OFF: _ENDED | {RequestState.DECODING, RequestState.RECOVERING},
    RequestState.DECODING: _ENDED | {RequestState.RECOVERING, RequestState.PARKED},
    # Waits in its lane for another attempt, or its worker is back with the one before.
    RequestState.RECOVERING: _ENDED | {RequestState.PREFILLING, RequestState.DECODING},
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    # It made room for interactive work, and waits in its lane until there is some for it. Once no
    # worker is left that could have any, it waits no longer than one that was on a lost worker.
    RequestState.PARKED: _ENDED | {RequestState.PREFILLING, RequestState.RECOVERING},
}


@dataclass(frozen=True, slots=True)
class StateLimits:
    """How long a request may stay in each state, in seconds; its own deadline always counts too.

    Beyond the queue a state has no bound of its own that would be right for every prompt and
    output length, so it is the longest life of a request; workers' own time-outs (a handoff that
    is not committed is recomputed) act sooner.
    """

    queued_s: float = math.inf
    recovering_s: float = math.inf

    def of(self, state: RequestState) -> float:
        if state is RequestState.QUEUED:
            return self.queued_s
        return self.recovering_s if state is RequestState.RECOVERING else math.inf


@dataclass(frozen=True, slots=True)
class StreamKey:
    """Where a request's events go: a client session, and the request's number in it."""

    session: int
    stream: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was validated and tokenized.

    Attributes:
        to: where its events go.
        request_id: the id that its client gave it; no other request of its tenant that has not
            ended has it.
        known_token_ids: output the caller already has; the stream continues after it.
        known_text_chars: code points of text that went with them.
        known_stop: the stop that the last known token ended the output with, as Finished.stop says
            it; None: it did not end it.
        arrived_at: when the request reached this process, by the core's clock, in seconds.
        timeout_s: how long after `arrived_at` it must end; None: the coordinator's limit alone.
        traceparent: W3C trace context, handed on to workers.
        session_id: the conversation that it belongs to; empty: none.
        slo_ttft_s, slo_itl_s: what the caller hopes for; None: no opinion.
        tenant: whom it is charged to.
        adapter: name of the LoRA adapter that it is computed with; empty: none.
        revision: the revision that the known tokens are from; empty: not known.
    """

    to: StreamKey
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: common_pb2.SamplingParams
    lane: common_pb2.Lane.ValueType
    arrived_at: float
    timeout_s: float | None = None
    known_token_ids: Sequence[int] = ()
    known_text_chars: int = 0
    known_stop: str | None = None
    traceparent: str = ""
    session_id: str = ""
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    tenant: str = DEFAULT_TENANT
    adapter: str = ""
    revision: str = ""

    @property
    def key(self) -> RequestKey:
        return RequestKey(request_name(self.tenant, self.request_id))

    def ordered_in(self, long_prompt_tokens: int) -> common_pb2.Lane.ValueType:
        """The lane that its prompt waits and is computed in: a long one is batch work.

        Args:
            long_prompt_tokens: longer ones are long; 0: none is.
        """
        is_long = 0 < long_prompt_tokens < len(self.prompt_token_ids)
        return common_pb2.LANE_BATCH if is_long else self.lane


class Prediction(NamedTuple):
    """How soon a request will have its first token.

    Attributes:
        wait_s: seconds until a worker begins with its prompt.
        work_s: seconds from then on.
    """

    wait_s: float
    work_s: float


@dataclass(slots=True)
class Interruption:
    """A time without a worker, or until the next one's first token; by the core's clock."""

    stage: common_pb2.Stage.ValueType
    began_at: float
    ended_at: float | None = None


@dataclass(slots=True)
class Request:
    """One admitted request. Only the core changes it, and its state only through `advance`.

    Attributes:
        fleet: The workers that it may run on; fixed once the output has begun. Only the
            RequestTable changes it.
        key: what it is found by; `id` is for people.
        token_ids: the whole output so far, known tokens included.
        text_chars: code points of text sent so far, known ones included.
        deadline: of the whole request, by the core's clock.
        hashes: of the prompt's blocks; None until they are needed.
        attempt: counts dispatches; 0 until the first.
        attempts_before: how many attempts an earlier request of this key had: workers may still
            report of those, so their numbers are not used again.
        handle: a short number for this attempt, which workers' steps name it by; 0 until the first.
        num_known: output tokens that were known when this attempt was dispatched.
        prefill: the prefill worker of this attempt; None when it runs unsplit.
        decode: the decode worker of this attempt; None when nothing is to be decoded.
        flows_from: the decode worker of this attempt, once tokens come from there and need nothing
            but to be sent on. The worker's own key object, compared by identity.
        prefill_done: whether the prefill worker's part of this attempt is over.
        spec: the part that all its commands share, so that its prompt is encoded once.
        handoff_id: this attempt's; empty when nothing is handed over.
        skip_tokens: how many tokens the handoff leaves out.
        hands_over_all: whether its handoffs leave out nothing any more: one left out what its
            decode worker no longer had.
        exposed_us: exposed time of the handoff, as reported; None until then.
        prefill_timings, decode_timings: as the workers reported them.
        interruptions: the times in which it had no worker, or waited for its next one's tokens.
        num_parked: how often it made room for interactive work.
        losses: why attempts were lost, since the last new token.
        avoid: workers that lost the request; they get it again only where there is no other.
        suspect: whether a worker died while it computed nothing but this request and others of
            which that may be said.
        waits_until: until when it waits for a worker that is on its way, by the core's clock
            (recovery_timeout.py).
        num_charged: how many tokens of its output its tenant was charged for.
        gaps_us: microseconds between its tokens.
        prediction: what was predicted of its first token, where that tells how good predictions
            are; else None.
        kept: what its client was sent, where only its own worker can go on with the output; None:
            others can.
    """

    submission: Submission
    fleet: Fleet
    submitted_at: float
    deadline: float
    key: RequestKey = field(init=False)
    num_prompt_tokens: int = field(init=False)
    state: RequestState = RequestState.QUEUED
    state_since: float = 0.0
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    text_chars: int = 0
    hashes: array[int] | None = None
    attempt: int = 0
    attempts_before: int = 0
    handle: int = 0
    num_known: int = 0
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    flows_from: WorkerKey | None = None
    prefill_done: bool = False
    spec: cluster_pb2.RequestSpec | None = None
    handoff_id: bytes = b""
    skip_tokens: int = 0
    hands_over_all: bool = False
    exposed_us: int | None = None
    prefill_timings: cluster_pb2.StageTimings | None = None
    decode_timings: cluster_pb2.StageTimings | None = None
    prompt_logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    interruptions: list[Interruption] = field(default_factory=list)
    num_parked: int = 0
    losses: list[BatonError] = field(default_factory=list)
    avoid: dict[WorkerKey, None] = field(default_factory=dict)
    suspect: bool = False
    waits_until: float = -math.inf
    dispatched_at: float | None = None
    first_token_at: float | None = None
    decoding_at: float | None = None
    last_token_at: float | None = None
    num_charged: int = field(init=False)
    gaps_us: array[int] = field(default_factory=lambda: array("I"))
    prediction: Prediction | None = None
    kept: RecentDeltas | None = None

    def __post_init__(self) -> None:
        self.key = self.submission.key
        self.num_prompt_tokens = len(self.submission.prompt_token_ids)
        self.num_charged = len(self.token_ids)

    @property
    def id(self) -> str:
        """What the client calls the request."""
        return self.submission.request_id

    @property
    def attempt_number(self) -> int:
        """What workers call this attempt: never used twice for one key."""
        return self.attempts_before + self.attempt

    def known_prompt(self, num_known: int) -> Sequence[int]:
        """Known output tokens that the prefill worker computes and hands over with the prompt.

        That is all but the last one, which the decode worker goes on from. It is none where the
        decode worker must go through them one by one, or they would get prompt logprobs.

        Args:
            num_known: output tokens that are known when the prompt is computed.
        """
        sampling = self.submission.sampling
        if num_known < 2 or sampling.HasField("prompt_logprobs") or needs_exact_state(sampling):
            return ()
        return self.token_ids[: num_known - 1]

    @property
    def num_tokens(self) -> int:
        """Of its prompt and of its output so far."""
        return self.num_prompt_tokens + len(self.token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that a prefill worker would compute if it were dispatched now."""
        return self.num_prompt_tokens + len(self.known_prompt(len(self.token_ids)))

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def waits(self) -> bool:
        """Whether the request waits in its lane."""
        return self.state in (RequestState.QUEUED, RequestState.RECOVERING, RequestState.PARKED)

    def is_resumed_by(self, submission: Submission) -> bool:
        """Whether a submission of the same key resumes this request, and is not in its way."""
        same_session = self.submission.to.session == submission.to.session
        return len(submission.known_token_ids) > 0 and not same_session

    def lacking(self, submission: Submission) -> list[bytes] | None:
        """The deltas, encoded, that a client lacks which comes back for this output.

        Returns:
            None where they are not kept, or this is the output of another request.
        """
        ours, known = self.submission, list(submission.known_token_ids)
        if (
            self.kept is None
            or self.state is not RequestState.DECODING
            or submission.adapter != ours.adapter
            or submission.sampling != ours.sampling
            or list(submission.prompt_token_ids) != list(ours.prompt_token_ids)
            or known != list(self.token_ids[: len(known)])
        ):
            return None
        return self.kept.between(
            (len(known), submission.known_text_chars), (len(self.token_ids), self.text_chars)
        )

    @property
    def has_begun(self) -> bool:
        """Whether the request runs or has output, so that its fleet must finish it."""
        return len(self.token_ids) > 0 or not self.waits

    def advance(self, state: RequestState, now: float) -> None:
        """Moves to another state.

        Raises:
            ValueError: the table has no such move.
        """
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"request {self.id}: no move from {self.state.name} to {state.name}")
        self.state, self.state_since = state, now

    def due(self, limits: StateLimits) -> float:
        """When the request is to be looked at next, by the core's clock."""
        since = self.state_since
        if self.state is RequestState.QUEUED:
            since = self.submission.arrived_at
        due = since + limits.of(self.state)
        if self.state is RequestState.RECOVERING:
            due = max(due, self.waits_until)
        return min(self.deadline, due)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is remembered of a request that has ended.

    Attributes:
        error_code: gRPC status code of a failed request, else 0.
        session: the client session that it came from.
        ttft_target_s, itl_target_s: its targets; None: it had none.
        stalls: its longest gaps between tokens that exceeded the target.
    """

    request_id: str
    state: RequestState
    lane: common_pb2.Lane.ValueType
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    attempt: int
    attempt_number: int
    prefill_worker_id: str
    decode_worker_id: str
    arrived_at: float
    ended_at: float
    budget: common_pb2.LatencyBudget
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    error_code: int = 0
    error: str = ""
    session: int = 0
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    stalls: tuple[Stall, ...] = ()
