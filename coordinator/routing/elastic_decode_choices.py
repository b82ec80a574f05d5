"""Chooses the decode worker of a request in an elastic cell.

elastic_choices.py explains the rule.
"""

from __future__ import annotations

import math

from baton.coordinator.routing.choices import DecodeChoice, PlacementSample, PrefillChoice
from baton.coordinator.routing.elastic_candidates import (
    Candidate,
    Demand,
    fastest_step_s,
    step_targets,
)
from baton.coordinator.routing.prompt_demand import PromptDemand
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.waiting_outputs import WaitingOutputs
from baton.coordinator.routing.worker_load import WorkerLoad

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
# If no worker keeps the ITL target even with one decode, the target is this many times the fastest
# worker's step with one decode.
_UNREACHABLE = 2.0


class ElasticDecodeChoices:
    """Chooses among the candidates for a request.

    Args:
        router: Router of the fleet's workers, with step targets.
        prompts: Recent prompts, which the owner adds.
    """

    def __init__(self, router: Router, prompts: PromptDemand) -> None:
        self._router, self._prompts = router, prompts
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
        added, fastest_s = demand.num_mean_tokens, fastest_step_s(candidates)
        share = self._waiting.counted_share
        itl_s = reachable_itl_s(demand.itl_s, fastest_s)
        longest_s = self.longest_step_s(demand, fastest_s)
        # With a limit of 0, every worker counts as needed, so the decodes are spread over all.
        shares = step_targets(self._router).shares_workers(fastest_s)
        limit_s = 0.0 if shares else itl_s * self._join_share(candidates, added)
        with_decodes = sorted(
            (candidate for candidate in candidates if candidate.load.num_decodes),
            key=lambda one: -one.load.mean_step_s(counted_share=share),
        )
        others = [candidate for candidate in candidates if not candidate.load.num_decodes]
        # Seconds of a step that the decodes need beyond the base of each worker that holds some.
        left_s = sum(
            one.load.mean_step_s(counted_share=share) - one.load.single_step_s
            for one in with_decodes
        )
        if with_decodes:
            fullest = with_decodes[0].load
            left_s += fullest.mean_step_s(1, added) - fullest.mean_step_s()
        best: Candidate | None = None
        # The kind of choice comes first in the cost. Kinds, the best first:
        # 0: a worker that is needed for the present decodes; the one with the shortest steps;
        # 1: another worker with decodes; the one with the longest steps;
        # 2: a worker without decodes; the one with the shortest prefill queue, and among equal ones
        #    the prefill worker, which needs no handoff;
        # 3: a worker whose steps become longer than limit_s; the one with the shortest steps;
        # 4: a worker whose batch outputs must be parked; core/dispatch.py then parks them.
        best_cost = math.inf, math.inf, False
        for candidate in (*with_decodes, *others):
            load = candidate.load
            step_s = load.mean_step_s(1, added, share)
            is_needed = left_s > 0
            if load.num_decodes:
                left_s -= limit_s - load.single_step_s
            if not self._router.has_room(load, demand.num_tokens + demand.num_output_tokens):
                continue
            if not load.num_decodes:
                cost = 2.0, load.queued_s(self._router.now), load.key != prefill.worker
            elif step_s <= limit_s:
                cost = (0.0, step_s, False) if is_needed else (1.0, -step_s, False)
            elif step_s <= longest_s or demand.must_place:
                cost = 3.0, step_s, False
            elif not demand.is_batch and load.mean_step_after_parking_s(1, added) <= itl_s:
                cost = 4.0, step_s, False
            else:
                continue
            if cost < best_cost:
                best, best_cost = candidate, cost
        return None if best is None else decode_choice(best, demand)

    def begins(self, sample: PlacementSample) -> None:
        """Learns from the placement of a request that begins."""
        self._pressure += (sample.is_busy - self._pressure) * _PRESSURE_WEIGHT
        self._waiting.add(sample)

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
        return itl_s * _JOIN_SHARE if self._router.num_interactive else math.inf

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
        loads = self._router.loads
        num_workers = (loads.open_prefill | loads.open_decode).bit_count()
        needed = self._prompts.needed_speed(num_workers, self._router.now)
        emptiest = min((candidate.load for candidate in candidates), key=WorkerLoad.mean_step_s)
        if emptiest.prompt_speed < needed:
            return False
        # The first decode of a worker lowers its speed of prompts; further decodes hardly do.
        return (
            emptiest.num_decodes > 0
            or emptiest.speed_with_one(step_targets(self._router), num_tokens) >= needed
        )


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
    step_s = max(fastest_s, min(demand.itl_s, 2 * fastest_s))
    return PlacementSample(
        # Prompts of less than a step share the next step with the new prompt.
        is_busy=all(
            load.queued_s(now) > load.single_step_s
            for load in loads
            if load.prompt_speed > _FAST_SPEED
        ),
        num_assigned=sum(load.num_decodes for load in loads),
        num_decoding=sum(load.decodes.num_arrived for load in loads),
        prompt_share=model.chunk_s(0, prefill.num_work_tokens) / (num_output_tokens * step_s),
        due_share=prefill.ttft_s / demand.due_in_s if demand.due_in_s > 0 else 1.0,
    )


def reachable_itl_s(itl_s: float, fastest_s: float) -> float:
    """Returns the longest step that requests are placed for, in seconds.

    Args:
        itl_s: ITL target.
        fastest_s: The fastest worker's step with one decode. If it takes longer than the target, no
            worker can keep the target, and requests must not wait for it.
    """
    return itl_s if fastest_s <= itl_s else _UNREACHABLE * fastest_s
