"""Decides whether a request may run now and on which workers, under the rules of its lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from baton.coordinator.routing.batch_prompts import BatchPrompts
from baton.coordinator.routing.choices import (
    DecodeChoice,
    NoPlacement,
    Placement,
    PrefillChoice,
    RoomWanted,
)
from baton.coordinator.routing.elastic.rule import ElasticRule
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.handoffs import Handoffs
from baton.coordinator.routing.loads.kv_forecast import KvForecast
from baton.coordinator.routing.loads.latency import LatencyRegistry
from baton.coordinator.routing.loads.worker_traits import traits_of
from baton.coordinator.routing.output_lengths import OutputLengths
from baton.coordinator.routing.placement_rule import PlacementRule
from baton.coordinator.routing.predictions import Predictions
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.routing.request_needs import RequestNeeds
from baton.coordinator.routing.strict.pool_choices import PoolChoices
from baton.coordinator.routing.strict.rule import StrictRule
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.requests import Request, WorkerKey
from baton.coordinator.state.workers import AttachedWorkers, Worker
from baton.coordinator.telemetry.recent_values import RecentValues
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import common_pb2

_BATCH = common_pb2.LANE_BATCH

_Found = TypeVar("_Found")


def _open_to(worker: Worker) -> Pool | None:
    """The pool that a worker gets work from; None while the worker takes no work."""
    return POOL_OF.get(worker.role) if worker.serving and worker.ledger.exclusive is None else None


class Placer:
    """Places the requests of one fleet on its workers, and tracks the load this causes.

    Args:
        config: Limits and targets.
        clock: Time of the event that the core handles.
        workers: The fleet's workers.
        latency: Latency models by worker kind.
        outputs: Prediction of output lengths; shared by all fleets.
        crowded: The placer adds the decode workers that get interactive work.
        prompt_times: The placer adds the seconds that interactive prompts take to compute without
            other work, prefix hits left out; only in an elastic cell.
        step_targets: Targets of the workers' steps.

    Attributes:
        view: load of each worker; read-only for callers.
        batch_prompts: batch prompts during their prefill; read-only for callers.
        prompts: block hashes of prompts.
        predictions: predicted prefill work and first-token times of requests.
    """

    def __init__(
        self,
        config: CoreConfig,
        clock: CoreClock,
        workers: AttachedWorkers,
        latency: LatencyRegistry,
        outputs: OutputLengths,
        crowded: dict[WorkerKey, None],
        prompt_times: RecentValues[float],
        step_targets: StepTargets,
    ) -> None:
        self._config, self._workers, self._latency = config, workers, latency
        self._outputs, self._crowded = outputs, crowded
        self.view = FleetView(
            clock,
            config.max_prefill_requests,
            config.max_decode_requests,
            step_targets if config.elastic else None,
        )
        self.batch_prompts = BatchPrompts(self.view, workers)
        self.prompts = PromptBlocks(self.view, workers)
        self._needs = RequestNeeds(config, workers, outputs)
        self._handoffs = Handoffs(workers, self.prompts)
        fetches = PrefixFetches(self.view, enabled=config.fetch)
        self._choices = PoolChoices(self.view, fetches)
        self._rule: PlacementRule = (
            ElasticRule(
                config,
                self.view,
                self.prompts,
                self._needs,
                self._handoffs,
                fetches,
                prompt_times,
            )
            if config.elastic
            else StrictRule(
                config,
                self.view,
                workers,
                self.prompts,
                self._needs,
                self._handoffs,
                self._choices,
            )
        )
        self.predictions = Predictions(
            self.view,
            self._rule,
            workers,
            self.prompts,
            self.batch_prompts,
            self._needs,
            config.latency,
        )

    def set_step_targets(self, targets: StepTargets) -> None:
        """Places from now on by these step targets; strict cells have no use for them."""
        if self._config.elastic:
            self.view.loads.set_step_targets(targets)

    # ---- Workers

    def attach(self, worker: Worker) -> None:
        """Adds a worker that has attached or reattached, and gives it work if it takes any."""
        if self.view.loads.get(worker.key) is None:
            self.view.add_worker(worker.key, traits_of(worker.hello, self._latency), None)
        self.refresh(worker)

    def refresh(self, worker: Worker) -> None:
        """Updates the pool of a worker after its role or state has changed."""
        if self.view.loads.get(worker.key) is not None:
            self.view.loads.set_pool(worker.key, _open_to(worker))

    def detach(self, worker: Worker) -> None:
        """Removes a worker and everything assigned to it."""
        self.view.remove_worker(worker.key)
        self._crowded.pop(worker.key, None)

    def check_integrity(self) -> None:
        """Raises AssertionError if the loads and the workers' pools are inconsistent."""
        self.view.check_integrity()
        for worker in self._workers:
            assert self.view.loads.pool(worker.key) is _open_to(worker)

    # ---- Requests

    def place(self, request: Request) -> Placement | NoPlacement:
        """Picks workers for the request whose turn it is, or says why it waits.

        A worker that lost the request before gets it again only if no other worker is available. A
        suspect (a request that may have crashed workers) gets only workers without unanswered
        requests, so that a crash loses no other request.
        """
        return self._without_avoided(request, self._rule.place)

    def becomes_late(self, request: Request) -> None:
        """Records that `place` found a request late; the caller lets others go first."""
        self._rule.becomes_late(request)

    def by_handoff(self, request: Request, source: Worker, within_s: float) -> Placement | None:
        """Plans a handoff of a running request from its decode worker to another decode worker.

        Args:
            request: the request, which `source` decodes.
            source: decode worker that gets no new requests.
            within_s: maximum number of seconds until the request continues on the new worker.

        Returns:
            None if the move would take longer, if no worker has room, or if `source` does not keep
            the KV blocks of requests that have left it.
        """
        if request.suspect or not source.hello.capacity.keeps_prefixes:
            return None
        match, needs = self.prompts.match(request), self._needs.decode(request)
        decode = self._choices.choose_decode(match, needs, prefill=source.key)
        if decode is None:
            return None
        num_tokens = request.num_prefill_tokens
        prefill = self._choices.by_handoff(
            source.key,
            decode.worker,
            num_tokens,
            computes_all=request.submission.computes_whole_prompt,
        )
        if prefill.ttft_s >= within_s:
            return None
        return self._handoffs.plan(request, prefill, decode)

    def has_room(self, request: Request) -> bool:
        """Whether any decode worker has room for a request that leaves its own worker."""
        match, needs = self.prompts.match(request), self._needs.decode(request)
        return self._choices.choose_decode(match, needs) is not None

    def room_wanted(self, request: Request) -> RoomWanted | None:
        """The decode worker on which batch requests should be parked for a request.

        Args:
            request: the request, for which `place` returned NoPlacement.FULL.

        Returns:
            None if parking does not help, or if it is a batch request itself.
        """
        if (
            self.view.loads.most_parkable() is None
            or self._needs.prompt_lane(request.submission) == _BATCH
        ):
            return None
        return self._without_avoided(request, self._room_wanted)

    def room_at(self, request: Request) -> float:
        """Predicts when a prefill worker will have room for a prompt that cannot be placed now.

        Returns:
            Time by the core's clock; infinite if no prediction is possible, or if the request
            waits for something other than a prefill worker.
        """
        return self._rule.room_at(request)

    def takes_only_interactive(self, request: Request) -> bool:
        """Whether a worker would take an interactive prompt, but none takes this batch prompt."""
        match = self.prompts.usable(request)
        return self._choices.takes_only_interactive(match, request.submission.session)

    def assign(self, request: Request, placement: Placement, *, can_be_parked: bool) -> None:
        """Adds a request to the load of the workers that it was placed on.

        Args:
            request: the request.
            placement: placement that `place` returned for the request.
            can_be_parked: whether the request may be parked if it is a batch request.
        """
        is_interactive = request.submission.lane != _BATCH
        self._rule.begins(request, placement)
        worker, is_local = placement.prefill.worker, placement.is_local
        # With strict roles, a decode worker that computes a prompt or hands over its own request
        # delays no other prompt.
        delays_prompts = self.view.loads.computes_prompts(self.view.loads.pool(worker))
        if delays_prompts or not is_local:
            self._assign_prompt(request, placement.prefill)
        has_batch_prompt = self._needs.prompt_lane(request.submission) == _BATCH
        if has_batch_prompt and can_be_parked and delays_prompts and not is_local:
            self.batch_prompts.begins(request.key, worker)
        if placement.decode is not None:
            self.view.assign_decode(
                request.key,
                placement.decode,
                request.submission.session,
                is_interactive=is_interactive,
                can_be_parked=can_be_parked and not is_interactive,
                num_mean_tokens=self._needs.mean_tokens(request),
                forecast=self._forecast(request, placement.decode.worker),
            )
            if is_interactive:
                self._crowded[placement.decode.worker] = None

    def adopt(self, request: Request, worker: WorkerKey) -> None:
        """Adds a request to the load of the worker that kept decoding it during a restart."""
        submission = request.submission
        num_tokens = request.num_tokens + self._needs.more_output_tokens(request)
        # No rule chose this worker, so only the KV tokens of the choice matter.
        choice = DecodeChoice(worker, step_s=0.0, num_kv_tokens=num_tokens, num_tokens=num_tokens)
        is_interactive = submission.lane != _BATCH
        self.view.assign_decode(
            request.key,
            choice,
            submission.session,
            is_interactive=is_interactive,
            can_be_parked=not is_interactive,
            forecast=self._forecast(request, worker),
        )
        self.view.first_token(request.key, request.prefill, request.decode)

    def computed(self, request: Request) -> None:
        """Records that a request's prompt has been computed."""
        self.batch_prompts.prefill_done(request.key)
        self.view.first_token(request.key, request.prefill, request.decode)

    def grows(self, request: Request, num_ahead: int) -> None:
        """Counts the KV tokens of a request whose output has grown, and reserves more KV room.

        Args:
            request: a request that decodes.
            num_ahead: tokens to reserve beyond the present output; the caller calls again before
                the output has used them.
        """
        num_output = len(request.token_ids) + num_ahead
        decode = request.decode
        self.view.record_tokens(request.key, decode, request.num_tokens)
        if self.view.outgrows(request.key, decode, request.num_prompt_tokens + num_output):
            num_output = min(num_output, self._needs.most_output_tokens(request.submission))
            num_tokens = request.num_prompt_tokens + num_output
            self.view.grow(request.key, decode, num_tokens, self._forecast(request, decode))

    def released(self, request: Request) -> None:
        """Removes a request from the load of its workers."""
        self.batch_prompts.prefill_done(request.key)
        self.view.release(request.key, request.prefill, request.decode)

    def ended(self, request: Request) -> None:
        """Records the length of a finished output for later predictions."""
        self._outputs.observe(request.submission.lane, len(request.token_ids))

    # ---- Parking of batch requests

    def is_crowded(self, worker: WorkerKey) -> bool:
        """Whether batch requests on a worker push interactive requests over their ITL target."""
        entry = self.view.loads.get(worker)
        return (
            entry is not None
            and 0 < entry.decodes.num_interactive < entry.num_decodes
            and self._rule.is_crowded(entry)
        )

    # ---- Private methods

    def _forecast(self, request: Request, worker: WorkerKey | None) -> KvForecast | None:
        """The KV tokens of a request while it decodes; None: its worker needs no forecasts."""
        entry = self.view.loads.get(worker)
        return self._needs.kv_forecast(request) if entry is not None and entry.is_tight else None

    def _without_avoided(self, request: Request, find: Callable[[Request], _Found]) -> _Found:
        """Calls `find` while the workers that the request must avoid get no work.

        If it finds nothing, it is called again with the workers that have lost the request.
        """
        if not request.avoid and not request.suspect:
            return find(request)
        # Lists instead of sets: their order decides between equally good workers, and must be the
        # same in each run of a simulation.
        avoided = [key for key in request.avoid if self.view.loads.get(key) is not None]
        closed = (
            [one.key for one in self._workers if one.ledger.unanswered] if request.suspect else []
        )
        with self.view.loads.closed([*closed, *avoided]):
            found = find(request)
        if avoided and (found is None or isinstance(found, NoPlacement)):
            with self.view.loads.closed(closed):
                found = find(request)
        return found

    def _assign_prompt(self, request: Request, choice: PrefillChoice) -> None:
        self.view.assign_prefill(
            request.key,
            choice,
            self.prompts.hashes_of(request),
            request.submission.session,
            request.first_token_due_at,
            is_batch=request.submission.lane == _BATCH,
        )

    def _room_wanted(self, request: Request) -> RoomWanted | None:
        entry = self.view.loads.most_parkable()
        if entry is None or self._needs.most_output_tokens(request.submission) == 1:
            return None
        needed = entry.in_blocks(request.num_tokens + self._needs.more_output_tokens(request))
        wanted = RoomWanted(
            entry.key,
            max(0, needed - entry.free_tokens),
            max(0, entry.num_decodes + 1 - self.view.loads.most_decodes(entry)),
        )
        is_there = not (wanted.num_tokens or wanted.num_requests)
        return None if is_there or needed > entry.free_tokens_after_parking else wanted
