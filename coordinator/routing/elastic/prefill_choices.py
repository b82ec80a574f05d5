"""Chooses the prefill worker of a request in an elastic cell.

choices.py explains the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from baton.coordinator.routing.choices import NoPlacement, PrefillChoice
from baton.coordinator.routing.elastic.cache_fills import CacheFills
from baton.coordinator.routing.elastic.candidates import (
    Candidate,
    Demand,
    Urgency,
    ahead_s,
    step_targets,
)
from baton.coordinator.routing.elastic.prompt_demand import PromptDemand
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad

# A worker takes another prompt while less than this much prefill work would go before it.
AHEAD_S = 0.2
# Late and batch requests go only to workers without prompts that keep at least this speed.
_LATE_SPEED = 0.3
# Extra weight of a second of computation compared with a second of waiting. strict/pool_choices.py
# gives the reason, and has a larger weight.
_WORK_WEIGHT = 1.0
# Added to the cost of a prefill worker that would miss the TTFT target, in seconds, so that any
# worker that meets the target is preferred.
_TOO_LATE_S = 1000.0
# A late request may join another late request on a worker only if that worker must compute at most
# this share of the tokens that the median candidate must compute.
_SMALL_SHARE = 0.75


class _Option(NamedTuple):
    """One way to compute the prompt.

    Attributes:
        load: load of the worker that computes it.
        choice: the worker, without or with a fetch.
        cost_s: seconds until the first token, and the harm to others; the least cost is best.
        has_room: whether the worker has KV room, and a place in the engine's batch.
    """

    load: WorkerLoad
    choice: PrefillChoice
    cost_s: float
    has_room: bool


class ElasticPrefillChoices:
    """Chooses among the candidates for a request.

    Args:
        view: View of the fleet's workers, with step targets.
        prompts: Recent prompts, which the owner adds.
        cache_fills: What workers stored in their caches, which the owner adds.
    """

    def __init__(self, view: FleetView, prompts: PromptDemand, cache_fills: CacheFills) -> None:
        self._view, self._prompts, self._cache_fills = view, prompts, cache_fills

    def choose(self, candidates: list[Candidate], demand: Demand) -> PrefillChoice | NoPlacement:
        """Returns the best prefill worker, or why the request waits for it.

        Idle workers often have equal costs. The one that stored least in its cache lately is taken.
        Otherwise the first workers would drop prefixes that are used again, while the caches of the
        last ones stay nearly empty.
        """
        options = tuple(self._options(candidates, demand))
        best = min((one for one in options if one.has_room), key=self._order, default=None)
        # If the best worker's queue is too long, no other worker is taken instead: the comparison
        # included this queue, and the other workers would still be later.
        if best is not None and self._has_short_queue(best.load, best.choice, demand):
            return best.choice
        best_cost_s = math.inf if best is None else best.cost_s
        # If the best worker has room and only its queue is too long, more KV room would not help,
        # and batch outputs must not be parked for it (core/dispatch.py).
        lacks_room = any(
            not one.has_room
            and one.cost_s < best_cost_s
            and self._has_short_queue(one.load, one.choice, demand)
            for one in options
        )
        return NoPlacement.FULL if lacks_room or not candidates else NoPlacement.BUSY

    def _order(self, option: _Option) -> tuple[float, float]:
        return option.cost_s, self._cache_fills.of(option.load.key)

    def _has_short_queue(self, load: WorkerLoad, choice: PrefillChoice, demand: Demand) -> bool:
        """Whether a prompt need not wait for the worker's queue in its lane."""
        return demand.urgency is Urgency.CONTINUES or (
            ahead_s(self._view, load, choice.num_work_tokens, demand) < AHEAD_S
        )

    def _options(self, candidates: list[Candidate], demand: Demand) -> Iterator[_Option]:
        """Yields the ways to compute the prompt that are allowed."""
        now, most_beside_late = self._view.now, _most_tokens_beside_late(candidates, demand)
        for candidate in candidates:
            load = candidate.load
            if not self._may_compute(load, demand):
                continue
            # A prompt takes KV room and a place in the engine's batch too.
            has_room = self._view.has_room(load, demand.num_tokens)
            for choice in candidate.choices:
                if choice.num_work_tokens > most_beside_late and load.has_late_request(now):
                    continue
                yield _Option(load, choice, self._cost_s(load, choice, demand), has_room)

    def _may_compute(self, load: WorkerLoad, demand: Demand) -> bool:
        """Whether a worker takes the prompt; a late or batch prompt must delay no one in time."""
        if not self._view.takes_prompts(load):
            return False
        if not demand.yields:
            return True
        if load.num_prefills:
            return False
        if demand.urgency is Urgency.LATE and step_targets(self._view).may_borrow:
            # A late prompt must not borrow time from streams that prompts in time need. In a small
            # cell, all workers may have streams for minutes, although few prompts come.
            speed = self._view.loads.prompt_speed
            if load.num_decodes and not self._prompts.leaves_time(speed, self._view.now):
                return False
        return load.prompt_speed >= _LATE_SPEED

    def _cost_s(self, load: WorkerLoad, choice: PrefillChoice, demand: Demand) -> float:
        cost_s = choice.ttft_s + self._harm_s(load, choice, demand)
        return cost_s + _TOO_LATE_S if choice.ttft_s > demand.due_in_s else cost_s

    def _harm_s(self, load: WorkerLoad, choice: PrefillChoice, demand: Demand) -> float:
        """Seconds that are added to a prompt's predicted first token to compare workers.

        The worker is busy for the prompt's work, and longer prompts, which it computes later, each
        wait for this work. Beside streams, two parts are added. The first token comes at the end of
        a step, half a step and at least one step after the prompt's turn. The streams get a longer
        step; simulations with one step for this had more requests within both targets than with
        none, half a step or two steps. These parts are not in the prediction itself: with them,
        more prompts counted as late, and fewer were in time.
        """
        num_tokens, work_s, now = choice.num_work_tokens, choice.work_s, self._view.now
        num_behind = load.num_behind(num_tokens, now, is_batch=demand.is_batch)
        alone_s = work_s * load.prompt_speed
        steps_s = 0.0
        if load.num_decodes:
            step_s = load.mean_step_s()
            steps_s = step_s / 2 + max(0.0, step_s + alone_s - work_s) + step_s
        return _WORK_WEIGHT * alone_s + num_behind * work_s + steps_s


def _most_tokens_beside_late(candidates: list[Candidate], demand: Demand) -> float:
    """Most tokens that a worker with a late request may compute for this request.

    A worker gets no second late request. Otherwise, in a cell beyond its capacity, late requests
    would take the places of requests that can be in time, and would hold KV room while the engine
    computes other prompts first. A prompt whose prefix only this worker holds is an exception,
    because computing the whole prompt elsewhere would delay more prompts.
    """
    if demand.urgency is not Urgency.OVERDUE or not candidates:
        return math.inf
    works = sorted(candidate.prefill.num_work_tokens for candidate in candidates)
    return _SMALL_SHARE * works[len(works) // 2]
