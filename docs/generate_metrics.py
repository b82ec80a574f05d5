"""Generates the tables of docs/metrics.md: run `python docs/generate_metrics.py`.

The tables come from the collectors of the processes; the other text of the page is written by hand.
With --check, the script changes nothing, and fails if the page is not the generated one; a test
does the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

from prometheus_client import Metric
from prometheus_client.registry import Collector

from baton.coordinator.core.core import Core
from baton.coordinator.server.metrics import CoreCollector
from baton.coordinator.state.config import CoreConfig
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.runtime.config import BatonConfig
from baton.runtime.security.refusals import Refusals
from baton.worker.gpus import GpuCollector
from baton.worker.metrics import WorkerCollector

PAGE = Path(__file__).parent / "metrics.md"
BEGIN = "<!-- begin: docs/generate_metrics.py makes this part -->\n"
END = "<!-- end of the generated part -->\n"
# Units by the end of a metric's name, the longest first.
_UNITS = {
    "_bytes_per_second": "bytes per second",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_watts": "watts",
    "_percentile": "percent",
    "_usage_ratio": "0 to 1",
    "_utilization_ratio": "0 to 1",
    "_share": "0 to 1",
    "_ratio": "factor",
}
# Beginnings of the help texts of metrics that are 0 or 1.
_FLAGS = ("Whether ", "1 if ")
# Labels of all metrics of a worker, which the table leaves out.
_WORKER_LABELS = {"model", "role"}
# Meaning of each label, in the order of the table.
_LABELS = {
    "lane": "`interactive` or `batch`",
    "pool": "`prefill` or `decode`",
    "state": "of workers: `serving`, `draining`, `other` (starting, silent, or leaving)",
    "outcome": "how something ended; of requests the finish reason (`stop`, `length`, `cancelled`) "
    "or the gRPC code of the error (`resource_exhausted`, ...)",
    "reason": "why something was refused or failed, in lower case; see [Errors](errors.md) for "
    "`baton_sheds_total`, and [Four words for no](#four-words-for-no)",
    "kind": "of tokens: `prompt` or `output`",
    "source": "tier that KV blocks came from: `device`, `host`, `disk`, `fetched` or `worker` "
    "(another worker), `computed`",
    "signal": "`ttft`, `itl` or `gap`",
    "direction": "of handoffs and staging: `send` or `receive`; of pools: `up`, `down`, `flip`",
    "transport": "`shm`, `nixl`, `grpc`, `nccl`, `gloo`, or `none` if none was agreed",
    "stage": "stage of a worker's start: `process`, `transfer`, `weights`, `kv`, `warm_up`, "
    "`other`, `total`",
    "worker": "ID of a worker, as in `baton workers`",
    "from": "worker that sends KV blocks; empty: none",
    "revision": "`stable` or `canary`",
    "quantile": "`0.5`, `0.95` or `0.99`",
    "service": "`Inference`, `Admin`, `Cluster`, `KvTransfer`, `metrics` or `TLS`",
    "route": "path of an HTTP route, such as `/v1/chat/completions`",
    "code": "HTTP status; 499: the client left first",
    "coordinator": "cell that could not be reached",
    "model": "name of a model",
    "url": "URL of a pooling server",
    "tier": "`device`, `host` or `disk`",
    "gpu": "number or UUID of a GPU, as CUDA shows it",
    "uuid": "UUID of a GPU",
    "role": "role of a worker: `prefill` or `decode`",
}


class Process(NamedTuple):
    """A kind of process that exports metrics.

    Attributes:
        title: Heading of its table.
        about: Where its metrics are, and what all of them have.
        collectors: Its own collectors.
        common: Labels of all its metrics, which the table leaves out.
    """

    title: str
    about: str
    collectors: tuple[Collector, ...]
    common: frozenset[str] = frozenset()


def processes() -> list[Process]:
    """Returns the processes with their collectors, built as each process builds them."""
    config = BatonConfig()
    gateway = GatewayCollector(
        GatewayStats(("/v1/completions",), Counter()), CallerSlots(1, "requests", "gateway_full")
    )
    return [
        Process(
            "Coordinator",
            "At `coordinator.metrics_listen`.",
            (CoreCollector(Core(CoreConfig.of(config)), config),),
        ),
        Process("Gateway", "At `/metrics` of `http.listen`.", (gateway,)),
        Process(
            "Worker",
            "At `worker.metrics_listen`. All have the labels `model` and `role` too.",
            (WorkerCollector("demo", "decode", ["grpc"]),),
            frozenset(_WORKER_LABELS),
        ),
        Process(
            "GPUs of a worker",
            "At `worker.metrics_listen`, with `baton[nvml]`. Nothing scales by them.",
            # Without handles, the collector reads nothing from NVML.
            (GpuCollector(cast("Any", None), ()),),
        ),
        Process(
            "All processes",
            "Beside the metrics of the coordinator, of each gateway and of each worker.",
            (Refusals(),),
        ),
    ]


def exported(metric: Metric) -> str:
    """Returns the name under which Prometheus shows a metric, without a histogram's suffixes."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def labels(metric: Metric) -> tuple[str, ...]:
    """Returns the label names of a metric."""
    # prometheus_client has no public attribute for them.
    return tuple(getattr(metric, "_labelnames"))  # noqa: B009


def unit(metric: Metric) -> str:
    """Returns the unit of a metric's values."""
    if metric.documentation.startswith(_FLAGS):
        return "0 or 1"
    return next((unit for end, unit in _UNITS.items() if metric.name.endswith(end)), "count")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(head)
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def made() -> str:
    """Returns the generated part of the page.

    Raises:
        ValueError: `_LABELS` lacks a label of a metric, or has one that no metric has.
    """
    lines, used = list[str](), set[str]()
    for process in processes():
        metrics = [one for collector in process.collectors for one in collector.collect()]
        used.update(name for one in metrics for name in labels(one))
        rows = [
            (
                f"`{exported(one)}`",
                one.type,
                ", ".join(f"`{name}`" for name in labels(one) if name not in process.common),
                unit(one),
                one.documentation.removesuffix("."),
            )
            for one in sorted(metrics, key=exported)
        ]
        lines += [f"## {process.title}", "", process.about, ""]
        lines += [*_table(("metric", "type", "labels", "unit", "meaning"), rows), ""]
    if wrong := used ^ _LABELS.keys():
        raise ValueError(f"_LABELS and the metrics differ in {sorted(wrong)}")
    lines += ["## Labels", "", *_table(("label", "value"), _LABELS_ROWS)]
    return "\n".join(lines)


_LABELS_ROWS = [(f"`{name}`", text) for name, text in _LABELS.items()]


def generated() -> str:
    """Returns what docs/metrics.md should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made()}\n\n{END}{after}"


def main() -> None:
    text = generated()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        raise SystemExit("docs/metrics.md is stale: run python docs/generate_metrics.py")


if __name__ == "__main__":
    main()
