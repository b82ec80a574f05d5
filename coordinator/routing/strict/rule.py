"""The placement rule of workers with fixed roles.

A prompt goes to a prefill worker and its output to a decode worker, with a handoff between them.
A request runs on the decode worker alone if a handoff is impossible, or if the decode worker
computes the prompt much sooner without delaying others (conditional disaggregation).
"""

from __future__ import annotations

import math

from baton.coordinator.routing.choices import NoPlacement, Placement, PrefillChoice
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.handoffs import Handoffs
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.prefixes.prefix_match import PrefixMatch
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.routing.request_needs import RequestNeeds
from baton.coordinator.routing.strict.local_prompts import LocalPrompts
from baton.coordinator.routing.strict.pool_choices import QUEUE_LIMITS, PoolChoices
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import Request, SessionKey
from baton.coordinator.state.workers import AttachedWorkers


class StrictRule:
    """The PlacementRule of workers with fixed roles.

    Args:
        config: Limits and targets.
        view: View of one fleet's workers.
        workers: The same workers.
        prompts: Block hashes of prompts.
        needs: Needs of the fleet's requests.
        handoffs: Handoffs between these workers.
        choices: Choices among these workers.
    """

    def __init__(
        self,
        config: CoreConfig,
        view: FleetView,
        workers: AttachedWorkers,
        prompts: PromptBlocks,
        needs: RequestNeeds,
        handoffs: Handoffs,
        choices: PoolChoices,
    ) -> None:
        self._view, self._workers, self._prompts = view, workers, prompts
        self._needs, self._handoffs, self._choices = needs, handoffs, choices
        self._may_compute_locally = config.local_prefill
        self._itl_target_s = config.lanes.interactive.itl_ms / 1e3
        self._local_prompts = LocalPrompts(view, self._itl_target_s)

    def place(self, request: Request) -> Placement | NoPlacement:
        """Returns the workers for a request whose turn it is, or why it waits."""
        match = self._prompts.usable(request)
        prefill = self._choices.choose_prefill(
            match,
            request.num_prefill_tokens,
            request.submission.session,
            QUEUE_LIMITS[self._needs.prompt_lane(request.submission)],
            may_fetch=self._needs.may_fetch(request),
        )
        if prefill is not None and self._needs.most_output_tokens(request.submission) == 1:
            return Placement(prefill, None)
        if not self._view.loads.num_prefill_workers and request.token_ids:
            # A client waits for the rest of an output, so a decode worker recomputes the prompt.
            return self._placed_on_one(request, match)
        local = self._choose_local(request, match, prefill)
        if local is not None:
            return local
        if prefill is None:
            return NoPlacement.BUSY
        needs = self._needs.decode(request)
        # The handoff leaves out blocks that the decode worker holds, even if the prefill worker
        # computes the whole prompt.
        held = self._prompts.match(request)
        decode = self._choices.choose_decode(held, needs, prefill=prefill.worker)
        if decode is None:
            return NoPlacement.FULL
        if (split := self._handoffs.plan(request, prefill, decode)) is not None:
            return split
        return self._placed_on_one(request, match)

    def begins(self, request: Request, placement: Placement) -> None:
        """Counts the long gaps that a decode worker's outputs get from a prompt of its own."""
        if placement.is_local:
            self._local_prompts.begins(placement.prefill)

    def becomes_late(self, request: Request) -> None:
        """Ignored: `place` finds no request late."""

    def room_at(self, request: Request) -> float:
        """Predicts when the idlest prefill worker has room for a prompt; see PlacementRule."""
        idlest = self._view.loads.idlest_prefill()
        if idlest is None:
            return math.inf
        return idlest.room_at(
            QUEUE_LIMITS[self._needs.prompt_lane(request.submission)], self._view.now
        )

    def is_crowded(self, entry: WorkerLoad) -> bool:
        """Whether steps exceed the ITL target of a worker with several batch outputs."""
        return (
            entry.decodes.num_interactive < entry.num_decodes - 1
            and entry.reserved_step_s() > self._itl_target_s
        )

    def soonest(
        self, match: PrefixMatch, num_tokens: int, session: SessionKey | None
    ) -> PrefillChoice | None:
        """Returns where a prompt's first token would come soonest; see PlacementRule."""
        return self._choices.choose_prefill(match, num_tokens, session)

    def alone_s(self, match: PrefixMatch, num_tokens: int, session: SessionKey | None) -> float:
        """Predicted seconds to compute a prompt on an idle worker; see PlacementRule."""
        # Workers that compute prompts have no decodes, so their work is that of idle workers.
        choice = self.soonest(match, num_tokens, session)
        return choice.work_s if choice is not None else math.inf

    def _placed_on_one(self, request: Request, match: PrefixMatch) -> Placement | NoPlacement:
        """Places a request on a decode worker that computes the prompt too."""
        decode = self._choices.choose_decode(match, self._needs.decode(request))
        return self._local_prompts.placed(decode) if decode is not None else NoPlacement.FULL

    def _choose_local(
        self, request: Request, match: PrefixMatch, prefill: PrefillChoice | None
    ) -> Placement | None:
        """The decode worker that should compute the prompt itself; None if that is not better.

        Args:
            request: the request.
            match: prefix match of the request's prompt.
            prefill: the prefill worker for the prompt; None: all are full.
        """
        if not self._may_compute_locally or not self._view.loads.num_prefill_workers:
            return None
        there_s = prefill.ttft_s if prefill is not None else math.inf
        if not self._local_prompts.may_pay(request.num_tokens, match, there_s):
            # This cheap check rejects nearly every request, without choosing a decode worker.
            return None
        decode = self._choices.choose_decode(match, self._needs.decode(request))
        worker = self._workers.get(decode.worker) if decode is not None else None
        if decode is None or worker is None or worker.ledger.local_prompt is not None:
            return None
        if prefill is None:
            soonest = self.soonest(match, request.num_prefill_tokens, request.submission.session)
            there_s = soonest.ttft_s if soonest is not None else math.inf
        local = self._local_prompts.placed(decode)
        pays = self._local_prompts.pays(
            local.prefill, there_s, self._needs.prompt_lane(request.submission)
        )
        return local if pays else None
