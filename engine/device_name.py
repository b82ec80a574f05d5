"""Finds out the model of the device that vLLM computes on."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

from vllm.platforms import current_platform

_log = logging.getLogger(__name__)
_CPU_INFO = Path("/proc/cpuinfo")


def device_name() -> str:
    """Returns the model of the first device, for example "NVIDIA H100 80GB HBM3".

    Workers on different devices take different times for the same step, so each model has a latency
    model of its own. Empty if the platform does not tell.
    """
    if current_platform.is_cpu():
        return _cpu_name()
    try:
        return str(current_platform.get_device_name())
    # Drivers and their libraries raise errors of their own; a name is not worth a failed start.
    except Exception as error:
        _log.warning("the name of the device is unknown: %s", error)
        return ""


def _cpu_name() -> str:
    """Returns the name that Linux shows on x86, or else the architecture."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = (line.partition(":") for line in lines)
    names = (value.strip() for key, _, value in fields if key.strip() == "model name")
    return next(names, "") or platform.machine()
