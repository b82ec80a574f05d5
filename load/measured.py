"""What clients saw of a load, in memory that does not grow with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.rpc import code_pb2

from baton.client.events import Usage
from baton.load.gap_histogram import GapHistogram
from baton.runtime.errors import RemoteError

# Different reasons that are told apart.
_MOST_REASONS = 32
NOT_SENT = "IN_FLIGHT_LIMIT"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as goodput; None: nothing.

    Attributes:
        itl_s: for the mean of its gaps between tokens.
    """

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(slots=True)
class Sample:
    """One request as it goes on; seconds by the generator's clock.

    Attributes:
        due_at: when it was to be sent.
        sent_at: when it was.
    """

    due_at: float
    sent_at: float
    first_at: float = math.nan
    last_at: float = math.nan
    num_tokens: int = 0


@dataclass(slots=True)
class Measured:
    """Requests of one lane.

    Attributes:
        ttft, e2e: from the moment at which a request was to be sent.
        ttft_from_send, e2e_from_send: from that at which it was.
        itl: all gaps between tokens.
        tpot: mean gaps, by request.
        lateness: of sending.
        num_unfinished: when the run was interrupted.
        sheds: requests refused for overload, by reason; all other failures are in `failures`.
        messages: the first one of each reason.
        num_resumed: times that requests went on at another session.
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
    ttft: GapHistogram = field(default_factory=GapHistogram)
    e2e: GapHistogram = field(default_factory=GapHistogram)
    ttft_from_send: GapHistogram = field(default_factory=GapHistogram)
    e2e_from_send: GapHistogram = field(default_factory=GapHistogram)
    itl: GapHistogram = field(default_factory=GapHistogram)
    tpot: GapHistogram = field(default_factory=GapHistogram)
    lateness: GapHistogram = field(default_factory=GapHistogram)
    sheds: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def sent(self, sample: Sample) -> None:
        self.num_requests += 1
        self.lateness.add(sample.sent_at - sample.due_at)

    def tokens(self, sample: Sample, count: int, now: float) -> None:
        """So many tokens of a request have come, at once."""
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
        """It has ended well."""
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
        in_time = self.slo.ttft_s is None or ttft_s <= self.slo.ttft_s
        steady = self.slo.itl_s is None or tpot_s <= self.slo.itl_s
        self.num_ttft_within += in_time
        self.num_tpot_within += steady
        self.num_attained += in_time and steady

    def failed(self, error: RemoteError) -> None:
        """The cluster has refused it, or it failed later."""
        is_shed = error.code == code_pb2.RESOURCE_EXHAUSTED
        reason = error.reason or code_pb2.Code.Name(error.code)
        self._count(self.sheds if is_shed else self.failures, reason, str(error))

    def not_sent(self, limit: int) -> None:
        """As many requests as the generator may have in flight were."""
        self.num_requests += 1
        self._count(self.failures, NOT_SENT, f"{limit} requests were in flight, the limit")

    def _count(self, counts: Counter[str], reason: str, message: str) -> None:
        if reason not in counts and len(counts) >= _MOST_REASONS:
            reason = "OTHER"
        counts[reason] += 1
        self.messages.setdefault(reason, message)

    @classmethod
    def of_all(cls, lanes: Iterable[Measured], slo: Slo) -> Measured:
        """The lanes as one."""
        lanes = list(lanes)
        found = cls(slo)
        for name in (
            *("num_requests", "num_ended", "num_unfinished", "num_ttft_within", "num_tpot_within"),
            *("num_attained", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
            "num_resumed",
        ):
            setattr(found, name, sum(getattr(one, name) for one in lanes))
        for name in ("ttft", "e2e", "ttft_from_send", "e2e_from_send", "itl", "tpot", "lateness"):
            setattr(found, name, GapHistogram.of_all(getattr(one, name) for one in lanes))
        for one in lanes:
            found.sheds.update(one.sheds)
            found.failures.update(one.failures)
            found.messages = one.messages | found.messages
        return found
