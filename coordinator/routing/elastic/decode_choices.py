"""Chooses the decode worker of a request in an elastic cell.

choices.py explains the rule.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

from baton.coordinator.routing.choices import DecodeChoice, PlacementSample, PrefillChoice
from baton.coordinator.routing.elastic.candidates import (
    Candidate,
    Demand,
    fastest_step_s,
    step_targets,
)
from baton.coordinator.routing.elastic.prompt_demand import PromptDemand
from baton.coordinator.routing.elastic.waiting_outputs import WaitingOutputs
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.state.requests import WorkerKey
from baton.runtime.steps.step_budget import reachable_itl_s

# Share of the ITL target that a decode step may take with one more decode: when prompts find free
# workers, and when they do not. Below capacity, a margin keeps streams fast; at capacity, it would
# cost prompts more time than it saves streams.
_JOIN_SHARE, _JOIN_SHARE_UNDER_PRESSURE = 0.92, 1.0
# Share of the ITL target that a decode step may take while workers with decodes compute prompts
# soon enough. It is smaller, because outputs grow, so that a step just within the target becomes
# too long. In simulations with long outputs, shares of 0.75 to 0.85 served equally many requests in
# time; smaller shares leave fewer fast workers for prompts.
_SPREAD_SHARE = 0.85
# The pressure is the share of recent placements at which every fast worker had prompts for more
# than one step: a running mean with this weight for the latest placement. The join share grows with
# the pressure, and reaches _JOIN_SHARE_UNDER_PRESSURE at a pressure of 1 / _PRESSURE_GAIN.
_PRESSURE_WEIGHT, _PRESSURE_GAIN = 0.03, 6.0
# With at least this many idle workers, and at most this pressure, outputs are spread too: prompts
# find a free worker also if one of these decodes.
_NUM_SPARE, _SPARE_PRESSURE = 3, 0.1
# A worker is fast if it computes prompts at more than this share of its full speed.
_FAST_SPEED = 1 / 3
# A decode costs the prompts of a worker too much if it costs them this many times as much as on the
# best worker. Workers of one kind have equal costs; those of equal hardware under two names have
# costs that differ by errors of the fit.
_TOO_COSTLY = 1.5
# Prompt tokens for which the cost of decodes is compared.
_TYPICAL_TOKENS = 1024


class _Kind(IntEnum):
    """Kinds of workers that may decode an output, the best first.

    Members:
        NEEDED: a worker that is needed for the present decodes; the one with the shortest steps.
        UNNEEDED: another worker with decodes; the one with the longest steps, so that the others
            finish their decodes.
        EMPTY: a worker without decodes that is not COSTLY, and on which one interactive stream is
            within the ITL target; the one with the shortest prefill queue, and among equal ones the
            prefill worker, which needs no handoff.
        COSTLY: a worker on which a decode costs the prompts much more than on another one, because
            it has other hardware or is slower; the one with the shortest steps.
        SLOW: a worker whose steps become longer than `_Limits.join_s`; the one with the shortest
            steps. If the decodes are spread over all workers, each worker with decodes is SLOW.
        TO_PARK: a worker whose batch outputs must be parked, which core/dispatch.py then does; the
            one with the shortest steps.
        NONE: the worker cannot decode the output.
    """

    NEEDED = 0
    UNNEEDED = 1
    EMPTY = 2
    COSTLY = 3
    SLOW = 4
    TO_PARK = 5
    NONE = 6


class _Rank(NamedTuple):
    """How a worker compares with others; the smallest rank is the best.

    Attributes:
        kind: the kind of the worker.
        cost_s: seconds that decide within the kind.
        needs_handoff: whether an EMPTY worker gets the KV cache from another worker.
    """

    kind: _Kind
    cost_s: float = math.inf
    needs_handoff: bool = False


_WORST = _Rank(_Kind.NONE)


class _Limits(NamedTuple):
    """Longest decode steps with one more decode, in seconds.

    Attributes:
        join_s: limit up to which decodes are packed on few workers; None: they are spread over all
            workers.
        longest_s: limit up to which the request is placed, unless it must be placed.
        reachable_s: limit for the decodes that remain after batch outputs were parked, and for one
            stream on an idle worker.
    """

    join_s: float | None
    longest_s: float
    reachable_s: float


class ElasticDecodeChoices:
    """Chooses among the candidates for a request.

    Args:
        view: View of the fleet's workers, with step targets.
        prompts: Recent prompts, which the owner adds.
    """

    def __init__(self, view: FleetView, prompts: PromptDemand) -> None:
        self._view, self._prompts = view, prompts
        self._pressure = 0.0
        self._waiting = WaitingOutputs()

    def choose(
        self, candidates: list[Candidate], demand: Demand, prefill: PrefillChoice
    ) -> DecodeChoice | None:
        """Returns the best decode worker; None: no worker has room within the ITL target.

        Args:
            candidates: the workers to compare.
            demand: needs of the request.
            prefill: the worker that was chosen to compute the prompt.
        """
        fastest_s, share = fastest_step_s(candidates), self._waiting.counted_share
        with_decodes = sorted(
            (candidate for candidate in candidates if candidate.load.num_decodes),
            key=lambda one: -one.load.mean_step_s(counted_share=share),
        )
        others = [candidate for candidate in candidates if not candidate.load.num_decodes]
        limits = self._limits(candidates, demand, fastest_s)
        costly = set[WorkerKey]()
        if limits.join_s is not None and len(self._view.loads.kinds) > 1:
            costly = _costly_workers(candidates, demand.num_mean_tokens, limits.reachable_s)
        efficient = [one for one in with_decodes if one.load.key not in costly]
        needed = _needed_workers(efficient, demand, share, limits)
        with_room = list[Candidate]()
        best: Candidate | None = None
        best_rank = _WORST
        for candidate in (*with_decodes, *others):
            load = candidate.load
            if not self._view.has_room(load, demand.num_tokens + demand.num_output_tokens):
                continue
            if load.key in costly:
                rank = _rank_costly(load, demand, share, limits)
            elif not load.num_decodes and (
                demand.is_batch or load.single_step_s <= limits.reachable_s
            ):
                is_other = load.key != prefill.worker
                rank = _Rank(_Kind.EMPTY, load.queued_s(self._view.now), is_other)
            else:
                rank = _rank(load, demand, share, limits, is_needed=load.key in needed)
            with_room.append(candidate)
            if (
                rank.kind < _Kind.SLOW
                and rank < best_rank
                and not self._view.has_safe_room(load, demand.num_tokens + demand.num_output_tokens)
            ):
                rank = _Rank(_Kind.SLOW, load.mean_step_s())
            if rank < best_rank:
                best, best_rank = candidate, rank
        if best is None and not any(one.load.num_decodes for one in with_room):
            # All workers that keep the ITL target lack KV room, and only slow idle ones have some.
            best = min(with_room, key=lambda one: one.load.single_step_s, default=None)
        return None if best is None else decode_choice(best, demand)

    def begins(self, sample: PlacementSample) -> None:
        """Learns from the placement of a request that begins."""
        self._pressure += (sample.is_busy - self._pressure) * _PRESSURE_WEIGHT
        self._waiting.add(sample)

    def _limits(self, candidates: list[Candidate], demand: Demand, fastest_s: float) -> _Limits:
        """Returns the limits of a step for a request; see `longest_step_s` for the arguments."""
        itl_s = reachable_itl_s(demand.itl_s, fastest_s)
        is_spread = step_targets(self._view).shares_workers(fastest_s)
        join_s = None
        if not is_spread:
            join_s = itl_s * self._join_share(candidates, demand.num_mean_tokens)
        return _Limits(join_s, self.longest_step_s(demand, fastest_s), itl_s)

    def longest_step_s(self, demand: Demand, fastest_s: float) -> float:
        """Longest decode step for which a request is placed, unless it must be placed.

        Args:
            demand: needs of the request.
            fastest_s: the fastest candidate's step with one decode.
        """
        itl_s = reachable_itl_s(demand.itl_s, fastest_s)
        if not demand.is_batch:
            return itl_s
        # Beside interactive outputs, batch outputs join only with a margin. Otherwise they would be
        # parked and placed again all the time.
        return itl_s * _JOIN_SHARE if self._view.num_interactive else math.inf

    def _join_share(self, candidates: list[Candidate], num_tokens: int) -> float:
        """Share of the ITL target that a step may take after a decode of `num_tokens` joins."""
        idle = [one for one in candidates if not (one.load.num_decodes or one.load.num_prefills)]
        has_spare = len(idle) >= _NUM_SPARE and self._pressure < _SPARE_PRESSURE
        if has_spare or self._prompts_can_wait(candidates, num_tokens):
            return _SPREAD_SHARE
        tight = min(1.0, self._pressure * _PRESSURE_GAIN)
        return _JOIN_SHARE + tight * (_JOIN_SHARE_UNDER_PRESSURE - _JOIN_SHARE)

    def _prompts_can_wait(self, candidates: list[Candidate], num_tokens: int) -> bool:
        """Whether the worker with the shortest steps computes prompts soon enough beside decodes.

        Args:
            candidates: The workers to compare.
            num_tokens: KV tokens of the decode that joins.
        """
        loads = self._view.loads
        num_workers = (loads.open_prefill | loads.open_decode).bit_count()
        needed = self._prompts.needed_speed(num_workers, self._view.now)
        emptiest = min((candidate.load for candidate in candidates), key=WorkerLoad.mean_step_s)
        if emptiest.prompt_speed < needed:
            return False
        # The first decode of a worker lowers its speed of prompts; further decodes hardly do.
        return (
            emptiest.num_decodes > 0
            or emptiest.speed_with_one(step_targets(self._view), num_tokens) >= needed
        )


def _needed_workers(
    with_decodes: list[Candidate], demand: Demand, counted_share: float, limits: _Limits
) -> set[WorkerKey]:
    """Finds the workers that the present decodes need together with one more decode.

    Args:
        with_decodes: the candidates with decodes, those with the longest steps first.
        demand: needs of the request that joins.
        counted_share: share of the assigned decodes that count.
        limits: longest decode steps.
    """
    needed = set[WorkerKey]()
    if limits.join_s is None or not with_decodes:
        return needed
    # Seconds of a step that the decodes need beyond the base of each worker that holds some.
    left_s = sum(
        one.load.mean_step_s(counted_share=counted_share) - one.load.single_step_s
        for one in with_decodes
    )
    fullest = with_decodes[0].load
    left_s += fullest.mean_step_s(1, demand.num_mean_tokens) - fullest.mean_step_s()
    for one in with_decodes:
        if left_s > 0:
            needed.add(one.load.key)
        left_s -= limits.join_s - one.load.single_step_s
    return needed


def _costly_workers(candidates: list[Candidate], num_tokens: int, itl_s: float) -> set[WorkerKey]:
    """Finds the workers that should rather compute prompts, among those with measured costs.

    The cost of a decode is the prompts that its part of a worker could compute. With fast GPUs for
    prompts and GPUs with much bandwidth for outputs, it is larger on the first. It is also larger
    on a slow worker, which holds much fewer streams within the ITL target. A worker is not compared
    before its steps of both kinds were measured: without outputs, they would never be measured.

    Args:
        candidates: the workers to compare.
        num_tokens: KV tokens of a stream.
        itl_s: longest step.
    """
    loads = [one.load for one in candidates if one.load.traits.latency.is_measured]
    costs = [(load.key, _cost(load, num_tokens, itl_s)) for load in loads]
    # A cost of 0 is an error of the fit.
    limit = _TOO_COSTLY * min((cost for _, cost in costs if cost > 0), default=math.inf)
    return {key for key, cost in costs if cost > limit}


def _cost(load: WorkerLoad, num_tokens: int, itl_s: float) -> float:
    """Prompt tokens per second of an idle worker, for each stream that it could hold instead.

    Infinite if it cannot hold any stream.
    """
    latency = load.traits.latency
    prompt_s, room_s = latency.model.chunk_s(0, _TYPICAL_TOKENS), itl_s - load.single_step_s
    if not prompt_s or room_s <= 0:
        return math.inf
    stream_s = latency.decode_step_s(2, 2 * num_tokens) - latency.decode_step_s(1, num_tokens)
    cost = _TYPICAL_TOKENS / prompt_s * stream_s
    # Without an ITL target, no number of streams fills a worker.
    return cost if math.isinf(room_s) else cost / room_s


def _rank_costly(load: WorkerLoad, demand: Demand, counted_share: float, limits: _Limits) -> _Rank:
    """Ranks a worker of `_costly_workers` with room for the request; arguments as in `_rank`."""
    step_s = load.mean_step_s(1, demand.num_mean_tokens, counted_share)
    is_free = demand.is_batch and not load.num_decodes
    if is_free or (limits.join_s is not None and step_s <= limits.join_s):
        return _Rank(_Kind.COSTLY, step_s)
    return _rank(load, demand, counted_share, limits, is_needed=False)


def _rank(
    load: WorkerLoad, demand: Demand, counted_share: float, limits: _Limits, *, is_needed: bool
) -> _Rank:
    """Ranks a worker with decodes and with room for the request.

    Args:
        load: load of the worker.
        demand: needs of the request.
        counted_share: share of the assigned decodes that count.
        limits: longest decode steps.
        is_needed: whether the present decodes need the worker.
    """
    added = demand.num_mean_tokens
    step_s = load.mean_step_s(1, added, counted_share)
    if limits.join_s is not None and step_s <= limits.join_s:
        return _Rank(_Kind.NEEDED, step_s) if is_needed else _Rank(_Kind.UNNEEDED, -step_s)
    if step_s <= limits.longest_s or demand.must_place:
        return _Rank(_Kind.SLOW, step_s)
    if demand.is_batch or load.mean_step_after_parking_s(1, added) > limits.reachable_s:
        return _WORST
    return _Rank(_Kind.TO_PARK, step_s)


def decode_choice(candidate: Candidate, demand: Demand) -> DecodeChoice:
    """Predicts a candidate as the decode worker of a request."""
    load = candidate.load
    return DecodeChoice(
        load.key,
        step_s=load.mean_step_s(1, demand.num_mean_tokens),
        num_kv_tokens=load.in_blocks(demand.num_tokens + demand.num_output_tokens),
        num_tokens=demand.num_tokens,
        hits=load.traits.hits(candidate.held, demand.num_tokens),
    )


def placement_sample(
    candidates: list[Candidate], demand: Demand, prefill: PrefillChoice, now: float
) -> PlacementSample:
    """Describes the cell for `ElasticDecodeChoices.begins`.

    Args:
        candidates: the workers that were compared.
        demand: needs of the request.
        prefill: the worker that was chosen to compute the prompt.
        now: time by the core's clock.
    """
    loads = [candidate.load for candidate in candidates]
    fastest_s, model = fastest_step_s(candidates), loads[0].traits.latency.model
    # On average, half of an output is there while it decodes.
    num_output_tokens = 2 * max(1, demand.num_mean_tokens - demand.num_tokens)
    output_s = num_output_tokens * max(fastest_s, min(demand.itl_s, 2 * fastest_s))
    prompt_s = model.chunk_s(0, prefill.num_work_tokens)
    return PlacementSample(
        # Prompts of less than a step share the next step with the new prompt.
        is_busy=all(
            load.queued_s(now) > load.single_step_s
            for load in loads
            if load.prompt_speed > _FAST_SPEED
        ),
        num_assigned=sum(load.num_decodes for load in loads),
        num_decoding=sum(load.decodes.num_arrived for load in loads),
        # Costs of 0 can be configured, and count until steps are measured.
        prompt_share=prompt_s / output_s if output_s else 1.0,
        due_share=prefill.ttft_s / demand.due_in_s if demand.due_in_s > 0 else 1.0,
    )
