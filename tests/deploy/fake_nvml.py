"""A fake of the functions of pynvml that Baton uses, for hosts without a GPU."""

from __future__ import annotations

from types import SimpleNamespace


class FakeNvml:
    """The pynvml module of a host with `num_gpus` GPUs.

    Args:
        num_gpus: Number of GPUs of the host.
        broken: Names of functions that fail with NVMLError, as on a driver without support.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, num_gpus: int = 4, broken: tuple[str, ...] = ()) -> None:
        self._uuids = [f"GPU-{number}" for number in range(num_gpus)]
        self._broken = broken

    def _raise_if_broken(self, name: str) -> None:
        if name in self._broken:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self._raise_if_broken("nvmlInit")

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
        self._raise_if_broken("nvmlDeviceGetPowerUsage")
        return 350_500
