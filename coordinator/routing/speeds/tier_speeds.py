"""Predicts how long a worker loads KV blocks from its own KV store, from its loads so far."""

from __future__ import annotations

from baton.coordinator.routing.prefixes.prefix_index import Tier
from baton.coordinator.routing.speeds.mean_speed import LEAST_BYTES, MeanSpeed, with_latest


class TierSpeeds:
    """Speeds of one worker's loads from host memory and from disk.

    The assumed speed applies until a load was measured. It also applies again some time after the
    last load: a worker whose loads were slow gets few prompts that need a load, so that its speed
    would never be measured again.

    Args:
        host_bytes_per_s: assumed bandwidth between host memory and the engine's cache, all ranks
            together.
        disk_bytes_per_s: assumed bandwidth between disk and host memory, all ranks together.
    """

    __slots__ = ("_assumed", "_measured")

    def __init__(self, host_bytes_per_s: float, disk_bytes_per_s: float) -> None:
        self._assumed = {Tier.HOST: 1 / host_bytes_per_s, Tier.DISK: 1 / disk_bytes_per_s}
        self._measured: dict[Tier, MeanSpeed] = {}

    def seconds(self, tier: Tier, num_bytes: float, now: float) -> float:
        """Predicted seconds of a load.

        Args:
            tier: HOST or DISK.
            num_bytes: bytes of all ranks; ranks that hold the same keys and values count once.
            now: time by the core's clock.
        """
        s_per_byte, found = self._assumed[tier], self._measured.get(tier)
        if found is not None:
            s_per_byte += (found.s_per_byte - s_per_byte) * found.share(now)
        return num_bytes * s_per_byte

    def bytes_per_s(self, tier: Tier, now: float) -> float:
        """Returns the speed by which loads are predicted; 0: they are assumed to take no time."""
        s_per_byte = self.seconds(tier, 1, now)
        return 1 / s_per_byte if s_per_byte else 0.0

    def measured(self) -> dict[Tier, float]:
        """Returns the mean speed of the latest loads, in bytes per second, by tier."""
        return {tier: 1 / found.s_per_byte for tier, found in tuple(self._measured.items())}

    def observe(self, tier: Tier, num_bytes: int, seconds: float, now: float) -> None:
        """Records loads; arguments as in `seconds`, with their duration."""
        if num_bytes >= LEAST_BYTES:
            self._measured[tier] = with_latest(self._measured.get(tier), num_bytes, seconds, now)
