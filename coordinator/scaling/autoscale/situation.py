"""Input of one plan of the pools' sizes: the workers, their needs, and the needs of the past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.scaling.autoscale.need import Need
from baton.coordinator.scaling.autoscale.need_history import recent_need
from baton.coordinator.scaling.autoscale.types import NeedHistory, PoolState
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig


@dataclass(frozen=True, slots=True)
class Situation:
    """Input of one plan.

    Attributes:
        members: the workers, by pool.
        needs: number of workers that the present load needs, by pool.
        states: pool states whose need histories contain `needs`.
        total_history: sums of both pools' needs.
        shared: whether the pools share their work.
        config: limits, targets and times.
        known_s: how long the load has been known.
        now: time by the core's clock.
    """

    members: Mapping[Pool, Members]
    needs: Mapping[Pool, Need]
    states: Mapping[Pool, PoolState]
    total_history: NeedHistory
    shared: bool
    config: ScalingConfig
    known_s: float
    now: float

    @property
    def is_young(self) -> bool:
        """Whether the load has been known for a short time only."""
        return self.known_s < self.config.young_s

    @property
    def can_flip(self) -> bool:
        """Whether workers can change pools: flips are on and the pools use equal GPU counts."""
        return self.config.flip and self.config.prefill.gpus == self.config.decode.gpus

    @property
    def current(self) -> int:
        """Number of serving and starting workers of both pools."""
        return sum(one.current for one in self.members.values())

    @property
    def total_needed(self) -> int:
        """Number of workers that the load of both pools needs."""
        return sum(one.workers for one in self.needs.values())

    def limits(self, pool: Pool) -> PoolLimits:
        """Limits of this pool; its workers that stay are always within them."""
        limits, num_staying = self.config.limits(pool), self.members[pool].num_staying
        return replace(
            limits,
            floor=max(limits.floor, num_staying),
            ceiling=max(limits.ceiling, num_staying),
        )

    def needed(self, pool: Pool) -> int:
        """Number of workers that the load of this pool needs."""
        return self.needs[pool].workers

    def recent_need(self, history: NeedHistory) -> int:
        """Maximum need in the last seconds; see need_history.py."""
        return recent_need(history, self.config, self.known_s, self.now)

    def recently_needed(self, pool: Pool) -> int:
        """Maximum need of this pool in the last seconds."""
        return self.recent_need(self.states[pool].need_history)
