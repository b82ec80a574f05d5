"""Measured speeds at which workers get KV blocks, as operators see them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.prefixes.prefix_index import Tier
from baton.coordinator.routing.speeds.transfers import Transfers

# Most pairs of workers that are listed; the most recently measured ones.
_MAX_PAIRS = 1024
_SOURCES = {Tier.HOST: "host", Tier.DISK: "disk"}


class KvSpeed(NamedTuple):
    """Mean speed of the latest copies of KV blocks to a worker.

    Attributes:
        worker: ID of the worker.
        source: "host" or "disk": loads from the worker's own tiers; "worker": handoffs and fetches
            from another worker.
        sender: ID of the other worker; empty for the worker's own tiers.
        bytes_per_s: bytes per second, of all ranks together.
    """

    worker: str
    source: str
    sender: str
    bytes_per_s: float


def measured_speeds(loads: Iterable[WorkerLoad], transfers: Transfers) -> Iterator[KvSpeed]:
    """Yields what has been measured of the workers of one fleet.

    Args:
        loads: the loads of the workers.
        transfers: the transfers between them.
    """
    for entry in loads:
        for tier, bytes_per_s in entry.tier_speeds.measured().items():
            yield KvSpeed(entry.key[0], _SOURCES[tier], "", bytes_per_s)
    for (sender, receiver), bytes_per_s in transfers.measured(_MAX_PAIRS).items():
        yield KvSpeed(receiver[0], "worker", sender[0], bytes_per_s)
