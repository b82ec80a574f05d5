"""What a worker shows Prometheus, from its last load report: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.v1 import cluster_pb2, kv_transfer_pb2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a worker; replaced as a whole, since scrapes come from another thread."""

    load: cluster_pb2.LoadReport = field(default_factory=cluster_pb2.LoadReport)
    transfer: kv_transfer_pb2.LocalStatistics = field(
        default_factory=kv_transfer_pb2.LocalStatistics
    )
    num_tokens: int = 0
    num_ended: Mapping[str, int] = field(default_factory=dict)


class WorkerCollector(Collector):
    """Turns the snapshot of the moment into metrics; every worker process has one.

    Attributes:
        snapshot: assigned by the worker, whenever it takes one.
    """

    def __init__(self, model: str, role: str) -> None:
        self._labels = {"model": model, "role": role}
        self.snapshot = Snapshot()

    def registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        load, transfer = self.snapshot.load, self.snapshot.transfer
        yield self._gauge("requests_running", "In the engine's steps.", load.num_running)
        yield self._gauge("requests_waiting", "In the engine's queue.", load.num_waiting)
        yield self._gauge(
            "kv_cache_usage_ratio",
            "Of the engine's KV blocks.",
            load.kv_tokens_used / load.kv_tokens_total if load.kv_tokens_total else 0.0,
        )
        yield self._gauge(
            "prefill_tokens_waiting",
            "Prompt tokens accepted and not computed.",
            load.prefill_tokens_waiting,
        )
        yield self._counter("engine_steps", "Steps of the engine.", load.num_steps)
        yield self._counter("generation_tokens", "Tokens reported.", self.snapshot.num_tokens)
        yield self._split(
            CounterMetricFamily,
            "requests",
            "Attempts that ended here.",
            "outcome",
            self.snapshot.num_ended,
        )
        yield self._split(
            GaugeMetricFamily,
            "staging_used_bytes",
            "Reserved for handoffs.",
            "direction",
            {"send": transfer.send_bytes_used, "receive": transfer.receive_bytes_used},
        )
        yield self._split(
            GaugeMetricFamily,
            "staging_size_bytes",
            "Of the staging arenas.",
            "direction",
            {"send": transfer.send_bytes_total, "receive": transfer.receive_bytes_total},
        )
        yield self._split(
            CounterMetricFamily,
            "handoff_bytes",
            "Moved between workers.",
            "direction",
            {"send": transfer.bytes_sent, "receive": transfer.bytes_received},
        )
        yield self._split(
            CounterMetricFamily,
            "handoffs",
            "Handoffs that ended here.",
            "outcome",
            {"committed": transfer.handoffs_committed, "failed": transfer.handoffs_failed},
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._split(GaugeMetricFamily, name, text, None, {"": value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._split(CounterMetricFamily, name, text, None, {"": value})

    def _split(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str | None,
        values: Mapping[str, float],
    ) -> Metric:
        names = [*self._labels, *([label] if label else [])]
        family = kind(f"baton_worker_{name}", text, labels=names)
        for value_name, value in values.items():
            family.add_metric([*self._labels.values(), *([value_name] if label else [])], value)
        return family
