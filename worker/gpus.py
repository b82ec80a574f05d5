"""What a worker's GPUs are doing, by NVML, read when it is scraped: shown, never scaled by.

Busy is not the same as needed: an engine that decodes one request keeps a GPU at 100 %.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.runtime.visible_gpus import visible_gpus

_log = logging.getLogger(__name__)

_LABELS = ("gpu", "uuid")


class Nvml(Protocol):
    """What is used of the module `pynvml` (PyPI: nvidia-ml-py), under its names."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...


# Name, what it says, how it is read. NVML gives per cent, bytes and milliwatts.
_READINGS: tuple[tuple[str, str, Callable[[Nvml, Any], float]], ...] = (
    (
        "baton_worker_gpu_utilization_ratio",
        "Of the time, in which something ran on the GPU.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        "baton_worker_gpu_memory_used_bytes",
        "By every process on the GPU.",
        lambda nvml, gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ),
    (
        "baton_worker_gpu_memory_size_bytes",
        "Of the GPU.",
        lambda nvml, gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ),
    (
        "baton_worker_gpu_power_watts",
        "Drawn by the GPU.",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    ),
)


class GpuCollector(Collector):
    """Metrics of some GPUs; what one of them cannot tell (MIG slices have no power) is left out.

    Args:
        nvml: the module, initialised.
        handles: of the GPUs, by the label `gpu`.
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
    """The collector of an engine's GPUs; None without GPUs, NVML or the package nvidia-ml-py.

    Engines take the first of the GPUs that CUDA shows them, as many as they have ranks. CUDA and
    NVML number a host's GPUs alike where all are of one model, or with
    CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        device: of the engine; only "cuda" has GPUs here.
        num_gpus: its ranks.
        visible: indices or UUIDs; None: those that CUDA shows this process.
        load: imports NVML's module.
    """
    if device != "cuda":
        return None
    try:
        nvml = load()
    except ImportError:
        _log.info("no metrics of GPUs: nvidia-ml-py is not installed (baton[nvml])")
        return None
    names = visible if visible is not None else visible_gpus()
    try:
        nvml.nvmlInit()
        if names is None:
            names = [str(number) for number in range(nvml.nvmlDeviceGetCount())]
        return GpuCollector(nvml, [(name, _handle(nvml, name)) for name in names[:num_gpus]])
    except nvml.NVMLError as error:
        _log.info("no metrics of GPUs: %s", error)
        return None


def _handle(nvml: Nvml, name: str) -> Any:
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
