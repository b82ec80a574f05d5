"""Scaling decisions: pool sizes, and the workers that drain or change their pool."""

from __future__ import annotations

from dataclasses import dataclass

from baton.coordinator.state.pools import Pool


@dataclass(frozen=True, slots=True)
class Want:
    """The role is to have so many workers, starting and serving ones counted once."""

    pool: Pool
    num_workers: int


@dataclass(frozen=True, slots=True)
class Drain:
    """A serving worker is to leave, or a starting one to be given up."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Flip:
    """A serving worker is to change to the other pool."""

    worker_id: str
    to: Pool


Action = Want | Drain | Flip


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """Of one pool; workers.

    Attributes:
        current: serving, and starting ones that are not stuck.
        needed: by the load alone.
        target: within limits, steps, window and budget.
        reason: in words, with the numbers.
    """

    pool: Pool
    current: int
    needed: int
    target: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    prefill: PoolDecision
    decode: PoolDecision
    actions: tuple[Action, ...] = ()
    frozen: str = ""
