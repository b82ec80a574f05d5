"""Turns a plan of the pools' sizes into a decision: actions, and reasons for operators."""

from __future__ import annotations

from baton.coordinator.scaling.autoscale.flips import PlannedFlip
from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.scaling.autoscale.need_history import last_needed_s
from baton.coordinator.scaling.autoscale.next_size import Limit, NextSize
from baton.coordinator.scaling.autoscale.situation import Situation
from baton.coordinator.scaling.autoscale.size_plan import SizePlan
from baton.coordinator.scaling.autoscale.types import NeedHistory
from baton.coordinator.state.pools import POOLS, Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import (
    Action,
    Decision,
    Drain,
    Flip,
    PoolDecision,
    SetSize,
)


def decision_of(plan: SizePlan, situation: Situation) -> Decision:
    """Returns the decision that carries out a plan."""
    actions: list[Action] = []
    if plan.flip is not None:
        actions += [Flip(one.worker_id, plan.flip.into) for one in plan.flipping]
    flipping = frozenset(one.worker_id for one in plan.flipping)
    decided = {}
    for pool in POOLS:
        members, target = situation.members[pool], plan.targets[pool]
        one = decided[pool] = PoolDecision(
            pool,
            members.current,
            situation.needed(pool),
            target,
            _reason(pool, plan, situation),
            lacking_gpus=plan.wanted[pool] - target,
        )
        actions += drains_of_stuck(members, situation.now)
        if target != plan.after_flip[pool]:
            actions.append(SetSize(pool, target))
        leaving = members.without(flipping).to_remove(plan.after_flip[pool] - target)
        actions += [Drain(worker.worker_id, one.reason) for worker in leaving]
    return Decision(decided[Pool.PREFILL], decided[Pool.DECODE], tuple(actions))


def drains_of_stuck(members: Members, now: float) -> list[Drain]:
    """Drains of the workers whose start is stuck; their age is known without any measurement."""
    return [
        Drain(one.worker_id, f"it has been starting for {now - one.since:.0f} s")
        for one in members.stuck
    ]


def _reason(pool: Pool, plan: SizePlan, situation: Situation) -> str:
    """Explains the decision on one pool."""
    need = situation.needs[pool]
    note = _size_note(pool, plan, situation)
    if plan.flip is not None:
        note = _flip_note(pool, plan.flip, situation)
    notes = note, _gpu_note(pool, plan, situation.config)
    parts = f"{need.reason}: {need.workers} needed", *notes
    return "; ".join(part for part in parts if part)


def _flip_note(pool: Pool, flip: PlannedFlip, situation: Situation) -> str:
    """Explains a flip, in the decision on one of its pools."""
    if pool is flip.into:
        giver = flip.giver
        return f"{flip.number} from {giver.value}, which needs {situation.needed(giver)}"
    return f"{flip.number} to {flip.into.value}, which is short"


def _gpu_note(pool: Pool, plan: SizePlan, config: ScalingConfig) -> str:
    """Explains a size that the GPUs do not suffice for; empty if they do."""
    if plan.targets[pool] >= plan.wanted[pool]:
        return ""
    return f"{plan.wanted[pool]} wanted, {plan.free_gpus} of {config.max_gpus} GPUs are free"


def _size_note(pool: Pool, plan: SizePlan, situation: Situation) -> str:
    """Explains why the size of a pool differs from the needed size; empty if it does not."""
    following = plan.next[pool]
    if not situation.shared:
        return _limit_note(following, situation.states[pool].need_history, situation)
    note = f"{situation.total_needed} in both pools, which share their work"
    limit = _limit_note(following, situation.total_history, situation)
    return f"{note}; {limit}" if limit else note


def _limit_note(following: NextSize, history: NeedHistory, situation: Situation) -> str:
    """Names the limit that applied to a size; empty if none did."""
    match following.limit:
        case None:
            return ""
        case Limit.STEP:
            return f"at most {following.size} in one step"
        case Limit.CEILING:
            return f"at most {following.size} allowed"
        case Limit.WINDOW:
            ago_s = last_needed_s(history, following.keep_at_least, situation.now)
            window = f"{situation.config.window_s:g} s"
            if ago_s is None:
                return f"{following.keep_at_least} were needed within {window}"
            return f"{following.keep_at_least} were needed {ago_s:.0f} s ago (kept for {window})"
