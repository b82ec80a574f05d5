"""What the autoscaler is told, what it remembers and what it answers; all frozen.

`decide(observation, config, state, now)` in autoscaler.py is pure. Who owns the cluster calls it
on a timer, keeps the state it returns, and carries out the actions: how many workers a role is to
have, who is to drain, who is to change roles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.coordinator.state.pools import Pool
from baton.runtime.latency import LatencyModel


class Phase(Enum):
    """Of a worker's life, as far as sizing goes."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker.

    Attributes:
        since: when it entered its phase, by the core's clock.
        num_tokens: assigned to it: who has least is drained first.
        gpus: that it has; None: as many as its pool's limits say.
        stays: it was started elsewhere, and is neither drained nor moved to another pool.
        responds: it takes new work now; one that does not can be drained, not moved.
        flips: of one that starts: it comes from the other pool, without a cold start.
    """

    worker_id: str
    pool: Pool
    phase: Phase
    since: float
    num_tokens: int = 0
    gpus: int | None = None
    stays: bool = False
    responds: bool = True
    flips: bool = False


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """One lane; totals since the coordinator started, which never fall.

    Attributes:
        num_arrived: requests, those refused for overload included.
        work_s: of prefill that they brought, cached prefixes left out.
        num_output_tokens: expected of them.
        num_kv_tokens: of KV cache that they hold on average while they decode.
        works_s: of the latest ones, in any order: how uneven prompts are.
        queued_s: of prefill work that is not done, at workers and in the lane; without the lane's
            while it waits for room on decode workers.
        num_waiting: requests in the lane.
        ttft_s: measured at the target's percentile since the last observation; None: no request.
        num_first, num_late: first tokens since the last observation; of these, after the target.
    """

    num_arrived: int = 0
    work_s: float = 0.0
    num_output_tokens: float = 0.0
    num_kv_tokens: float = 0.0
    works_s: tuple[float, ...] = ()
    queued_s: float = 0.0
    num_waiting: int = 0
    ttft_s: float | None = None
    num_first: int = 0
    num_late: int = 0

    @property
    def required(self) -> tuple[float, ...]:
        """The numbers that a decision needs: finite, and at least 0."""
        return (
            self.num_arrived,
            self.work_s,
            self.num_output_tokens,
            self.num_kv_tokens,
            self.queued_s,
            self.num_waiting,
            *self.works_s,
        )


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The decode pool now.

    Attributes:
        num_decodes: requests assigned, those still in prefill included.
        num_in_prefill: of these.
        reserved_tokens: KV tokens of them all, expected output included.
        kv_tokens: room of one worker.
        most_requests: that one worker may have, whatever room it has; 0: not known.
        itl_s: measured at the target's percentile of the latest steps; None: none was made.
        itl_predicted_s: the model's for the same steps, at the same percentile.
    """

    num_decodes: int = 0
    num_in_prefill: int = 0
    reserved_tokens: int = 0
    kv_tokens: int = 0
    most_requests: int = 0
    itl_s: float | None = None
    itl_predicted_s: float | None = None

    @property
    def required(self) -> tuple[float, ...]:
        """The numbers that a decision needs: finite, and at least 0."""
        return self.num_decodes, self.reserved_tokens, self.kv_tokens


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that one decision rests on.

    Attributes:
        observed_at: when the workers were last heard of, by the core's clock.
        workers: starting ones too.
        latency: what steps cost.
        lanes: by name.
    """

    observed_at: float
    workers: tuple[WorkerView, ...]
    latency: LatencyModel
    lanes: tuple[tuple[str, LaneLoad], ...] = ()
    decode: DecodeLoad = field(default_factory=DecodeLoad)

    @property
    def required(self) -> tuple[float, ...]:
        """The required numbers of the decode pool and of all lanes."""
        return (
            *self.decode.required,
            *(number for _, lane in self.lanes for number in lane.required),
        )

    def of(self, pool: Pool, phase: Phase) -> list[WorkerView]:
        return [one for one in self.workers if one.pool is pool and one.phase is phase]


# ---- What it remembers.


@dataclass(frozen=True, slots=True)
class Sample:
    """What arrived in one interval, of all lanes that a pool grows for; per second.

    Attributes:
        rate: requests.
        work: seconds of prefill work.
        output_tokens, kv_tokens: as in LaneLoad.
        span_s: of the interval.
        present: requests at its end, from their arrival to their last token.
    """

    at: float
    span_s: float
    rate: float
    work: float
    output_tokens: float
    kv_tokens: float
    present: float = 0.0


@dataclass(frozen=True, slots=True)
class Misses:
    """Requests of late, the older the less they count.

    Attributes:
        allowed: how many may miss their target.
        seen: how many have.
    """

    allowed: float = 0.0
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """Of one pool.

    Attributes:
        wanted: what was wanted when, within the window, oldest first.
        correction: factor on predictions that measurements ask for.
        misses: since it was last raised.
        small_at: when it was last smaller than it had to be.
        flipped_in_at: when the latest worker came from the other pool.
    """

    wanted: tuple[tuple[float, int], ...] = ()
    correction: float = 1.0
    misses: Misses = field(default_factory=Misses)
    small_at: float = -1e18
    flipped_in_at: float = -1e18


@dataclass(frozen=True, slots=True)
class State:
    """Everything between two decisions; `State()` knows nothing.

    Attributes:
        now: of the latest decision.
        lanes: as observed then.
        samples: of the past, oldest first.
        wanted: of both pools together, as in PoolState.
        busy_at: when a request was last there.
    """

    now: float | None = None
    lanes: tuple[tuple[str, LaneLoad], ...] = ()
    samples: tuple[Sample, ...] = ()
    prefill: PoolState = field(default_factory=PoolState)
    decode: PoolState = field(default_factory=PoolState)
    wanted: tuple[tuple[float, int], ...] = ()
    busy_at: float | None = None
