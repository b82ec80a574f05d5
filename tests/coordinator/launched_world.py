"""A core that starts its own workers, with a launcher controlled by the test."""

from __future__ import annotations

from dataclasses import replace

from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig, ScalingSettings
from baton.v1 import cluster_pb2, common_pb2

ROLES = {Pool.PREFILL: common_pb2.ROLE_PREFILL, Pool.DECODE: common_pb2.ROLE_DECODE}
CONFIG = ScalingConfig(
    prefill=PoolLimits(0, 4),
    decode=PoolLimits(0, 4),
    cold_start_s=10.0,
    start_timeout_s=30.0,
    down_window_s=60.0,
)


class Launched:
    """A world whose core starts `prefill` and `decode` workers at the beginning.

    Attributes:
        world: Core with its clock and recorded effects.
        started, ended: IDs of workers that the core has started and ended, in order.
        there: IDs of workers that have attached.
        gone: IDs of workers whose processes have ended.
    """

    def __init__(
        self, new_world, prefill=1, decode=1, *, autoscale=False, limits=None, world=None, **config
    ) -> None:
        config = replace(CONFIG, **config, **(limits or {}))
        scaling = ScalingSettings(config, autoscale=autoscale)
        self.world = new_world(scaling=scaling, **(world or {}))
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.world.handle(ev.LauncherReady({Pool.PREFILL: prefill, Pool.DECODE: decode}))

    @property
    def core(self):
        return self.world.core

    @property
    def started(self) -> list[str]:
        return [one.worker_id for one in self.world.membership if isinstance(one, ev.StartWorker)]

    @property
    def ended(self) -> list[str]:
        return [one.worker_id for one in self.world.membership if isinstance(one, ev.EndWorker)]

    def pool_of(self, worker_id: str) -> Pool:
        return next(
            one.pool
            for one in self.world.membership
            if isinstance(one, ev.StartWorker) and one.worker_id == worker_id
        )

    def revision_of(self, worker_id: str) -> str:
        return next(
            one.revision.name
            for one in self.world.membership
            if isinstance(one, ev.StartWorker) and one.worker_id == worker_id
        )

    def come_up(self) -> None:
        """Attaches all starting workers."""
        for worker_id in self.started:
            if worker_id not in self.there | self.gone and worker_id not in self.ended:
                self.there.add(worker_id)
                role = ROLES[self.pool_of(worker_id)]
                self.world.attach(
                    worker_id,
                    role,
                    startup_ms={"process": 100, "weights": 2000},
                    revision=self.revision_of(worker_id),
                )

    def wait(self, seconds: float) -> None:
        """Advances the clock; workers send signs of life, and draining workers leave."""
        for _ in range(round(seconds)):
            self.world.wait(1)
            self.leave()

    def leave(self) -> None:
        """Stops idle draining workers, and reports ended processes as gone."""
        for worker in self.core.workers:
            if worker.state == cluster_pb2.WORKER_STATE_DRAINING and not len(worker.ledger):
                stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
                self.world.handle(ev.WorkerChanged(worker.key, stopped))
        for worker_id in set(self.ended) - self.gone:
            self.gone.add(worker_id)
            self.world.handle(ev.WorkerExited(worker_id, "was ended", gone=True))

    def ids(self, pool: Pool) -> set[str]:
        """IDs of attached workers that do not drain."""
        return {
            worker.id
            for worker in self.core.workers
            if worker.role == ROLES[pool] and worker.state != cluster_pb2.WORKER_STATE_DRAINING
        }

    def reason(self, pool: Pool) -> str:
        return self.core.scaler.decisions[pool][-1].decision.reason

    def answer_flips(self) -> None:
        """Workers carry out their SetRoleCommands."""
        for worker in self.core.workers:
            for command in self.world.commands[worker.id]:
                if isinstance(command, cluster_pb2.SetRoleCommand) and worker.role != command.role:
                    change = cluster_pb2.WorkerStateChanged(
                        state=cluster_pb2.WORKER_STATE_SERVING, role=command.role
                    )
                    self.world.handle(ev.WorkerChanged(worker.key, change))
