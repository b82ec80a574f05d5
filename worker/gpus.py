"""GPU metrics from NVML, read at each scrape. They are displayed and not used for scaling.

A busy GPU is not necessarily needed: an engine that decodes one request keeps its GPU at 100 %.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.runtime.process.visible_gpus import visible_gpus

_log = logging.getLogger(__name__)

_LABELS = ("gpu", "uuid")


class Nvml(Protocol):
    """Functions used of the module `pynvml` (PyPI: nvidia-ml-py), under their names there."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...


# Metric name, help text and reader. NVML reports percent, bytes and milliwatts.
_READINGS: tuple[tuple[str, str, Callable[[Nvml, Any], float]], ...] = (
    (
        "baton_worker_gpu_utilization_ratio",
        "Fraction of time in which the GPU was running a kernel.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        "baton_worker_gpu_memory_used_bytes",
        "GPU memory used by all processes, in bytes.",
        lambda nvml, gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ),
    (
        "baton_worker_gpu_memory_size_bytes",
        "Total GPU memory, in bytes.",
        lambda nvml, gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ),
    (
        "baton_worker_gpu_power_watts",
        "Power draw of the GPU, in watts.",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    ),
)


class GpuCollector(Collector):
    """Metrics of some GPUs; omits values that a GPU does not provide (MIG slices have no power).

    Args:
        nvml: Initialised NVML module.
        handles: NVML handles of the GPUs, by value of the label `gpu`.
    """

    def __init__(self, nvml: Nvml, handles: Sequence[tuple[str, Any]]) -> None:
        self._nvml, self._gpus = nvml, list[tuple[tuple[str, str], Any]]()
        for name, handle in handles:
            try:
                uuid = nvml.nvmlDeviceGetUUID(handle)
            except nvml.NVMLError:
                uuid = ""
            self._gpus.append(((name, uuid), handle))

    def collect(self) -> Iterator[Metric]:
        for name, text, read in _READINGS:
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, handle in self._gpus:
                try:
                    value = read(self._nvml, handle)
                except self._nvml.NVMLError:
                    continue
                family.add_metric(labels, value)
            yield family


def collector(
    device: str,
    num_gpus: int,
    visible: Sequence[str] | None = None,
    load: Callable[[], Nvml] = lambda: importlib.import_module("pynvml"),
) -> GpuCollector | None:
    """Collector for an engine's GPUs; None without GPUs, NVML or the package nvidia-ml-py.

    An engine uses as many of the GPUs that CUDA shows as it has ranks, from the first. CUDA and
    NVML number the GPUs of a host equally if all are of one model, or with
    CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        device: Device of the engine; only "cuda" has GPUs here.
        num_gpus: Number of the engine's ranks.
        visible: Indices or UUIDs of the visible GPUs; None means those that CUDA shows.
        load: Imports the NVML module.
    """
    if device != "cuda":
        return None
    try:
        nvml = load()
    except ImportError:
        _log.info("no GPU metrics: nvidia-ml-py is not installed (baton[nvml])")
        return None
    names = visible if visible is not None else visible_gpus()
    try:
        nvml.nvmlInit()
        if names is None:
            names = [str(number) for number in range(nvml.nvmlDeviceGetCount())]
        return GpuCollector(nvml, [(name, _handle(nvml, name)) for name in names[:num_gpus]])
    except nvml.NVMLError as error:
        _log.info("no GPU metrics: %s", error)
        return None


def _handle(nvml: Nvml, name: str) -> Any:
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
