"""Which request may run now, and where: the router's choices under the lanes' rules.

A prompt goes to a prefill worker and its output to a decode worker, with a handoff between them.
It runs unsplit, on the decode worker alone, where it cannot be handed over, and where its prompt is
computed much sooner there without making others wait (conditional disaggregation).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from baton.coordinator.routing.batch_prompts import BatchPrompts
from baton.coordinator.routing.choices import DecodeChoice, Placement, PrefillChoice, RoomWanted
from baton.coordinator.routing.latency import LatencyRegistry
from baton.coordinator.routing.local_prompts import LocalPrompts
from baton.coordinator.routing.output_lengths import OutputLengths, max_output_tokens
from baton.coordinator.routing.predictions import Predictions
from baton.coordinator.routing.prefix_index import PrefixMatch
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_load import Ahead
from baton.coordinator.routing.worker_traits import block_size_of, handoff_bytes, traits_of
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.requests import Request, WorkerKey
from baton.coordinator.state.workers import AttachedWorkers, Worker
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

_Found = TypeVar("_Found")


def _open_to(worker: Worker) -> Pool | None:
    """The pool whose work a worker is given; None while it takes none."""
    return POOL_OF.get(worker.role) if worker.serving and worker.ledger.exclusive is None else None


class Placer:
    """Places the requests of one fleet on its workers, and counts there what they take.

    Args:
        config: limits and targets.
        workers: The fleet's workers.
        latency: what steps cost on each worker.
        outputs: how long outputs are; shared by all fleets.
        crowded: takes the decode workers that are given interactive work.

    Attributes:
        router: what each worker has; only read from outside.
        batch_prompts: batch prompts that are being computed; only read from outside.
        prompts: the block hashes of prompts.
        predictions: what requests are predicted to take.
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
        self.prompts = PromptBlocks(self.router, workers)
        self.predictions = Predictions(
            self.router, workers, self.prompts, self.batch_prompts, outputs, config
        )

    # ---- Members.

    def attach(self, worker: Worker) -> None:
        """A worker has attached, or is back: it is known, and gets work if it takes any."""
        if self.router.load(worker.key) is None:
            traits = traits_of(worker.hello, self._latency)
            self.router.add_worker(worker.key, traits, None)
            self._local_prompts.attach(traits)
        self.refresh(worker)

    def refresh(self, worker: Worker) -> None:
        """Looks again at whether a worker takes work, and which."""
        if self.router.load(worker.key) is not None:
            self.router.set_pool(worker.key, _open_to(worker))

    def detach(self, worker: Worker) -> None:
        """A worker is gone, with all that was assigned to it."""
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

    def place(self, request: Request) -> Placement | None:
        """Picks workers for the request whose turn it is; None when a worker it needs has no room.

        A worker that lost the request before gets it again only where there is no other. A
        suspect (a request that workers may have died of) gets only workers that have answered
        every request they have, so that it endangers none that was not answered yet.
        """
        return self._among_wanted(request, self._place)

    def by_handoff(self, request: Request, source: Worker, within_s: float) -> Placement | None:
        """Another decode worker for an output, and the one that it leaves to hand it over.

        Args:
            request: the request, which `source` decodes.
            source: a worker that is given no more outputs.
            within_s: how soon it is to go on there.

        Returns:
            None where it would be later, no worker has room, or `source` keeps nothing of what has
            left it.
        """
        if request.suspect or not source.hello.capacity.keeps_prefixes:
            return None
        choice = self.router.by_handoff(source.key, request.num_prefill_tokens)
        if choice.predicted_s >= within_s:
            return None
        decode = self._decode_anew(request, source.key)
        return self._split(request, choice, decode) if decode is not None else None

    def has_room(self, request: Request) -> bool:
        """Whether some decode worker has room for an output that leaves its own."""
        return self._decode_anew(request, None) is not None

    def room_wanted(self, request: Request) -> RoomWanted | None:
        """The decode worker where batch outputs should make room for a request that has no place.

        Returns:
            None where the request waits for something else, or is batch work itself.
        """
        if self.router.most_yielding() is None or self._lane_of(request) == _BATCH:
            return None
        return self._among_wanted(request, self._room_wanted)

    def room_at(self, request: Request) -> float:
        """When a prefill worker will have room for a prompt that finds none now.

        Returns:
            By the core's clock; infinite where that cannot be foreseen, or where it is not room
            on a prefill worker that the request lacks.
        """
        idlest = self.router.idlest_prefill()
        if idlest is None:
            return math.inf
        return idlest.room_at(_AHEAD[self._lane_of(request)], self.router.now)

    def is_crowded_out(self, request: Request) -> bool:
        """Whether every prefill worker is too full for a batch prompt, and one takes another."""
        match, now = self.prompts.match(request), self.router.now
        entries = self.router.prefill_candidates(match, request.submission.session_id)
        batch, interactive = _AHEAD[_BATCH], _AHEAD[common_pb2.LANE_INTERACTIVE]
        return all(one.is_full(batch, now) for one in entries) and not all(
            one.is_full(interactive, now) for one in entries
        )

    def assign(self, request: Request, placement: Placement, *, yields: bool) -> None:
        """Counts a request on the workers that it was placed on.

        Args:
            request: the request.
            placement: what `place` returned for it.
            yields: whether it may be told to make room, should it be a batch request.
        """
        session, urgent = request.submission.session_id, request.submission.lane != _BATCH
        if placement.prefill is not None:
            self.router.assign_prefill(
                request.key, placement.prefill, self.prompts.hashes_of(request), session
            )
            worker = placement.prefill.worker
            # One that hands over its own output is nobody's to wait for.
            in_pool = self.router.pool(worker) is Pool.PREFILL
            if yields and in_pool and self._lane_of(request) == _BATCH:
                self.batch_prompts.begins(request.key, worker)
        if placement.decode is not None:
            if placement.prefill is None:
                self._local_prompts.begins(placement.decode)
            self.router.assign_decode(
                request.key,
                placement.decode,
                session,
                urgent=urgent,
                yields=yields and not urgent,
            )
            if urgent:
                self._crowded[placement.decode.worker] = None

    def adopt(self, request: Request, worker: WorkerKey) -> None:
        """Counts a request on the decode worker that goes on with it from before a restart."""
        submission = request.submission
        most = max_output_tokens(submission, self._workers.max_model_len)
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
        self.router.assign_decode(
            request.key, choice, submission.session_id, urgent=urgent, yields=not urgent
        )
        self.router.first_token(request.key, request.prefill, request.decode)

    def computed(self, request: Request) -> None:
        """A request's prompt has been computed."""
        self.batch_prompts.over(request.key)
        self.router.first_token(request.key, request.prefill, request.decode)

    def grows(self, request: Request, num_ahead: int) -> None:
        """Counts the KV room of a request that has grown.

        Args:
            request: a request that decodes.
            num_ahead: room is counted for so many tokens more than it has: it is looked at again
                before it has them.
        """
        num_output = len(request.token_ids) + num_ahead
        decode = request.decode
        if self.router.outgrows(request.key, decode, request.num_prompt_tokens + num_output):
            most = max_output_tokens(request.submission, self._workers.max_model_len)
            num_output = min(num_output, most)
            self.router.grow(request.key, decode, request.num_prompt_tokens + num_output)

    def released(self, request: Request) -> None:
        """A request leaves its workers: what it took there is free."""
        self.batch_prompts.over(request.key)
        self.router.release(request.key, request.prefill, request.decode)

    def ended(self, request: Request) -> None:
        """Learns from an output that came to its natural end how long outputs are."""
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

    # ---- Inside.

    def _lane_of(self, request: Request) -> common_pb2.Lane.ValueType:
        """The lane that the request's prompt is computed in."""
        return request.submission.ordered_in(self._config.lanes.long_prompt_tokens)

    def _among_wanted(
        self, request: Request, look: Callable[[Request], _Found | None]
    ) -> _Found | None:
        """What is found while workers that the request should not have are given nothing."""
        if not request.avoid and not request.suspect:
            return look(request)
        # Lists and not sets: their order decides between workers that are equally good, and must
        # be the same in each run of a simulation.
        shunned = [key for key in request.avoid if self.router.load(key) is not None]
        closed = (
            [one.key for one in self._workers if one.ledger.unanswered] if request.suspect else []
        )
        with self._closed([*closed, *shunned]):
            found = look(request)
        if found is None and shunned:
            with self._closed(closed):
                found = look(request)
        return found

    @contextlib.contextmanager
    def _closed(self, workers: Iterable[WorkerKey]) -> Iterator[None]:
        """While it is entered these workers are given nothing."""
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
        submission, match = request.submission, self.prompts.match(request)
        most = max_output_tokens(submission, self._workers.max_model_len)
        prefill = self.router.choose_prefill(
            match, request.num_prefill_tokens, submission.session_id, _AHEAD[self._lane_of(request)]
        )
        if prefill is not None and most == 1:
            return Placement(prefill, None)
        local = self._choose_local(request, match, most, prefill)
        if local is not None:
            return Placement(None, local)
        if prefill is None:
            return None
        decode = self._choose_decode(request, match, most, prefill.worker)
        if decode is None:
            return None
        if (split := self._split(request, prefill, decode)) is not None:
            return split
        unsplit = self._choose_decode(request, match, most, None)
        return Placement(None, unsplit) if unsplit is not None else None

    def _room_wanted(self, request: Request) -> RoomWanted | None:
        submission, match = request.submission, self.prompts.match(request)
        most = max_output_tokens(submission, self._workers.max_model_len)
        entry, num_known = self.router.most_yielding(), len(request.token_ids)
        if entry is None or most == 1:
            return None
        if self.router.num_prefill_workers or not num_known:
            prefill = self.router.choose_prefill(
                match, request.num_prefill_tokens, submission.session_id, _AHEAD[submission.lane]
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
        """The decode worker for a request; None when none has room.

        Args:
            request: the request.
            match: of its prompt.
            most: tokens that its whole output may have.
            prefill: the worker that computes its prompt; None: the decode worker does.
        """
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

    def _choose_local(
        self, request: Request, match: PrefixMatch, most: int, prefill: PrefillChoice | None
    ) -> DecodeChoice | None:
        """The decode worker that is to compute the prompt itself; None where that is no better."""
        if not self.router.num_prefill_workers:
            # Someone waits for the rest of an output: it goes on without a prefill worker.
            return (
                self._choose_decode(request, match, most, None) if len(request.token_ids) else None
            )
        if not self._config.local_prefill:
            return None
        there_s = prefill.predicted_s if prefill is not None else math.inf
        num_tokens = request.num_tokens
        if not self._local_prompts.may_pay(num_tokens, match, there_s):
            # Nearly always so, and known without choosing a worker.
            return None
        choice = self._choose_decode(request, match, most, None)
        if choice is None:
            return None
        worker, entry = self._workers.get(choice.worker), self.router.load(choice.worker)
        if worker is None or entry is None or worker.ledger.local_prompt is not None:
            return None
        if prefill is None:
            there_s = self.predictions.at_a_prefill_worker_s(request, match)
        pays = self._local_prompts.pays(choice, entry, there_s, self._lane_of(request))
        return choice if pays else None

    def _split(
        self, request: Request, prefill: PrefillChoice, decode: DecodeChoice
    ) -> Placement | None:
        """Both workers, with a handoff between them; None where it does not fit into them."""
        skip_tokens = self._skip_tokens(request, decode)
        if not self._can_hand_over(request, prefill.worker, decode.worker, skip_tokens):
            return None
        return Placement(prefill, decode, skip_tokens)

    def _skip_tokens(self, request: Request, decode: DecodeChoice) -> int:
        """How many tokens the handoff leaves out: whole blocks that the decode worker has.

        It leaves never out all of them: the engine computes from the last one.
        """
        if request.hands_over_all:
            return 0
        worker = self._workers.get(decode.worker)
        assert worker is not None
        block_size = block_size_of(worker.hello)
        held = min(decode.num_cached_tokens, request.num_prefill_tokens - 1)
        return held // block_size * block_size

    def _can_hand_over(
        self, request: Request, prefill: WorkerKey, decode: WorkerKey, skip_tokens: int
    ) -> bool:
        """Whether the handoff fits into both workers, and the request can go on after it."""
        sender, receiver = self._workers.get(prefill), self._workers.get(decode)
        assert sender is not None
        assert receiver is not None
        num_bytes = handoff_bytes(sender.hello, request.num_prefill_tokens - skip_tokens)
        return (
            num_bytes <= sender.hello.capacity.max_send_bytes
            and num_bytes <= receiver.hello.capacity.max_receive_bytes
            and receiver.can_replay(request.submission.sampling)
        )
