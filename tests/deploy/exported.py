"""Metrics that the processes export, read from their own collectors."""

from __future__ import annotations

from collections import Counter

from prometheus_client.registry import Collector

from baton.coordinator.core.core import Core
from baton.coordinator.server.metrics import CoreCollector
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.runtime.config import parse
from baton.v1 import kv_transfer_pb2
from baton.worker import gpus
from baton.worker.metrics import Snapshot, WorkerCollector
from tests.deploy.fake_nvml import FakeNvml

# The series `up` and these labels are added by Prometheus when it scrapes.
UP = {"up": set()}
SCRAPED = {"job", "instance", "cell"}
_SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}


def collectors() -> list[Collector]:
    """Returns one collector of each kind, built as its process builds it."""
    # Only pools that are sized by their load have all series.
    config = parse({"scaling": {"autoscale": True}}, "the test")
    core = Core(CoreConfig.of(config))
    core.scaler.begin(dict.fromkeys(Pool, 1))
    gpu_collector = gpus.collector("cuda", 1, "0", FakeNvml)
    assert gpu_collector is not None
    worker_collector = WorkerCollector("demo", "decode", ["grpc"])
    worker_collector.snapshot = Snapshot(
        transfer=kv_transfer_pb2.LocalStatistics(send_bytes_total=1, receive_bytes_total=1)
    )
    return [
        CoreCollector(core, config),
        GatewayCollector(
            GatewayStats(("/v1/completions",), Counter()),
            CallerSlots(1, "requests", "gateway_full"),
        ),
        worker_collector,
        gpu_collector,
    ]


def names() -> dict[str, set[str]]:
    """Returns the label names of each series, by the name of the series."""
    found = dict(UP)
    for collector in collectors():
        for family in collector.collect():
            labels = set(family._labelnames)
            for suffix in _SUFFIXES[family.type]:
                found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return {name: labels | SCRAPED for name, labels in found.items()}


def samples() -> dict[frozenset[tuple[str, str]], float]:
    """Returns the samples of one scrape of each kind of process, all idle.

    The keys are the labels, with the metric name as the label `__name__`.
    """
    return {
        frozenset(
            {"__name__": one.name, "instance": "i", "cell": "c", **one.labels}.items()
        ): one.value
        for collector in collectors()
        for family in collector.collect()
        for one in family.samples
    }
