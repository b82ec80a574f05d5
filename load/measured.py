"""Measurements of a load as seen by clients; memory use does not grow with the load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from google.rpc import code_pb2

from baton.client.events import Usage
from baton.load.duration_histogram import DurationHistogram
from baton.runtime.errors import RemoteError
from baton.runtime.ttft_target import TtftTarget

# Distinct failure reasons that are counted; any further reason counts as "OTHER".
_MAX_REASONS = 32
NOT_SENT = "IN_FLIGHT_LIMIT"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets that a request must meet to count as goodput; None: no target.

    Attributes:
        ttft: Longest time to first token, by the tokens of the prompt.
        itl_s: Longest mean gap between the tokens of a request.
    """

    ttft: TtftTarget | None = None
    itl_s: float | None = None


@dataclass(slots=True)
class Sample:
    """Times of one request, in seconds of the generator's clock.

    Attributes:
        due_at: Planned send time.
        sent_at: Actual send time.
        first_at, last_at: Arrival of the first and the latest token; nan before that.
    """

    due_at: float
    sent_at: float
    first_at: float = math.nan
    last_at: float = math.nan
    num_tokens: int = 0


@dataclass(slots=True)
class Measured:
    """Counters and histograms of the requests of one lane.

    Attributes:
        ttft, e2e: Seconds from the planned send time.
        ttft_from_send, e2e_from_send: Seconds from the actual send time.
        itl: All gaps between tokens.
        tpot: Mean gap of each request.
        lateness: Actual minus planned send time.
        num_unfinished: Requests in flight when the run was interrupted.
        sheds: Requests refused because of overload, by reason.
        failures: All other failed requests, by reason.
        messages: First error message of each reason.
        num_resumed: How often a request was resumed on another session.
    """

    slo: Slo
    num_requests: int = 0
    num_ended: int = 0
    num_unfinished: int = 0
    num_ttft_within: int = 0
    num_tpot_within: int = 0
    num_attained: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_resumed: int = 0
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    e2e: DurationHistogram = field(default_factory=DurationHistogram)
    ttft_from_send: DurationHistogram = field(default_factory=DurationHistogram)
    e2e_from_send: DurationHistogram = field(default_factory=DurationHistogram)
    itl: DurationHistogram = field(default_factory=DurationHistogram)
    tpot: DurationHistogram = field(default_factory=DurationHistogram)
    lateness: DurationHistogram = field(default_factory=DurationHistogram)
    sheds: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def sent(self, sample: Sample) -> None:
        self.num_requests += 1
        self.lateness.add(sample.sent_at - sample.due_at)

    def tokens(self, sample: Sample, count: int, now: float) -> None:
        """Records that `count` tokens of a request arrived together."""
        if sample.num_tokens:
            self.itl.add(now - sample.last_at)
        else:
            sample.first_at = now
            self.ttft.add(now - sample.due_at)
            self.ttft_from_send.add(now - sample.sent_at)
        if count > 1:
            self.itl.add(0.0, count - 1)
        sample.last_at = now
        sample.num_tokens += count
        self.num_output_tokens += count

    def finished(self, sample: Sample, usage: Usage) -> None:
        """Records that a request ended without an error."""
        self.num_ended += 1
        self.num_prompt_tokens += usage.prompt_tokens
        self.num_cached_tokens += usage.cached_prompt_tokens
        if not sample.num_tokens:
            return
        self.e2e.add(sample.last_at - sample.due_at)
        self.e2e_from_send.add(sample.last_at - sample.sent_at)
        ttft_s, tpot_s = sample.first_at - sample.due_at, 0.0
        if sample.num_tokens > 1:
            tpot_s = (sample.last_at - sample.first_at) / (sample.num_tokens - 1)
            self.tpot.add(tpot_s)
        target = self.slo.ttft
        in_time = target is None or ttft_s <= target.of(usage.prompt_tokens)
        steady = self.slo.itl_s is None or tpot_s <= self.slo.itl_s
        self.num_ttft_within += in_time
        self.num_tpot_within += steady
        self.num_attained += in_time and steady

    def failed(self, error: RemoteError) -> None:
        """Records that the cluster refused a request, or that the request failed later."""
        is_shed = error.code == code_pb2.RESOURCE_EXHAUSTED
        reason = error.reason or code_pb2.Code.Name(error.code)
        self._count(self.sheds if is_shed else self.failures, reason, str(error))

    def not_sent(self, limit: int) -> None:
        """Records a request that was not sent because `limit` requests were in flight."""
        self.num_requests += 1
        self._count(self.failures, NOT_SENT, f"{limit} requests were in flight, the limit")

    def _count(self, counts: Counter[str], reason: str, message: str) -> None:
        if reason not in counts and len(counts) >= _MAX_REASONS:
            reason = "OTHER"
        counts[reason] += 1
        self.messages.setdefault(reason, message)

    @classmethod
    def merged(cls, lanes: Iterable[Measured], slo: Slo) -> Measured:
        """Returns the sum of all lanes."""
        found, lanes = cls(slo), list(lanes)
        for one in fields(cls):
            if one.name != "slo":
                values = [getattr(lane, one.name) for lane in lanes]
                setattr(found, one.name, _merged(getattr(found, one.name), values))
        return found


def _merged(empty: object, values: Sequence[Any]) -> object:
    """Merges the values of one field of all lanes, by the type of the field's empty value."""
    match empty:
        case int():
            return sum(values)
        case DurationHistogram():
            return DurationHistogram.merged(values)
        case Counter():
            return sum(values, Counter())
        case dict():
            # The earliest lane's message of each reason is kept.
            return reduce(lambda merged, other: other | merged, values, {})
        case _:
            raise TypeError(f"Measured has a field of type {type(empty).__name__}")
