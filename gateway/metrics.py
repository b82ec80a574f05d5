"""The gateway's Prometheus metrics: HTTP requests, and latencies as clients observe them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from baton.gateway.caller_slots import CallerSlots
from baton.runtime.telemetry.histogram import Histogram

_LANES = ("interactive", "batch")
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_SLOW_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


class RouteStats:
    """Latency histograms of one generation route and lane, in seconds."""

    __slots__ = ("e2e", "itl", "ttft")

    def __init__(self) -> None:
        self.ttft, self.itl, self.e2e = Histogram(_TTFT_S), Histogram(_FAST_S), Histogram(_SLOW_S)


class BatchStats:
    """Batches of this gateway.

    Attributes:
        num_open: Number of batches that have not ended.
        num_running: Number of lines that run.
        lines: Number of lines since the gateway started, by outcome: "completed", "failed", or
            "refused" (the line runs again).
        num_bytes: Size of files and results.
    """

    def __init__(self) -> None:
        self.num_open = self.num_running = self.num_bytes = 0
        self.lines: Counter[str] = Counter()


class GatewayStats:
    """Totals since the gateway started.

    Attributes:
        requests: Number of ended requests, by route and HTTP status.
        latencies: Latencies of generations, by route and lane.
        num_connections: Number of open connections.
        refused_connections: Number of connections closed for exceeding a limit, by reason.
        failovers: Number of requests served by another cell, by the unreachable cell's name.
        batches: Counts of batches and their lines.
        pooling_health: Whether each pooling server answers, by model and URL.
    """

    def __init__(self, routes: Iterable[str], failovers: Counter[str]) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.latencies = {(route, lane): RouteStats() for route in routes for lane in _LANES}
        self.num_connections = 0
        self.refused_connections: Counter[str] = Counter()
        self.failovers = failovers
        self.batches = BatchStats()
        self.pooling_health: dict[tuple[str, str], bool] = {}


class GatewayCollector(Collector):
    """Converts the counts to Prometheus metrics at each scrape."""

    def __init__(self, stats: GatewayStats, slots: CallerSlots) -> None:
        self._stats, self._slots = stats, slots

    def registry(self) -> CollectorRegistry:
        found = CollectorRegistry()
        found.register(self)
        return found

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        requests = CounterMetricFamily(
            "baton_http_requests",
            "HTTP requests that ended; code 499 means that the client disconnected first.",
            labels=["route", "code"],
        )
        for (route, code), count in tuple(stats.requests.items()):
            requests.add_metric([route, str(code)], count)
        yield requests
        for attribute, name, documentation in (
            (
                "ttft",
                "baton_http_time_to_first_token_seconds",
                "Time from the request's head to its first token.",
            ),
            (
                "itl",
                "baton_http_inter_token_latency_seconds",
                "Time between consecutive deltas of a choice.",
            ),
            (
                "e2e",
                "baton_http_request_duration_seconds",
                "Time from the head of a generation request to the last byte of its response.",
            ),
        ):
            family = HistogramMetricFamily(name, documentation, labels=["route", "lane"])
            for (route, lane), one in stats.latencies.items():
                histogram: Histogram = getattr(one, attribute)
                family.add_metric([route, lane], histogram.buckets(), sum_value=histogram.total)
            yield family
        yield GaugeMetricFamily(
            "baton_http_requests_running",
            "Generation requests that are running.",
            value=len(self._slots),
        )
        yield GaugeMetricFamily(
            "baton_http_connections", "Open HTTP connections.", value=stats.num_connections
        )
        yield _counter(
            "baton_http_refusals",
            "Connections that the gateway closed because they exceeded a limit, by reason.",
            "reason",
            stats.refused_connections,
        )
        yield _counter(
            "baton_http_failovers",
            "Requests that another cell served because this cell could not be reached.",
            "coordinator",
            stats.failovers,
        )
        health = GaugeMetricFamily(
            "baton_http_pooling_up",
            "Whether a pooling server answers its health check.",
            labels=["model", "url"],
        )
        for labels, is_up in stats.pooling_health.items():
            health.add_metric(labels, is_up)
        yield health
        yield _counter(
            "baton_http_batch_lines",
            "Lines of batches that completed, failed, or were refused and run again, by outcome.",
            "outcome",
            stats.batches.lines,
        )
        for name, documentation, value in (
            ("batches_open", "Batches that have not ended.", stats.batches.num_open),
            ("batch_lines_running", "Lines of batches that run.", stats.batches.num_running),
            ("batches_bytes", "Size of files and results of batches.", stats.batches.num_bytes),
        ):
            yield GaugeMetricFamily(f"baton_http_{name}", documentation, value=value)


def _counter(name: str, documentation: str, label: str, counts: Counter[str]) -> Metric:
    """Returns a counter family with one label."""
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value, count in tuple(counts.items()):
        family.add_metric([value], count)
    return family
