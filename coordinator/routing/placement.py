"""Which request may run now, and where: the router's choices under the lanes' rules.

A prompt goes to a prefill worker and its output to a decode worker, with a handoff between them.
It runs unsplit, on the decode worker alone, where it cannot be handed over, and where its prompt is
computed much sooner there without making others wait (conditional disaggregation).
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator

from baton.coordinator.core.core_config import CoreConfig
from baton.coordinator.core.output_lengths import OutputLengths, max_output_tokens
from baton.coordinator.core.request import Prediction, Request, Submission, WorkerKey
from baton.coordinator.core.workers import AttachedWorkers, Worker
from baton.coordinator.routing.batch_prompts import BatchPrompts
from baton.coordinator.routing.choices import DecodeChoice, Placement, PrefillChoice
from baton.coordinator.routing.latency import LatencyRegistry
from baton.coordinator.routing.load_index import POOL_OF, Pool
from baton.coordinator.routing.local_prompts import LocalPrompts
from baton.coordinator.routing.prefix_index import PrefixMatch
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_load import Ahead
from baton.coordinator.routing.worker_traits import block_size_of, handoff_bytes, traits_of
from baton.runtime.block_hashes import block_hashes, root_of
from baton.runtime.sampling import needs_exact_state
from baton.v1 import common_pb2

_BATCH = common_pb2.LANE_BATCH
# Prefill work on one worker, by lane, that lets no other prompt of the lane join. The second step
# keeps an engine busy while its answer to the first is on its way; batch goes without, so that an
# interactive prompt never finds more than one of its steps ahead of it.
_AHEAD = {
    common_pb2.LANE_INTERACTIVE: Ahead(2.0, foresees=True),
    _BATCH: Ahead(1.0, foresees=False),
}
# Batch joins interactive outputs up to this share of their target, and is parked beyond all of it:
# between the two nothing moves.
_JOIN_SHARE = 0.9


def _open_to(worker: Worker) -> Pool | None:
    """What it is given; None while it takes nothing."""
    return POOL_OF.get(worker.role) if worker.serving and not worker.alone else None


class Placer:
    """Owns the router of one revision's workers, and what is expected of its requests.

    Args:
        outputs: how long outputs are; shared by all revisions.
        crowded: takes the decode workers that are given interactive work.

    Attributes:
        router, batch_prompts: to be read only from outside.
    """

    def __init__(
        self,
        config: CoreConfig,
        workers: AttachedWorkers,
        latency: LatencyRegistry,
        outputs: OutputLengths,
        crowded: dict[WorkerKey, None],
    ) -> None:
        self._config, self._workers, self._latency = config, workers, latency
        self.router = Router(config.max_prefill_requests, config.max_decode_requests)
        self._outputs, self._crowded = outputs, crowded
        self._itl_target_s = config.lanes.interactive.itl_ms / 1e3
        self._local_prompts = LocalPrompts(self.router, self._itl_target_s)
        self.batch_prompts = BatchPrompts(self.router, workers)

    # ---- Members.

    def attach(self, worker: Worker) -> None:
        """A worker is there, or is there again; it is filed by `refresh`."""
        if self.router.load(worker.key) is None:
            traits = traits_of(worker.hello, self._latency)
            self.router.add_worker(worker.key, traits, None)
            self._local_prompts.attach(traits)
        self.refresh(worker)

    def refresh(self, worker: Worker) -> None:
        """Whether it takes work, and which, may have changed."""
        if self.router.load(worker.key) is not None:
            self.router.set_pool(worker.key, _open_to(worker))

    def detach(self, worker: Worker) -> None:
        entry = self.router.load(worker.key)
        if entry is not None:
            self._local_prompts.detach(entry.traits)
        self.router.remove_worker(worker.key)
        self._crowded.pop(worker.key, None)

    def check_integrity(self) -> None:
        """Raises AssertionError when sums, masks or owners differ from what they stand for."""
        self.router.check_integrity()
        for worker in self._workers:
            assert self.router.pool(worker.key) is _open_to(worker)

    # ---- Requests.

    def work_s(self, request: Request) -> float:
        """Seconds of prefill work in a request that is to wait."""
        entry, num_tokens = self.router.idlest_prefill(), request.num_prefill_tokens
        if entry is None:
            # What waits for the first worker is work all the same.
            return self._unmeasured_work_s(num_tokens)
        match = self.router.match(self._hashes(request))
        cached = match.blocks_of(entry.key) * entry.traits.block_size_tokens
        return entry.traits.latency.prefill_s(max(1, num_tokens - cached))

    def place(self, request: Request) -> Placement | None:
        """Picks workers for the request whose turn it is; None when one it needs has no room.

        A worker that gave the request up before gets it again only where there is no other. A
        suspect gets workers that are at work on nothing but answered requests.
        """
        if not request.avoid and not request.suspect:
            return self._place(request)
        # In order, as all that decides whose turn it is among equals: sets of names have none.
        shunned = [key for key in request.avoid if self.router.load(key) is not None]
        closed = [one.key for one in self._workers if one.unanswered] if request.suspect else []
        with self._closed([*closed, *shunned]):
            found = self._place(request)
        if found is None and shunned:
            with self._closed(closed):
                found = self._place(request)
        return found

    def room_at(self, request: Request) -> float:
        """When a prefill worker will have room for a prompt that finds none now.

        By the core's clock; infinite where that cannot be foreseen, or is not what it lacks.
        """
        idlest = self.router.idlest_prefill()
        if idlest is None:
            return math.inf
        return idlest.room_at(_AHEAD[request.submission.lane], self.router.now)

    def is_crowded_out(self, request: Request) -> bool:
        """Whether every prefill worker is too full for a batch prompt, and one takes another."""
        match, now = self.router.match(self._hashes(request)), self.router.now
        entries = self.router.prefill_candidates(match, request.submission.session_id)
        batch, interactive = _AHEAD[_BATCH], _AHEAD[common_pb2.LANE_INTERACTIVE]
        return all(one.is_full(batch, now) for one in entries) and not all(
            one.is_full(interactive, now) for one in entries
        )

    def assign(self, request: Request, placement: Placement, *, yields: bool) -> None:
        """It goes where it was placed.

        Args:
            request: that was placed.
            placement: where.
            yields: whether a batch prompt may be told to make room while it is computed.
        """
        session, urgent = request.submission.session_id, request.submission.lane != _BATCH
        if placement.prefill is not None:
            self.router.assign_prefill(
                request.key, placement.prefill, self._hashes(request), session
            )
            if yields and not urgent:
                self.batch_prompts.begins(request.key, placement.prefill.worker)
        if placement.decode is not None:
            if placement.prefill is None:
                self._local_prompts.begins(placement.decode)
            self.router.assign_decode(request.key, placement.decode, session, urgent=urgent)
            if urgent:
                self._crowded[placement.decode.worker] = None

    def adopt(self, request: Request, worker: WorkerKey) -> None:
        """It decodes there already."""
        submission, model = request.submission, self._workers.model
        most = max_output_tokens(submission, model.max_model_len if model is not None else 0)
        num_known = len(request.token_ids)
        num_more = self._outputs.expected(submission.lane, most, num_known)
        num_tokens = request.num_prompt_tokens + num_known + num_more
        # Nobody chose it: only what it takes counts.
        choice = DecodeChoice(
            worker,
            predicted_s=0.0,
            num_kv_tokens=num_tokens,
            num_cached_tokens=0,
            num_tokens=num_tokens,
        )
        urgent = submission.lane != _BATCH
        self.router.assign_decode(request.key, choice, submission.session_id, urgent=urgent)
        self.router.first_token(request.key)

    def computed(self, request: Request) -> None:
        """Its prompt is."""
        self.batch_prompts.over(request.key)
        self.router.first_token(request.key)

    def grows(self, request: Request, num_ahead: int) -> None:
        """It has more tokens, and is looked at again before it has so many more."""
        num_output = len(request.token_ids) + num_ahead
        if self.router.outgrows(request.key, request.num_prompt_tokens + num_output):
            model = self._workers.model
            max_len = model.max_model_len if model is not None else 0
            num_output = min(num_output, max_output_tokens(request.submission, max_len))
            self.router.grow(request.key, request.num_prompt_tokens + num_output)

    def released(self, request: Request) -> None:
        """It leaves its workers."""
        self.batch_prompts.over(request.key)
        self.router.release(request.key)

    def ended(self, request: Request) -> None:
        """Its output came to its natural end."""
        self._outputs.observe(request.submission.lane, len(request.token_ids))

    # ---- Yielding.

    def must_yield(self, worker: WorkerKey) -> bool:
        """Whether batch outputs there make interactive ones slower than they may be."""
        entry = self.router.load(worker)
        return (
            entry is not None
            and 0 < entry.num_urgent < entry.num_decodes - 1
            and entry.itl_with_s(0, 0) > self._itl_target_s
        )

    # ---- Predictions.

    def demand(self, submission: Submission, hashes: array[int]) -> tuple[float, int, float]:
        """Seconds of prefill work, prompt tokens and output tokens to be expected of a request."""
        num_tokens = len(submission.prompt_token_ids)
        work_s = self._cached_work_s(num_tokens, hashes)
        model = self._workers.model
        most = max_output_tokens(submission, model.max_model_len if model is not None else 0)
        return work_s, num_tokens, self._outputs.mean(submission.lane, most or num_tokens)

    def predicted_ttft(
        self, submission: Submission, hashes: array[int], in_lane_s: Callable[[float, int], float]
    ) -> Prediction | None:
        """From now on, behind all that goes first; None while no prefill worker is there.

        Args:
            submission: not queued.
            hashes: of its prompt.
            in_lane_s: how long it waits before it is given to a worker, by the seconds of its own
                work and how many workers there are.
        """
        num_workers = self.router.num_prefill_workers
        if not num_workers:
            return None
        num_tokens = len(submission.prompt_token_ids)
        choice = self.router.choose_prefill(
            self.router.match(hashes), num_tokens, submission.session_id
        )
        if choice is None:
            return None
        wait_s = choice.predicted_s - choice.work_s
        entry, worker = self.router.load(choice.worker), self._workers.get(choice.worker)
        if (
            submission.lane != _BATCH
            and entry is not None
            and self.batch_prompts.give_way(entry, worker)
        ):
            wait_s = min(wait_s, entry.step_s)
        wait_s += in_lane_s(choice.work_s, num_workers)
        # Behind others it waits for whole steps, one more at worst. With half of one, the mean, a
        # full cell admitted 1.5 % that came too late.
        wait_s += min(wait_s, entry.step_s) if entry is not None else 0.0
        return Prediction(wait_s, choice.work_s)

    def ends_in_s(self, request: Request) -> float:
        """Until a request that decodes has all of its output, where it is."""
        entry = self.router.load(request.decode) if request.decode is not None else None
        if entry is None:
            return 0.0
        lane = request.submission.lane
        model = self._workers.model
        most = max_output_tokens(request.submission, model.max_model_len if model else 0)
        num_more = self._outputs.expected(lane, most, len(request.token_ids))
        return num_more * entry.itl_with_s(0, 0)

    def goes_on_in_s(self, request: Request, waiting_s: float) -> float:
        """Until it would go on elsewhere: its prompt and what is known computed once more.

        Args:
            request: that decodes.
            waiting_s: of prefill work in the lanes.
        """
        wait_s = self._wait_s(request, self.router.match(self._hashes(request)))
        num_workers = self.router.num_prefill_workers
        return wait_s + (waiting_s / num_workers if num_workers else 0.0)

    # ---- Inside.

    def _unmeasured_work_s(self, num_tokens: int) -> float:
        """Of a prompt where no worker can be asked: as one without a cache that is not measured."""
        return self._config.latency.prefill_s(max(1, num_tokens))

    def _cached_work_s(self, num_tokens: int, hashes: array[int]) -> float:
        """Of a prompt, with the most of it that a prefill worker with room holds."""
        entry = self.router.idlest_prefill()
        if entry is None:
            return self._unmeasured_work_s(num_tokens)
        blocks = self.router.longest_prefill(self.router.match(hashes))
        cached = blocks * entry.traits.block_size_tokens
        return entry.traits.latency.prefill_s(max(1, num_tokens - cached))

    def _hashes(self, request: Request) -> array[int]:
        if request.hashes is None:
            request.hashes = self.hashes(request.submission)
        return request.hashes

    def hashes(self, submission: Submission) -> array[int]:
        """Of the prompt's blocks; none while no worker has said how large they are."""
        worker = self._workers.first
        if worker is None:
            return array("Q")
        return block_hashes(
            submission.prompt_token_ids, block_size_of(worker.hello), root_of(submission.adapter)
        )

    @contextlib.contextmanager
    def _closed(self, workers: Iterable[WorkerKey]) -> Iterator[None]:
        for key in workers:
            self.router.set_pool(key, None)
        try:
            yield
        finally:
            for key in workers:
                worker = self._workers.get(key)
                if worker is not None:
                    self.refresh(worker)

    def _place(self, request: Request) -> Placement | None:
        submission, match = request.submission, self.router.match(self._hashes(request))
        model = self._workers.model
        most = max_output_tokens(submission, model.max_model_len if model is not None else 0)
        prefill = self.router.choose_prefill(
            match, request.num_prefill_tokens, submission.session_id, _AHEAD[submission.lane]
        )
        if prefill is not None and most == 1:
            return Placement(prefill, None)
        local = self._local(request, match, most, prefill)
        if local is not None:
            return Placement(None, local)
        if prefill is None:
            return None
        decode = self._decode(request, match, most, prefill.worker)
        if decode is None:
            return None
        skip_tokens = self._skip_tokens(request, decode)
        if self._fits(request, prefill.worker, decode.worker, skip_tokens):
            return Placement(prefill, decode, skip_tokens)
        unsplit = self._decode(request, match, most, None)
        return Placement(None, unsplit) if unsplit is not None else None

    def _decode(
        self, request: Request, match: PrefixMatch, most: int, prefill: WorkerKey | None
    ) -> DecodeChoice | None:
        submission, num_known = request.submission, len(request.token_ids)
        max_itl_s = math.inf
        if yields := submission.lane == _BATCH:
            max_itl_s = self._itl_target_s * _JOIN_SHARE
        elif submission.slo_itl_s is not None:
            max_itl_s = submission.slo_itl_s
        return self.router.choose_decode(
            match,
            request.num_prompt_tokens + num_known,
            self._outputs.expected(submission.lane, most, num_known),
            prefill=prefill,
            session=submission.session_id,
            max_itl_s=max_itl_s,
            yields=yields,
        )

    def _local(
        self, request: Request, match: PrefixMatch, most: int, prefill: PrefillChoice | None
    ) -> DecodeChoice | None:
        """The decode worker that computes the prompt itself, where that is the better way."""
        if not self.router.num_prefill_workers:
            # Someone waits for the rest of an output: it goes on without a prefill worker.
            return self._decode(request, match, most, None) if len(request.token_ids) else None
        if not self._config.local_prefill:
            return None
        there_s = prefill.predicted_s if prefill is not None else math.inf
        num_tokens = request.num_prompt_tokens + len(request.token_ids)
        if not self._local_prompts.may_pay(num_tokens, match, there_s):
            # As nearly always: nobody need be chosen to know it.
            return None
        choice = self._decode(request, match, most, None)
        if choice is None:
            return None
        worker, entry = self._workers.get(choice.worker), self.router.load(choice.worker)
        if worker is None or entry is None or worker.computes_prompt:
            return None
        if prefill is None:
            there_s = self._wait_s(request, match)
        pays = self._local_prompts.pays(choice, entry, there_s, request.submission.lane)
        return choice if pays else None

    def _wait_s(self, request: Request, match: PrefixMatch) -> float:
        """Until its first token, could it be queued at a prefill worker now."""
        choice = self.router.choose_prefill(
            match, request.num_prefill_tokens, request.submission.session_id
        )
        return choice.predicted_s if choice is not None else math.inf

    def _skip_tokens(self, request: Request, decode: DecodeChoice) -> int:
        """Of the tokens to be handed over, those there already; never all of them."""
        if request.hands_over_all:
            return 0
        worker = self._workers.get(decode.worker)
        assert worker is not None
        block_size = block_size_of(worker.hello)
        held = min(decode.num_cached_tokens, request.num_prefill_tokens - 1)
        return held // block_size * block_size

    def _fits(
        self, request: Request, prefill: WorkerKey, decode: WorkerKey, skip_tokens: int
    ) -> bool:
        """Whether the prompt can be handed over."""
        sender, receiver = self._workers.get(prefill), self._workers.get(decode)
        assert sender is not None
        assert receiver is not None
        num_bytes = handoff_bytes(sender.hello, request.num_prefill_tokens - skip_tokens)
        return (
            num_bytes <= sender.hello.capacity.max_send_bytes
            and num_bytes <= receiver.hello.capacity.max_receive_bytes
            and (
                receiver.hello.capacity.supports_forced_tokens
                or not needs_exact_state(request.submission.sampling)
            )
        )
