"""What the core counts, as plain numbers that a metrics endpoint may read at any time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES
from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.requests import EndedRequest, Request
from baton.coordinator.state.workers import Worker
from baton.coordinator.telemetry.fleet_stats import FleetStats
from baton.coordinator.telemetry.recent import Recent, Stage
from baton.coordinator.telemetry.sketch import Sketch
from baton.runtime.config import LaneTargetsConfig
from baton.runtime.handoff_metrics import EXPOSED_S, reason_label, transport_label
from baton.runtime.histogram import Histogram
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_START_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Of a worker's start: what its Hello may name, and "total": from the order until it attached.
_START_STAGES = ("process", "transfer", "weights", "kv", "warm_up", "other", "total")
_SLOW_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


class LaneStats:
    """Of one lane: latencies in seconds, and how many of its requests are running."""

    __slots__ = ("e2e", "itl", "num_running", "queue", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft, self.queue = Histogram(_TTFT_S), Histogram(_TTFT_S)
        self.itl, self.tpot, self.e2e = Histogram(_FAST_S), Histogram(_FAST_S), Histogram(_SLOW_S)
        self.num_running = 0


_NUM_COLD_STARTS = 32


class ColdStart(NamedTuple):
    """A worker that attached: when, by the core's clock, and how long its start took."""

    at: float
    worker_id: str
    role: common_pb2.Role.ValueType
    lasted_s: float


# What the autoscaler looks at of the latest requests.
_NUM_WORKS, _NUM_TTFTS = 256, 4096


class LaneDemand:
    """What clients asked of one lane, whether it was let in or refused for overload.

    Attributes:
        num_arrived: requests.
        work_s: of prefill, cached prefixes left out.
        num_output_tokens: expected.
        num_kv_tokens: held on average while they decode.
        works_s: prefill work of the latest.
        ttfts_s: of first tokens since whoever sizes the pools last looked, who clears it.
    """

    __slots__ = (
        "num_arrived",
        "num_kv_tokens",
        "num_output_tokens",
        "ttfts_s",
        "work_s",
        "works_s",
    )

    def __init__(self) -> None:
        self.num_arrived = 0
        self.work_s = self.num_output_tokens = self.num_kv_tokens = 0.0
        self.works_s: deque[float] = deque(maxlen=_NUM_WORKS)
        self.ttfts_s: deque[float] = deque(maxlen=_NUM_TTFTS)

    def arrived(self, work_s: float, num_prompt_tokens: int, num_output_tokens: float) -> None:
        self.num_arrived += 1
        self.work_s += work_s
        self.num_output_tokens += num_output_tokens
        self.num_kv_tokens += num_prompt_tokens + num_output_tokens / 2
        self.works_s.append(work_s)


class CoreStats:
    """Totals since the coordinator started.

    Args:
        targets: what requests that name none hope for.

    Attributes:
        recent: the same of the last minute, and more.
        demand: by lane: what pools are sized by.
        requests: by lane and outcome (finish reason, or error code's name; lower case).
        sheds: submissions that were not admitted for overload, by reason.
        rejections: submissions that were wrong, by the error code's name; counted by the shell.
        handoffs: committed ones by transport.
        handoff_bytes: of those, by transport.
        num_handoff_fallbacks: epochs of handoffs, however they ended, that a transport failed.
        handoff_failures: by refusal reason.
        num_workers_unresponsive: times that a worker's requests went elsewhere before it was lost.
        num_recoveries: attempts lost whose requests went on.
        num_parked: times that a batch request made room for interactive ones.
        latest_cold_starts: oldest first.
        num_adopted: requests that a worker went on with after another coordinator's end.
        num_moved: times that a request went on elsewhere so that its worker could change roles.
        num_prefixes_gone: times that a decode worker had dropped what its handoff left out.
        cold_starts: workers that came up, by pool.
        cold_start_s: how long they took, by stage.
        num_failed_starts: workers that ended before they had served for a while.
        scalings: decisions that changed a pool, by pool and "up", "down" or "flip" (into it).
        compared: Statistics of the fleets that a rollout compares; replaced by the rollout.
    """

    def __init__(self, targets: LaneTargetsConfig | None = None) -> None:
        self.recent = Recent(targets)
        self.lanes = {lane: LaneStats() for lane in LANES}
        self.demand = {lane: LaneDemand() for lane in LANES}
        self.requests: Counter[tuple[common_pb2.Lane.ValueType, str]] = Counter()
        self.sheds: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.handoffs: Counter[str] = Counter()
        self.handoff_bytes: Counter[str] = Counter()
        self.num_handoff_fallbacks = 0
        self.handoff_exposed = Histogram(EXPOSED_S)
        self.handoff_failures: Counter[str] = Counter()
        self.num_workers_lost = 0
        self.num_workers_unresponsive = 0
        self.num_recoveries = 0
        self.num_parked = 0
        self.num_adopted = 0
        self.latest_cold_starts: deque[ColdStart] = deque(maxlen=_NUM_COLD_STARTS)
        self.num_moved = 0
        self.num_prefixes_gone = 0
        self.cold_starts: Counter[str] = Counter()
        self.cold_start_s = {stage: Histogram(_START_S) for stage in _START_STAGES}
        self.num_failed_starts = 0
        self.scalings: Counter[tuple[str, str]] = Counter()
        self.compared: Mapping[Fleet, FleetStats] = {}

    def came_up(self, worker: Worker, now: float) -> None:
        """A worker has attached for the first time, and may say how long its stages took."""
        startup_ms = worker.hello.startup_ms
        self.cold_starts[POOL_OF[worker.role].value] += 1
        if startup_ms:
            lasted_s = sum(startup_ms.values()) / 1e3
            self.latest_cold_starts.append(ColdStart(now, worker.id, worker.role, lasted_s))
        for stage, milliseconds in startup_ms.items():
            known = stage if stage in self.cold_start_s and stage != "total" else "other"
            self.cold_start_s[known].observe(milliseconds / 1e3)

    def cold_started(self, seconds: float) -> None:
        """From the order to start a worker until it was there."""
        self.cold_start_s["total"].observe(seconds)

    def scaled(self, pool: str, direction: str) -> None:
        self.scalings[pool, direction] += 1

    def admitted(self, request: Request, now: float) -> None:
        self.recent.at(now).lanes[request.submission.lane].num_admitted += 1
        if (fleet := self.compared.get(request.fleet)) is not None:
            fleet.num_admitted += 1

    def shed(self, lane: common_pb2.Lane.ValueType, reason: str, now: float) -> None:
        """A submission was not admitted for overload."""
        self.sheds[reason.lower()] += 1
        self.recent.at(now).lanes[lane].sheds[reason.lower()] += 1

    def dispatched(self, request: Request, now: float, *, after_start: bool) -> None:
        """For the first time.

        Args:
            request: that was sent to its workers.
            now: by the core's clock.
            after_start: one of these was not there yet when the request came.
        """
        lane, waited_s = self.lanes[request.submission.lane], now - request.submitted_at
        lane.num_running += 1
        lane.queue.observe(waited_s)
        recent = self.recent.at(now).lanes[request.submission.lane]
        recent.tenant(request.submission.tenant).wait.observe(waited_s)
        if after_start:
            recent.after_start.observe(waited_s)

    def first_token(
        self, request: Request, now: float, stages: Sequence[tuple[Stage, float]]
    ) -> None:
        """Its first token came; `stages` say what that took, in seconds."""
        submission = request.submission
        ttft_s = now - submission.arrived_at
        self.lanes[submission.lane].ttft.observe(ttft_s)
        self.demand[submission.lane].ttfts_s.append(ttft_s)
        if (fleet := self.compared.get(request.fleet)) is not None:
            fleet.lanes[submission.lane].ttft.observe(ttft_s)
        self.recent.at(now).lanes[submission.lane].first_token(
            submission.tenant,
            request.num_prompt_tokens,
            ttft_s,
            self.ttft_target_s(request),
            stages,
        )

    def ttft_target_s(self, request: Request) -> float | None:
        """What it hopes for; None for nothing."""
        lane = request.submission.lane
        return request.submission.slo_ttft_s or self.recent.ttft_target_s(lane)

    def itl_target_s(self, request: Request) -> float | None:
        """What it hopes for between two tokens; None for nothing."""
        lane = request.submission.lane
        return request.submission.slo_itl_s or self.recent.itl_target_s(lane)

    def ended(self, request: Request, record: EndedRequest, outcome: str) -> None:
        lane = self.lanes[record.lane]
        if request.dispatched_at is not None:
            lane.num_running -= 1
        self.requests[record.lane, outcome] += 1
        self.num_prompt_tokens += record.num_prompt_tokens
        lane.e2e.observe(record.ended_at - record.arrived_at)
        if (fleet := self.compared.get(request.fleet)) is not None:
            fleet.ended(record.error_code)
        if request.first_token_at is not None and request.last_token_at is not None:
            num_new = len(request.token_ids) - len(request.submission.known_token_ids)
            if num_new > 1:
                lane.tpot.observe((request.last_token_at - request.first_token_at) / (num_new - 1))
        recent = self.recent.at(record.ended_at).lanes[record.lane]
        recent.num_ended += 1
        recent.num_failed += bool(record.error_code)
        recent.num_output_tokens += record.num_output_tokens
        recent.tenant(record.tenant).num_tokens += (
            record.num_prompt_tokens + record.num_output_tokens
        )
        recent.e2e.observe(record.ended_at - record.arrived_at)
        sums: dict[Stage, int] = {}
        for span in record.budget.stages:
            sums[span.stage] = sums.get(span.stage, 0) + span.duration_us
        for stage, sum_us in sums.items():
            sketch = recent.stages.get(stage)
            if sketch is None:
                sketch = recent.stages[stage] = Sketch()
            sketch.observe(sum_us / 1e6)

    def moved_to_stable(self, fleet: Fleet) -> None:
        """Counts a request that moved from this fleet to the stable fleet."""
        if (found := self.compared.get(fleet)) is not None:
            found.num_moved += 1

    def recovered(self, request: Request, now: float) -> None:
        if (fleet := self.compared.get(request.fleet)) is not None:
            fleet.num_recoveries += 1
        self.num_recoveries += 1
        self.recent.at(now).counts["recoveries"] += 1

    def parked(self, now: float) -> None:
        self.num_parked += 1
        self.recent.at(now).counts["parked"] += 1

    def worker_lost(self, now: float) -> None:
        self.num_workers_lost += 1
        self.recent.at(now).counts["workers_lost"] += 1

    def worker_unresponsive(self, now: float) -> None:
        self.num_workers_unresponsive += 1
        self.recent.at(now).counts["workers_unresponsive"] += 1

    def handoff_fell_back(self, num_fallbacks: int, now: float) -> None:
        self.num_handoff_fallbacks += num_fallbacks
        self.recent.at(now).counts["handoff_fallbacks"] += num_fallbacks

    def handoff_committed(self, report: cluster_pb2.HandoffReport, now: float) -> None:
        transport = transport_label(report.transport)
        self.handoffs[transport] += 1
        self.handoff_bytes[transport] += report.num_bytes
        self.handoff_exposed.observe(report.exposed_us / 1e6)
        self.recent.at(now).exposed.observe(report.exposed_us / 1e6)

    def handoff_failed(self, reason: kv_transfer_pb2.RefusalReason.ValueType, now: float) -> None:
        self.handoff_failures[reason_label(reason)] += 1
        self.recent.at(now).counts["handoff_failures"] += 1
