"""Assigns CPU cores to local workers on hosts without a GPU.

Without this, all vLLM processes on a host bind their threads to the same cores, and a transfer that
runs during a prefill slows the prefill down.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from baton.runtime.config import BatonConfig
from baton.runtime.process import affinity

_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class CoreShares:
    """Cores of each worker's engine, in start order, and cores of the transfer services.

    Attributes:
        engines: for each worker, the cores of each of its ranks.
        transfer: cores for transfer services, which exclude the cores of prefill engines. Empty:
            any core, because the prefill engines use all cores.
    """

    engines: tuple[tuple[tuple[int, ...], ...], ...]
    transfer: tuple[int, ...]

    def environment(self, index: int, num_ranks: int) -> dict[str, str]:
        """Environment that binds a worker's engine with `num_ranks` ranks to the worker's cores."""
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
    """Distributes the cores evenly; if there are more ranks than cores, some ranks share a core.

    Args:
        cores: cores to distribute.
        prefill_ranks: number of engine ranks of each prefill worker.
        decode_ranks: number of engine ranks of each decode worker.
    """
    workers = [*prefill_ranks, *decode_ranks]
    dealt = iter(affinity.split_cores(cores, max(1, sum(workers))))
    engines = tuple(tuple(islice(dealt, num_ranks)) for num_ranks in workers)
    prefilling = {
        core for engine in engines[: len(prefill_ranks)] for rank in engine for core in rank
    }
    return CoreShares(engines, tuple(core for core in cores if core not in prefilling))


def on_this_host(config: BatonConfig) -> CoreShares:
    """Core shares of the configured workers.

    NO_SHARES if the engine is not vLLM on CPUs, or if the environment already binds the threads.
    """
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
    """Assigns this host's core shares to workers when they start."""

    def __init__(self, config: BatonConfig) -> None:
        self._shares = on_this_host(config)
        self._places: dict[str, int] = {}
        self._ending: set[str] = set()
        cpus = list(self._shares.transfer)
        if cpus and not config.kv_transfer.cpus:
            transfer = config.kv_transfer.model_copy(update={"cpus": cpus})
            config = config.model_copy(update={"kv_transfer": transfer})
        # The given configuration, with the cores of the transfer services added.
        self.config = config

    def take(self, worker_id: str, num_ranks: int) -> dict[str, str]:
        """Assigns a share to a worker; returns the environment that binds its engine.

        It is the first free share. If no share is free, it is the share of a worker that is ending.

        Args:
            worker_id: ID of the worker.
            num_ranks: ranks of the worker's engine; a rollout may change the configured number.
        """
        ending = {self._places[one] for one in self._ending}
        staying = {place for one, place in self._places.items() if one not in self._ending}
        num_shares = len(self._shares.engines)
        # The places from `num_shares` on have no cores of their own.
        place = min(
            set(range(num_shares + len(staying) + 1)) - staying,
            key=lambda place: (place >= num_shares, place in ending, place),
        )
        self._places[worker_id] = place
        return self._shares.environment(place, num_ranks)

    def ends(self, worker_id: str) -> None:
        """Marks a worker as ending; ignores unknown workers."""
        if worker_id in self._places:
            self._ending.add(worker_id)

    def give_back(self, worker_id: str) -> None:
        """Frees a worker's share; ignores unknown workers."""
        self._places.pop(worker_id, None)
        self._ending.discard(worker_id)
