"""Which cores local workers compute on, where there is no GPU.

Left alone, every vLLM on a host binds its threads to the same cores, and whatever moves bytes while
a prompt is computed takes its time from the prefill.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from baton.runtime import affinity
from baton.runtime.config import BatonConfig

_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class CoreShares:
    """Cores of each worker's engine, in the order they are started, and of transfer services.

    Attributes:
        engines: per worker, the cores of each of its ranks.
        transfer: none that prefills, unless every core does; empty: any.
    """

    engines: tuple[tuple[tuple[int, ...], ...], ...]
    transfer: tuple[int, ...]

    def environment(self, index: int, num_ranks: int) -> dict[str, str]:
        """What binds the engine of the index-th worker: its cores, dealt to so many ranks."""
        if index >= len(self.engines) or num_ranks < 1:
            return {}
        ranks = self.engines[index]
        if len(ranks) != num_ranks:
            ranks = affinity.split_cores(
                sorted({core for rank in ranks for core in rank}), num_ranks
            )
        bound = (",".join(map(str, cores)) for cores in ranks)
        return {affinity.VLLM_BIND_THREADS: "|".join(bound)}


NO_SHARES = CoreShares((), ())


def share(
    cores: Sequence[int], prefill_ranks: Sequence[int], decode_ranks: Sequence[int]
) -> CoreShares:
    """Deals the cores out evenly; with more ranks than cores some share one.

    Args:
        cores: to deal out.
        prefill_ranks: of each prefill worker, how many ranks its engine has.
        decode_ranks: likewise.
    """
    workers = [*prefill_ranks, *decode_ranks]
    dealt = iter(affinity.split_cores(cores, max(1, sum(workers))))
    engines = tuple(tuple(islice(dealt, num_ranks)) for num_ranks in workers)
    prefilling = {
        core for engine in engines[: len(prefill_ranks)] for rank in engine for core in rank
    }
    return CoreShares(engines, tuple(core for core in cores if core not in prefilling))


def on_this_host(config: BatonConfig) -> CoreShares:
    """The shares for `config`'s workers; NO_SHARES where they are not this program's to choose."""
    if (
        config.engine != "vllm"
        or affinity.VLLM_BIND_THREADS in os.environ
        or _NVIDIA_DRIVER.exists()
        or not hasattr(os, "sched_getaffinity")
    ):
        return NO_SHARES
    pools = [config.prefill, config.decode]
    sizes = [config.num_ranks(pool) for pool in pools]
    if not all(sizes):
        return NO_SHARES
    prefill, decode = ([size] * pool.workers for size, pool in zip(sizes, pools, strict=True))
    return share(sorted(os.sched_getaffinity(0)), prefill, decode)


class CorePlaces:
    """Deals this host's shares out to workers as they are started."""

    def __init__(self, config: BatonConfig) -> None:
        self._shares = on_this_host(config)
        self._places: dict[str, int] = {}
        cpus = list(self._shares.transfer)
        if cpus and not config.kv_transfer.cpus:
            transfer = config.kv_transfer.model_copy(update={"cpus": cpus})
            config = config.model_copy(update={"kv_transfer": transfer})
        # With the cores of the workers' transfer services.
        self.config = config

    def take(self, worker_id: str, num_ranks: int) -> dict[str, str]:
        """The first free place becomes this worker's; returns what binds its engine to it.

        Args:
            worker_id: of the worker.
            num_ranks: of its engine; a rollout's may have others than the configured number.
        """
        taken = self._places.values()
        place = next(place for place in itertools.count() if place not in taken)
        self._places[worker_id] = place
        return self._shares.environment(place, num_ranks)

    def give_back(self, worker_id: str) -> None:
        """The worker's place is free again; unknown ones are ignored."""
        self._places.pop(worker_id, None)
