"""The core's counters as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from baton.coordinator.core import Core
from baton.coordinator.lanes import lane_name
from baton.runtime.histogram import Histogram
from baton.v1 import cluster_pb2, common_pb2

_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
# Of LaneStats: attribute, metric name, what it says.
_LANE_HISTOGRAMS = (
    ("ttft", "gen_ai_server_time_to_first_token_seconds", "Time to first token, from arrival."),
    (
        "tpot",
        "gen_ai_server_time_per_output_token_seconds",
        "Mean gap between a request's tokens after the first.",
    ),
    ("e2e", "gen_ai_server_request_duration_seconds", "Whole request, from arrival."),
    ("itl", "baton_inter_token_latency_seconds", "Every gap between two outputs of a stream."),
    ("queue", "baton_request_queue_seconds", "Wait in the lane until dispatched."),
)


class CoreCollector(Collector):
    """Reads the core from the scraping thread: numbers and snapshots only."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        stats = self._core.stats
        for attribute, name, documentation in _LANE_HISTOGRAMS:
            family = HistogramMetricFamily(name, documentation, labels=["lane"])
            for lane, lane_stats in stats.lanes.items():
                _add(family, [lane_name(lane)], getattr(lane_stats, attribute))
            yield family
        queued = GaugeMetricFamily("baton_queue_depth", "Requests waiting.", labels=["lane"])
        running = GaugeMetricFamily("baton_requests_running", "Dispatched.", labels=["lane"])
        for lane, lane_stats in stats.lanes.items():
            queued.add_metric([lane_name(lane)], self._core.num_queued(lane))
            running.add_metric([lane_name(lane)], lane_stats.num_running)
        yield queued
        yield running
        yield from self._cold_starts()
        yield from self._totals()
        yield self._workers()

    def _totals(self) -> Iterator[Metric]:
        stats = self._core.stats
        requests = CounterMetricFamily(
            "baton_requests", "Requests that ended.", labels=["lane", "outcome"]
        )
        for (lane, outcome), count in tuple(stats.requests.items()):
            requests.add_metric([lane_name(lane), outcome], count)
        yield requests
        tokens = CounterMetricFamily("baton_tokens", "Tokens.", labels=["kind"])
        tokens.add_metric(["prompt"], stats.num_prompt_tokens)
        tokens.add_metric(["output"], stats.num_output_tokens)
        yield tokens
        for name, documentation, counts in (
            ("baton_sheds", "Submissions not admitted for overload.", stats.sheds),
            ("baton_rejections", "Submissions that were wrong.", stats.rejections),
            ("baton_handoff_failures", "Handoffs that never loaded.", stats.handoff_failures),
        ):
            family = CounterMetricFamily(name, documentation, labels=["reason"])
            for reason, count in tuple(counts.items()):
                family.add_metric([reason], count)
            yield family
        for name, documentation, counts in (
            ("baton_handoffs", "Handoffs committed.", stats.handoffs),
            (
                "baton_handoff_bytes",
                "Bytes of committed handoffs; throughput is its rate.",
                stats.handoff_bytes,
            ),
        ):
            family = CounterMetricFamily(name, documentation, labels=["transport"])
            for transport, count in tuple(counts.items()):
                family.add_metric([transport], count)
            yield family
        yield CounterMetricFamily(
            "baton_handoff_fallbacks",
            "Times that a handoff's transport failed and the next one took over.",
            value=stats.num_handoff_fallbacks,
        )
        exposed = HistogramMetricFamily(
            "baton_handoff_exposed_seconds",
            "From the last layer computed until the commit was verified.",
            labels=[],
        )
        _add(exposed, [], stats.handoff_exposed)
        yield exposed
        for name, documentation, count in (
            ("baton_workers_lost", "Workers that did not leave cleanly.", stats.num_workers_lost),
            (
                "baton_workers_unresponsive",
                "Times that a silent or stuck worker's requests went elsewhere.",
                stats.num_workers_unresponsive,
            ),
            ("baton_recoveries", "Lost attempts of requests that went on.", stats.num_recoveries),
            ("baton_parked", "Times that batch requests made room.", stats.num_parked),
            (
                "baton_adopted",
                "Requests that workers went on with after another coordinator's end.",
                stats.num_adopted,
            ),
        ):
            yield CounterMetricFamily(name, documentation, value=count)

    def _cold_starts(self) -> Iterator[Metric]:
        stats = self._core.stats
        started = CounterMetricFamily(
            "baton_cold_starts", "Workers that came new.", labels=["pool"]
        )
        for pool, role in _ROLES.items():
            started.add_metric([pool], stats.cold_starts[role])
        yield started
        stages = HistogramMetricFamily(
            "baton_cold_start_seconds", "Their start, until they could serve.", labels=["stage"]
        )
        for stage, histogram in stats.cold_start_stages.items():
            _add(stages, [stage], histogram)
        yield stages

    def _workers(self) -> Metric:
        family = GaugeMetricFamily("baton_workers", "Attached.", labels=["pool", "state"])
        for pool, role in _ROLES.items():
            workers = [worker for worker in self._core.workers if worker.role == role]
            serving = sum(worker.serving for worker in workers)
            draining = sum(worker.state == cluster_pb2.WORKER_STATE_DRAINING for worker in workers)
            family.add_metric([pool, "serving"], serving)
            family.add_metric([pool, "draining"], draining)
            family.add_metric([pool, "other"], len(workers) - serving - draining)
        return family


def registry(core: Core) -> CollectorRegistry:
    """A registry with everything the coordinator shows."""
    found = CollectorRegistry()
    found.register(CoreCollector(core))
    return found


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, histogram.buckets(), sum_value=histogram.total)
