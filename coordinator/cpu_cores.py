"""Which cores local workers compute on, where there is no GPU.

Left alone, every vLLM on a host binds its threads to the same cores, and whatever moves bytes while
a prompt is computed takes its time from the prefill.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.runtime import affinity
from baton.runtime.config import BatonConfig

_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class CoreShares:
    """Cores of each worker's engine, in the order they are started, and of transfer services.

    Attributes:
        transfer: none that prefills, unless every core does; empty: any.
    """

    engines: tuple[tuple[int, ...], ...]
    transfer: tuple[int, ...]

    def environment(self, index: int) -> dict[str, str]:
        """What binds the engine of the index-th worker."""
        if index >= len(self.engines):
            return {}
        return {affinity.VLLM_BIND_THREADS: ",".join(map(str, self.engines[index]))}


NO_SHARES = CoreShares((), ())


def share(cores: Sequence[int], num_prefill: int, num_decode: int) -> CoreShares:
    """Deals the cores out evenly; with more workers than cores some share one."""
    num_workers = max(1, num_prefill + num_decode)
    engines = affinity.deal(cores, num_workers)
    prefilling = {core for engine in engines[:num_prefill] for core in engine}
    return CoreShares(engines, tuple(core for core in cores if core not in prefilling))


def on_this_host(config: BatonConfig) -> CoreShares:
    """The shares for `config`'s workers; NO_SHARES where they are not this program's to choose."""
    if (
        config.engine != "vllm"
        or affinity.VLLM_BIND_THREADS in os.environ
        or config.engine_args.get("tensor_parallel_size", 1) != 1
        or _NVIDIA_DRIVER.exists()
        or not hasattr(os, "sched_getaffinity")
    ):
        return NO_SHARES
    cores = sorted(os.sched_getaffinity(0))
    return share(cores, config.prefill.workers, config.decode.workers)
