"""Counters and histograms of the core, as plain numbers that a metrics endpoint may read."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.coordinator.state.demand import FirstToken, Work
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES
from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.requests import EndedRequest, PromptSources, Request
from baton.coordinator.state.workers import Worker
from baton.coordinator.telemetry.fleet_stats import FleetStats
from baton.coordinator.telemetry.recent import Recent, Stage
from baton.coordinator.telemetry.sketch import Sketch
from baton.runtime.kv.handoff_metrics import EXPOSED_S, reason_label, transport_label
from baton.runtime.telemetry.histogram import Histogram
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

_FAST_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045),
    *(0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.125, 0.15, 0.2, 0.25, 0.35, 0.5, 1.0, 2.5, 5.0),
)
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_START_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Stages of a worker's start that its Hello may report. "total" is the time from the start order
# until the worker attached.
_START_STAGES = ("process", "transfer", "weights", "kv", "warm_up", "other", "total")
_SLOW_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


# Bounds of a latency divided by its target. 1 is a bound, so that the counts of met targets are
# exact.
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class LaneStats:
    """Latencies of one lane in seconds.

    Attributes:
        ttft_ratio: times to first token divided by the request's own target.
        gap_ratio: gaps between outputs divided by the lane's target of a single gap at that time.
    """

    __slots__ = ("e2e", "gap_ratio", "itl", "queue", "tpot", "ttft", "ttft_ratio")

    def __init__(self) -> None:
        self.ttft, self.queue = Histogram(_TTFT_S), Histogram(_TTFT_S)
        self.ttft_ratio, self.gap_ratio = Histogram(_RATIOS), Histogram(_RATIOS)
        self.itl, self.tpot, self.e2e = Histogram(_FAST_S), Histogram(_FAST_S), Histogram(_SLOW_S)


# Number of worker starts kept for the status.
_NUM_COLD_STARTS = 32


class ColdStart(NamedTuple):
    """The start of a worker that attached.

    Attributes:
        at: time by the core's clock when the worker attached.
        worker_id: ID of the worker.
        role: role of the worker.
        lasted_s: seconds that the start took.
    """

    at: float
    worker_id: str
    role: common_pb2.Role.ValueType
    lasted_s: float


# Number of latest requests kept for the autoscaler.
_NUM_WORKS, _NUM_TTFTS = 256, 4096


class LaneDemand:
    """Demand of clients in one lane, including requests refused for overload, once each.

    Attributes:
        num_arrived: number of requests.
        work_s: seconds of prefill work, without cached prefixes.
        num_output_tokens: expected number of output tokens.
        num_kv_tokens: sum over requests of the KV tokens held on average during decoding.
        works: prefill work of the latest requests.
        first_tokens: first tokens since the last autoscaling decision, which clears the list,
            except those of requests that were held (Request.was_held).
        decode_full_at: time when a request last waited while only room on a stable decode worker
            was lacking; only with fixed roles.
    """

    __slots__ = (
        "decode_full_at",
        "first_tokens",
        "num_arrived",
        "num_kv_tokens",
        "num_output_tokens",
        "work_s",
        "works",
    )

    def __init__(self) -> None:
        self.num_arrived = 0
        self.work_s = self.num_output_tokens = self.num_kv_tokens = 0.0
        self.works: deque[Work] = deque(maxlen=_NUM_WORKS)
        self.first_tokens: deque[FirstToken] = deque(maxlen=_NUM_TTFTS)
        self.decode_full_at = -math.inf

    def arrived(self, work_s: float, num_prompt_tokens: int, num_output_tokens: float) -> None:
        self.num_arrived += 1
        self.work_s += work_s
        self.num_output_tokens += num_output_tokens
        self.num_kv_tokens += num_prompt_tokens + num_output_tokens / 2
        self.works.append(Work(work_s, num_prompt_tokens))


class CoreStats:
    """Totals since the coordinator started.

    Attributes:
        recent: statistics of the last minute.
        demand: demand by lane; the autoscaler sizes the pools by it.
        requests: ended requests by lane and outcome (finish reason, or error code's name; lower
            case).
        prompt_tokens: tokens of the prompts that were computed, by source: "device", "host",
            "disk", "fetched" and "computed" (PromptSources). A prompt that is computed again
            counts again.
        fetches: ended fetches of prefixes from other workers: "loaded" or "failed".
        sheds: submissions refused for overload, by reason.
        rejections: invalid submissions, by the error code's name; counted by the gRPC server.
        handoffs: committed handoffs, by transport.
        handoff_bytes: bytes of committed handoffs, by transport.
        num_handoff_fallbacks: handoff epochs in which a transport failed, of all handoffs.
        handoff_failures: failed handoffs, by refusal reason.
        num_workers_unresponsive: times that an unresponsive worker's requests were moved away
            before the worker was lost.
        num_recoveries: lost attempts whose requests continued on other workers.
        num_parked: times that a batch request was parked for interactive requests.
        latest_cold_starts: latest worker starts, oldest first.
        num_adopted: requests of a previous coordinator that continued on their worker.
        num_moved: times that a request was moved because its worker changed its role or left, or
            because its revision ended.
        num_prefixes_gone: times that a decode worker lacked blocks that it could not compute.
        cold_starts: workers that attached for the first time, by pool.
        cold_start_s: seconds that worker starts took, by stage.
        num_failed_starts: workers that ended before they had been attached for STABLE_S
            (launches.py), or that never attached.
        scalings: decisions that changed a pool, by pool and "up", "down" or "flip" (into it).
        compared: Statistics of the fleets that a rollout compares; replaced by the rollout.
    """

    def __init__(self) -> None:
        self.recent = Recent()
        self.lanes = {lane: LaneStats() for lane in LANES}
        self.demand = {lane: LaneDemand() for lane in LANES}
        self.requests: Counter[tuple[common_pb2.Lane.ValueType, str]] = Counter()
        self.sheds: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.prompt_tokens: Counter[str] = Counter(device=0, host=0, disk=0, fetched=0, computed=0)
        self.fetches: Counter[str] = Counter(loaded=0, failed=0)
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

    def attached_first(self, worker: Worker, now: float) -> None:
        """Records a worker that attached for the first time, with its start times if reported."""
        startup_ms = worker.hello.startup_ms
        self.cold_starts[POOL_OF[worker.role].value] += 1
        if startup_ms:
            lasted_s = sum(startup_ms.values()) / 1e3
            self.latest_cold_starts.append(ColdStart(now, worker.id, worker.role, lasted_s))
        for stage, milliseconds in startup_ms.items():
            known = stage if stage in self.cold_start_s and stage != "total" else "other"
            self.cold_start_s[known].observe(milliseconds / 1e3)

    def cold_started(self, seconds: float) -> None:
        """Records the seconds from the order to start a worker until it attached."""
        self.cold_start_s["total"].observe(seconds)

    def scaled(self, pool: str, direction: str) -> None:
        self.scalings[pool, direction] += 1

    def admitted(self, request: Request, now: float) -> None:
        self.recent.at(now).lanes[request.submission.lane].num_admitted += 1
        if (fleet := self.compared.get(request.fleet)) is not None:
            fleet.num_admitted += 1

    def shed(self, lane: common_pb2.Lane.ValueType, reason: str, now: float) -> None:
        """Records a submission that was refused for overload."""
        self.sheds[reason.lower()] += 1
        self.recent.at(now).lanes[lane].sheds[reason.lower()] += 1

    def dispatched(self, request: Request, now: float, *, after_start: bool) -> None:
        """Records the first dispatch of a request.

        Args:
            request: request that was sent to its workers.
            now: time by the core's clock.
            after_start: whether one of the workers attached after the request had arrived.
        """
        lane, waited_s = self.lanes[request.submission.lane], now - request.submitted_at
        lane.queue.observe(waited_s)
        recent = self.recent.at(now).lanes[request.submission.lane]
        recent.tenant(request.submission.tenant).wait.observe(waited_s)
        if after_start:
            recent.after_start.observe(waited_s)

    def first_token(
        self,
        request: Request,
        now: float,
        stages: Sequence[tuple[Stage, float]],
        target_s: float | None,
    ) -> None:
        """Records the first token of a request.

        Args:
            request: the request.
            now: time by the core's clock.
            stages: seconds per stage until the first token.
            target_s: target of the request's time to first token; None: no target.
        """
        submission = request.submission
        ttft_s = now - submission.arrived_at
        self.num_prompt_tokens += request.num_prompt_tokens
        self.lanes[submission.lane].ttft.observe(ttft_s)
        if target_s is not None:
            self.lanes[submission.lane].ttft_ratio.observe(ttft_s / target_s)
        if not request.was_held:
            # A request that waited for a limit, or for room on a decode worker, would not have been
            # faster with more prefill workers.
            self.demand[submission.lane].first_tokens.append(
                FirstToken(ttft_s, request.num_prompt_tokens, request.revision)
            )
        if (fleet := self.compared.get(request.fleet)) is not None:
            fleet.lanes[submission.lane].ttft.observe(ttft_s)
        self.recent.at(now).lanes[submission.lane].first_token(
            submission.tenant,
            request.num_prompt_tokens,
            ttft_s,
            target_s,
            stages,
        )

    def prompt_computed(self, sources: PromptSources, now: float) -> None:
        """Counts the tokens of a prompt whose worker has its whole KV cache."""
        window = self.recent.at(now).prompt_tokens
        for counts in (self.prompt_tokens, window):
            counts["device"] += sources.device
            counts["host"] += sources.host
            counts["disk"] += sources.disk
            counts["fetched"] += sources.fetched
            counts["computed"] += sources.computed

    def fetch_ended(self, *, loaded: bool) -> None:
        """Counts a fetch of a prefix, when its request's prompt has been computed.

        Args:
            loaded: whether the prefix was loaded; otherwise the worker computed it.
        """
        self.fetches["loaded" if loaded else "failed"] += 1

    def ended(self, request: Request, record: EndedRequest, outcome: str) -> None:
        lane = self.lanes[record.lane]
        self.requests[record.lane, outcome] += 1
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
