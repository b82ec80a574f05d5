"""Load of one worker as the coordinator counts it, which is newer than the worker's reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.coordinator.routing.loads.decode_set import DecodeSet
from baton.coordinator.routing.loads.prompt_queue import PromptQueue, QueuedPrompt
from baton.coordinator.routing.loads.worker_traits import WorkerTraits
from baton.coordinator.routing.prefixes.prefix_index import Tier
from baton.coordinator.routing.speeds.tier_speeds import TierSpeeds
from baton.coordinator.state.requests import PromptHits, RequestKey, WorkerKey
from baton.runtime.steps.step_budget import StepTargets, Streams, prompt_share_alone, prompt_speed

# Time until the first bytes of a load from host memory have arrived.
_LOAD_BASE_S = 0.001
# Share of the KV cache that decodes may reach together before their forecasts are needed.
_TIGHT_SHARE = 0.6


class QueueLimit(NamedTuple):
    """Limit of prefill work queued on a worker.

    Attributes:
        num_chunks: number of chunks (steps) of work from which the worker counts as full.
        predicts_progress: whether the predicted progress of the worker's first prompt is subtracted
            from its work, so that the next prompt arrives before the worker is idle.
    """

    num_chunks: float
    predicts_progress: bool


NO_QUEUE_LIMIT = QueueLimit(math.inf, predicts_progress=False)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """Load of one worker.

    Attributes:
        bit: the worker's bit in masks of workers.
        free_at: predicted time when the assigned prefill work is done.
        decodes: the assigned decodes; `LoadIndex.update` must follow a change.
        next_long_gap_at: earliest time at which the worker may compute another prompt that makes
            the gaps of its decodes too long; until then their share of long gaps is used up.
        tier_speeds: measured speeds of its loads from host memory and from disk.
        prompt_speed: speed of prompts beside the assigned decodes, as a share of the speed of an
            idle worker, (0, 1]. Only kept in elastic cells; elsewhere 1.
        prompt_share: share of a step that goes to prompt tokens while nothing decodes; the rest is
            the step's base. Only kept in elastic cells; elsewhere 1.
    """

    key: WorkerKey
    traits: WorkerTraits
    bit: int
    free_at: float = -math.inf
    decodes: DecodeSet = field(default_factory=DecodeSet)
    next_long_gap_at: float = -math.inf
    tier_speeds: TierSpeeds = field(init=False)
    prompt_speed: float = 1.0
    prompt_share: float = 1.0
    _prompts: PromptQueue = field(default_factory=PromptQueue)
    # Time when the present first prompt became the first.
    _first_since: float = -math.inf
    _unassigned_tokens: int = 0
    # Mean time until a step without decodes ends.
    _rest_of_step_s: float = 0.0

    def __post_init__(self) -> None:
        traits = self.traits
        self.tier_speeds = TierSpeeds(traits.host_bytes_per_s, traits.disk_bytes_per_s)

    @property
    def num_prefills(self) -> int:
        return len(self._prompts)

    @property
    def queued_tokens(self) -> int:
        """Tokens of assigned prompts that have no first token yet."""
        return self._prompts.num_tokens

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def free_tokens(self) -> int:
        """KV tokens that the assigned requests are not expected to need at any time."""
        return self.traits.kv_tokens - self.decodes.peak_tokens - self._unassigned_tokens

    @property
    def free_tokens_after_parking(self) -> int:
        """The same once all decodes that may be parked have left."""
        return self.traits.kv_tokens - self.decodes.staying_tokens - self._unassigned_tokens

    @property
    def is_tight(self) -> bool:
        """Whether forecasts of the decodes are needed to tell how much room there is.

        Elsewhere the KV cache has room for all decodes at their largest sizes, and for some more.
        """
        reserved = self.decodes.reserved_tokens + self._unassigned_tokens
        return reserved > _TIGHT_SHARE * self.traits.kv_tokens

    @property
    def surely_free_tokens(self) -> int:
        """The same with a large margin for outputs that become long."""
        return self.traits.kv_tokens - self.decodes.safe_tokens - self._unassigned_tokens

    @property
    def passing_tokens(self) -> int:
        """KV tokens of the longest assigned prompt whose output another worker will decode."""
        prompts = self._prompts.items()
        return max((one.num_tokens for key, one in prompts if key not in self.decodes), default=0)

    @property
    def chunk_step_s(self) -> float:
        """Predicted seconds of a step that computes a whole chunk of a prompt."""
        return self.traits.latency.prefill_s(self.traits.chunk_tokens)

    @property
    def single_step_s(self) -> float:
        """Predicted seconds of a decode step with one short request."""
        return self.traits.latency.decode_step_s(1, 0)

    def reserved_step_s(self, num_requests: int = 0, num_tokens: int = 0) -> float:
        """Predicted seconds per decode step once all decodes use the KV tokens reserved for them.

        Args:
            num_requests: number of decodes to add.
            num_tokens: KV tokens to reserve for them.
        """
        return self.traits.latency.decode_step_s(
            len(self.decodes) + num_requests, self.decodes.reserved_tokens + num_tokens
        )

    def mean_step_s(
        self, num_requests: int = 0, num_tokens: int = 0, counted_share: float = 1.0
    ) -> float:
        """Predicted seconds per decode step with the KV tokens that decodes have on average.

        If the decodes have more tokens now, these count.

        Args:
            num_requests: number of decodes to add.
            num_tokens: KV tokens that they have on average.
            counted_share: share of the assigned decodes that count.
        """
        return self.traits.latency.decode_step_s(
            counted_share * len(self.decodes) + num_requests,
            counted_share * self.decodes.step_tokens + num_tokens,
        )

    def mean_step_after_parking_s(self, num_requests: int, num_tokens: int) -> float:
        """The same as `mean_step_s` after all decodes that may be parked have left."""
        num_staying, held = self.decodes.after_parking()
        return self.traits.latency.decode_step_s(num_staying + num_requests, held + num_tokens)

    def one_step_s(self, now: float) -> float:
        """Predicted seconds until a request that needs one step has run, if it came now.

        It waits for half a step on average, and then for its own step.
        """
        if self.decodes:
            return 1.5 * self.reserved_step_s()
        if self._prompts:
            return 1.5 * min(self.queued_s(now), 2 * self._rest_of_step_s or self.chunk_step_s)
        return self.traits.latency.prefill_s(1)

    def tier_load_s(self, hits: PromptHits, now: float) -> float:
        """Predicted seconds to load the KV cache of tokens from host memory and from disk."""
        num_host, num_disk = hits.num_host, hits.num_disk
        if not num_host + num_disk:
            return 0.0
        per_token, speeds = self.traits.kv_bytes_per_token, self.tier_speeds
        from_host_s = speeds.seconds(Tier.HOST, per_token * (num_host + num_disk), now)
        from_disk_s = speeds.seconds(Tier.DISK, per_token * num_disk, now)
        return _LOAD_BASE_S + from_disk_s + from_host_s

    def prompt_s(self, num_tokens: int, hits: PromptHits, now: float) -> float:
        """Predicted seconds to load and compute a prompt of `num_tokens` tokens without a queue."""
        num_new = max(1, num_tokens - hits.num_tokens)
        load_s = self.tier_load_s(hits, now)
        return self.traits.latency.prefill_s(num_new) + load_s

    def queued_s(self, now: float) -> float:
        """Predicted seconds until the remaining prefill work is done, beside the decodes."""
        return max(0.0, self.free_at - now)

    def work_s(self, now: float) -> float:
        """Predicted seconds of remaining prefill work on a worker without decodes."""
        return self.queued_s(now) * self.prompt_speed

    def interactive_work_s(self, now: float) -> float:
        """The same, of the prompts that are not batch prompts."""
        left_s = self._prompts.interactive_left_s(now, self.prompt_speed)
        return min(self.work_s(now), left_s)

    def ahead_s(self, num_tokens: int, now: float, *, is_batch: bool = False) -> float:
        """Predicted seconds of prefill work that goes before a prompt of `num_tokens` tokens.

        A worker computes interactive prompts before batch ones, then those that can be in time, the
        shortest first. Others delay such a prompt by the rest of the step that is under way.

        Prompts count with their whole work, although some of it is done: in simulations near
        capacity, counting only the rest sent workers more prompts than they computed in time.
        """
        left_s = self.queued_s(now)
        if not left_s:
            return 0.0
        work_s, has_others = 0.0, False
        for prompt in self._prompts:
            if prompt.goes_before(num_tokens, now, is_batch=is_batch):
                work_s += prompt.work_s / self.prompt_speed
            else:
                has_others = True
        return min(left_s, work_s + (self._rest_of_step_s if has_others else 0.0))

    def num_behind(self, num_tokens: int, now: float, *, is_batch: bool = False) -> int:
        """Number of prompts in time that a prompt of `num_tokens` tokens goes before.

        Args:
            num_tokens: tokens of the prompt to compute.
            now: time by the core's clock.
            is_batch: whether the prompt is of a batch request; only prompts of its lane count.
        """
        return sum(
            one.is_batch == is_batch and one.num_tokens > num_tokens and one.due_at >= now
            for one in self._prompts
        )

    def prompt_work_s(self, num_tokens: int, now: float) -> float:
        """Predicted seconds that a prompt adds to the worker's queue, beside its decodes.

        On a worker with several other prompts, it shares steps with them, so it adds only its part
        of a step's base. Prompts that are overdue are no reason to expect that.
        """
        latency = self.traits.latency
        tokens_s = latency.model.chunk_s(0, num_tokens)
        if self.decodes:
            # `prompt_speed` includes the base of steps with decodes.
            return tokens_s / self.prompt_speed
        alone_s = latency.prefill_s(num_tokens)
        if len(self._prompts) > 1 and self.queued_s(now) > 0:
            alone_s = min(alone_s, tokens_s / self.prompt_share)
        return alone_s / self.prompt_speed

    def has_late_request(self, now: float) -> bool:
        """Whether an assigned first token is overdue, or its worker decodes after a late one."""
        return self.decodes.num_late > 0 or any(one.due_at < now for one in self._prompts)

    def predict_prompt_speed(self, targets: StepTargets, now: float) -> None:
        """Updates `prompt_speed`, and the queue with it, after a change of decodes or targets."""
        model = self.traits.latency.model
        self._rest_of_step_s = targets.prompt_step_s / 2
        self.prompt_share = prompt_share_alone(model, targets)
        limit_s = math.inf
        if self.decodes.num_interactive:
            limit_s = targets.expected_limit_s(self.mean_step_s(), self.single_step_s)
        streams = Streams(len(self.decodes), self.decodes.step_tokens, limit_s)
        speed = prompt_speed(model, targets, streams, self.prompt_share)
        if speed != self.prompt_speed:
            self._prompts.advance(now, self.prompt_speed)
            self.prompt_speed = speed
            self._predict_end(now)

    def speed_with_one(self, targets: StepTargets, num_tokens: int) -> float:
        """Speed of prompts beside one interactive decode of `num_tokens` KV tokens."""
        model = self.traits.latency.model
        step_s = self.traits.latency.decode_step_s(1, num_tokens)
        limit_s = targets.expected_limit_s(step_s, self.single_step_s)
        streams = Streams(1, num_tokens, limit_s)
        return prompt_speed(model, targets, streams, prompt_share_alone(model, targets))

    def is_full(self, limit: QueueLimit, now: float) -> bool:
        """Whether the worker's queue is at the limit, so that it takes no further prompt."""
        most = limit.num_chunks * self.traits.chunk_tokens
        return self.queued_tokens >= most and not (
            limit.predicts_progress and self._has_room_at(most) <= now
        )

    def room_at(self, limit: QueueLimit, now: float) -> float:
        """Predicted time, by the core's clock, when a full worker has room.

        Infinite if the worker has no room before it reports a first token.
        """
        most = limit.num_chunks * self.traits.chunk_tokens
        if not limit.predicts_progress or self.queued_tokens < most:
            return math.inf
        at = self._has_room_at(most)
        return at if at > now else math.inf

    def _has_room_at(self, num_tokens: float) -> float:
        """Time when fewer than `num_tokens` are left, by the predicted work of the first prompt."""
        first = self._prompts.first
        if first is None:
            return -math.inf
        num_more = num_tokens - (self.queued_tokens - first.num_tokens)
        if num_more <= 0:
            # The prompts after the first one reach the limit even without it.
            return math.inf
        share = max(0.0, 1 - num_more / first.num_tokens)
        return self._first_since + first.work_s * share

    def assign_prefill(
        self,
        request: RequestKey,
        work_s: float,
        num_tokens: int,
        now: float = 0.0,
        due_at: float = math.inf,
        *,
        is_batch: bool = False,
    ) -> None:
        """Adds a prompt that takes `work_s` seconds at the present speed."""
        if not self._prompts:
            self._first_since = now
        self._prompts.advance(now, self.prompt_speed)
        work_s *= self.prompt_speed
        self._prompts.add(request, QueuedPrompt(work_s, num_tokens, due_at, is_batch))
        self._predict_end(now)

    def prompt_computed(self, request: RequestKey, now: float) -> None:
        """Removes a prompt whose first token came; idempotent."""
        ended = self._end_prompt(request, now, is_computed=True)
        if ended is not None and ended.due_at < now:
            self.decodes.mark_late(request)

    def drop_prompt(self, request: RequestKey, now: float) -> None:
        """Removes a prompt that the worker stops computing; idempotent."""
        self._end_prompt(request, now, is_computed=False)

    def _end_prompt(
        self, request: RequestKey, now: float, *, is_computed: bool
    ) -> QueuedPrompt | None:
        if request not in self._prompts:
            return None
        first = self._prompts.first
        self._prompts.advance(now, self.prompt_speed)
        ended = self._prompts.end(request, is_computed=is_computed)
        if ended is first:
            self._first_since = now
        self._predict_end(now)
        return ended

    def _predict_end(self, now: float) -> None:
        self.free_at = now + self._prompts.left_s / self.prompt_speed

    def record_long_gaps(self, num_tokens: int, share: float, now: float) -> None:
        """Records a prompt whose computation here makes gaps of the running decodes too long.

        Args:
            num_tokens: tokens of the prompt that are computed.
            share: share of a decode's steps that may be too long.
            now: time by the core's clock.
        """
        num_steps = -(-num_tokens // self.traits.chunk_tokens)
        until = now + num_steps * self.reserved_step_s() / share
        self.next_long_gap_at = max(self.next_long_gap_at, until)

    def has_prompt(self, request: RequestKey) -> bool:
        """Whether the prompt of an assigned request is not computed yet."""
        return request in self._prompts

    def in_blocks(self, num_tokens: int) -> int:
        """Rounds a number of tokens up to whole KV blocks."""
        block_size = self.traits.block_size_tokens
        return -(-num_tokens // block_size) * block_size

    def report(self, kv_tokens_used: int) -> None:
        """Updates the load from the number of KV tokens that the worker reports as used.

        Tokens are reserved before the worker uses them. Reported tokens beyond the reservations
        belong to requests of a previous coordinator that no client has resumed yet.
        """
        self._unassigned_tokens = max(0, kv_tokens_used - self.decodes.reserved_tokens)

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum differs from its parts."""
        self._prompts.check_integrity()
        self.decodes.check_integrity()
