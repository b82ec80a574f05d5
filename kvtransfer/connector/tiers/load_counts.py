"""Counts the loads from the KV store, by which the coordinator measures the speed of its tiers."""

from __future__ import annotations

from baton.kvtransfer.connector.step_report import TierLoad


class LoadCounts:
    """Bytes and durations of loads since they were taken last, by tier.

    The coordinator compares the bytes with those of a prompt's tokens, in which a block counts
    once. Ranks that hold the same keys and values load them once each, at the same time.

    Args:
        num_ranks: Number of ranks.
        num_replicas: Number of ranks that hold the same keys and values (KvLayout.num_replicas).
    """

    def __init__(self, num_ranks: int, num_replicas: int) -> None:
        self._num_ranks, self._num_replicas = num_ranks, num_replicas
        self._counts: dict[str, TierLoad] = {}

    def add(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Counts loads; both numbers are those of all ranks added up.

        Args:
            tier: "host" or "disk".
            num_bytes: Bytes that the ranks have loaded.
            seconds: Time that this took.
        """
        bytes_before, before_s = self._counts.get(tier, (0, 0.0))
        self._counts[tier] = TierLoad(
            bytes_before + num_bytes // self._num_replicas,
            before_s + seconds / self._num_ranks,
        )

    def take(self) -> dict[str, TierLoad]:
        """Returns the loads of each tier.

        A tier without bytes is left out. Time that its loads have taken so far counts later.
        """
        taken = {tier: load for tier, load in self._counts.items() if load.num_bytes}
        for tier in taken:
            del self._counts[tier]
        return taken
