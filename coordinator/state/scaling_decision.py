"""Scaling decisions: pool sizes, and the workers that drain or change their pool."""

from __future__ import annotations

from dataclasses import dataclass

from baton.coordinator.state.pools import Pool


@dataclass(frozen=True, slots=True)
class SetSize:
    """A pool must get this number of workers, starting and serving workers together."""

    pool: Pool
    num_workers: int


@dataclass(frozen=True, slots=True)
class Drain:
    """A serving worker must drain, or the start of a starting worker must be cancelled."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Flip:
    """A serving worker must change to the other pool."""

    worker_id: str
    to: Pool


Action = SetSize | Drain | Flip


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """The decision on one pool's size; sizes are numbers of workers.

    Attributes:
        current: Serving workers, and starting workers that are not stuck.
        needed: Size that the load alone needs.
        target: Size after limits, step bounds, the stabilisation window and the GPU budget.
        reason: Reason in words, with the numbers.
        lacking_gpus: Workers by which `target` is smaller because of the GPU budget.
    """

    pool: Pool
    current: int
    needed: int
    target: int
    reason: str
    lacking_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the scaling policy on both pools.

    Attributes:
        actions: Changes to carry out, in order.
    """

    prefill: PoolDecision
    decode: PoolDecision
    actions: tuple[Action, ...] = ()
