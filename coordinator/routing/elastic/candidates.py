"""The workers that a placement in an elastic cell compares, with what it predicts of each.

choices.py explains how the workers are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from heapq import nsmallest
from typing import NamedTuple

from baton.coordinator.routing.choices import PrefillChoice
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prefixes.prefix_match import NUM_HOLDERS, HeldPrefix, PrefixMatch
from baton.coordinator.state.requests import SessionKey, WorkerKey
from baton.runtime.steps.step_budget import StepTargets

# Number of candidates that may fetch the prompt's beginning from another worker.
_NUM_FETCHING = 4


class Urgency(Enum):
    """How a request is weighed against the other requests of an elastic cell.

    Members:
        CONTINUES: a stream that lost its worker. It is placed like an OVERDUE request, and also
            where prompts are queued ahead of it.
        OVERDUE: it has waited for long. It is placed even if streams then miss their ITL target.
        NORMAL: it is placed where it keeps the targets of all requests.
        YIELDS: a batch request. It is placed only where it delays no request that can be in time.
        LATE: its first token cannot be in time on any worker. It yields too, and is not placed
            beside streams that would lend time to it.
    """

    CONTINUES = "continues"
    OVERDUE = "overdue"
    NORMAL = "normal"
    YIELDS = "yields"
    LATE = "late"


class Demand(NamedTuple):
    """The needs of a request.

    Attributes:
        num_tokens: Tokens to compute without any cache: the prompt, and the output known so far.
        num_output_tokens: Output tokens for which KV room is reserved; 0: the request ends with its
            first token.
        num_mean_tokens: KV tokens that similar requests have on average while they decode.
        due_in_s: Seconds until the first token is due; infinite if it has no target.
        itl_s: ITL target of interactive requests, in seconds.
        urgency: How it is weighed against other requests.
        others_go_first_if_late: Whether the request is not placed if its first token would be late.
        session: The session; None means no session.
        may_fetch: Whether the prefill worker may fetch the prompt's beginning from another worker.
        is_batch: Whether it is a batch request, which may be parked for interactive requests.
    """

    num_tokens: int
    num_output_tokens: int
    num_mean_tokens: int
    due_in_s: float
    itl_s: float
    urgency: Urgency = Urgency.NORMAL
    others_go_first_if_late: bool = False
    session: SessionKey | None = None
    may_fetch: bool = True
    is_batch: bool = False

    @classmethod
    def of_prompt(cls, num_tokens: int, session: SessionKey | None) -> Demand:
        """The needs of a prompt without targets, for a prediction of its first token.

        Args:
            num_tokens: Tokens of the prompt.
            session: The session; None means no session.
        """
        return cls(
            num_tokens,
            num_output_tokens=0,
            num_mean_tokens=0,
            due_in_s=math.inf,
            itl_s=math.inf,
            session=session,
        )

    @property
    def must_place(self) -> bool:
        """Whether it is placed even if other requests then miss their ITL target."""
        return self.urgency in (Urgency.CONTINUES, Urgency.OVERDUE)

    @property
    def yields(self) -> bool:
        """Whether it is placed only where it delays no request that can be in time."""
        return self.urgency in (Urgency.YIELDS, Urgency.LATE)


class Candidate(NamedTuple):
    """A worker that the rule compares.

    Attributes:
        load: the worker's load.
        held: the prefix of the prompt that the worker holds.
        prefill: the worker as the prefill worker, without a fetch.
        fetch: the same with a fetch from another worker; None: no other worker holds more of the
            prompt.
    """

    load: WorkerLoad
    held: HeldPrefix
    prefill: PrefillChoice
    fetch: PrefillChoice | None

    @property
    def choices(self) -> tuple[PrefillChoice, ...]:
        """The worker as the prefill worker, without and with the fetch."""
        return (self.prefill,) if self.fetch is None else (self.prefill, self.fetch)

    @property
    def soonest(self) -> PrefillChoice:
        """The choice with which the first token comes sooner."""
        if self.fetch is None or self.prefill.ttft_s <= self.fetch.ttft_s:
            return self.prefill
        return self.fetch


class ElasticCandidates:
    """Finds the workers of one fleet that are compared, and predicts them as prefill workers.

    Args:
        view: View of the fleet's workers, with step targets.
        fetches: Fetches between these workers.
    """

    def __init__(self, view: FleetView, fetches: PrefixFetches) -> None:
        self._view, self._fetches = view, fetches

    def compared(
        self, match: PrefixMatch, session: SessionKey | None
    ) -> list[tuple[WorkerLoad, HeldPrefix]]:
        """Workers that a placement in an elastic cell compares.

        Returns:
            The workers of the least loaded group that get work, the workers with the longest
            prefixes, the session's last workers, and the workers with most KV room and with the
            shortest prefill queue. With each, the prefix that it holds.
        """
        loads = self._view.loads
        group = loads.least_loaded_group()
        found = {entry.key: entry for entry in group if loads.pool(entry.key) is not None}
        if loads.num_groups > 1:
            last = self._view.last_of(session)
            holders = match.holders(NUM_HOLDERS, loads.open_prefill | loads.open_decode)
            # The group with the fewest requests may have no room, if its requests are long.
            emptiest, idlest = loads.by_room.least(), loads.by_queue.least()
            for worker in (*holders, last.prefill, last.decode, emptiest, idlest):
                entry = loads.get(worker)
                if entry is not None and loads.pool(entry.key) is not None:
                    found[entry.key] = entry
        return [(entry, match.held_by(worker)) for worker, entry in found.items()]

    def of(self, match: PrefixMatch, demand: Demand) -> list[Candidate]:
        """The candidates for a request, each with its prediction as the prefill worker."""
        found = self.compared(match, demand.session)
        candidates = [
            Candidate(load, held, self._prefill(load, held, demand), None) for load, held in found
        ]
        sources = self._fetches.sources(match) if demand.may_fetch else {}
        if not sources:
            return candidates
        # Only the workers that would compute the whole prompt soonest are compared with a fetch,
        # because they are likely to compute the rest soonest.
        soonest = nsmallest(
            _NUM_FETCHING, range(len(found)), key=lambda at: candidates[at].prefill.ttft_s
        )
        for at in soonest:
            candidate = candidates[at]
            fetch = self._prefill_with_fetch(
                match, sources, candidate.load, candidate.prefill, demand
            )
            candidates[at] = candidate._replace(fetch=fetch)
        return candidates

    def _prefill(self, load: WorkerLoad, held: HeldPrefix, demand: Demand) -> PrefillChoice:
        hits = load.traits.hits(held, load.traits.reusable_tokens(demand.num_tokens))
        num_new = demand.num_tokens - hits.num_tokens
        work_s = load.prompt_work_s(num_new, self._view.now)
        load_s = load.tier_load_s(hits, self._view.now)
        wait_s = ahead_s(self._view, load, num_new, demand) + load_s
        return PrefillChoice(load.key, wait_s + work_s, work_s, num_new, hits)

    def _prefill_with_fetch(
        self,
        match: PrefixMatch,
        sources: Mapping[WorkerKey, HeldPrefix],
        load: WorkerLoad,
        own: PrefillChoice,
        demand: Demand,
    ) -> PrefillChoice | None:
        """Returns a prefill worker with a fetch; None: no worker holds more of the prompt.

        Args:
            match: prefix match of the prompt.
            sources: workers that the prompt's beginning may be fetched from.
            load: load of the prefill worker.
            own: the same worker without the fetch.
            demand: needs of the request.
        """
        fetch = self._fetches.best(match, sources, load, demand.num_tokens, own.hits)
        if fetch is None:
            return None
        num_new = demand.num_tokens - fetch.num_tokens
        choice = self._fetches.choice(own, fetch, load.prompt_work_s(num_new, self._view.now))
        # The prompt is fetched while the worker computes the prompts ahead of it.
        wait_s = max(ahead_s(self._view, load, num_new, demand), fetch.fetch_s)
        return choice._replace(ttft_s=wait_s + choice.work_s)


def ahead_s(view: FleetView, load: WorkerLoad, num_tokens: int, demand: Demand) -> float:
    """Seconds of prompts that a worker computes before this many tokens of the request."""
    return load.ahead_s(num_tokens, view.now, is_batch=demand.is_batch)


def step_targets(view: FleetView) -> StepTargets:
    """Targets of the workers' steps; in an elastic cell, the view has some."""
    assert view.loads.step_targets is not None
    return view.loads.step_targets


def fastest_step_s(candidates: list[Candidate]) -> float:
    """Seconds of a decode step with one stream on the fastest candidate."""
    return min(candidate.load.single_step_s for candidate in candidates)
