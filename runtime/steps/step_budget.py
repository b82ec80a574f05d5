"""Decides how many prompt tokens a worker computes in its next step, and of which prompts.

vLLM's scheduler and the simulated engine's scheduler use this one policy. A step first computes one
token of every stream, that is, of every output that is being decoded. The policy then adds prompt
tokens as long as the predicted time of the step stays within a limit:

- Beside interactive streams, the limit follows from their ITL targets: the worker's target, or the
  target that a request named. A stream whose tokens came faster than its target has saved time, and
  a later step may spend it. A stream whose tokens came more slowly gets shorter steps until it has
  caught up. The stream with the tightest limit decides. A stream counts from the time when its
  request arrives with its first token, although its KV cache may still be on its way
  (`StreamPace.coming`): the steps until it is loaded are part of its first gap.
- If `StepTargets.longest_gap_s` is more than 1.2 times the ITL target (long gaps), a step with
  interactive prompts that can be in time may take up to that long. It borrows the time that the
  streams would save in their next `_BORROWED_TOKENS` tokens. Prompts are then in time in cells
  where every worker has streams. If a step with one stream already takes most of the ITL target,
  the borrowed time has no limit, also where steps without prompts are too long, and late
  interactive prompts borrow too: streams then catch up so slowly, or never, that prompts waiting
  for them would be late, and would take the same time later.
- Without interactive streams, the limit is `StepTargets.prompt_step_s`, so that a short prompt that
  arrives never waits for the whole computation of a long one. If no stream decodes or is coming, a
  step with interactive prompts that can be in time may take up to `_PROMPT_STEPS` times as long, in
  two cases: the fixed part of a step takes long, or there is only one prompt and its computation
  takes most of its TTFT target.

Prompts get tokens in the order of `prompt_order`: first by lane; then prompts that can still meet
their TTFT target before those that cannot; then by the remaining computation, the shortest first,
less a share of the time that the prompt has waited. No prompt starves: after `_LANE_WAIT_S` a
prompt is ordered like an interactive one that can be in time, and such a prompt is overtaken only
by prompts that arrive within (its remaining seconds / _AGING) after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.runtime.config import StepsConfig
from baton.runtime.steps.latency import LatencyModel

# Share of the longest gap that the predicted time of one step may take, because predictions err.
_GAP_MARGIN = 0.9
# Share of the ITL target that a stream's mean gap may take. It is larger than _GAP_MARGIN, because
# the errors of single predictions cancel in a mean. With 0.99, streams with few tokens missed the
# target more often.
_MEAN_MARGIN = 0.97
# A stream counts as late by at most this many ITL targets. Otherwise one very late stream, for
# example after a preemption, would stop all prompts for seconds.
_MOST_GAPS_BEHIND = 10
# Seconds of remaining computation that one second of waiting is worth.
_AGING = 0.05
# After this wait, a prompt is ordered like an interactive one that can be in time.
_LANE_WAIT_S = 30.0
# Share of a step's prompt tokens that goes to the oldest running prompt.
_OLDEST_SHARE = 0.1
# Least time for prompt tokens, as a share of the step's other time: with interactive streams, and
# without. It applies even if the step takes longer than its limit without any prompt token: fewer
# prompt tokens would make prompts many times slower and streams hardly faster. It is a time and not
# a number of tokens, because on a slow worker 16 tokens take half of an ITL target.
_LEAST_SHARE, _LEAST_SHARE_ALONE = 0.1, 1.0
# Least time of a prompt token in seconds, against division by zero.
_LEAST_S = 1e-9
# While nothing decodes, a step with interactive prompts that can be in time may be longer than
# `prompt_step_s`: at most _FIXED_PARTS times as long as its fixed part, so that 5 % of the time
# goes to fixed parts, and at most _PROMPT_STEPS times as long as `prompt_step_s`. The first of
# these limits does not apply to a single prompt whose first token is due within _URGENT times its
# computation: in simulations with two workers, 1 to 2 % of all requests were late only because of
# fixed parts. Late and batch prompts get no longer steps, so that the next prompt can still be in
# time beside them. In simulations with two workers near capacity, longer steps for all prompts made
# 3 to 11 percentage points more of the requests late.
_FIXED_PARTS, _PROMPT_STEPS, _URGENT = 20.0, 3.0, 2.0
# If no worker keeps the ITL target even with one decode, the target is this many times the fastest
# worker's step with one decode.
_UNREACHABLE = 2.0
# Default of `longest_gap_s`, and its value with long gaps, as multiples of the ITL target. Steps
# borrow time only if `longest_gap_s` is longer than the default.
_LONGEST_GAP, _LONG_GAP = 1.2, 3.0
# A step may borrow the time that streams would save in this many tokens. In simulations with two
# workers, 60 served more requests in time than 20 near capacity, and than 1,000 beyond capacity.
_BORROWED_TOKENS = 60
# Streams whose decode steps take at most this share of the ITL target save enough time for most
# prompts to be computed in steps of the longest length.
FAST_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class StepTargets:
    """Targets of a worker's steps, in seconds.

    Attributes:
        itl_s: Target of a stream's mean gap between tokens, unless its request named one; None: no
            target, so such streams do not limit steps.
        longest_gap_s: Longest step beside interactive streams; at least `itl_s`. Not used without
            `itl_s`. If it is more than 1.2 times `itl_s`, steps may borrow time (`may_borrow`).
        prompt_step_s: Longest step without interactive streams; interactive prompts that can be in
            time may get a longer one.
    """

    itl_s: float | None = None
    longest_gap_s: float = math.inf
    prompt_step_s: float = 0.2

    @classmethod
    def of(
        cls, config: StepsConfig, itl_s: float | None, *, long_gaps: bool = False
    ) -> StepTargets:
        """Returns the targets of a configuration.

        Args:
            config: The configuration.
            itl_s: ITL target of the interactive lane; None: it has none.
            long_gaps: Whether gaps are long; used only if the configuration does not set
                `longest_gap_ms`.
        """
        prompt_step_s = config.prompt_step_ms / 1e3
        if itl_s is None:
            return cls(prompt_step_s=prompt_step_s)
        longest_ms = config.longest_gap_ms
        default_s = (_LONG_GAP if long_gaps else _LONGEST_GAP) * itl_s
        longest_s = default_s if longest_ms is None else longest_ms / 1e3
        return cls(itl_s, max(itl_s, longest_s), prompt_step_s)

    @property
    def may_borrow(self) -> bool:
        """Whether steps may spend time that streams have not saved yet."""
        # Rounding errors must not turn the default into a longer gap.
        return self.itl_s is not None and self.longest_gap_s > 1.001 * _LONGEST_GAP * self.itl_s

    def of_stream(self, itl_s: float | None) -> StepTargets:
        """Returns the targets of a step that contains this stream.

        Args:
            itl_s: ITL target that the stream's request named; None: it named none. The longest gap
                changes in proportion.
        """
        if itl_s is None:
            return self
        longest = _LONGEST_GAP if self.itl_s is None else self.longest_gap_s / self.itl_s
        return StepTargets(itl_s, itl_s * longest, self.prompt_step_s)

    def stream_limit_s(self, saved_s: float = 0.0) -> float:
        """Longest predicted time of a step with a stream; infinite without an ITL target.

        Args:
            saved_s: Seconds by which the stream is ahead of its ITL target. The result may be
                negative if the stream is late.
        """
        if self.itl_s is None:
            return math.inf
        longest_s = min(self.longest_gap_s, _LONGEST_GAP * self.itl_s)
        return min(self.itl_s * _MEAN_MARGIN + saved_s, longest_s * _GAP_MARGIN)

    def shares_workers(self, single_step_s: float) -> bool:
        """Whether every worker should serve prompts and streams alike.

        Args:
            single_step_s: Time of the fastest worker's decode step with one stream.
        """
        return (
            self.itl_s is not None and self.may_borrow and single_step_s > FAST_SHARE * self.itl_s
        )

    def expected_limit_s(self, step_s: float, single_step_s: float) -> float:
        """Longest time that placement expects for a worker's steps with prompts.

        Args:
            step_s: Time of the worker's decode steps without prompts.
            single_step_s: The same with one stream.
        """
        if self.itl_s is None or not self.may_borrow:
            return self.stream_limit_s()
        if step_s <= FAST_SHARE * self.itl_s or self.shares_workers(single_step_s):
            return self.longest_gap_s * _GAP_MARGIN
        return self.stream_limit_s()


def reachable_itl_s(itl_s: float, fastest_s: float) -> float:
    """Returns the longest step that requests are placed for, in seconds.

    Args:
        itl_s: ITL target.
        fastest_s: The fastest worker's step with one decode. If it takes longer than the target, no
            worker can keep the target, and requests must not wait for it.
    """
    return itl_s if fastest_s <= itl_s else _UNREACHABLE * fastest_s


class Prompt(NamedTuple):
    """A prompt that the next step may compute.

    Attributes:
        num_done: Tokens of it that earlier steps computed.
        num_left: Tokens still to compute, at least 1.
        priority: Lane: 0 for interactive; larger values go later.
        waited_s: Seconds since the request arrived at the worker.
        running: Whether it holds KV blocks.
        due_in_s: Seconds until its first token is due; infinite without a TTFT target.
        max_chunk: Most tokens of it that one step may compute; None: no limit.
    """

    num_done: int
    num_left: int
    priority: int
    waited_s: float
    running: bool
    due_in_s: float = math.inf
    max_chunk: int | None = None

    @property
    def num_allowed(self) -> int:
        """Most tokens of it in the next step."""
        return self.num_left if self.max_chunk is None else min(self.num_left, self.max_chunk)

    @property
    def lane(self) -> int:
        """The lane that the prompt is ordered by; smaller values go first."""
        return self.priority if self.waited_s < _LANE_WAIT_S else min(self.priority, 0)


class Streams(NamedTuple):
    """The streams that decode in the next step.

    Attributes:
        num_streams: Number of streams.
        num_kv_tokens: KV tokens that they attend to, in total.
        limit_s: Longest time of the step that all interactive streams allow, those that are coming
            included: the smallest `StreamPace.limit_s`. Infinite without interactive streams, and
            without an ITL target.
        num_drafts: Draft tokens (speculative decoding) that the step verifies, in addition to one
            token per stream.
        itl_s: Smallest ITL target of the interactive streams; None: they have none, and the step
            borrows no time from them.
    """

    num_streams: int = 0
    num_kv_tokens: int = 0
    limit_s: float = math.inf
    num_drafts: int = 0
    itl_s: float | None = None

    @classmethod
    def of(
        cls,
        num_streams: int,
        num_kv_tokens: int,
        paces: Iterable[StreamPace],
        targets: StepTargets,
        num_drafts: int = 0,
    ) -> Streams:
        """Streams of a worker with these targets; `paces` are those of its interactive streams."""
        limit_s, itl_s = math.inf, None
        for pace in paces:
            limit_s = min(limit_s, pace.limit_s(targets))
            target_s = pace.target_s(targets)
            if target_s is not None:
                itl_s = target_s if itl_s is None else min(itl_s, target_s)
        return cls(num_streams, num_kv_tokens, limit_s, num_drafts, itl_s)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes for the streams."""
        return self.num_streams + self.num_drafts


_ALONE = Streams()


@dataclass(slots=True)
class StreamPace:
    """Compares the tokens of one stream with its ITL target.

    Attributes:
        at: When `num_tokens` was counted, in seconds. A new stream begins at the time of its latest
            token, even if another worker has made that token.
        num_tokens: Output tokens of the stream so far.
        itl_s: ITL target that its request named; None: the worker's target applies.
        saved_s: Seconds by which the stream is ahead of its ITL target; negative when it is late.
    """

    at: float
    num_tokens: int
    itl_s: float | None = None
    saved_s: float = 0.0

    @classmethod
    def coming(cls, now: float, itl_s: float | None) -> StreamPace:
        """The pace of a stream whose first token is out and whose KV cache is not loaded yet.

        It limits steps like a stream that is on target. How long it has waited does not count: a
        transfer may take seconds, and prompts would get no time meanwhile.
        """
        return cls(now, 0, itl_s)

    def target_s(self, targets: StepTargets) -> float | None:
        """The stream's ITL target in seconds; `targets` are the worker's."""
        return targets.itl_s if self.itl_s is None else self.itl_s

    def advance(self, targets: StepTargets, now: float, num_tokens: int) -> None:
        """Counts the tokens up to `now`; `targets` are the worker's in the time since `at`."""
        itl_s = self.target_s(targets)
        if itl_s is None:
            self.saved_s = 0.0
        else:
            allowed_s = itl_s * _MEAN_MARGIN * (num_tokens - self.num_tokens)
            saved_s = self.saved_s + allowed_s - (now - self.at)
            self.saved_s = max(saved_s, -_MOST_GAPS_BEHIND * itl_s)
        self.at, self.num_tokens = now, num_tokens

    def limit_s(self, targets: StepTargets) -> float:
        """Longest predicted time of a step beside this stream; `targets` are the worker's."""
        return targets.of_stream(self.itl_s).stream_limit_s(self.saved_s)


def prompt_order(prompt: Prompt, model: LatencyModel) -> tuple[int, bool, float, float]:
    """Sort key of the prompts of a step; smaller values go first."""
    order_s = _left_s(prompt, model) - _AGING * prompt.waited_s
    return prompt.lane, _is_late(prompt, model), order_s, -prompt.waited_s


def _left_s(prompt: Prompt, model: LatencyModel) -> float:
    """Seconds to compute the rest of a prompt, without the term that grows with its square."""
    return prompt.num_left * max(model.prefill_per_token_s, _LEAST_S)


def _is_late(prompt: Prompt, model: LatencyModel) -> bool:
    return _left_s(prompt, model) > prompt.due_in_s and prompt.waited_s < _LANE_WAIT_S


def _can_be_in_time(prompt: Prompt, model: LatencyModel) -> bool:
    """Whether a prompt is interactive and not late."""
    return not prompt.lane and not _is_late(prompt, model)


def step_limit_s(
    targets: StepTargets, streams: Streams, fixed_s: float = math.inf, single_s: float = 0.0
) -> float:
    """Longest predicted time of the next step, in seconds; may be negative.

    Args:
        targets: The step's targets.
        streams: The streams that decode in it.
        fixed_s: Predicted time of the step without prompts. With the default, the step borrows no
            time.
        single_s: Predicted time of a step with one stream and no prompts.
    """
    if math.isinf(streams.limit_s):
        return targets.prompt_step_s
    if streams.itl_s is None:
        return streams.limit_s
    tightest = targets.of_stream(streams.itl_s)
    if not tightest.may_borrow:
        return streams.limit_s
    longest_s = tightest.longest_gap_s * _GAP_MARGIN
    if math.isfinite(fixed_s) and tightest.shares_workers(single_s):
        return longest_s
    saved_s = max(0.0, streams.itl_s * _MEAN_MARGIN - fixed_s)
    return max(streams.limit_s, min(streams.limit_s + _BORROWED_TOKENS * saved_s, longest_s))


def prompt_tokens(
    model: LatencyModel,
    targets: StepTargets,
    streams: Streams,
    prompts: Sequence[Prompt],
    max_tokens: int,
    share: float = 1.0,
) -> list[int]:
    """Number of tokens of each prompt in the next step.

    Args:
        model: Predicts the time of a step.
        targets: The step's targets.
        streams: The streams that decode in it.
        prompts: In the order of `prompt_order`.
        max_tokens: Most tokens of a step, those of the streams included.
        share: Share of the time for prompts that they may take; the rest is for copies in the step.
            With less than 1, the step borrows no time.

    Returns:
        One number per prompt, in the same order; the sum and `streams.num_tokens` are together at
        most `max_tokens`. At least one number is positive if the step has room for a token. The
        oldest running prompt of the most urgent lane always gets a token then: prompts that wait
        may get no KV blocks until a running one has ended.
    """
    room = max_tokens - streams.num_tokens
    grants = [0] * len(prompts)
    if room <= 0 or not prompts:
        return grants
    fixed_s, spent_s = _streams_s(model, streams), 0.0
    # No time is borrowed for batch prompts, and for late ones only if every worker has streams for
    # long: prompts in time need it.
    has_streams = math.isfinite(streams.limit_s)
    late_may_borrow = has_streams and targets.shares_workers(model.decode_step_s(1, 0))
    in_time_s = others_s = share * _prompts_s(model, targets, streams._replace(itl_s=None), fixed_s)
    if share == 1.0:
        in_time_s = _prompts_s(model, targets, streams, fixed_s)
    oldest, oldest_s = _oldest_running(prompts), others_s
    if oldest is not None and _can_be_in_time(prompts[oldest], model):
        # Without the time by which a step without streams gets longer.
        oldest_s = in_time_s
    if not streams.num_streams and math.isinf(streams.limit_s):
        longest_s = _PROMPT_STEPS * targets.prompt_step_s
        is_urgent = len(prompts) == 1 and prompts[0].due_in_s <= _URGENT * _left_s(
            prompts[0], model
        )
        if not is_urgent:
            longest_s = min(longest_s, _FIXED_PARTS * fixed_s)
        in_time_s = max(in_time_s, longest_s - fixed_s)

    def room_s(prompt: Prompt) -> float:
        may_borrow = _can_be_in_time(prompt, model) or (late_may_borrow and not prompt.lane)
        return (in_time_s if may_borrow else others_s) - spent_s

    def add(index: int, most: int) -> None:
        nonlocal spent_s, room
        prompt = prompts[index]
        begin = prompt.num_done + grants[index]
        count = max(0, min(most, prompt.num_allowed - grants[index], room))
        grants[index] += count
        room -= count
        spent_s += model.chunk_s(begin, count)

    if oldest is not None:
        fits = _fits(model, prompts[oldest].num_done, oldest_s)
        add(oldest, max(1, int(_OLDEST_SHARE * min(room, fits))))
    for index, prompt in enumerate(prompts):
        if room <= 0 or (seconds := room_s(prompt)) <= 0:
            break
        add(index, _fits(model, prompt.num_done + grants[index], seconds))
    if not any(grants):
        add(0, 1)
    return grants


def prompt_speed(
    model: LatencyModel, targets: StepTargets, streams: Streams, share_alone: float
) -> float:
    """Speed of prompts beside these streams, as a share of the speed without streams; (0, 1].

    A step without streams counts as full speed, although it pays its base as well.

    Args:
        model: Predicts the time of a step.
        targets: The step's targets.
        streams: The streams that decode in it.
        share_alone: `prompt_share_alone` of the same model and targets.
    """
    return min(1.0, _prompt_share(model, targets, streams) / share_alone)


def prompt_share_alone(model: LatencyModel, targets: StepTargets) -> float:
    """Share of a step that goes to prompt tokens if nothing decodes; the rest is its base."""
    return _prompt_share(model, targets, _ALONE)


def _prompt_share(model: LatencyModel, targets: StepTargets, streams: Streams) -> float:
    """Share of a step's time that goes to prompt tokens."""
    fixed_s = _streams_s(model, streams)
    prompts_s = _prompts_s(model, targets, streams, fixed_s)
    return prompts_s / (fixed_s + prompts_s)


def _prompts_s(
    model: LatencyModel, targets: StepTargets, streams: Streams, fixed_s: float
) -> float:
    """Seconds of a step that its targets leave for prompt tokens."""
    least_share = _LEAST_SHARE_ALONE if math.isinf(streams.limit_s) else _LEAST_SHARE
    limit_s = step_limit_s(targets, streams, fixed_s, model.decode_step_s(1, 0))
    return max(limit_s - fixed_s, least_share * fixed_s)


def _streams_s(model: LatencyModel, streams: Streams) -> float:
    """Time of a step with these streams and a prompt chunk, without the chunk's own time."""
    return model.mixed_step_s(1, 0, streams.num_streams, streams.num_kv_tokens) - (
        model.prefill_per_token_s
    )


def _fits(model: LatencyModel, num_done: int, seconds: float) -> int:
    """Largest n with b*n + c*n*(2*num_done + n) <= seconds."""
    if seconds <= 0:
        return 0
    square_s = model.prefill_per_token_squared_s
    linear_s = max(model.prefill_per_token_s, _LEAST_S) + 2 * square_s * num_done
    # This form of the solution stays exact for a tiny square term.
    root = math.sqrt(linear_s * linear_s + 4 * square_s * seconds)
    return int(2 * seconds / (linear_s + root) + 1e-9)


def _oldest_running(prompts: Sequence[Prompt]) -> int | None:
    running = [index for index, prompt in enumerate(prompts) if prompt.running]
    if not running:
        return None
    return min(running, key=lambda index: (prompts[index].lane, -prompts[index].waited_s))
