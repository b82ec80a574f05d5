"""Data of one request in the coordinator: its submission, its state, and its record at the end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType

from baton.coordinator.state.recent_deltas import RecentDeltas
from baton.runtime.errors import BatonError
from baton.runtime.names import DEFAULT_TENANT, request_name
from baton.runtime.prompts.request_digest import request_digest
from baton.runtime.prompts.sampling import needs_exact_state
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import admin_pb2, cluster_pb2, common_pb2, inference_pb2

if TYPE_CHECKING:
    from baton.coordinator.state.fleets import Fleet
    from baton.coordinator.state.slow_steps import Stall

WorkerKey = tuple[str, int]
"""Worker id and incarnation: one process."""
RequestKey = NewType("RequestKey", str)
"""Name of a request in the coordinator and on workers; see request_name in runtime/names.py."""


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

    # Enum's own hash runs Python code on the name; members are compared by identity anyway.
    __hash__ = object.__hash__


_ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # To DECODING: a worker goes on with an output that another coordinator sent it.
    RequestState.QUEUED: _ENDED | {RequestState.PREFILLING, RequestState.DECODING},
    # To DECODING without HANDING_OFF: the decode worker computes the prompt itself.
    RequestState.PREFILLING: _ENDED
    | {
        RequestState.HANDING_OFF,
        RequestState.DECODING,
        RequestState.RECOVERING,
        RequestState.PARKED,
    },
    RequestState.HANDING_OFF: _ENDED | {RequestState.DECODING, RequestState.RECOVERING},
    RequestState.DECODING: _ENDED | {RequestState.RECOVERING, RequestState.PARKED},
    # The worker of the request was lost or left, and the request waits in its lane for another
    # attempt. To DECODING: its worker has come back.
    RequestState.RECOVERING: _ENDED | {RequestState.PREFILLING, RequestState.DECODING},
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    # The request was taken off a worker that goes on, and waits in its lane for another turn. To
    # RECOVERING: no worker for it is attached, so the recovery timeout applies from now on.
    RequestState.PARKED: _ENDED | {RequestState.PREFILLING, RequestState.RECOVERING},
}


@dataclass(frozen=True, slots=True)
class StateLimits:
    """How long a request may stay in a state, in seconds; the request's deadline applies too.

    Only waiting states have a limit of their own: no limit would be right for every prompt and
    output length. Workers' own timeouts act sooner than the deadline (for example, a worker
    computes the prompt itself when a handoff is not committed in time).
    """

    queued_s: float = math.inf
    recovering_s: float = math.inf

    def of(self, state: RequestState) -> float:
        if state is RequestState.QUEUED:
            return self.queued_s
        return self.recovering_s if state is RequestState.RECOVERING else math.inf


@dataclass(frozen=True, slots=True)
class StreamKey:
    """Where a request's events go: a client session, and the number of the stream in it."""

    session: int
    stream: int


class SessionKey(NamedTuple):
    """A conversation. Tenants choose session IDs independently of each other."""

    tenant: str
    session_id: str


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was validated and tokenized.

    Attributes:
        to: The stream that its events go to.
        request_id: The client's id; unique among the requests of the tenant that have not ended.
        known_token_ids: Output tokens that the caller has; the stream continues after them.
        known_text_chars: Code points of text that were sent with the known tokens.
        known_stop: The stop that ended the output with the last known token, in the form of
            Finished.stop; None: the output goes on.
        arrived_at: When the request reached this process, in seconds of the core's clock.
        timeout_s: Seconds after `arrived_at` in which the request must end; None: only the
            coordinator's limit applies.
        traceparent: W3C trace context, which workers get too.
        session_id: The conversation that the request belongs to; empty: none.
        slo_ttft, slo_itl_s: Targets that the caller asked for; None: the lane's targets apply.
        tenant: The tenant that is charged for the request.
        adapter: Name of the LoRA adapter that computes the request; empty: none.
        cache_salt: The request finds only KV blocks of requests with the same salt.
        revision: Revision that computed the known tokens; empty: not known.
        route: Route of the gateway that the request came by; empty: it came by gRPC.
        images: Images of the prompt, in order.
        chat: The chat with the images' files, for workers that compute the prompt; None: the prompt
            has no images.
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
    slo_ttft: TtftTarget | None = None
    slo_itl_s: float | None = None
    tenant: str = DEFAULT_TENANT
    adapter: str = ""
    cache_salt: str = ""
    revision: str = ""
    route: str = ""
    images: Sequence[common_pb2.PromptImage] = ()
    chat: inference_pb2.ChatPrompt | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(request_name(self.tenant, self.request_id))

    @property
    def digest(self) -> int:
        """Hash that differs for other requests that a client may submit under the same id."""
        return request_digest(
            self.prompt_token_ids, self.sampling, self.adapter, images=self.images
        )

    @property
    def session(self) -> SessionKey | None:
        """The conversation that the request belongs to."""
        return SessionKey(self.tenant, self.session_id) if self.session_id else None

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether engines use no cached blocks: with them, a prompt would have no logprobs."""
        return self.sampling.HasField("prompt_logprobs")

    def cut_to(self, max_model_len: int) -> Submission:
        """Returns the submission with a max_tokens that fits this context length.

        It is returned unchanged if it has no max_tokens, or if its prompt does not fit: then it
        fails before an attempt.
        """
        sampling, room = self.sampling, max_model_len - len(self.prompt_token_ids)
        most = max(room, sampling.min_tokens)
        if room <= 0 or not sampling.HasField("max_tokens") or sampling.max_tokens <= most:
            return self
        return replace(self, sampling=with_max_tokens(sampling, most))

    def ordered_in(self, long_prompt_tokens: int) -> common_pb2.Lane.ValueType:
        """Returns the lane that orders its prompt: a long prompt is ordered in the batch lane.

        Args:
            long_prompt_tokens: A prompt with more tokens is long; 0: no prompt is long.
        """
        is_long = 0 < long_prompt_tokens < len(self.prompt_token_ids)
        return common_pb2.LANE_BATCH if is_long else self.lane

    def ttft_target_s(self, of_lane: TtftTarget | None) -> float | None:
        """Returns the target of the request's time to first token in seconds; None: no target.

        Args:
            of_lane: Target of requests that name none.
        """
        target = self.slo_ttft or of_lane
        return None if target is None else target.of(len(self.prompt_token_ids))

    def ttft_growth_s(self, of_lane: TtftTarget | None) -> float:
        """Returns the part of that target that grows with the prompt; 0 without a target."""
        target = self.slo_ttft or of_lane
        return 0.0 if target is None else target.growth_s(len(self.prompt_token_ids))


def with_max_tokens(
    sampling: common_pb2.SamplingParams, max_tokens: int
) -> common_pb2.SamplingParams:
    """Returns a copy with this max_tokens; the original is shared by many requests."""
    found = common_pb2.SamplingParams()
    found.CopyFrom(sampling)
    found.max_tokens = max_tokens
    return found


class Prediction(NamedTuple):
    """Predicted time to first token.

    Attributes:
        wait_s: Seconds until a worker starts with the prompt.
        work_s: Seconds from the start of the prompt to the first token, beside the present decodes.
    """

    wait_s: float
    work_s: float


class PredictedSpeeds(NamedTuple):
    """Speeds by which loads of KV blocks were predicted, in bytes per second; 0: no such load.

    Attributes:
        host, disk: loads from the host memory and the disk of the worker that computes the prompt.
        fetch: fetch of a prefix by the worker that computes the prompt.
    """

    host: float = 0.0
    disk: float = 0.0
    fetch: float = 0.0


class PromptHits(NamedTuple):
    """Tokens of a prompt that a worker need not compute.

    Attributes:
        num_device: tokens in the engine's prefix cache.
        num_host: tokens after these that it loads from its KV store in host memory.
        num_disk: tokens after these that it loads from its disk, through host memory.
    """

    num_device: int = 0
    num_host: int = 0
    num_disk: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_device + self.num_host + self.num_disk


class PlacementPrediction(NamedTuple):
    """Predictions of the coordinator when it chose the workers of an attempt.

    Attributes:
        prompt_worker: ID of the worker that computes the prompt.
        queue_s: seconds until that worker begins to compute the prompt, including the load from
            host memory and from disk, or the fetch.
        computation_s: seconds of the prompt's computation there.
        hits: prompt tokens that this worker holds.
        decode_worker: ID of the worker that decodes; "": the request ends with its first token.
        step_s: seconds of a decode step there with this request; 0 without a decode worker.
        num_fetched: prompt tokens that the worker of the prompt gets from another worker.
        fetched_from: ID of the other worker; "": there is none.
        speeds: speeds of the loads and of the fetch.
    """

    prompt_worker: str
    queue_s: float
    computation_s: float
    hits: PromptHits
    decode_worker: str
    step_s: float
    num_fetched: int = 0
    fetched_from: str = ""
    speeds: PredictedSpeeds = PredictedSpeeds()


class PromptSources(NamedTuple):
    """Prompt tokens of one attempt by the place that their KV cache came from.

    Attributes:
        device: from the prefix cache of the worker that computed the rest of the prompt.
        host: loaded from that worker's host memory.
        computed: computed by that worker.
        handoff: handed over to the decode worker.
        disk: loaded from the disk of the worker that computed the rest of the prompt.
        fetched: fetched from another worker by the worker that computed the rest of the prompt.
    """

    device: int
    host: int
    computed: int
    handoff: int
    disk: int = 0
    fetched: int = 0

    @classmethod
    def of(cls, timings: cluster_pb2.StageTimings, num_prompt_tokens: int) -> PromptSources:
        """The sources of a prompt by the timings of the worker that computed it."""
        device, host = timings.num_cached_tokens, timings.num_host_tokens
        disk, fetched = timings.num_disk_tokens, timings.num_fetched_tokens
        computed = max(0, num_prompt_tokens - device - host - disk - fetched)
        return cls(device, host, computed, 0, disk, fetched)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that no worker computed for this attempt."""
        return self.device + self.host + self.disk + self.fetched


@dataclass(slots=True)
class Interruption:
    """A time in which a request had no worker or waited for its next worker's first token.

    Times are seconds of the core's clock; `ended_at` is None while the interruption goes on.
    `decode` and `handoff_id` are those of the attempt that it ended.
    """

    stage: common_pb2.Stage.ValueType
    began_at: float
    decode: WorkerKey | None
    handoff_id: bytes
    ended_at: float | None = None


class StageSpan(NamedTuple):
    """A part of a request's time, in microseconds since its arrival.

    `worker_id` is empty for time that was not spent on a worker.
    """

    stage: common_pb2.Stage.ValueType
    start_us: int
    duration_us: int
    worker_id: str


@dataclass(slots=True)
class Request:
    """One admitted request. Only the core changes it; its state changes only through `advance`.

    Attributes:
        fleet: The workers that it may run on; fixed once the output has begun. Only the
            RequestTable changes it.
        key: Unique name in the coordinator and on workers; `id` is the client's name.
        token_ids: Whole output so far, including known tokens.
        text_chars: Code points of text sent so far, including known text.
        deadline: When the request must end, by the core's clock.
        hashes: Hashes of the prompt's blocks; None until they are needed.
        attempt: Number of dispatches; 0 before the first.
        is_resumed: Whether an earlier request of this key began its output in the same lane. Other
            known tokens are only a claim of the client, which a coordinator believes just after its
            start.
        attempts_before: Number of attempts that an earlier request of this key had. Workers may
            still report of those attempts, so their numbers are not used again.
        handle: Short number of this attempt, which workers use in their steps; 0 before the first.
        num_known: Output tokens that were known when this attempt was dispatched.
        prefill: Prefill worker of this attempt; None: the decode worker computes the prompt.
        decode: Decode worker of this attempt; None: the request ends with its first token.
        pass_through_from: Decode worker of this attempt, once the core passes its tokens on without
            further checks (core/outputs.py). It is the registry's own key object, which is
            compared by identity.
        prefill_done: Whether the prompt of this attempt is computed.
        prompt_done_at: When the prefill worker had computed the prompt of this attempt, by the
            core's clock; None until then.
        spec: Part that all commands of the request share; kept, so that it is made only once.
        handoff_id: Id of this attempt's handoff; empty: this attempt has no handoff.
        skip_tokens: Number of tokens that the handoff leaves out.
        fetch: Prefix that this attempt fetches from another worker; None: it fetches nothing.
        hands_over_all: Whether handoffs must leave out nothing, and decode workers get the images:
            an earlier decode worker lacked blocks that it could not compute.
        exposed_us: Exposed time of the handoff in microseconds; None until it is reported.
        prefill_timings, decode_timings: Stage timings of this attempt as the workers first reported
            them; None until then.
        num_cached_prompt_tokens: Prompt tokens that no worker computed for the first attempt whose
            prompt was computed; None until then. A later attempt also finds the blocks that the
            first one computed.
        prompt_sources: Where the prompt's KV cache came from in the latest attempt; None: not known
            yet.
        interruptions: Times in which the request had no worker.
        past_stages: Stages from the arrival to the start of the latest interruption.
        num_parked: How often the request made room for interactive work.
        losses: Errors of the attempts that were lost since the last new token.
        avoid: Workers that lost the request; they get it again only if there is no other worker.
        suspect: Whether a worker died while it computed only this request and other suspects.
        due_at: When the first token is due by the TTFT target, by the core's clock; infinite
            without a target.
        growth_s: Part of its TTFT target that grows with its prompt, in seconds. It lets requests
            that arrive this much later go first (lanes/tenants.py).
        is_late: Whether its first token cannot be in time, so that it goes after all others
            (lanes/lanes.py); only in elastic cells.
        was_held: Whether it has waited for the max_concurrent of its tenant, for the max_running of
            its lane or, with fixed roles, for room on a decode worker, so that its time to first
            token says little about the workers that compute prompts.
        waits_until: Until when the request waits for a starting worker, by the core's clock
            (core/recovery_timeout.py).
        num_charged: Number of output tokens that the tenant was charged for.
        gaps_us: Microseconds between the tokens.
        prediction: Predicted time to first token, which the actual time corrects; None: there is
            none, or it says nothing about predictions (TtftForecast.is_informative).
        placement_prediction: Predictions by which the workers of the latest attempt were chosen;
            None: no attempt was placed.
        recent_deltas: Deltas that the client was sent, if only this worker can continue the
            output; None: other workers can continue it.
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
    is_resumed: bool = False
    attempts_before: int = 0
    handle: int = 0
    num_known: int = 0
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    pass_through_from: WorkerKey | None = None
    prefill_done: bool = False
    prompt_done_at: float | None = None
    spec: cluster_pb2.RequestSpec | None = None
    handoff_id: bytes = b""
    skip_tokens: int = 0
    fetch: cluster_pb2.FetchPlan | None = None
    hands_over_all: bool = False
    due_at: float = math.inf
    growth_s: float = 0.0
    is_late: bool = False
    was_held: bool = False
    exposed_us: int | None = None
    prefill_timings: cluster_pb2.StageTimings | None = None
    decode_timings: cluster_pb2.StageTimings | None = None
    prompt_sources: PromptSources | None = None
    prompt_logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    num_cached_prompt_tokens: int | None = None
    interruptions: list[Interruption] = field(default_factory=list)
    past_stages: Sequence[StageSpan] = ()
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
    placement_prediction: PlacementPrediction | None = None
    prediction: Prediction | None = None
    recent_deltas: RecentDeltas | None = None

    def __post_init__(self) -> None:
        self.key = self.submission.key
        self.num_prompt_tokens = len(self.submission.prompt_token_ids)
        self.num_charged = len(self.token_ids)

    @property
    def id(self) -> str:
        """The client's id of the request."""
        return self.submission.request_id

    @property
    def lane(self) -> common_pb2.Lane.ValueType:
        """The lane that it was submitted to."""
        return self.submission.lane

    @property
    def revision(self) -> str:
        """Name of its fleet."""
        return self.fleet.name

    @property
    def attempt_number(self) -> int:
        """Number of this attempt on workers; never used twice for one key."""
        return self.attempts_before + self.attempt

    @property
    def first_token_due_at(self) -> float:
        """Like `due_at`, but infinite once the output has begun: such a request is never late."""
        return math.inf if self.token_ids else self.due_at

    def known_prompt(self, num_known: int) -> Sequence[int]:
        """Returns the known output tokens that the prefill worker computes with the prompt.

        These are all but the last known token, from which the decode worker continues. The result
        is empty if the decode worker must replay the tokens one by one, or if the tokens would get
        prompt logprobs.

        Args:
            num_known: Number of output tokens that are known when the prompt is computed.
        """
        sampling = self.submission.sampling
        if num_known < 2 or sampling.HasField("prompt_logprobs") or needs_exact_state(sampling):
            return ()
        return self.token_ids[: num_known - 1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and of the output so far."""
        return self.num_prompt_tokens + len(self.token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that a prefill worker would compute if it got the request now."""
        return self.num_prompt_tokens + len(self.known_prompt(len(self.token_ids)))

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def waits(self) -> bool:
        """Whether the request waits in its lane."""
        return self.state in (RequestState.QUEUED, RequestState.RECOVERING, RequestState.PARKED)

    def is_resumed_by(self, submission: Submission) -> bool:
        """Returns whether a submission of the same key resumes this request.

        A submission without known tokens, or on the same session, is a duplicate instead.
        """
        same_session = self.submission.to.session == submission.to.session
        return len(submission.known_token_ids) > 0 and not same_session

    def lacking(self, submission: Submission) -> list[bytes] | None:
        """Returns the encoded deltas that a resuming client has not received.

        Returns:
            None if the deltas are not kept, or if the output belongs to another request.
        """
        ours, known = self.submission, list(submission.known_token_ids)
        if (
            self.recent_deltas is None
            or self.state is not RequestState.DECODING
            or submission.adapter != ours.adapter
            or submission.sampling != ours.sampling
            or list(submission.prompt_token_ids) != list(ours.prompt_token_ids)
            or list(submission.images) != list(ours.images)
            or known != list(self.token_ids[: len(known)])
        ):
            return None
        return self.recent_deltas.between(
            (len(known), submission.known_text_chars), (len(self.token_ids), self.text_chars)
        )

    @property
    def goes_first(self) -> bool:
        """Whether it goes before all others when it waits: a client waits for the rest of it.

        This holds for interactive requests. The client sees the pause, and `max_recovery_s` ends
        it with an error.
        """
        has_run = self.attempt > 0 or self.is_resumed
        is_interactive = self.submission.lane == common_pb2.LANE_INTERACTIVE
        return is_interactive and has_run and len(self.token_ids) > 0

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
        """Returns when the request's timer is due, by the core's clock."""
        since = self.state_since
        if self.state is RequestState.QUEUED:
            since = self.submission.arrived_at
        due = since + limits.of(self.state)
        if self.state is RequestState.RECOVERING:
            due = max(due, self.waits_until)
        return min(self.deadline, due)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Record of a request that has ended.

    Attributes:
        error_code: gRPC status code of a failed request, else 0.
        session: Client session that the request came from.
        lost_digest: `Submission.digest` of a request whose session was lost, so that its client may
            resume it; None if the request ended in another way.
        ttft_target_s, itl_target_s: Targets of the request; None: no target.
        stalls: Longest gaps between tokens that exceeded the target.
        placement_prediction, prompt_sources: As in Request.
        route: As in Submission.
        revision: Name of its fleet.
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
    lost_digest: int | None = None
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    stalls: tuple[Stall, ...] = ()
    placement_prediction: PlacementPrediction | None = None
    prompt_sources: PromptSources | None = None
    route: str = ""
    revision: str = ""

    def is_resumed_by(self, submission: Submission) -> bool:
        """Returns whether a submission of the same key resumes this request.

        A request that its client cancelled does not count, and neither does a submission with
        another prompt, other parameters or more tokens than this request had.
        """
        return (
            self.lost_digest is not None
            and 0 < len(submission.known_token_ids) <= self.num_output_tokens
            and self.lost_digest == submission.digest
        )
