"""What the processes export, by asking their own collectors."""

from __future__ import annotations

from fake_nvml import FakeNvml

from baton.coordinator.core import Core
from baton.coordinator.core_config import CoreConfig
from baton.coordinator.metrics import CoreCollector
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.runtime.config import BatonConfig
from baton.worker import gpus
from baton.worker.metrics import WorkerCollector

# Exported by pools that size themselves.
COMING = {
    "baton_workers_desired": {"pool"},
    "baton_cold_starts_total": {"pool"},
}
# Prometheus's own, and what scraping adds.
UP = {"up": set()}
SCRAPED = {"job", "instance", "cell"}
_SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}


def names() -> dict[str, set[str]]:
    """Labels by the name of a series."""
    config = BatonConfig()
    of_gpus = gpus.collector("cuda", 1, None, FakeNvml)
    assert of_gpus is not None
    found = COMING | UP
    for collector in (
        CoreCollector(Core(CoreConfig.of(config)), config),
        GatewayCollector(GatewayStats(("/v1/completions",))),
        WorkerCollector("demo", "prefill"),
        of_gpus,
    ):
        for family in collector.collect():
            labels = set(family._labelnames)
            for suffix in _SUFFIXES[family.type]:
                found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return {name: labels | SCRAPED for name, labels in found.items()}
