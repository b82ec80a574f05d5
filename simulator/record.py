"""What a simulation has seen: requests by their clients, workers by their cost."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_decision import Decision


@dataclass(frozen=True, slots=True)
class Moment:
    """At one decision.

    Attributes:
        at_s: since the beginning.
        prefill, decode: workers that serve.
        prefill_paid, decode_paid: with those that start and drain.
        num_arrived: requests since the decision before.
        ttft_p95_s, itl_p95_s: of tokens since then; nan of none.
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
    """Times by the simulation's clock, in arrays by request; nan: never.

    Attributes:
        reasons: why requests failed, by how many.
        decisions: with their reasons in words.
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

    def failed(self, number: int, now: float, reason: str) -> None:
        # Numbers differ from one to the next.
        self.reasons["".join(one for one in reason if not one.isdigit())[:80]] += 1
        self.ends[number] = math.nan

    # ---- Workers.

    def worker_began(self, worker_id: str, pool: Pool, now: float) -> None:
        self._lives[worker_id] = _Life(pool, now)

    def worker_moved(self, worker_id: str, pool: Pool) -> None:
        """It belongs to another pool now, which has as many GPUs per worker."""
        self._lives[worker_id].pool = pool

    def worker_ended(self, worker_id: str, now: float) -> None:
        self._lives[worker_id].ended_at = now

    def cold_start(self, seconds: float) -> None:
        self.num_cold_starts += 1
        self.cold_start_s += seconds

    def close(self, now: float) -> None:
        """Workers are paid for until then."""
        self._closed_at = now

    def event(self, now: float, what: str) -> None:
        self.events.append((now - self.began_at, what))

    def decided(
        self, now: float, decision: Decision, itl_p95_s: float, sizes: dict[Pool, int]
    ) -> None:
        """Notes a decision, and the state of the cell at it."""
        before = self.decisions[-1][1] if self.decisions else None
        if decision.actions or before is None:
            self.decisions.append((now - self.began_at, decision))
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
        """Of all workers, from the order to start until they have gone."""
        end = self._closed_at
        return (
            math.fsum(
                self.gpus[one.pool]
                * (min(end, end if one.ended_at is None else one.ended_at) - min(end, one.began_at))
                for one in self._lives.values()
            )
            / 3600
        )
