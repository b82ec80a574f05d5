"""Events of a request's stream, in order: Accepted, then Tokens, then Finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.runtime.enum_names import enum_name
from baton.v1 import common_pb2, inference_pb2

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "unspecified"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The coordinator admitted the request: the first event, unless a cancellation was earlier."""

    request_id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate token at one position.

    Attributes:
        token_id: ID of the token.
        logprob: Natural logarithm of its probability.
        rank: Rank of the token in the vocabulary at this position; 1 is the most likely token.
        text: Text of the token.
    """

    token_id: int
    logprob: float
    rank: int
    text: str


# Not frozen: setting the fields of a frozen dataclass would double the cost per token.
@dataclass(slots=True)
class Tokens:
    """Output tokens, contiguous and without repeats from event to event.

    Attributes:
        token_ids: IDs of the tokens.
        text: Text that became final with these tokens; it may lag behind the tokens.
        offset: Index of the first of token_ids in the whole output.
        logprobs: Candidates per token, chosen token first; empty if not requested.
    """

    token_ids: tuple[int, ...]
    text: str
    offset: int
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """Joins consecutive events."""
        return cls(
            tuple(token for part in parts for token in part.token_ids),
            "".join(part.text for part in parts),
            parts[0].offset if parts else 0,
            tuple(entry for part in parts for entry in part.logprobs),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; cached prompt tokens came from a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a request.

    Attributes:
        stage: Name of a Stage in common.proto, in lower case: "tokenize", "queue", "prefill", ...
        start_ms: Start of the stage, since the coordinator received the request.
        duration_ms: Duration of the stage.
        worker_id: Worker that spent the time; empty for the coordinator.
    """

    stage: str
    start_ms: float
    duration_ms: float
    worker_id: str


@dataclass(frozen=True, slots=True)
class LatencyBudget:
    """Breakdown of a request's latency by stage, from its arrival at the coordinator."""

    stages: tuple[StageTime, ...]
    ttft_ms: float
    total_ms: float
    itl_p50_ms: float
    itl_max_ms: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a request that did not fail.

    Attributes:
        reason: Why the output ended.
        stop: The stop string that matched, or the decimal ID of the stop token; empty otherwise.
        usage: Token counts.
        budget: Breakdown of the request's latency.
        prompt_logprobs: Candidates per prompt position, if requested; the first position has none.
    """

    reason: FinishReason
    stop: str
    usage: Usage
    budget: LatencyBudget
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


Event: TypeAlias = Accepted | Tokens | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete output. `model` is empty if the request was cancelled before it was accepted."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    finished: Finished

    @classmethod
    def of(
        cls, request_id: str, model: str, parts: Sequence[Tokens], finished: Finished
    ) -> Completion:
        """Joins all events of a stream."""
        whole = Tokens.joined(parts)
        return cls(request_id, model, whole.text, whole.token_ids, whole.logprobs, finished)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the output ended."""
        return self.finished.reason

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return self.finished.usage


def accepted(message: inference_pb2.Accepted) -> Accepted:
    """Converts the protobuf message."""
    return Accepted(message.request_id, message.model, message.prompt_tokens)


def finished(message: inference_pb2.Finished) -> Finished:
    """Converts the protobuf message."""
    usage = message.usage
    return Finished(
        _FINISH_REASONS.get(message.reason, "unspecified"),
        message.stop,
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens),
        budget(message.budget),
        logprobs(message.prompt_logprobs),
    )


def budget(message: common_pb2.LatencyBudget) -> LatencyBudget:
    """Converts the protobuf message."""
    return LatencyBudget(
        tuple(
            StageTime(
                enum_name(common_pb2.Stage.DESCRIPTOR, stage.stage),
                stage.start_us / 1e3,
                stage.duration_us / 1e3,
                stage.worker_id,
            )
            for stage in message.stages
        ),
        message.ttft_us / 1e3,
        message.total_us / 1e3,
        message.itl_p50_us / 1e3,
        message.itl_max_us / 1e3,
    )


def logprobs(
    positions: Iterable[common_pb2.TokenLogprobs],
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Converts the protobuf messages, one per position."""
    return tuple(
        tuple(
            TokenLogprob(entry.token_id, entry.logprob, entry.rank, entry.text)
            for entry in position.entries
        )
        for position in positions
    )


_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
