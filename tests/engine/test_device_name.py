"""The model of the device that an engine runs on."""

from __future__ import annotations

import pytest

from baton.engine import device_name as devices


class Gpu:
    """A platform of vLLM with GPUs."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def is_cpu(self) -> bool:
        return False

    def get_device_name(self) -> str:
        if self._name is None:
            raise RuntimeError("the driver does not answer")
        return self._name


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA H20", "NVIDIA H20"), (None, "")])
def test_a_gpu_has_its_model(monkeypatch, name, expected):
    monkeypatch.setattr(devices, "current_platform", Gpu(name))
    assert devices.device_name() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nmodel name\t: Xeon 8481C @ 2.70GHz\n\nmodel name\t: other\n", "Xeon"),
        ("processor : 0\nCPU implementer : 0x41\n", "aarch64"),
        (None, "aarch64"),
    ],
)
def test_a_cpu_has_its_model_or_its_architecture(monkeypatch, tmp_path, text, expected):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(devices, "_CPU_INFO", path)
    monkeypatch.setattr(devices.platform, "machine", lambda: "aarch64")
    assert devices.device_name().startswith(expected)
