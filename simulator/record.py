"""Records of a simulation: request times, worker lifetimes, decisions."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_decision import Decision


@dataclass(frozen=True, slots=True)
class Moment:
    """State of the cluster at a scaling decision, or at a fixed interval if nothing is scaled.

    Attributes:
        at_s: Seconds since the beginning.
        prefill, decode: Serving workers; colocated workers count as decode workers.
        prefill_paid, decode_paid: Serving, starting and draining workers.
        num_arrived: Requests that arrived since the previous moment.
        ttft_p95_s, itl_p95_s: 95th percentiles since the previous moment; nan if there were no
            tokens.
    """

    at_s: float
    prefill: int
    decode: int
    prefill_paid: int
    decode_paid: int
    num_arrived: int
    ttft_p95_s: float
    itl_p95_s: float


@dataclass(slots=True)
class _Life:
    pool: Pool
    began_at: float
    ended_at: float | None = None


@dataclass(slots=True)
class Record:
    """Everything that happened in a simulation; times are virtual seconds.

    Attributes:
        gpus: GPUs per worker, by pool.
        arrivals, firsts, ends: Arrival, first token and end of each request; nan: never.
        prompts, outputs: Prompt and output tokens of each request.
        reasons: Number of failed requests, by reason.
        moments: State of the cluster over time.
        events: Orders, drains and flips of workers, in words.
        decisions: Scaling decisions that had actions, and the first one.
    """

    began_at: float
    gpus: dict[Pool, int]
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    firsts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    prompts: array[int] = field(default_factory=lambda: array("I"))
    outputs: array[int] = field(default_factory=lambda: array("I"))
    reasons: Counter[str] = field(default_factory=Counter)
    moments: list[Moment] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    num_cold_starts: int = 0
    cold_start_s: float = 0.0
    _lives: dict[str, _Life] = field(default_factory=dict)
    _closed_at: float = math.nan
    _new: int = 0
    _new_ttfts: list[float] = field(default_factory=list)

    # ---- Requests.

    def arrived(self, number: int, now: float, num_prompt: int, num_output: int) -> None:
        assert number == len(self.arrivals)
        self.arrivals.append(now)
        self.firsts.append(math.nan)
        self.ends.append(math.nan)
        self.prompts.append(num_prompt)
        self.outputs.append(num_output)
        self._new += 1

    def first_token(self, number: int, now: float) -> None:
        self.firsts[number] = now
        self._new_ttfts.append(now - self.arrivals[number])

    def finished(self, number: int, now: float) -> None:
        self.ends[number] = now

    def failed(self, number: int, reason: str) -> None:
        # Digits are removed so that messages that differ only in numbers count as one reason.
        self.reasons["".join(one for one in reason if not one.isdigit())[:80]] += 1
        self.ends[number] = math.nan

    # ---- Workers.

    def worker_began(self, worker_id: str, pool: Pool, now: float) -> None:
        self._lives[worker_id] = _Life(pool, now)

    def worker_moved(self, worker_id: str, pool: Pool) -> None:
        """Moves a worker to another pool with the same number of GPUs per worker."""
        self._lives[worker_id].pool = pool

    def worker_ended(self, worker_id: str, now: float) -> None:
        self._lives[worker_id].ended_at = now

    def cold_start(self, seconds: float) -> None:
        self.num_cold_starts += 1
        self.cold_start_s += seconds

    def close(self, now: float) -> None:
        """Ends the recording of costs: workers are paid for until `now`."""
        self._closed_at = now

    def event(self, now: float, what: str) -> None:
        self.events.append((now - self.began_at, what))

    def decided(
        self, now: float, decision: Decision, itl_p95_s: float, sizes: dict[Pool, int]
    ) -> None:
        """Records a decision and the state of the cluster at that time."""
        before = self.decisions[-1][1] if self.decisions else None
        if decision.actions or before is None:
            self.decisions.append((now - self.began_at, decision))
        self.sample(now, itl_p95_s, sizes)

    def sample(self, now: float, itl_p95_s: float, sizes: dict[Pool, int]) -> None:
        """Records the state of the cluster at this time."""
        paid = Counter(one.pool for one in self._lives.values() if one.ended_at is None)
        ordered = sorted(self._new_ttfts)
        self.moments.append(
            Moment(
                at_s=now - self.began_at,
                prefill=sizes[Pool.PREFILL],
                decode=sizes[Pool.DECODE],
                prefill_paid=paid[Pool.PREFILL],
                decode_paid=paid[Pool.DECODE],
                num_arrived=self._new,
                ttft_p95_s=ordered[int(len(ordered) * 0.95)] if ordered else math.nan,
                itl_p95_s=itl_p95_s,
            )
        )
        self._new, self._new_ttfts = 0, []

    @property
    def lasted_s(self) -> float:
        return self._closed_at - self.began_at

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all workers, each from the start order to the end of the worker."""
        end = self._closed_at
        return (
            math.fsum(
                self.gpus[one.pool]
                * (min(end, end if one.ended_at is None else one.ended_at) - min(end, one.began_at))
                for one in self._lives.values()
            )
            / 3600
        )
