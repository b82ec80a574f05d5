"""Messages that vLLM carries between the connector beside its scheduler and those in the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from baton.kvtransfer.connector.handoffs.handoff_step import HandoffStep, LoadReport
from baton.kvtransfer.connector.tiers.cache_drops import Clearing
from baton.kvtransfer.disk.orders import DiskReport, Order

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        OffloadingWorkerMetadata,
    )


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders for a step, which vLLM carries from ConnectorScheduler to every ConnectorWorker.

    Attributes:
        handoffs: Blocks to save and to load for handoffs.
        host: Copies from and to host memory; None without a host tier.
        disk: Orders for the ranks' disks.
        clearing: Blocks of host memory that an operator has deleted.
        is_idle: Whether the step computes nothing.
        limit_s: Longest time of the step that its streams allow; 0: none is known.
    """

    handoffs: HandoffStep = field(default_factory=HandoffStep)
    host: OffloadingConnectorMetadata | None = None
    disk: list[Order] = field(default_factory=list)
    clearing: Clearing = field(default_factory=Clearing)
    is_idle: bool = False
    limit_s: float = 0.0


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """The ranks' report to ConnectorScheduler after a step.

    Attributes:
        loads: How the step's loads went.
        is_cut_off: Whether a rank has lost the transfer service.
        host: Copies from and to host memory that have ended; None: there were none.
        disk: Orders that the ranks' disks have carried out; None: there were none.
        cleared: Orders of an operator whose last block a rank has overwritten, once per rank.
    """

    loads: LoadReport
    is_cut_off: bool = False
    host: OffloadingWorkerMetadata | None = None
    disk: DiskReport | None = None
    cleared: list[int] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, RankReport)
        self.loads.add(other.loads)
        self.is_cut_off = self.is_cut_off or other.is_cut_off
        if self.host is None or other.host is None:
            self.host = self.host or other.host
        else:
            self.host = self.host.aggregate(other.host)
        if self.disk is None or other.disk is None:
            self.disk = self.disk or other.disk
        else:
            self.disk.add(other.disk)
        self.cleared += other.cleared
        return self
