"""NVML without a GPU: as much of the module pynvml as Baton uses, under its names."""

from __future__ import annotations

from types import SimpleNamespace


class FakeNvml:
    """A host with some GPUs.

    Args:
        broken: names of functions that this driver does not have.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, num_gpus: int = 4, broken: tuple[str, ...] = ()) -> None:
        self._uuids = [f"GPU-{number}" for number in range(num_gpus)]
        self._broken = broken

    def _works(self, name: str) -> None:
        if name in self._broken:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self._works("nvmlInit")

    def nvmlDeviceGetCount(self) -> int:
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self._uuids):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self._uuids:
            raise self.NVMLError("Not Found")
        return self._uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self._uuids[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50 + handle, memory=20)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * 2**30, free=20 * 2**30, used=60 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._works("nvmlDeviceGetPowerUsage")
        return 350_500
