"""Reports and counts the KV blocks of all tiers of this worker."""

from __future__ import annotations

from baton.engine.base import EngineStep
from baton.v1 import cluster_pb2
from baton.worker.cache_reports import CacheReports
from baton.worker.metrics import DEVICE, DISK, HOST, CacheCounts, TierCounts
from baton.worker.outbox import Outbox


class TierReports:
    """Passes changes of the tiers on to the coordinator, and counts for the metrics.

    Args:
        outbox: Queue for the reports.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._device = CacheReports(outbox)
        self._host = CacheReports(outbox, cluster_pb2.CACHE_TIER_HOST)
        self._disk = CacheReports(outbox, cluster_pb2.CACHE_TIER_DISK)
        # Counts since the start; see CacheCounts.
        self._num_host_tokens = self._num_disk_tokens = 0
        self._num_wrong_files, self._disk_failed = 0, False

    def take(self, step: EngineStep) -> None:
        """Takes what a step reports about the tiers."""
        if step.cache is not None:
            self._device.take(step.cache)
        if step.host_cache is not None:
            self._host.take(step.host_cache)
        self.take_disk(step)

    def take_disk(self, step: EngineStep) -> None:
        """Takes what a step reports about the disk tier.

        The worker passes the steps of the warm-up. Their other blocks are those of the warm-up
        itself, which no prompt has.
        """
        if step.disk_cache is not None:
            self._disk.take(step.disk_cache)
        self._num_wrong_files += step.num_wrong_files
        self._disk_failed = self._disk_failed or step.disk_failed

    def count_loads(self, num_host_tokens: int, num_disk_tokens: int) -> None:
        """Counts prompt tokens that the engine has loaded for a request."""
        self._num_host_tokens += num_host_tokens
        self._num_disk_tokens += num_disk_tokens

    def flush(self) -> None:
        """Posts the pending changes of all tiers."""
        for tier in (self._device, self._host, self._disk):
            tier.flush()

    def report_all(self) -> None:
        """Posts all blocks, for a coordinator that does not know any of them."""
        for tier in (self._device, self._host, self._disk):
            tier.report_all()

    def counts(self) -> CacheCounts:
        """The current counts."""
        tiers = {
            DEVICE: (self._device, 0),
            HOST: (self._host, self._num_host_tokens),
            DISK: (self._disk, self._num_disk_tokens),
        }
        return CacheCounts(
            tiers={
                name: TierCounts(len(tier), tier.num_removed, num_tokens)
                for name, (tier, num_tokens) in tiers.items()
            },
            num_wrong_files=self._num_wrong_files,
            disk_failed=self._disk_failed,
        )
