"""Workers of one pool as the autoscaler counts them, and the order in which they are removed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.coordinator.scaling.autoscale.types import Observation, Phase, WorkerView
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig


@dataclass(frozen=True, slots=True)
class Members:
    """Workers of a pool.

    Attributes:
        serving: serving workers.
        starting: workers that start or flip into the pool.
        stuck: workers whose cold start has taken longer than the start timeout.
        num_gpus: GPUs of all workers, including stuck and draining workers.
    """

    serving: tuple[WorkerView, ...]
    starting: tuple[WorkerView, ...]
    stuck: tuple[WorkerView, ...]
    num_gpus: int

    @property
    def current(self) -> int:
        """Number of serving and starting workers."""
        return len(self.serving) + len(self.starting)

    @property
    def num_cold(self) -> int:
        """Number of workers that start with a cold start, in contrast to flips."""
        return sum(not one.flips for one in self.starting)

    @property
    def num_warm(self) -> int:
        """Number of serving workers, and of workers that flip into the pool."""
        return self.current - self.num_cold

    @property
    def num_staying(self) -> int:
        """Number of workers that other processes have started; the pool keeps these."""
        return sum(one.stays for one in (*self.serving, *self.starting))

    @property
    def movable(self) -> Members:
        """Members that may be moved to the other pool now."""
        serving = tuple(one for one in self.serving if one.responds and not one.stays)
        return replace(self, serving=serving, starting=())

    @classmethod
    def of(cls, observation: Observation, pool: Pool, config: ScalingConfig, now: float) -> Members:
        starting = observation.of(pool, Phase.STARTING)
        # A flip may take as long as the worker's requests; it has a limit of its own (drain_s).
        stuck = tuple(
            one for one in starting if not one.flips and now - one.since > config.start_timeout_s
        )
        usual = config.limits(pool).gpus
        everyone = (one.gpus for one in observation.workers if one.pool is pool)
        return cls(
            serving=tuple(observation.of(pool, Phase.SERVING)),
            starting=tuple(one for one in starting if one not in stuck),
            stuck=stuck,
            num_gpus=sum(usual if gpus is None else gpus for gpus in everyone),
        )

    def without(self, gone: frozenset[str]) -> Members:
        """The members without the serving workers that have these IDs."""
        return replace(
            self, serving=tuple(one for one in self.serving if one.worker_id not in gone)
        )

    def to_remove(self, number: int) -> list[WorkerView]:
        """Workers to remove: first starting workers, then the serving workers with the least load.

        Among starting workers, cold starts come before flips, and the youngest comes first.
        """
        starting = sorted(self.starting, key=lambda one: (one.flips, -one.since, one.worker_id))
        serving = sorted(self.serving, key=lambda one: (one.num_tokens, -one.since, one.worker_id))
        ours = [one for one in (*starting, *serving) if not one.stays]
        return ours[: max(0, number)]


def share_work(observation: Observation, config: ScalingConfig) -> bool:
    """Whether any worker can do the work of both pools, so that only their sum matters."""
    return observation.shared and config.prefill.gpus == config.decode.gpus
