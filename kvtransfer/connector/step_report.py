"""The connector's report on one step, which vLLM carries to Baton's engine.

vLLM carries it to Baton's process as a dict of plain values (SchedulerStats.kv_connector_stats).
Only this module knows the dict's keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.kvtransfer.block_changes import CacheChange
from baton.kvtransfer.connector.step_work import StepWork


class HostLoad(NamedTuple):
    """Prompt tokens that a request loads from host memory.

    Attributes:
        num_tokens: Number of these tokens.
        num_from_disk: Number of these tokens that had to come from disk to host memory.
    """

    num_tokens: int
    num_from_disk: int


class TierLoad(NamedTuple):
    """Loads from one tier that have ended.

    Attributes:
        num_bytes: Bytes of all ranks; ranks that hold the same keys and values count once.
        seconds: Time in which the ranks loaded them, all at the same time.
    """

    num_bytes: int
    seconds: float


class Dropped(NamedTuple):
    """Result of an order to delete KV blocks (cache_drops.py).

    Attributes:
        num_device: Blocks deleted on the device.
        num_host: Blocks deleted in host memory.
        num_disk: Blocks deleted on disk.
        has_files_left: Whether the disk has failed, so that files may be left.
    """

    num_device: int
    num_host: int
    num_disk: int
    has_files_left: bool


@dataclass(slots=True)
class StepReport:
    """Report on a step that has ended; each part of the connector adds its fields.

    Attributes:
        work: The step's work. None if the step loaded handoffs or computed nothing: its time says
            nothing about the model.
        cache: Change of the prefix cache; None for no change.
        host_cache: Change of host memory; None for no change.
        disk_cache: Change of the disk; None for no change.
        num_wrong_files: Files of the disk that were wrong, so that their blocks were not used.
        disk_failed: True once, when the disk has failed and is not used any more.
        host_loads: Loads from host memory that requests have begun, by the engine's request ID.
        tier_loads: Loads that have ended, by tier: "host" or "disk".
        dropped: Orders to delete KV blocks that have ended, by their IDs.
        gone: Requests that lack blocks that they cannot compute, by the engine's request ID. The
            value of a request that serves a fetch and has saved nothing is the number of leading
            prompt tokens that this engine holds; the value of any other request is 0.
        is_cut_off: Whether this engine has lost its transfer service, which does not come back.
    """

    work: StepWork | None = None
    cache: CacheChange | None = None
    host_cache: CacheChange | None = None
    disk_cache: CacheChange | None = None
    num_wrong_files: int = 0
    disk_failed: bool = False
    host_loads: dict[str, HostLoad] = field(default_factory=dict)
    tier_loads: dict[str, TierLoad] = field(default_factory=dict)
    dropped: dict[int, Dropped] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    is_cut_off: bool = False

    def encode(self) -> dict[str, Any]:
        """Returns the report as plain values, without the fields that say nothing."""
        encoded = {
            "work": self.work,
            "cache": _encoded(self.cache),
            "host_cache": _encoded(self.host_cache),
            "disk_cache": _encoded(self.disk_cache),
            "wrong_files": self.num_wrong_files,
            "disk_failed": self.disk_failed,
            "host_loads": self.host_loads,
            "tier_loads": self.tier_loads,
            "dropped": self.dropped,
            "gone": self.gone,
            "cut_off": self.is_cut_off,
        }
        return {key: value for key, value in encoded.items() if value}

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> StepReport:
        """Reads the result of `encode`, whose tuples have become lists."""
        get = encoded.get
        work = get("work")
        return cls(
            work=None if work is None else StepWork(*work),
            cache=_decoded(get("cache")),
            host_cache=_decoded(get("host_cache")),
            disk_cache=_decoded(get("disk_cache")),
            num_wrong_files=get("wrong_files", 0),
            disk_failed=get("disk_failed", False),
            host_loads={name: HostLoad(*load) for name, load in get("host_loads", {}).items()},
            tier_loads={tier: TierLoad(*load) for tier, load in get("tier_loads", {}).items()},
            dropped={drop_id: Dropped(*done) for drop_id, done in get("dropped", {}).items()},
            gone=dict(get("gone", {})),
            is_cut_off=get("cut_off", False),
        )


def _encoded(change: CacheChange | None) -> Sequence[Any] | None:
    return None if change is None else (change.stored, change.removed, change.cleared)


def _decoded(encoded: Sequence[Any] | None) -> CacheChange | None:
    return None if encoded is None else CacheChange(*encoded)
