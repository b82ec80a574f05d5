"""GPU metrics from NVML: only this worker's GPUs, and no metrics without GPUs."""

from __future__ import annotations

import importlib
import inspect

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.worker import gpus
from tests.deploy.fake_nvml import FakeNvml


def shown(collector: gpus.GpuCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def test_units():
    found = {
        sample.name: sample.value
        for family in gpus.collector("cuda", 1, ["1"], FakeNvml).collect()
        for sample in family.samples
    }
    assert found == {
        "baton_worker_gpu_utilization_ratio": 0.51,
        "baton_worker_gpu_memory_used_bytes": 60 * 2**30,
        "baton_worker_gpu_memory_size_bytes": 80 * 2**30,
        "baton_worker_gpu_power_watts": 350.5,
    }


@pytest.mark.parametrize(
    ("visible", "num_gpus", "uuids"),
    [
        ("2,3", 2, ["GPU-2", "GPU-3"]),
        ("2,3", 1, ["GPU-2"]),
        ("GPU-3", 1, ["GPU-3"]),
    ],
)
def test_a_worker_shows_its_own_gpus(visible, num_gpus, uuids):
    text = shown(gpus.collector("cuda", num_gpus, visible.split(","), FakeNvml))
    for number in range(4):
        assert (f'uuid="GPU-{number}"' in text) is (f"GPU-{number}" in uuids)


def test_without_cuda_visible_devices_a_worker_has_the_first_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = shown(gpus.collector("cuda", 2, None, FakeNvml))
    assert 'gpu="1"' in text
    assert 'gpu="2"' not in text


def test_values_that_a_gpu_does_not_provide_are_left_out():
    nvml = FakeNvml(1, ("nvmlDeviceGetPowerUsage",))
    text = shown(gpus.collector("cuda", 1, ["0"], lambda: nvml))
    assert "baton_worker_gpu_utilization_ratio{" in text
    assert "baton_worker_gpu_power_watts{" not in text


def no_module():
    raise ImportError("pynvml")


@pytest.mark.parametrize(
    ("device", "visible", "load"),
    [
        ("cpu", "0", FakeNvml),
        ("none", "0", FakeNvml),
        ("cuda", "0", no_module),
        ("cuda", "0", lambda: FakeNvml(1, ("nvmlInit",))),
        ("cuda", "7", FakeNvml),
    ],
)
def test_without_gpu_driver_or_library_there_are_no_metrics(device, visible, load):
    assert gpus.collector(device, 1, [visible], load) is None


def test_the_fake_has_the_functions_of_the_real_module():
    real = importlib.import_module("pynvml")
    assert issubclass(real.NVMLError, Exception)
    for name in vars(gpus.Nvml):
        if not name.startswith("nvml"):
            continue
        wanted = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
        function = inspect.unwrap(getattr(real, name))
        assert list(inspect.signature(function).parameters)[: len(wanted)] == wanted
    for struct, fields in (
        (real.c_nvmlUtilization_t, {"gpu"}),
        (real.c_nvmlMemory_t, {"used", "total"}),
    ):
        assert fields <= {name for name, _ in struct._fields_}
