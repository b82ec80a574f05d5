"""Predicts the prefill work of requests, their time to first token and the time of a move."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

from baton.coordinator.routing.batch_prompts import BatchPrompts
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.placement_rule import PlacementRule
from baton.coordinator.routing.prefixes.prefix_match import HeldPrefix
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.routing.request_needs import RequestNeeds
from baton.coordinator.state.requests import Prediction, Request, Submission
from baton.coordinator.state.workers import AttachedWorkers
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import common_pb2


class Predictions:
    """Predicts from the fitted latency of one fleet's workers and from their queues.

    The class has no side effects.

    Args:
        view: View of the same workers.
        rule: Placement rule of the cell.
        workers: Workers of one fleet.
        prompts: Cuts prompts into blocks of these workers' block size.
        batch_prompts: Batch prompts that may be parked for interactive prompts.
        needs: Needs of the requests.
        unmeasured: Latency model of workers that have no measured one.
    """

    def __init__(
        self,
        view: FleetView,
        rule: PlacementRule,
        workers: AttachedWorkers,
        prompts: PromptBlocks,
        batch_prompts: BatchPrompts,
        needs: RequestNeeds,
        unmeasured: LatencyModel,
    ) -> None:
        self._view, self._workers, self._prompts = view, workers, prompts
        self._rule = rule
        self._batch_prompts, self._needs = batch_prompts, needs
        self._unmeasured = unmeasured

    def prefill_s(self, request: Request) -> float:
        """Predicted seconds to load and compute the prompt of a waiting request."""
        entry, num_tokens = self._view.loads.idlest_prefill(), request.num_prefill_tokens
        if entry is None:
            # Requests count as work even before the first worker has attached.
            return self._unmeasured_prefill_s(num_tokens)
        held = self._prompts.usable(request).held_by(entry.key)
        return _prefill_s(entry, num_tokens, held, self._view.now)

    def demand(self, submission: Submission, hashes: array[int]) -> tuple[float, int, float]:
        """Predicted demand of a request on the prefill and decode pools.

        Args:
            submission: the request.
            hashes: hashes of the prompt's blocks.

        Returns:
            Seconds of prefill work, number of prompt tokens, expected number of output tokens.
        """
        num_tokens = len(submission.prompt_token_ids)
        entry = self._view.loads.idlest_prefill()
        if entry is None:
            prefill_s = self._unmeasured_prefill_s(num_tokens)
        else:
            held = self._view.longest_prefill(self._prompts.usable_for(submission, hashes))
            prefill_s = _prefill_s(entry, num_tokens, held, self._view.now)
        return prefill_s, num_tokens, self._needs.mean_output_tokens(submission)

    def ttft(
        self, submission: Submission, hashes: array[int], in_lane_s: Callable[[float, float], float]
    ) -> Prediction | None:
        """Predicts the time to first token of a request, including all queues ahead of it.

        Args:
            submission: the request, which is not queued.
            hashes: hashes of the prompt's blocks.
            in_lane_s: function that predicts the seconds of waiting in the lane; its arguments are
                the seconds of the request's own work on a worker without decodes, and the number of
                prefill workers. A worker that computes prompts at half speed beside its decodes
                counts half.

        Returns:
            None while no worker computes prompts.
        """
        num_tokens, session = len(submission.prompt_token_ids), submission.session
        match = self._prompts.usable_for(submission, hashes)
        choice = self._rule.soonest(match, num_tokens, session)
        if choice is None:
            return None
        num_workers = self._view.loads.prompt_speed
        wait_s = choice.ttft_s - choice.work_s
        entry, worker = self._view.loads.get(choice.worker), self._workers.get(choice.worker)
        if (
            self._needs.prompt_lane(submission) != common_pb2.LANE_BATCH
            and entry is not None
            and self._batch_prompts.may_be_parked(entry, worker)
        ):
            wait_s = min(wait_s, entry.chunk_step_s)
        speed = 1.0 if entry is None else entry.prompt_speed
        wait_s += in_lane_s(choice.work_s * speed, num_workers)
        # A queued prompt waits for whole steps, so it may wait for one step more than predicted.
        # Adding half a step (the mean) made a full cell admit 1.5 % of requests that came too late.
        wait_s += min(wait_s, entry.chunk_step_s) if entry is not None else 0.0
        return Prediction(wait_s, choice.work_s)

    def alone_s(self, submission: Submission, hashes: array[int]) -> float:
        """Predicted seconds to compute a prompt on the best worker if all workers were idle.

        Args:
            submission: the request.
            hashes: hashes of the prompt's blocks.

        Returns:
            Seconds without queues, decodes and loads of cached blocks; infinite if no worker
            computes prompts.
        """
        num_tokens, session = len(submission.prompt_token_ids), submission.session
        match = self._prompts.usable_for(submission, hashes)
        return self._rule.alone_s(match, num_tokens, session)

    def remaining_output_s(self, request: Request) -> float:
        """Predicted seconds that a request needs for the rest of its output on its present worker.

        Returns:
            Seconds; 0 if the worker is gone.
        """
        entry = self._view.loads.get(request.decode) if request.decode is not None else None
        if entry is None:
            return 0.0
        return self._needs.more_output_tokens(request) * entry.reserved_step_s()

    def move_s(self, request: Request, waiting_s: float) -> float:
        """Predicted seconds until a decoding request continues if it left its worker now.

        A prefill worker then recomputes the prompt and the output generated so far.

        Args:
            request: the request.
            waiting_s: seconds of prefill work that wait in the lanes.

        Returns:
            Seconds; infinite if no worker computes prompts.
        """
        match, session = self._prompts.usable(request), request.submission.session
        choice = self._rule.soonest(match, request.num_prefill_tokens, session)
        if choice is None:
            return math.inf
        speed = self._view.loads.prompt_speed
        return choice.ttft_s + (waiting_s / speed if speed else 0.0)

    def _unmeasured_prefill_s(self, num_tokens: int) -> float:
        """Prefill seconds by the configured latency model, without any cached prefix."""
        return self._unmeasured.prefill_s(max(1, num_tokens))


def _prefill_s(entry: WorkerLoad, num_tokens: int, held: HeldPrefix, now: float) -> float:
    """Predicted prefill seconds on a worker that holds this prefix of the prompt."""
    return entry.prompt_s(num_tokens, entry.traits.hits(held, num_tokens), now)
