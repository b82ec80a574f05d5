"""The placement rule of an elastic cell: any worker may compute a prompt and decode its output.

choices.py explains how the workers are chosen.
"""

from __future__ import annotations

import math

from baton.coordinator.routing.choices import NoPlacement, Placement, PrefillChoice
from baton.coordinator.routing.elastic.cache_fills import CacheFills
from baton.coordinator.routing.elastic.candidates import Demand, ElasticCandidates, Urgency
from baton.coordinator.routing.elastic.choices import ElasticChoices
from baton.coordinator.routing.elastic.prefill_choices import AHEAD_S
from baton.coordinator.routing.elastic.prompt_demand import PromptDemand
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.handoffs import Handoffs
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prefixes.prefix_match import PrefixMatch
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.routing.request_needs import RequestNeeds
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.lanes import lane_config
from baton.coordinator.state.requests import Request, RequestState, SessionKey
from baton.coordinator.telemetry.recent_values import RecentValues
from baton.runtime.steps.step_budget import reachable_itl_s
from baton.v1 import common_pb2

_BATCH = common_pb2.LANE_BATCH
# A request that has waited for this share of its lane's max_queue_s is placed even where it delays
# others. If the cell is beyond its capacity, placing a late interactive request makes other
# requests late. The share of the interactive lane is therefore large, and leaves only enough time
# for the placement.
_MUST_PLACE_SHARE = {common_pb2.LANE_INTERACTIVE: 0.8, _BATCH: 1 / 6}


class ElasticRule:
    """The PlacementRule of an elastic cell.

    Args:
        config: Limits and targets.
        view: View of one fleet's workers, with step targets.
        prompts: Block hashes of prompts.
        needs: Needs of the fleet's requests.
        handoffs: Handoffs between these workers.
        fetches: Fetches between these workers.
        prompt_times: The rule adds the seconds that interactive prompts take to compute without
            other work, prefix hits left out.
    """

    def __init__(
        self,
        config: CoreConfig,
        view: FleetView,
        prompts: PromptBlocks,
        needs: RequestNeeds,
        handoffs: Handoffs,
        fetches: PrefixFetches,
        prompt_times: RecentValues[float],
    ) -> None:
        self._lanes, self._view, self._prompts = config.lanes, view, prompts
        self._needs, self._handoffs, self._prompt_times = needs, handoffs, prompt_times
        self._prompt_demand, self._cache_fills = PromptDemand(), CacheFills()
        self._candidates = ElasticCandidates(view, fetches)
        self._choices = ElasticChoices(
            view, self._candidates, self._prompt_demand, self._cache_fills
        )

    def place(self, request: Request) -> Placement | NoPlacement:
        """Returns the workers for a request whose turn it is, or why it waits.

        Requests are late only if they wait in the interactive lane.
        """
        match, demand = self._prompts.usable(request), self._demand(request)
        found = self._choices.place(match, demand)
        if isinstance(found, NoPlacement):
            return found
        prefill, decode, sample = found
        if decode is not None and decode.worker != prefill.worker:
            split = self._handoffs.plan(request, prefill, decode)
            if split is not None:
                return split._replace(sample=sample)
            # The handoff exceeds the limits of these workers.
            found = self._choices.place_on_one(match, demand)
            if isinstance(found, NoPlacement):
                return found
        return Placement(found.prefill, found.decode, sample=sample)

    def begins(self, request: Request, placement: Placement) -> None:
        """Learns from a placement.

        The rule counts the tokens that the request stores in caches, and measures the prompt of an
        interactive request.
        """
        self._count_stored(request, placement)
        if placement.sample is not None:
            self._choices.begins(placement.sample)
        if request.submission.lane == _BATCH:
            return
        entry = self._view.loads.entries[placement.prefill.worker]
        prompt_s = entry.traits.latency.model.chunk_s(0, placement.prefill.num_work_tokens)
        self._prompt_times.add(prompt_s)
        target_s = request.first_token_due_at - request.submitted_at
        self._prompt_demand.add(prompt_s, target_s, self._view.now)

    def becomes_late(self, request: Request) -> None:
        """Learns that prompts cannot all be in time; see PlacementRule."""
        self._prompt_demand.was_late(self._view.now)

    def _count_stored(self, request: Request, placement: Placement) -> None:
        """Counts the tokens that a request stores in the caches of its workers."""
        prefill, decode = placement.prefill, placement.decode
        stored = {prefill.worker: request.num_tokens - prefill.hits.num_device}
        if decode is not None:
            num_tokens = self._needs.more_output_tokens(request)
            if decode.worker != prefill.worker:
                num_tokens += decode.num_tokens - decode.hits.num_device
            stored[decode.worker] = stored.get(decode.worker, 0) + num_tokens
        for worker, num_tokens in stored.items():
            cache_tokens = self._view.loads.entries[worker].traits.kv_tokens
            self._cache_fills.add(worker, num_tokens, cache_tokens, self._view.now)

    def room_at(self, request: Request) -> float:
        """Predicts when a worker's prompts are nearly computed; see PlacementRule."""
        if self._view.loads.idlest_prefill() is None:
            return math.inf
        found = self._candidates.compared(self._prompts.usable(request), None)
        times = [entry.free_at - AHEAD_S for entry, _ in found]
        return min((at for at in times if at > self._view.now), default=math.inf)

    def is_crowded(self, entry: WorkerLoad) -> bool:
        """Whether mean steps exceed the limit by which decode workers are chosen."""
        return entry.mean_step_s() > reachable_itl_s(self._itl_target_s, entry.single_step_s)

    def soonest(
        self, match: PrefixMatch, num_tokens: int, session: SessionKey | None
    ) -> PrefillChoice | None:
        """Returns where a prompt's first token would come soonest; see PlacementRule."""
        return self._choices.soonest(match, num_tokens, session)

    def alone_s(self, match: PrefixMatch, num_tokens: int, session: SessionKey | None) -> float:
        """Predicted seconds to compute a prompt on an idle worker; see PlacementRule."""
        # A fetch leaves as much to compute as the worker has that holds the prefix.
        found = (
            (entry.traits, entry.traits.hits(held, num_tokens).num_tokens)
            for entry, held in self._candidates.compared(match, session)
        )
        return min(
            (traits.latency.prefill_s(max(1, num_tokens - num_held)) for traits, num_held in found),
            default=math.inf,
        )

    @property
    def _itl_target_s(self) -> float:
        """ITL target of interactive requests in seconds; infinite: there is none."""
        targets = self._view.loads.step_targets
        return math.inf if targets is None or targets.itl_s is None else targets.itl_s

    def _demand(self, request: Request) -> Demand:
        submission, lane = request.submission, self._needs.prompt_lane(request.submission)
        ends_with_first = self._needs.most_output_tokens(submission) == 1
        return Demand(
            num_tokens=request.num_tokens,
            num_output_tokens=0 if ends_with_first else self._needs.more_output_tokens(request),
            num_mean_tokens=self._needs.mean_tokens(request),
            due_in_s=request.first_token_due_at - self._view.now,
            itl_s=self._itl_target_s,
            urgency=self._urgency(request),
            # A request that lost its worker does not go behind others: `max_recovery_s` may end
            # before it would have its turn.
            others_go_first_if_late=(
                request.state is RequestState.QUEUED and not request.is_late and lane != _BATCH
            ),
            session=submission.session,
            may_fetch=self._needs.may_fetch(request),
            is_batch=submission.lane == _BATCH,
        )

    def _urgency(self, request: Request) -> Urgency:
        submission, lane = request.submission, self._needs.prompt_lane(request.submission)
        is_batch = submission.lane == _BATCH
        # A stream that lost its worker continues at once, because its client sees the pause. A
        # batch output may have been parked for requests that still run, so it waits.
        if request.token_ids and not is_batch:
            return Urgency.CONTINUES
        longest_s = lane_config(self._lanes, submission.lane).max_queue_s
        if self._view.now - request.state_since > _MUST_PLACE_SHARE[lane] * longest_s:
            return Urgency.OVERDUE
        if request.is_late:
            return Urgency.LATE
        return Urgency.YIELDS if is_batch else Urgency.NORMAL
