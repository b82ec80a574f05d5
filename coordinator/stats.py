"""What the core counts, as plain numbers that a metrics endpoint may read at any time."""

from __future__ import annotations

from collections import Counter, deque

from baton.coordinator.lanes import LANES
from baton.coordinator.request import EndedRequest, Request
from baton.runtime.handoff_metrics import EXPOSED_S, reason_label, transport_label
from baton.runtime.histogram import Histogram
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_SLOW_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


# Of Hello.startup_ms.
COLD_START_STAGES = ("process", "transfer", "weights", "kv", "warm_up")


class LaneStats:
    """Of one lane: latencies in seconds, and how many of its requests are running."""

    __slots__ = ("e2e", "itl", "num_running", "queue", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft, self.queue = Histogram(_TTFT_S), Histogram(_TTFT_S)
        self.itl, self.tpot, self.e2e = Histogram(_FAST_S), Histogram(_FAST_S), Histogram(_SLOW_S)
        self.num_running = 0


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

    Attributes:
        demand: by lane: what pools are sized by.
        requests: by lane and outcome (finish reason, or error code's name; lower case).
        sheds: submissions that were not admitted for overload, by reason.
        rejections: submissions that were wrong, by the error code's name; counted by the shell.
        handoffs: committed ones by transport.
        handoff_bytes: of those, by transport.
        num_handoff_fallbacks: epochs of handoffs, however they ended, that a transport failed.
        handoff_failures: by refusal reason.
        cold_starts: workers that came new, by role.
        cold_start_stages: how long they took until they served, by stage.
        num_workers_unresponsive: times that a worker's requests went elsewhere before it was lost.
        num_recoveries: attempts lost whose requests went on.
        num_parked: times that a batch request made room for interactive ones.
        num_adopted: requests that a worker went on with after another coordinator's end.
    """

    def __init__(self) -> None:
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
        self.cold_starts: Counter[common_pb2.Role.ValueType] = Counter()
        self.cold_start_stages = {stage: Histogram(_SLOW_S) for stage in COLD_START_STAGES}
        self.num_workers_lost = 0
        self.num_workers_unresponsive = 0
        self.num_recoveries = 0
        self.num_parked = 0
        self.num_adopted = 0

    def dispatched(self, request: Request, now: float) -> None:
        lane = self.lanes[request.submission.lane]
        lane.num_running += 1
        lane.queue.observe(now - request.submitted_at)

    def ended(self, request: Request, record: EndedRequest, outcome: str) -> None:
        lane = self.lanes[record.lane]
        if request.dispatched_at is not None:
            lane.num_running -= 1
        self.requests[record.lane, outcome] += 1
        self.num_prompt_tokens += record.num_prompt_tokens
        lane.e2e.observe(record.ended_at - record.arrived_at)
        if request.first_token_at is not None and request.last_token_at is not None:
            num_new = len(request.token_ids) - len(request.submission.known_token_ids)
            if num_new > 1:
                lane.tpot.observe((request.last_token_at - request.first_token_at) / (num_new - 1))

    def worker_attached(self, hello: cluster_pb2.Hello) -> None:
        """A worker that this coordinator did not know; counted unless it served another before."""
        if hello.generation:
            return
        self.cold_starts[hello.role] += 1
        for stage, histogram in self.cold_start_stages.items():
            if stage in hello.startup_ms:
                histogram.observe(hello.startup_ms[stage] / 1e3)

    def handoff_committed(self, report: cluster_pb2.HandoffReport) -> None:
        transport = transport_label(report.transport)
        self.handoffs[transport] += 1
        self.handoff_bytes[transport] += report.num_bytes
        self.handoff_exposed.observe(report.exposed_us / 1e6)

    def handoff_failed(self, reason: kv_transfer_pb2.RefusalReason.ValueType) -> None:
        self.handoff_failures[reason_label(reason)] += 1
