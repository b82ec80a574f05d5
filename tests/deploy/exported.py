"""What the processes export, by asking their own collectors."""

from __future__ import annotations

from collections import Counter

from fake_nvml import FakeNvml
from prometheus_client.registry import Collector

from baton.coordinator.core.core import Core
from baton.coordinator.server.metrics import CoreCollector
from baton.coordinator.state.config import CoreConfig
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.runtime.config import BatonConfig
from baton.v1 import kv_transfer_pb2
from baton.worker import gpus
from baton.worker.metrics import Snapshot, WorkerCollector

# Prometheus's own, and what scraping adds.
UP = {"up": set()}
SCRAPED = {"job", "instance", "cell"}
_SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}


def collectors() -> list[Collector]:
    """One of each, as its process registers it."""
    config = BatonConfig()
    of_gpus = gpus.collector("cuda", 1, "0", FakeNvml)
    assert of_gpus is not None
    of_worker = WorkerCollector("demo", "decode", ["grpc"])
    of_worker.snapshot = Snapshot(
        transfer=kv_transfer_pb2.LocalStatistics(send_bytes_total=1, receive_bytes_total=1)
    )
    return [
        CoreCollector(Core(CoreConfig.of(config)), config),
        GatewayCollector(GatewayStats(("/v1/completions",), Counter())),
        of_worker,
        of_gpus,
    ]


def names() -> dict[str, set[str]]:
    """Labels by the name of a series."""
    found = dict(UP)
    for collector in collectors():
        for family in collector.collect():
            labels = set(family._labelnames)
            for suffix in _SUFFIXES[family.type]:
                found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return {name: labels | SCRAPED for name, labels in found.items()}


def samples() -> dict[frozenset[tuple[str, str]], float]:
    """What a scrape of one idle process of each kind brings; the name is a label too."""
    return {
        frozenset(
            {"__name__": one.name, "instance": "i", "cell": "c", **one.labels}.items()
        ): one.value
        for collector in collectors()
        for family in collector.collect()
        for one in family.samples
    }
