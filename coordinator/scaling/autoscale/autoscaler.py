"""Decides the sizes of the prefill and decode pools; `decide` is a pure function.

The prefill pool follows the predicted tail of TTFT, the decode pool follows ITL and KV cache use.
Both pools are sized for the load expected after one cold start, and grow at once. They shrink to
the largest size that was needed within a time window. If one pool is short and the other has spare
workers, workers change roles before new workers are started. If the workers of both pools do the
same work (an elastic cell with workers of one kind), the sum of both needs sizes both pools
together.

Words for sizes, in the order of the computation:

- current: serving workers, and starting workers that are not stuck.
- needed: size that the present load needs. A need history remembers the needed sizes.
- keep_at_least: size below which a pool does not shrink, because of its need history.
- wanted: size after the pool's limits, the largest step and flips.
- target: wanted size that the GPUs of `scaling.max_gpus` suffice for. The decision names it.
"""

from __future__ import annotations

from dataclasses import replace

from baton.coordinator.scaling.autoscale.corrections import decode_correction, prefill_feedback
from baton.coordinator.scaling.autoscale.decode_need import decode_need
from baton.coordinator.scaling.autoscale.explanation import decision_of
from baton.coordinator.scaling.autoscale.frozen import frozen
from baton.coordinator.scaling.autoscale.load_history import is_busy, unusable, with_sample
from baton.coordinator.scaling.autoscale.members import Members, share_work
from baton.coordinator.scaling.autoscale.need import Need
from baton.coordinator.scaling.autoscale.need_history import with_need
from baton.coordinator.scaling.autoscale.prefill_need import prefill_need
from baton.coordinator.scaling.autoscale.situation import Situation
from baton.coordinator.scaling.autoscale.size_plan import plan_sizes
from baton.coordinator.scaling.autoscale.types import Misses, Observation, PoolState, Sample, State
from baton.coordinator.state.pools import POOLS, Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import Decision

# Seconds after a pool was too small during which missed targets are ignored, because the earlier
# shortage caused them.
_SETTLES_S = 30.0


class Autoscaler:
    """Calls `decide` and keeps the state between decisions."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config, self.interval_s = config, config.interval_s
        self._state = State()

    def decide(self, observation: Observation, config: ScalingConfig, now: float) -> Decision:
        decision, self._state = decide(observation, config, self._state, now)
        return decision


def decide(
    observation: Observation, config: ScalingConfig, state: State, now: float
) -> tuple[Decision, State]:
    """Makes one decision.

    Args:
        observation: the present observation.
        config: limits, targets and times; may change between calls.
        state: state returned by the previous call; `State()` at first.
        now: time by the core's clock, in seconds. If the clock went back or a long pause occurred,
            the load and need histories are dropped, and no pool shrinks until there are new ones.

    Returns:
        The decision, and the state for the next one.
    """
    members = {pool: Members.of(observation, pool, config, now) for pool in POOLS}
    problem = unusable(observation, now)
    if problem:
        # The old state is kept, so that the next sample covers the whole time since the last one.
        return frozen(members, config, problem, now), state
    samples, problem = with_sample(observation, config, state, now)
    busy_at = now if state.busy_at is None or is_busy(observation, state) else state.busy_at
    after = replace(state, now=now, lanes=observation.lanes, samples=samples, busy_at=busy_at)
    if problem:
        return frozen(members, config, problem, now), _without_needs(after)
    is_idle = now - busy_at >= config.idle_s
    needs = _needs(observation, config, after, members, now, is_idle=is_idle)
    situation = _situation(observation, config, after, members, needs, now, is_idle=is_idle)
    plan = plan_sizes(situation)
    states = dict(situation.states)
    if plan.flip is not None:
        into = plan.flip.into
        states[into] = replace(states[into], flipped_in_at=now)
    span_s = 0.0 if state.now is None else now - state.now
    after = replace(
        after,
        prefill=_with_ttfts(states[Pool.PREFILL], observation, situation, span_s),
        decode=_with_gaps(states[Pool.DECODE], observation),
        total_history=situation.total_history,
    )
    return decision_of(plan, situation), after


def _without_needs(state: State) -> State:
    """Forgets the earlier needs together with the load, so that the present sizes count again."""
    return replace(
        state,
        prefill=replace(state.prefill, need_history=()),
        decode=replace(state.decode, need_history=()),
        total_history=(),
    )


def _needs(
    observation: Observation,
    config: ScalingConfig,
    state: State,
    members: dict[Pool, Members],
    now: float,
    *,
    is_idle: bool,
) -> dict[Pool, Need]:
    """Numbers of workers that the load of each pool needs."""
    num_prefill, num_decode = (len(members[pool].serving) for pool in POOLS)
    num_all = num_prefill + num_decode
    shared = share_work(observation, config)
    prefill = prefill_need(
        observation,
        config,
        state.samples,
        state.prefill.correction,
        # In a shared cell, all workers compute the queued prompts.
        num_all if shared else num_prefill,
        now,
    )
    decode = decode_need(
        observation,
        config,
        state.samples,
        state.decode.correction,
        num_all - max(1, prefill.workers) if shared else num_decode,
        now,
    )
    needs = {Pool.PREFILL: prefill, Pool.DECODE: decode}
    if is_idle:
        return needs
    return {pool: _keep_one(need, config.idle_s) for pool, need in needs.items()}


def _keep_one(need: Need, idle_s: float) -> Need:
    """Needs at least one worker, until no request has come for `idle_s` seconds."""
    if need.workers:
        return need
    return Need(1, f"{need.reason}, and one worker stays until none has come for {idle_s:g} s")


def _situation(
    observation: Observation,
    config: ScalingConfig,
    state: State,
    members: dict[Pool, Members],
    needs: dict[Pool, Need],
    now: float,
    *,
    is_idle: bool,
) -> Situation:
    """Adds the present needs to the histories of the needs."""
    # Workers of a pool that only `_keep_one` has needed; they leave without a further delay.
    num_kept = int(is_idle)
    known_s = _known_s(state.samples, now)
    states = {Pool.PREFILL: state.prefill, Pool.DECODE: state.decode}
    for pool in POOLS:
        history = with_need(
            states[pool].need_history,
            members[pool].current,
            needs[pool].workers,
            config,
            known_s,
            now,
            num_kept=num_kept,
        )
        states[pool] = replace(states[pool], need_history=history)
    total_history = with_need(
        state.total_history,
        sum(one.current for one in members.values()),
        sum(need.workers for need in needs.values()),
        config,
        known_s,
        now,
        num_kept=num_kept * len(POOLS),
    )
    return Situation(
        members=members,
        needs=needs,
        states=states,
        total_history=total_history,
        shared=share_work(observation, config),
        config=config,
        known_s=known_s,
        now=now,
    )


def _known_s(samples: tuple[Sample, ...], now: float) -> float:
    """How long the load has been known."""
    return now - samples[0].at + samples[0].span_s


def _with_ttfts(
    state: PoolState, observation: Observation, situation: Situation, span_s: float
) -> PoolState:
    """Updates the prefill pool's state with the TTFTs measured in the last `span_s` seconds.

    Missed targets of a pool that was recently too small are ignored: the shortage explains them.
    """
    now, config = situation.now, situation.config
    if _is_prefill_short(situation):
        return replace(state, misses=Misses(), small_at=now)
    if now - state.small_at < _SETTLES_S:
        return replace(state, misses=Misses())
    lanes = dict(observation.lanes)
    measured = [(lanes[name], target) for name, target in config.targets if name in lanes]
    return prefill_feedback(state, measured, span_s)


def _is_prefill_short(situation: Situation) -> bool:
    """Whether too few workers compute prompts now."""
    serving = {pool: len(one.serving) for pool, one in situation.members.items()}
    if situation.shared:
        return situation.total_needed > sum(serving.values())
    return situation.needed(Pool.PREFILL) > serving[Pool.PREFILL]


def _with_gaps(state: PoolState, observation: Observation) -> PoolState:
    """Updates the decode pool's state with the measured gaps between tokens."""
    return replace(state, correction=decode_correction(state.correction, observation.decode))
