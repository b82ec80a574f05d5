"""Decides the sizes of the prefill and decode pools; `decide` is a pure function.

The prefill pool follows the predicted tail of TTFT, the decode pool follows ITL and KV cache use.
Both pools are sized for the load expected after one cold start, and grow at once. They shrink to
the largest size that was needed within a time window. If one pool is short and the other has spare
workers, workers change roles before new workers are started. If the workers of both pools do the
same work (an elastic cell with workers of one kind), the sum of both needs sizes both pools
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from baton.coordinator.scaling.autoscale import forecast, sizing
from baton.coordinator.scaling.autoscale.corrections import decode_correction, prefill_feedback
from baton.coordinator.scaling.autoscale.decode_need import decode_need
from baton.coordinator.scaling.autoscale.need import Need, lanes_with_targets
from baton.coordinator.scaling.autoscale.prefill_need import prefill_need
from baton.coordinator.scaling.autoscale.sizing import POOLS, Members
from baton.coordinator.scaling.autoscale.types import Misses, Observation, PoolState, Sample, State
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import (
    Action,
    Decision,
    Drain,
    Flip,
    PoolDecision,
    Want,
)

# After a pause of more than this many intervals between decisions, load counts are not usable.
_LONGEST_PAUSE = 12
# An observation older than this freezes the pools.
_STALE_S = 20.0
# Seconds after a pool was too small during which missed targets are ignored, because the earlier
# shortage caused them.
_SETTLES_S = 30.0


def decide(
    observation: Observation, config: ScalingConfig, state: State, now: float
) -> tuple[Decision, State]:
    """Makes one decision.

    Args:
        observation: the present observation.
        config: limits, targets and times; may change between calls.
        state: state returned by the previous call; `State()` at first.
        now: time by the core's clock, in seconds. If the clock went back or a long pause occurred,
            the load history is dropped, and no pool shrinks until there is a new history.

    Returns:
        The decision, and the state for the next one.
    """
    members = {pool: Members.of(observation, pool, config, now) for pool in POOLS}
    problem = _unusable(observation, now)
    if problem:
        # The old state is kept, so that the next sample covers the whole time since the last one.
        return _frozen(members, config, problem, now), state
    samples, problem = _samples(observation, config, state, now)
    after = replace(
        state,
        now=now,
        lanes=observation.lanes,
        samples=samples,
        busy_at=now if state.busy_at is None or _busy(observation, state) else state.busy_at,
    )
    if problem:
        return _frozen(members, config, problem, now), after
    states = {Pool.PREFILL: state.prefill, Pool.DECODE: state.decode}
    serving = {pool: len(members[pool].serving) for pool in POOLS}
    shared = sizing.share_work(observation, config)
    num_all = sum(serving.values())
    # In a shared cell, all workers compute the queued prompts.
    num_prefill = num_all if shared else serving[Pool.PREFILL]
    prefill = prefill_need(observation, config, samples, state.prefill.correction, num_prefill, now)
    num_decode = serving[Pool.DECODE]
    if shared:
        num_decode = num_all - max(1, prefill.workers)
    decode = decode_need(observation, config, samples, state.decode.correction, num_decode, now)
    needs = {Pool.PREFILL: prefill, Pool.DECODE: decode}
    idle = after.busy_at is not None and now - after.busy_at >= config.idle_s
    needs = {pool: _keep_one(need, config.idle_s, idle=idle) for pool, need in needs.items()}
    # Workers of a pool that only `_keep_one` has needed; they leave without a further delay.
    num_kept = int(idle)
    known_s = now - samples[0].at + samples[0].span_s
    states = {
        pool: replace(
            states[pool],
            wanted=sizing.add_need(
                states[pool].wanted,
                members[pool].current,
                needs[pool].workers,
                config,
                known_s,
                now,
                num_kept=num_kept,
            ),
        )
        for pool in POOLS
    }
    wanted = sizing.add_need(
        state.wanted,
        sum(one.current for one in members.values()),
        sum(need.workers for need in needs.values()),
        config,
        known_s,
        now,
        num_kept=num_kept * len(POOLS),
    )
    decision, flipped_into = _decision(
        members, needs, states, wanted, config, known_s, now, shared=shared
    )
    if flipped_into is not None:
        states[flipped_into] = replace(states[flipped_into], flipped_in_at=now)
    short = states[Pool.PREFILL].wanted[-1][1] > serving[Pool.PREFILL]
    if shared:
        short = wanted[-1][1] > sum(serving.values())
    states = _with_feedback(
        observation, config, states, now - (state.now or now), now, prefill_short=short
    )
    return decision, replace(
        after, prefill=states[Pool.PREFILL], decode=states[Pool.DECODE], wanted=wanted
    )


def _unusable(observation: Observation, now: float) -> str:
    """Returns why the observation cannot be used; empty if it can."""
    age_s = now - observation.observed_at
    if not math.isfinite(age_s) or age_s > _STALE_S:
        return f"the workers were last heard of {age_s:.0f} s ago"
    for number in observation.required:
        if not math.isfinite(number) or number < 0:
            return f"a measurement is {number}"
    return ""


def _frozen(
    members: dict[Pool, Members], config: ScalingConfig, problem: str, now: float
) -> Decision:
    """Keeps the pools' sizes, but grows pools to their minimum and ends stuck starts."""
    decided = {}
    for pool in POOLS:
        current, floor = members[pool].current, config.limits(pool).floor
        reason = f"{problem}: stays as it is"
        if current < floor:
            reason = f"{problem}: at least {floor} all the same"
        decided[pool] = PoolDecision(pool, current, current, max(current, floor), reason)
    sizes, _ = sizing.within_gpu_budget(
        {pool: one.target for pool, one in decided.items()}, members, config
    )
    actions: list[Action] = []
    for pool in POOLS:
        actions += _drains_of_stuck(members[pool], now)
        if sizes[pool] > members[pool].current:
            actions.append(Want(pool, sizes[pool]))
        lacking = decided[pool].target - sizes[pool]
        decided[pool] = replace(decided[pool], target=sizes[pool], lacking_gpus=lacking)
    return Decision(decided[Pool.PREFILL], decided[Pool.DECODE], tuple(actions))


def _drains_of_stuck(members: Members, now: float) -> list[Drain]:
    """Drains of the workers whose start is stuck; their age is known without any measurement."""
    return [
        Drain(one.worker_id, f"it has been starting for {now - one.since:.0f} s")
        for one in members.stuck
    ]


def _samples(
    observation: Observation, config: ScalingConfig, state: State, now: float
) -> tuple[tuple[Sample, ...], str]:
    """Appends a sample since the last decision to the history.

    Returns:
        The history, and the reason why no history is available (empty if one is).
    """
    if state.now is None:
        return (), "nothing is known of the load yet"
    span_s = now - state.now
    if span_s < 0:
        return (), f"the clock went back {-span_s:.0f} s"
    if span_s > _LONGEST_PAUSE * config.interval_s:
        return (), f"nothing was decided for {span_s:.0f} s"
    past = forecast.kept(state.samples, now)
    if not span_s:
        return past, "" if past else "nothing is known of the load yet"
    lanes = frozenset(lanes_with_targets(config))
    sample = forecast.sample(
        state.lanes, observation.lanes, lanes, now, span_s, observation.decode.num_with_targets
    )
    if sample is None:
        return (), "the coordinator's counts began again"
    return (*past, sample), ""


def _busy(observation: Observation, state: State) -> bool:
    """Whether any request was present since the last decision, including lanes without targets."""
    before = dict(state.lanes)
    return observation.decode.num_decodes > 0 or any(
        lane.queued_s > 0
        or lane.num_waiting > 0
        or lane.num_arrived != before.get(name, lane).num_arrived
        for name, lane in observation.lanes
    )


def _keep_one(need: Need, idle_s: float, *, idle: bool) -> Need:
    """Needs at least one worker until no request has come for `idle_s` seconds."""
    if need.workers or idle:
        return need
    return Need(1, f"{need.reason}, and one worker stays until none has come for {idle_s:g} s")


def _with_feedback(
    observation: Observation,
    config: ScalingConfig,
    states: dict[Pool, PoolState],
    span_s: float,
    now: float,
    *,
    prefill_short: bool,
) -> dict[Pool, PoolState]:
    """Updates the pool states with measured TTFT and ITL.

    Missed targets of a pool that was recently too small are ignored: the shortage explains them.
    """
    lanes, found = dict(observation.lanes), dict(states)
    one = found[Pool.PREFILL]
    if prefill_short:
        found[Pool.PREFILL] = replace(one, misses=Misses(), small_at=now)
    elif now - one.small_at < _SETTLES_S:
        found[Pool.PREFILL] = replace(one, misses=Misses())
    else:
        measured = [(lanes[name], target) for name, target in config.targets if name in lanes]
        found[Pool.PREFILL] = prefill_feedback(one, measured, span_s)
    one = found[Pool.DECODE]
    factor = decode_correction(one.correction, observation.decode)
    found[Pool.DECODE] = replace(one, correction=factor)
    return found


def _decision(
    members: dict[Pool, Members],
    needs: dict[Pool, Need],
    states: dict[Pool, PoolState],
    wanted: Sequence[tuple[float, int]],
    config: ScalingConfig,
    known_s: float,
    now: float,
    *,
    shared: bool,
) -> tuple[Decision, Pool | None]:
    needed = {pool: needs[pool].workers for pool in POOLS}
    sizes: dict[Pool, int] = {}
    why: dict[Pool, str] = {}
    if shared:
        sizes, limit = sizing.joint_sizes(members, needed, wanted, config, known_s, now)
        note = f"{sum(needed.values())} in both pools, which share their work"
        why = dict.fromkeys(POOLS, f"{note}; {limit}" if limit else note)
        most, flip = sizes, sizing.plan_exchange(sizes, members, config)
    else:
        recent = sizing.recent_needs(states, config, known_s, now)
        most = sizing.shrink_limits(members, needed, states, wanted, recent, config, known_s)
        for pool in POOLS:
            sizes[pool], why[pool] = sizing.next_size(
                members[pool].current,
                needed[pool],
                most[pool],
                sizing.last_needed_s(states[pool].wanted, most[pool], now),
                config,
                config.limits(pool),
            )
        flip = sizing.plan_flip(sizes, members, needed, states, recent, config, now)
    actions: list[Action] = []
    moved = dict.fromkeys(POOLS, 0)
    gone: set[str] = set()
    if flip is not None:
        number, into = flip
        giver = sizing.other_pool(into)
        moved[into], moved[giver] = number, -number
        why[into] = f"{number} from {giver.value}, which needs {needed[giver]}"
        why[giver] = f"{number} to {into.value}, which is short"
        for worker in sizing.to_remove(sizing.movable(members[giver]), number):
            actions.append(Flip(worker.worker_id, into))
            gone.add(worker.worker_id)
    after = {pool: members[pool].current + moved[pool] for pool in POOLS}
    # A pool that has given workers to the other pool does not shrink further in this decision.
    sizes = {pool: after[pool] if moved[pool] < 0 else sizes[pool] for pool in POOLS}
    if flip is not None:
        # Starts that a flipped worker replaces are ended, unless `most` keeps them for both pools
        # together.
        into, giver = flip[1], sizing.other_pool(flip[1])
        spared = min(after[into], sum(most.values()) - sizes[giver], config.limits(into).ceiling)
        sizes[into] = max(sizes[into], spared)
    allowed, poor = sizing.within_gpu_budget(sizes, _moved(members, moved), config)
    decided = {}
    for pool in POOLS:
        need = needs[pool]
        notes = "; ".join(note for note in (why[pool], poor[pool]) if note)
        reason = f"{need.reason}: {need.workers} needed" + (f"; {notes}" if notes else "")
        decided[pool] = PoolDecision(
            pool,
            members[pool].current,
            need.workers,
            allowed[pool],
            reason,
            lacking_gpus=sizes[pool] - allowed[pool],
        )
        actions += _drains_of_stuck(members[pool], now)
        if allowed[pool] != after[pool]:
            actions.append(Want(pool, allowed[pool]))
        staying = replace(
            members[pool],
            serving=tuple(one for one in members[pool].serving if one.worker_id not in gone),
        )
        actions += [
            Drain(one.worker_id, reason)
            for one in sizing.to_remove(staying, after[pool] - allowed[pool])
        ]
    into_pool = flip[1] if flip is not None else None
    return Decision(decided[Pool.PREFILL], decided[Pool.DECODE], tuple(actions)), into_pool


def _moved(members: dict[Pool, Members], moved: dict[Pool, int]) -> dict[Pool, Members]:
    """The members after the flips; flipped workers count as serving in their new pool."""
    found = dict(members)
    for pool in POOLS:
        one = members[pool]
        if moved[pool] < 0:
            found[pool] = replace(one, serving=one.serving[: len(one.serving) + moved[pool]])
        elif moved[pool]:
            giver = members[sizing.other_pool(pool)]
            found[pool] = replace(one, serving=(*one.serving, *giver.serving[: moved[pool]]))
    return found
