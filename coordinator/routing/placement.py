"""Decides whether a request may run now and on which workers, under the rules of its lane.

A prompt goes to a prefill worker and its output to a decode worker, with a handoff between them.
A request runs on the decode worker alone if a handoff is impossible, or if the decode worker
computes the prompt much sooner without delaying others (conditional disaggregation).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from baton.coordinator.routing.batch_prompts import BatchPrompts
from baton.coordinator.routing.choices import (
    DecodeChoice,
    NoPlacement,
    Placement,
    PrefillChoice,
    RoomWanted,
)
from baton.coordinator.routing.elastic import AHEAD_S, Demand, ElasticRule, reachable_itl_s
from baton.coordinator.routing.latency import LatencyRegistry
from baton.coordinator.routing.local_prompts import LocalPrompts
from baton.coordinator.routing.output_lengths import OutputLengths, max_output_tokens
from baton.coordinator.routing.predictions import Predictions
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prefix_match import PrefixMatch
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.routing.prompt_demand import PromptDemand
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.strict import StrictRule
from baton.coordinator.routing.worker_load import QueueLimit
from baton.coordinator.routing.worker_traits import block_size_of, handoff_bytes, traits_of
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.lanes import lane_config
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.requests import Request, RequestState, WorkerKey
from baton.coordinator.state.workers import AttachedWorkers, Worker
from baton.coordinator.telemetry.recent_values import RecentValues
from baton.runtime import kv_fingerprint
from baton.runtime.sampling import needs_exact_state
from baton.runtime.step_budget import StepTargets
from baton.v1 import common_pb2

_BATCH = common_pb2.LANE_BATCH
# Limit of prefill work queued on one worker, by lane, in steps. With two steps the engine stays
# busy while its answer to the first step is on its way. The batch limit is one step, so that an
# interactive prompt waits for at most one batch step.
_QUEUE_LIMITS = {
    common_pb2.LANE_INTERACTIVE: QueueLimit(2.0, predicts_progress=True),
    _BATCH: QueueLimit(1.0, predicts_progress=False),
}
# Batch requests join interactive requests while steps take at most this share of the ITL target.
# They are parked when steps exceed the whole target. The two limits differ, so that a batch request
# is not placed and parked again and again.
_JOIN_SHARE = 0.9
# In an elastic cell, a request that has waited for this share of its lane's max_queue_s is placed
# even where it delays others. If the cell is beyond its capacity, placing a late interactive
# request makes other requests late. The share of the interactive lane is therefore large, and
# leaves only enough time for the placement.
_MUST_PLACE_SHARE = {common_pb2.LANE_INTERACTIVE: 0.8, _BATCH: 1 / 6}

_Found = TypeVar("_Found")


def _open_to(worker: Worker) -> Pool | None:
    """The pool that a worker gets work from; None while the worker takes no work."""
    return POOL_OF.get(worker.role) if worker.serving and worker.ledger.exclusive is None else None


class Placer:
    """Places the requests of one fleet on its workers, and tracks the load this causes.

    Args:
        config: Limits and targets.
        workers: The fleet's workers.
        latency: Latency models by worker kind.
        outputs: Prediction of output lengths; shared by all fleets.
        crowded: The placer adds the decode workers that get interactive work.
        prompt_times: The placer adds the seconds that interactive prompts take to compute without
            other work, prefix hits left out; only in an elastic cell.
        step_targets: Targets of the workers' steps.

    Attributes:
        router: load of each worker; read-only for callers.
        batch_prompts: batch prompts during their prefill; read-only for callers.
        prompts: block hashes of prompts.
        predictions: predicted prefill work and first-token times of requests.
    """

    def __init__(
        self,
        config: CoreConfig,
        workers: AttachedWorkers,
        latency: LatencyRegistry,
        outputs: OutputLengths,
        crowded: dict[WorkerKey, None],
        prompt_times: RecentValues[float],
        step_targets: StepTargets,
    ) -> None:
        self._config, self._workers, self._latency = config, workers, latency
        self.router = Router(
            config.max_prefill_requests,
            config.max_decode_requests,
            step_targets if config.elastic else None,
        )
        fetches = PrefixFetches(self.router, enabled=config.fetch)
        self._strict = StrictRule(self.router, fetches)
        self._prompt_demand = PromptDemand()
        self._rule = (
            ElasticRule(self.router, fetches, self._prompt_demand) if config.elastic else None
        )
        self._outputs, self._crowded, self._prompt_times = outputs, crowded, prompt_times
        self._itl_target_s = config.lanes.interactive.itl_ms / 1e3
        self._local_prompts = LocalPrompts(self.router, self._itl_target_s)
        self.batch_prompts = BatchPrompts(self.router, workers)
        self.prompts = PromptBlocks(self.router, workers)
        self.predictions = Predictions(
            self.router,
            self._rule or self._strict,
            workers,
            self.prompts,
            self.batch_prompts,
            outputs,
            config,
        )

    def set_step_targets(self, targets: StepTargets) -> None:
        """Places from now on by these step targets; strict cells have no use for them."""
        if self._config.elastic:
            self.router.set_step_targets(targets)

    # ---- Workers

    def attach(self, worker: Worker) -> None:
        """Adds a worker that has attached or reattached, and gives it work if it takes any."""
        if self.router.load(worker.key) is None:
            traits = traits_of(worker.hello, self._latency)
            self.router.add_worker(worker.key, traits, None)
            self._local_prompts.attach(traits)
        self.refresh(worker)

    def refresh(self, worker: Worker) -> None:
        """Updates the pool of a worker after its role or state has changed."""
        if self.router.load(worker.key) is not None:
            self.router.set_pool(worker.key, _open_to(worker))

    def detach(self, worker: Worker) -> None:
        """Removes a worker and everything assigned to it."""
        entry = self.router.load(worker.key)
        if entry is not None:
            self._local_prompts.detach(entry.traits)
        self.router.remove_worker(worker.key)
        self._crowded.pop(worker.key, None)

    def check_integrity(self) -> None:
        """Raises AssertionError if the router's state and the workers' pools are inconsistent."""
        self.router.check_integrity()
        for worker in self._workers:
            assert self.router.pool(worker.key) is _open_to(worker)

    # ---- Requests

    def place(self, request: Request) -> Placement | NoPlacement:
        """Picks workers for the request whose turn it is, or says why it waits.

        Only elastic cells distinguish late requests, and only among those that wait in the
        interactive lane. A worker that lost the request before gets it again only if no other
        worker is available. A suspect (a request that may have crashed workers) gets only workers
        without unanswered requests, so that a crash loses no other request.
        """
        return self._without_avoided(request, self._place)

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
        decode = self._decode_anew(request, source.key)
        if decode is None:
            return None
        num_tokens = request.num_prefill_tokens
        choice = self._strict.by_handoff(source.key, decode.worker, num_tokens)
        return self._split(request, choice, decode) if choice.predicted_s < within_s else None

    def has_room(self, request: Request) -> bool:
        """Whether any decode worker has room for a request that leaves its own worker."""
        return self._decode_anew(request, None) is not None

    def room_wanted(self, request: Request) -> RoomWanted | None:
        """The decode worker on which batch requests should be parked for a waiting request.

        Returns:
            None if the request waits for something else, or is a batch request itself.
        """
        if self.router.most_yielding() is None or self._lane_of(request) == _BATCH:
            return None
        return self._without_avoided(request, self._room_wanted)

    def room_at(self, request: Request) -> float:
        """Predicts when a prefill worker will have room for a prompt that cannot be placed now.

        Returns:
            Time by the core's clock; infinite if no prediction is possible, or if the request
            waits for something other than a prefill worker.
        """
        idlest = self.router.idlest_prefill()
        if idlest is None:
            return math.inf
        if self._rule is not None:
            found = self._rule.candidates(self.prompts.match(request), None)
            times = [entry.free_at - AHEAD_S for entry, _ in found]
            return min((at for at in times if at > self.router.now), default=math.inf)
        return idlest.room_at(_QUEUE_LIMITS[self._lane_of(request)], self.router.now)

    def is_crowded_out(self, request: Request) -> bool:
        """Whether no prefill worker takes a batch prompt, but one would take an interactive one."""
        match, now = self.prompts.match(request), self.router.now
        entries = self._strict.prefill_candidates(match, request.submission.session)
        batch, interactive = _QUEUE_LIMITS[_BATCH], _QUEUE_LIMITS[common_pb2.LANE_INTERACTIVE]
        return all(one.is_full(batch, now) for one in entries) and not all(
            one.is_full(interactive, now) for one in entries
        )

    def assign(self, request: Request, placement: Placement, *, yields: bool) -> None:
        """Adds a request to the load of the workers that it was placed on.

        Args:
            request: the request.
            placement: placement that `place` returned for the request.
            yields: whether the request may be parked if it is a batch request.
        """
        urgent = request.submission.lane != _BATCH
        if urgent and self._rule is not None and (reader := placement.reader) is not None:
            self._measure_prompt(request, reader)
        if placement.prefill is not None:
            self._assign_prompt(request, placement.prefill)
            worker = placement.prefill.worker
            # With strict roles, a decode worker that hands over its own request delays no prompt.
            computes_prompts = self.router.loads.computes_prompts(self.router.pool(worker))
            if yields and computes_prompts and self._lane_of(request) == _BATCH:
                self.batch_prompts.begins(request.key, worker)
        if placement.decode is not None:
            if placement.local is not None:
                self._assign_prompt(request, placement.local)
            elif placement.prefill is None:
                self._local_prompts.begins(placement.decode)
            self.router.assign_decode(
                request.key,
                placement.decode,
                request.submission.session,
                urgent=urgent,
                yields=yields and not urgent,
                num_mean_tokens=self._num_mean_tokens(request),
            )
            if urgent:
                self._crowded[placement.decode.worker] = None

    def adopt(self, request: Request, worker: WorkerKey) -> None:
        """Adds a request to the load of the worker that kept decoding it during a restart."""
        submission = request.submission
        most = max_output_tokens(submission, self._workers.max_model_len)
        num_known = len(request.token_ids)
        num_more = self._outputs.expected(submission.lane, most, num_known)
        num_tokens = request.num_prompt_tokens + num_known + num_more
        # The router did not choose this worker, so only the KV tokens of the choice matter.
        choice = DecodeChoice(
            worker,
            predicted_s=0.0,
            num_kv_tokens=num_tokens,
            num_cached_tokens=0,
            num_tokens=num_tokens,
        )
        urgent = submission.lane != _BATCH
        self.router.assign_decode(
            request.key, choice, submission.session, urgent=urgent, yields=not urgent
        )
        self.router.first_token(request.key, request.prefill, request.decode)

    def computed(self, request: Request) -> None:
        """Records that a request's prompt has been computed."""
        self.batch_prompts.prefill_done(request.key)
        self.router.first_token(request.key, request.prefill, request.decode)

    def grows(self, request: Request, num_ahead: int) -> None:
        """Reserves more KV room for a request whose output has grown.

        Args:
            request: a request that decodes.
            num_ahead: tokens to reserve beyond the present output; the caller calls again before
                the output has used them.
        """
        num_output = len(request.token_ids) + num_ahead
        decode = request.decode
        if self.router.outgrows(request.key, decode, request.num_prompt_tokens + num_output):
            most = max_output_tokens(request.submission, self._workers.max_model_len)
            num_output = min(num_output, most)
            self.router.grow(request.key, decode, request.num_prompt_tokens + num_output)

    def released(self, request: Request) -> None:
        """Removes a request from the load of its workers."""
        self.batch_prompts.prefill_done(request.key)
        self.router.release(request.key, request.prefill, request.decode)

    def ended(self, request: Request) -> None:
        """Records the length of a finished output for later predictions."""
        self._outputs.observe(request.submission.lane, len(request.token_ids))

    def _num_mean_tokens(self, request: Request) -> int:
        """KV tokens that requests like this one have on average while they decode."""
        submission = request.submission
        most = max_output_tokens(submission, self._workers.max_model_len)
        return request.num_tokens + round(self._outputs.mean_of_running(submission.lane, most) / 2)

    # ---- Parking of batch requests

    def must_yield(self, worker: WorkerKey) -> bool:
        """Whether batch requests on a worker push interactive requests over their ITL target."""
        entry, targets = self.router.load(worker), self.router.step_targets
        if entry is None or not 0 < entry.num_urgent < entry.num_decodes:
            return False
        if targets is None:
            return (
                entry.num_urgent < entry.num_decodes - 1
                and entry.itl_with_s(0, 0) > self._itl_target_s
            )
        # The same limit by which the rule of an elastic cell places requests.
        itl_s = math.inf if targets.itl_s is None else targets.itl_s
        return entry.mean_itl_s() > reachable_itl_s(itl_s, entry.single_step_s)

    # ---- Private methods

    def _lane_of(self, request: Request) -> common_pb2.Lane.ValueType:
        """The lane that the request's prompt is computed in."""
        return request.submission.ordered_in(self._config.lanes.long_prompt_tokens)

    def _without_avoided(self, request: Request, find: Callable[[Request], _Found]) -> _Found:
        """Calls `find` while the workers that the request must avoid get no work.

        If it finds nothing, it is called again with the workers that have lost the request.
        """
        if not request.avoid and not request.suspect:
            return find(request)
        # Lists instead of sets: their order decides between equally good workers, and must be the
        # same in each run of a simulation.
        avoided = [key for key in request.avoid if self.router.load(key) is not None]
        closed = (
            [one.key for one in self._workers if one.ledger.unanswered] if request.suspect else []
        )
        with self._closed([*closed, *avoided]):
            found = find(request)
        if avoided and (found is None or isinstance(found, NoPlacement)):
            with self._closed(closed):
                found = find(request)
        return found

    @contextlib.contextmanager
    def _closed(self, workers: Iterable[WorkerKey]) -> Iterator[None]:
        """Gives these workers no work inside the `with` block."""
        for key in workers:
            self.router.set_pool(key, None)
        try:
            yield
        finally:
            for key in workers:
                worker = self._workers.get(key)
                if worker is not None:
                    self.refresh(worker)

    def _assign_prompt(self, request: Request, choice: PrefillChoice) -> None:
        self.router.assign_prefill(
            request.key,
            choice,
            self.prompts.hashes_of(request),
            request.submission.session,
            request.first_token_due_at,
            is_batch=request.submission.lane == _BATCH,
        )

    def _measure_prompt(self, request: Request, reader: PrefillChoice) -> None:
        load = self.router.load(reader.worker)
        assert load is not None
        prompt_s = load.traits.latency.model.chunk_s(0, reader.num_work_tokens)
        self._prompt_times.add(prompt_s)
        target_s = request.first_token_due_at - request.submitted_at
        self._prompt_demand.add(prompt_s, target_s, self.router.now)

    def _demand(self, request: Request) -> Demand:
        submission, num_known = request.submission, len(request.token_ids)
        targets = self.router.step_targets
        most = max_output_tokens(submission, self._workers.max_model_len)
        waited_s = self.router.now - request.state_since
        longest_s = lane_config(self._config.lanes, submission.lane).max_queue_s
        share = _MUST_PLACE_SHARE[self._lane_of(request)]
        is_batch = submission.lane == _BATCH
        # A stream that lost its worker continues at once, because its client sees the pause. A
        # batch output may have been parked for requests that still run, so it waits.
        continues = num_known > 0 and not is_batch
        must_place = continues or waited_s > share * longest_s
        return Demand(
            num_tokens=request.num_tokens,
            num_output_tokens=(
                0 if most == 1 else self._outputs.expected(submission.lane, most, num_known)
            ),
            num_mean_tokens=self._num_mean_tokens(request),
            due_in_s=request.first_token_due_at - self.router.now,
            itl_s=math.inf if targets is None or targets.itl_s is None else targets.itl_s,
            # A request that lost its worker does not go behind others: `max_recovery_s` may end
            # before it would have its turn.
            others_go_first_if_late=(
                request.state is RequestState.QUEUED
                and not request.is_late
                and self._lane_of(request) != _BATCH
            ),
            is_late=request.is_late,
            waits_for_others=(request.is_late or is_batch) and not must_place,
            must_place=must_place,
            continues=continues,
            session=submission.session,
            may_fetch=self._may_fetch(request),
            is_batch=is_batch,
        )

    @staticmethod
    def _may_fetch(request: Request) -> bool:
        """Whether the reader may fetch the prompt's beginning from another worker.

        It may not for prompt logprobs, for which engines compute whole prompts, and not for images,
        because the holder has no images from which it could compute blocks that it lacks.
        """
        computes_all = request.submission.sampling.HasField("prompt_logprobs")
        has_images = bool(request.submission.images)
        return not (request.suspect or has_images or (computes_all and not len(request.token_ids)))

    def _place_elastic(self, rule: ElasticRule, request: Request) -> Placement | NoPlacement:
        found = rule.place(self.prompts.match(request), self._demand(request))
        if isinstance(found, NoPlacement):
            return found
        if found.decoder is None:
            return Placement(found.reader, None)
        decoder = found.decoder.worker
        if found.reader.worker != decoder:
            split = self._split(request, found.reader, found.decoder)
            if split is not None:
                return split
        local = found.reader
        if local.worker != decoder:
            local = local._replace(worker=decoder, fetch=None)
        return Placement(None, found.decoder, local=local)

    def _place(self, request: Request) -> Placement | NoPlacement:
        if self._rule is not None:
            return self._place_elastic(self._rule, request)
        submission, match = request.submission, self.prompts.match(request)
        most = max_output_tokens(submission, self._workers.max_model_len)
        prefill = self._strict.choose_prefill(
            match,
            request.num_prefill_tokens,
            submission.session,
            _QUEUE_LIMITS[self._lane_of(request)],
            may_fetch=self._may_fetch(request),
        )
        if prefill is not None and most == 1:
            return Placement(prefill, None)
        local = self._choose_local(request, match, most, prefill)
        if local is not None:
            return Placement(None, local)
        if prefill is None:
            return NoPlacement.FULL
        decode = self._choose_decode(request, match, most, prefill.worker)
        if decode is None:
            return NoPlacement.FULL
        if (split := self._split(request, prefill, decode)) is not None:
            return split
        unsplit = self._choose_decode(request, match, most, None)
        return Placement(None, unsplit) if unsplit is not None else NoPlacement.FULL

    def _room_wanted(self, request: Request) -> RoomWanted | None:
        submission, match = request.submission, self.prompts.match(request)
        most = max_output_tokens(submission, self._workers.max_model_len)
        entry, num_known = self.router.most_yielding(), len(request.token_ids)
        if entry is None or most == 1:
            return None
        if self._rule is None and (self.router.num_prefill_workers or not num_known):
            prefill = self._strict.choose_prefill(
                match,
                request.num_prefill_tokens,
                submission.session,
                _QUEUE_LIMITS[submission.lane],
            )
            if prefill is None:
                return None
        num_more = self._outputs.expected(submission.lane, most, num_known)
        needed = entry.in_blocks(request.num_prompt_tokens + num_known + num_more)
        wanted = RoomWanted(
            entry.key,
            max(0, needed - entry.free_tokens),
            max(0, entry.num_decodes + 1 - self.router.most_decodes(entry)),
        )
        is_there = not (wanted.num_tokens or wanted.num_requests)
        return None if is_there or wanted.num_tokens > entry.yielding_tokens else wanted

    def _decode_anew(self, request: Request, source: WorkerKey | None) -> DecodeChoice | None:
        most = max_output_tokens(request.submission, self._workers.max_model_len)
        return self._choose_decode(request, self.prompts.match(request), most, source)

    def _choose_decode(
        self, request: Request, match: PrefixMatch, most: int, prefill: WorkerKey | None
    ) -> DecodeChoice | None:
        """The decode worker for a request; None if no worker has room.

        Args:
            request: the request.
            match: prefix match of the request's prompt.
            most: maximum number of tokens of the whole output.
            prefill: the worker that computes the prompt; None: the decode worker computes it.
        """
        submission, num_known = request.submission, len(request.token_ids)
        max_itl_s = math.inf
        if yields := submission.lane == _BATCH:
            max_itl_s = self._itl_target_s * _JOIN_SHARE
        elif submission.slo_itl_s is not None:
            max_itl_s = submission.slo_itl_s
        return self._strict.choose_decode(
            match,
            request.num_prompt_tokens + num_known,
            self._outputs.expected(submission.lane, most, num_known),
            prefill=prefill,
            session=submission.session,
            max_itl_s=max_itl_s,
            yields=yields,
        )

    def _choose_local(
        self, request: Request, match: PrefixMatch, most: int, prefill: PrefillChoice | None
    ) -> DecodeChoice | None:
        """The decode worker that should compute the prompt itself; None if that is not better."""
        if not self.router.num_prefill_workers:
            # A client waits for the rest of an output, so a decode worker recomputes the prompt.
            return (
                self._choose_decode(request, match, most, None) if len(request.token_ids) else None
            )
        if not self._config.local_prefill:
            return None
        there_s = prefill.predicted_s if prefill is not None else math.inf
        num_tokens = request.num_tokens
        if not self._local_prompts.may_pay(num_tokens, match, there_s):
            # This cheap check rejects nearly every request, without choosing a decode worker.
            return None
        choice = self._choose_decode(request, match, most, None)
        if choice is None:
            return None
        worker, entry = self._workers.get(choice.worker), self.router.load(choice.worker)
        if worker is None or entry is None or worker.ledger.local_prompt is not None:
            return None
        if prefill is None:
            there_s = self.predictions.next_token_s(request, match)
        pays = self._local_prompts.pays(choice, entry, there_s, self._lane_of(request))
        return choice if pays else None

    def _split(
        self, request: Request, prefill: PrefillChoice, decode: DecodeChoice
    ) -> Placement | None:
        """Both workers with a handoff between them; None if the handoff exceeds their limits."""
        skip_tokens = self._skip_tokens(request, decode)
        if not self._can_hand_over(request, prefill.worker, decode.worker, skip_tokens):
            return None
        return Placement(prefill, decode, skip_tokens)

    def _skip_tokens(self, request: Request, decode: DecodeChoice) -> int:
        """Tokens that the handoff leaves out: whole blocks in the decode worker's cache.

        The handoff never leaves out the last token, because the engine continues from it.
        """
        worker = self._workers.get(decode.worker)
        assert worker is not None
        # A cached prefix of keys and values is of no use to a model with recurrent states, unless
        # the worker has the state at its end too, which the prefix index does not tell.
        if request.hands_over_all or kv_fingerprint.keeps_states(worker.hello.fingerprint):
            return 0
        block_size = block_size_of(worker.hello)
        held = min(decode.num_cached_tokens, request.num_prefill_tokens - 1)
        return held // block_size * block_size

    def _can_hand_over(
        self, request: Request, prefill: WorkerKey, decode: WorkerKey, skip_tokens: int
    ) -> bool:
        """Whether both workers accept a handoff of this size and the receiver can continue."""
        sender, receiver = self._workers.get(prefill), self._workers.get(decode)
        assert sender is not None
        assert receiver is not None
        num_bytes = handoff_bytes(sender.hello, request.num_prefill_tokens - skip_tokens)
        if kv_fingerprint.keeps_states(receiver.hello.fingerprint) and needs_exact_state(
            request.submission.sampling
        ):
            # The receiver computes the prompt's last token again, and has the state after it only.
            return False
        return (
            num_bytes <= sender.hello.capacity.max_send_bytes
            and num_bytes <= receiver.hello.capacity.max_receive_bytes
            and receiver.can_replay(request.submission.sampling)
        )
