"""Prometheus metrics of a worker, from the values of its last load report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from baton.runtime.kv.handoff_metrics import reason_label, transport_label
from baton.v1 import cluster_pb2, kv_transfer_pb2
from baton.worker.handoffs import RECEIVE, SEND, HandoffCounts

# Names of the tiers of KV blocks, as values of the label `tier`.
DEVICE, HOST, DISK = "device", "host", "disk"

_Reason: TypeAlias = "kv_transfer_pb2.RefusalReason.ValueType"
_Key = TypeVar("_Key", bound=tuple[str, ...])


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of one tier of KV blocks: the engine's cache, host memory or the disk.

    Attributes:
        num_blocks: Number of blocks that the tier holds.
        num_removed: Number of blocks that the tier has lost since the start: evicted, or deleted.
        num_loaded_tokens: Prompt tokens loaded from the tier; 0 for the engine's cache.
    """

    num_blocks: int = 0
    num_removed: int = 0
    num_loaded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counts of a worker's KV blocks.

    Attributes:
        tiers: Counts by tier: device, host and disk.
        num_wrong_files: Files of the disk tier that were wrong, since the start.
        disk_failed: Whether the disk tier has failed.
    """

    tiers: Mapping[str, TierCounts] = field(default_factory=dict)
    num_wrong_files: int = 0
    disk_failed: bool = False


@dataclass(frozen=True, slots=True)
class RunnerCounts:
    """Counts of a worker's requests since its start.

    Attributes:
        num_tokens: Output tokens reported.
        num_ended: Ended attempts by outcome.
        num_handoff_tokens: Prompt tokens loaded from handoffs.
    """

    num_tokens: int = 0
    num_ended: Mapping[str, int] = field(default_factory=dict)
    num_handoff_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metric values at one moment; replaced as a whole, because another thread reads it."""

    load: cluster_pb2.LoadReport = field(default_factory=cluster_pb2.LoadReport)
    transfer: kv_transfer_pb2.LocalStatistics = field(
        default_factory=kv_transfer_pb2.LocalStatistics
    )
    counts: RunnerCounts = field(default_factory=RunnerCounts)
    caches: CacheCounts = field(default_factory=CacheCounts)
    handoffs: HandoffCounts = field(default_factory=HandoffCounts)


class WorkerCollector(Collector):
    """Turns the current snapshot into metrics; every worker process has one.

    Args:
        model: Value of the label `model` of all metrics.
        role: Value of the label `role` of all metrics.
        transports: Transports that the worker may use.

    Attributes:
        snapshot: Current values; the worker replaces it with each load report.
    """

    def __init__(self, model: str, role: str, transports: Sequence[str] = ()) -> None:
        self._labels = {"model": model, "role": role}
        self._transports = transports
        self.snapshot = Snapshot()

    def serves(self, role: str) -> None:
        """Changes the label `role`."""
        # The dict is replaced, because a scrape may be reading the old one.
        self._labels = {**self._labels, "role": role}

    def registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def transfer_refusals(self) -> dict[tuple[str, str], int]:
        """Calls that the transfer service refused, by service and reason."""
        found = self.snapshot.transfer.access_refusals
        return {("KvTransfer", reason): count for reason, count in found.items()}

    def collect(self) -> Iterator[Metric]:
        load, counts = self.snapshot.load, self.snapshot.counts
        transfer, caches = self.snapshot.transfer, self.snapshot.caches
        host, disk = (caches.tiers.get(name, TierCounts()) for name in (HOST, DISK))
        yield self._gauge("requests_running", "Requests in the engine's steps.", load.num_running)
        yield self._gauge("requests_waiting", "Requests in the engine's queue.", load.num_waiting)
        yield self._gauge(
            "kv_cache_usage_ratio",
            "Fraction of the engine's KV blocks that is in use.",
            load.kv_tokens_used / load.kv_tokens_total if load.kv_tokens_total else 0.0,
        )
        yield self._gauge(
            "prefill_tokens_waiting",
            "Prompt tokens of accepted requests that are not computed yet.",
            load.prefill_tokens_waiting,
        )
        yield self._counter("engine_steps", "Steps of the engine.", load.num_steps)
        yield self._counter("generation_tokens", "Output tokens reported.", counts.num_tokens)
        yield self._gauge(
            "host_kv_blocks",
            "KV blocks that the KV store in host memory holds.",
            host.num_blocks,
        )
        yield self._counter(
            "host_prompt_tokens",
            "Prompt tokens loaded from the KV store in host memory.",
            host.num_loaded_tokens,
        )
        yield self._gauge("disk_kv_blocks", "KV blocks that the disk holds.", disk.num_blocks)
        yield self._counter(
            "disk_prompt_tokens", "Prompt tokens loaded from disk.", disk.num_loaded_tokens
        )
        yield self._split(
            CounterMetricFamily,
            "removed_kv_blocks",
            "KV blocks that a tier has evicted, or deleted because an operator asked for it.",
            ("tier",),
            {(tier,): each.num_removed for tier, each in caches.tiers.items()},
        )
        yield self._counter(
            "disk_wrong_files",
            "Files of KV blocks that were missing or damaged, and were not used.",
            caches.num_wrong_files,
        )
        yield self._gauge(
            "disk_failed",
            "1 if the disk has failed, so that the worker no longer uses it; otherwise 0.",
            caches.disk_failed,
        )
        yield self._split(
            CounterMetricFamily,
            "requests",
            "Attempts of requests that ended on this worker, by outcome.",
            ("outcome",),
            {(outcome,): count for outcome, count in counts.num_ended.items()},
        )
        yield self._split(
            GaugeMetricFamily,
            "staging_used_bytes",
            "Staging memory reserved for handoffs, in bytes.",
            ("direction",),
            {(SEND,): transfer.send_bytes_used, (RECEIVE,): transfer.receive_bytes_used},
        )
        yield self._split(
            GaugeMetricFamily,
            "staging_size_bytes",
            "Size of the staging memory, in bytes.",
            ("direction",),
            {(SEND,): transfer.send_bytes_total, (RECEIVE,): transfer.receive_bytes_total},
        )
        yield self._split(
            GaugeMetricFamily,
            "staging_waiting_handoffs",
            "Handoffs that wait for staging memory.",
            ("direction",),
            {(SEND,): transfer.num_waiting_sends, (RECEIVE,): transfer.num_waiting_receives},
        )
        yield from self._handoffs()

    def _handoffs(self) -> Iterator[Metric]:
        transfer, counts = self.snapshot.transfer, self.snapshot.handoffs
        # Configured transports start at 0, so that Prometheus can compute rates from the beginning.
        num_bytes: Counter[tuple[str, ...]] = Counter()
        num_frames: Counter[tuple[str, ...]] = Counter()
        fallbacks: Counter[tuple[str, ...]] = Counter()
        moved = [kv_transfer_pb2.TransportStatistics(name=name) for name in self._transports]
        for one in (*moved, *transfer.transports):
            name = transport_label(one.name)
            num_bytes[SEND, name] += one.bytes_sent
            num_bytes[RECEIVE, name] += one.bytes_received
            num_frames[SEND, name] += one.frames_sent
            num_frames[RECEIVE, name] += one.frames_received
            fallbacks[(name,)] += one.fallbacks
        by_transport = ("direction", "transport")
        yield self._split(
            CounterMetricFamily,
            "handoff_bytes",
            "Bytes of KV caches moved between workers.",
            by_transport,
            num_bytes,
        )
        yield self._split(
            CounterMetricFamily,
            "handoff_frames",
            "Frames (runs of KV blocks) moved between workers.",
            by_transport,
            num_frames,
        )
        yield self._split(
            CounterMetricFamily,
            "handoff_fallbacks",
            "Times that this transport failed for an outgoing handoff and the next one took over.",
            ("transport",),
            fallbacks,
        )
        yield self._split(
            CounterMetricFamily,
            "handoffs",
            "Ended handoffs by outcome. committed: sent and verified; released: loaded.",
            ("direction", "outcome", "transport"),
            counts.num_ended,
        )
        yield self._counter(
            "handoff_prompt_tokens",
            "Prompt tokens loaded from handoffs.",
            self.snapshot.counts.num_handoff_tokens,
        )
        refusals: Counter[tuple[str, ...]] = Counter()
        for reason, count in transfer.refusals.items():
            refusals[(reason_label(cast("_Reason", reason)),)] += count
        yield self._split(
            CounterMetricFamily,
            "handoff_refusals",
            "Opens, frames and commits refused by this worker or by the receiver, by reason.",
            ("reason",),
            refusals,
        )
        yield self._counter(
            "handoff_lease_expiries",
            "Handoffs that ended because no frame arrived, or no load started, for too long.",
            transfer.expiries,
        )
        exposed = HistogramMetricFamily(
            "baton_worker_handoff_exposed_seconds",
            "Time from the last computed layer until the commit was verified, in seconds.",
            labels=[*self._labels, "transport"],
        )
        for transport, histogram in counts.exposed.items():
            exposed.add_metric(
                [*self._labels.values(), transport], histogram.buckets(), histogram.total
            )
        yield exposed

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._split(GaugeMetricFamily, name, text, (), {(): value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._split(CounterMetricFamily, name, text, (), {(): value})

    def _split(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        values: Mapping[_Key, float],
    ) -> Metric:
        family = kind(f"baton_worker_{name}", text, labels=[*self._labels, *labels])
        for names, value in values.items():
            family.add_metric([*self._labels.values(), *names], value)
        return family
