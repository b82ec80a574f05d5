"""The policy of a step's prompt tokens, by random prompts and streams."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.config import StepsConfig
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import (
    Prompt,
    StepTargets,
    StreamPace,
    Streams,
    prompt_order,
    prompt_tokens,
    step_limit_s,
)

MODEL = LatencyModel(5e-3, 1e-4, 2e-9, 8e-3, 5e-5, 2e-7)
TARGETS = StepTargets(0.05, 0.06, 0.2)
# Steps may borrow time from streams.
LONG_GAPS = StepTargets(0.05, 0.15, 0.2)
# Shares of the ITL target and of the longest gap that the policy aims at.
MEAN_MARGIN, GAP_MARGIN = 0.97, 0.9
# Longest step of prompts in time without streams, as a multiple of the step's fixed part and of
# `prompt_step_s`. The first does not hold for a prompt alone that is due within URGENT times its
# computation.
FIXED_PARTS, PROMPT_STEPS, URGENT = 20.0, 3.0, 2.0

prompts = st.lists(
    st.builds(
        Prompt,
        num_done=st.integers(0, 5000),
        num_left=st.integers(1, 20_000),
        priority=st.integers(0, 1),
        waited_s=st.floats(0, 1000),
        running=st.booleans(),
        max_chunk=st.none() | st.integers(1, 300),
    ),
    max_size=12,
)
streams = st.builds(
    Streams,
    num_streams=st.integers(0, 100),
    num_kv_tokens=st.integers(0, 100_000),
    limit_s=st.floats(-10, 10).map(TARGETS.stream_limit_s) | st.just(math.inf),
    num_drafts=st.integers(0, 300),
    itl_s=st.none() | st.floats(0.01, 0.2),
)


def ordered(found: list[Prompt]) -> list[Prompt]:
    return sorted(found, key=lambda one: prompt_order(one, MODEL))


@given(prompts, streams, st.integers(1, 4096))
def test_a_step_has_at_most_its_tokens_and_no_prompt_gets_more_than_it_needs(
    found: list[Prompt], decoding: Streams, max_tokens: int
) -> None:
    found = ordered(found)
    grants = prompt_tokens(MODEL, TARGETS, decoding, found, max_tokens)
    assert len(grants) == len(found)
    assert all(0 <= grant <= one.num_allowed for grant, one in zip(grants, found, strict=True))
    assert sum(grants) <= max(0, max_tokens - decoding.num_tokens)


@given(prompts, streams, st.integers(1, 4096), st.sampled_from([TARGETS, LONG_GAPS]))
def test_a_step_takes_as_long_as_its_limit_or_has_the_least_tokens(
    found: list[Prompt], decoding: Streams, max_tokens: int, targets: StepTargets
) -> None:
    found = ordered(found)
    grants = prompt_tokens(MODEL, targets, decoding, found, max_tokens)
    if sum(grants) <= 1:
        return
    squares = sum(
        grant * (2 * one.num_done + grant) for grant, one in zip(grants, found, strict=True)
    )
    num_streams, num_kv = decoding.num_streams, decoding.num_kv_tokens
    # The oldest running prompt gets a token in any case.
    least_s = MODEL.prefill_per_token_s + MODEL.prefill_per_token_squared_s * (2 * 5000 + 1)
    predicted_s = MODEL.mixed_step_s(sum(grants), squares, num_streams, num_kv)
    fixed_s = MODEL.mixed_step_s(1, 0, num_streams, num_kv)
    share = 2.0 if math.isinf(decoding.limit_s) else 1.1
    alone_s = fixed_s - MODEL.prefill_per_token_s
    single_s = MODEL.decode_step_s(1, 0)
    limit_s = max(step_limit_s(targets, decoding, alone_s, single_s), share * fixed_s)
    if not num_streams and any(not one.lane for one in found):
        left_s = found[0].num_left * MODEL.prefill_per_token_s
        is_urgent = len(found) == 1 and found[0].due_in_s <= URGENT * left_s
        parts = math.inf if is_urgent else FIXED_PARTS
        limit_s = max(limit_s, min(parts * fixed_s, PROMPT_STEPS * targets.prompt_step_s))
    assert predicted_s <= limit_s + least_s


@given(prompts, streams, st.integers(1, 4096))
def test_the_oldest_running_prompt_of_the_first_lane_always_gets_tokens(
    found: list[Prompt], decoding: Streams, max_tokens: int
) -> None:
    found = ordered(found)
    grants = prompt_tokens(MODEL, TARGETS, decoding, found, max_tokens)
    has_room = max_tokens > decoding.num_tokens
    assert any(grants) == (has_room and bool(found))
    running = [one for one in found if one.running]
    if running and has_room:
        oldest = min(running, key=lambda one: (one.lane, -one.waited_s))
        assert grants[found.index(oldest)] > 0


@pytest.mark.parametrize(
    ("prompt", "longest_s"),
    [
        (Prompt(0, 10_000, 0, 0.0, running=False, due_in_s=30.0), FIXED_PARTS * 0.02),
        (Prompt(0, 10_000, 0, 0.0, running=False), FIXED_PARTS * 0.02),
        (Prompt(0, 10_000, 0, 0.0, running=False, due_in_s=1.9), PROMPT_STEPS * 0.2),
        (Prompt(0, 10_000, 0, 9.0, running=False, due_in_s=0.1), 0.2),
        (Prompt(0, 10_000, 1, 0.0, running=False), 0.2),
    ],
    ids=["in time", "without a TTFT target", "hardly in time", "late", "batch"],
)
def test_without_streams_only_prompts_in_time_make_steps_longer(
    prompt: Prompt, longest_s: float
) -> None:
    """Where the fixed part of a step takes 20 ms, steps of 200 ms would lose 10 % to it."""
    slow = LatencyModel(0.02, 1e-4, 0.0, 0.02, 5e-5, 2e-7)
    (tokens,) = prompt_tokens(slow, TARGETS, Streams(0, 0), [prompt], 100_000)
    assert slow.mixed_step_s(tokens, 0, 0, 0) == pytest.approx(longest_s, abs=1e-3)


def test_a_stream_that_is_coming_limits_steps_like_one_on_target() -> None:
    """Also if nothing decodes: its first gap began with the token that its reader has made."""
    prompt = Prompt(0, 10_000, 0, 0.0, running=False, due_in_s=1.9)
    coming = Streams.of(0, 0, [StreamPace.coming(100.0, None)], TARGETS)
    (tokens,) = prompt_tokens(MODEL, TARGETS, coming, [prompt], 100_000)
    longest_s = MEAN_MARGIN * 0.05
    assert MODEL.mixed_step_s(tokens, tokens**2, 0, 0) == pytest.approx(longest_s, abs=1e-3)
    named = Streams.of(0, 0, [StreamPace.coming(100.0, 0.02)], TARGETS)
    (fewer,) = prompt_tokens(MODEL, TARGETS, named, [prompt], 100_000)
    assert 0 < fewer < tokens / 2


def test_beside_copies_prompts_get_a_share_of_the_time_that_streams_leave() -> None:
    """Also with long gaps: the step borrows no time then."""
    prompt = Prompt(0, 10_000, 0, 0.0, running=False)
    for targets in (TARGETS, LONG_GAPS):
        streams = Streams.of(4, 1000, [StreamPace.coming(100.0, None)], targets)
        alone_s = MODEL.mixed_step_s(0, 0, 4, 1000)
        (tokens,) = prompt_tokens(MODEL, targets, streams, [prompt], 100_000, 0.5)
        took_s = MODEL.mixed_step_s(tokens, tokens**2, 4, 1000) - alone_s
        assert took_s == pytest.approx((MEAN_MARGIN * 0.05 - alone_s) / 2, rel=0.05)


def test_a_prompt_that_is_hardly_in_time_makes_no_longer_steps_beside_another() -> None:
    slow = LatencyModel(0.02, 1e-4, 0.0, 0.02, 5e-5, 2e-7)
    hardly = Prompt(0, 10_000, 0, 0.0, running=False, due_in_s=1.9)
    grants = prompt_tokens(slow, TARGETS, Streams(0, 0), [hardly, hardly], 100_000)
    assert slow.mixed_step_s(sum(grants), 0, 0, 0) == pytest.approx(FIXED_PARTS * 0.02, abs=1e-3)


def test_a_late_prompt_fills_only_the_shorter_limit_behind_one_in_time() -> None:
    slow = LatencyModel(0.02, 1e-4, 0.0, 0.02, 5e-5, 2e-7)
    in_time = Prompt(0, 2_500, 0, 0.0, running=False, due_in_s=1.0)
    late = Prompt(0, 10_000, 0, 1.0, running=False, due_in_s=0.1)
    assert prompt_tokens(slow, TARGETS, Streams(0, 0), [in_time, late], 100_000) == [2_500, 0]


def test_the_oldest_running_prompt_leaves_most_of_a_small_step_to_a_short_prompt() -> None:
    """Its share is one of the step's tokens, also when the time would allow for many more."""
    found = [Prompt(0, 10, 0, 0.0, running=False), Prompt(64, 200, 0, 1.0, running=True)]
    assert prompt_tokens(MODEL, TARGETS, Streams(1, 5, TARGETS.stream_limit_s()), found, 64) == [
        10,
        53,
    ]


def test_tokens_that_a_prompt_may_not_have_in_one_step_go_to_the_next_prompt() -> None:
    first, second = Prompt(0, 500, 0, 0.0, running=False), Prompt(0, 900, 0, 0.0, running=False)
    whole = [first, second]
    assert prompt_tokens(MODEL, TARGETS, Streams(), whole, 128) == [128, 0]
    bounded = [one._replace(max_chunk=100) for one in whole]
    assert prompt_tokens(MODEL, TARGETS, Streams(), bounded, 128) == [100, 28]


def test_the_lane_goes_first_then_the_shortest_prompt() -> None:
    long, short = Prompt(0, 5000, 0, 0.0, False), Prompt(0, 50, 0, 0.0, False)
    batch = Prompt(0, 10, 1, 20.0, False)
    assert ordered([batch, long, short]) == [short, long, batch]


def test_a_prompt_that_cannot_be_in_time_goes_behind_those_that_can() -> None:
    """It needs 0.1 s more. After half a minute it is ordered like the others."""
    long = Prompt(0, 5000, 0, 0.0, running=False, due_in_s=0.6)
    cases = ((0.09, 1.0, False), (0.11, 1.0, True), (-1.0, 31.0, True))
    for due_in_s, waited_s, is_first in cases:
        short = Prompt(0, 1000, 0, waited_s, running=True, due_in_s=due_in_s)
        assert (ordered([long, short])[0] is short) == is_first
    batch = Prompt(0, 10, 1, 20.0, running=False)
    late = Prompt(0, 1000, 0, 1.0, running=False, due_in_s=-1.0)
    assert ordered([batch, late]) == [late, batch]


def test_a_late_prompt_does_not_starve_while_prompts_in_time_keep_coming() -> None:
    fresh = Prompt(0, 2000, 0, 0.0, running=False, due_in_s=1.0)
    assert_computed(4000, [fresh, fresh], is_late=True)


def test_a_long_prompt_is_overtaken_only_by_prompts_that_came_soon_after_it() -> None:
    """Twenty times its remaining computation: 5,000 tokens of 0.1 ms each, so 10 s."""
    for waited_s, is_first in ((9.0, False), (11.0, True)):
        long, fresh = Prompt(0, 5001, 0, waited_s, False), Prompt(0, 1, 0, 0.0, False)
        assert (ordered([fresh, long])[0] is long) == is_first


def test_no_prompt_starves_while_short_ones_keep_coming() -> None:
    """Short prompts take more than a step's tokens in each step; the long one has no blocks yet."""
    short = Prompt(0, 2000, 0, 0.0, running=False)
    assert_computed(4000, [Prompt(0, 500, 0, 0.0, False), short])


def test_a_batch_prompt_does_not_starve_while_interactive_prompts_keep_coming() -> None:
    """Interactive prompts take more than a step's tokens in each step."""
    fresh = Prompt(0, 2000, 0, 0.0, running=False)
    assert_computed(6000, [fresh, fresh, Prompt(500, 2000, 0, 1.0, running=True)], priority=1)


def assert_computed(
    num_steps: int, others: list[Prompt], *, priority: int = 0, is_late: bool = False
) -> None:
    """Asserts that 2,000 tokens are computed although each step begins with these others."""
    left, waited_s, step_s = 2000, 0.0, 0.05
    for _ in range(num_steps):
        due_in_s = -waited_s if is_late else math.inf
        one = Prompt(2000 - left, left, priority, waited_s, left < 2000, due_in_s)
        found = ordered([*others, one])
        grants = prompt_tokens(
            MODEL, TARGETS, Streams(4, 4000, TARGETS.stream_limit_s()), found, 512
        )
        left -= grants[next(index for index, each in enumerate(found) if each is one)]
        waited_s += step_s
        if left <= 0:
            return
    raise AssertionError(f"{left} tokens are left after {waited_s} s")


def test_a_stream_spends_what_it_has_saved_up_to_the_longest_gap() -> None:
    aim_s, most_s = TARGETS.itl_s * MEAN_MARGIN, TARGETS.longest_gap_s * GAP_MARGIN
    for ahead_s, limit_s in ((0.0, aim_s), (0.002, aim_s + 0.002), (9.0, most_s)):
        assert step_limit_s(
            TARGETS, Streams(1, 1, TARGETS.stream_limit_s(ahead_s))
        ) == pytest.approx(limit_s)


def test_a_stream_keeps_the_target_that_its_request_named() -> None:
    """Its longest gap changes in proportion to the target."""
    for itl_s in (0.02, 0.2):
        pace = StreamPace(0.0, 0, itl_s)
        assert pace.limit_s(TARGETS) == pytest.approx(itl_s * MEAN_MARGIN)
        pace.advance(TARGETS, 1.0, 100)
        assert pace.saved_s == pytest.approx(100 * itl_s * MEAN_MARGIN - 1.0)
        assert pace.limit_s(TARGETS) == pytest.approx(itl_s * 1.2 * GAP_MARGIN)
    assert StreamPace(0.0, 0, 0.02).limit_s(StepTargets()) == pytest.approx(0.02 * MEAN_MARGIN)
    assert StreamPace(0.0, 0).limit_s(TARGETS) == TARGETS.stream_limit_s()
    assert math.isinf(StreamPace(0.0, 0).limit_s(StepTargets()))


def test_a_stream_that_is_late_gets_shorter_steps() -> None:
    found = [Prompt(0, 5000, 0, 0.0, running=True)]
    in_time, late, later = (
        prompt_tokens(
            MODEL, TARGETS, Streams(1, 100, TARGETS.stream_limit_s(saved_s)), found, 2048
        )[0]
        for saved_s in (0.0, -0.02, -0.4)
    )
    assert in_time > late > later > 0


def test_steps_of_a_slow_worker_keep_the_target_beside_prompts() -> None:
    # A decode step takes 39 ms and 16 prompt tokens 26 ms, as measured on a slow CPU.
    slow = LatencyModel(30e-3, 1.6e-3, 0.0, 36e-3, 3e-3, 0.0)
    found = [Prompt(0, 1500, 0, 10.0, running=True), Prompt(0, 64, 0, 0.0, running=False)]
    streams = Streams(1, 100, TARGETS.stream_limit_s())
    grants = prompt_tokens(slow, TARGETS, streams, found, 2048)
    assert grants[0] > 0
    assert slow.mixed_step_s(sum(grants), 0, 1, 100) <= TARGETS.itl_s


def test_a_stream_gains_with_early_tokens_and_owes_ten_gaps_at_most() -> None:
    pace = StreamPace(at=0.0, num_tokens=1)
    pace.advance(TARGETS, 0.1, 11)
    assert pace.saved_s == pytest.approx(10 * TARGETS.itl_s * MEAN_MARGIN - 0.1)
    pace.advance(TARGETS, 100.0, 12)
    assert pace.saved_s == pytest.approx(-10 * TARGETS.itl_s)


def test_a_changed_target_does_not_count_for_earlier_tokens() -> None:
    pace = StreamPace(at=0.0, num_tokens=0)
    pace.advance(TARGETS, 10 * TARGETS.itl_s * MEAN_MARGIN, 10)
    assert pace.saved_s == pytest.approx(0.0)
    strict = StepTargets(0.02, 0.03, 0.2)
    pace.advance(strict, pace.at + 0.02, 11)
    assert pace.saved_s == pytest.approx(-0.02 * (1 - MEAN_MARGIN))
    pace.advance(StepTargets(), 100.0, 12)
    assert pace.saved_s == 0.0


def test_steps_without_interactive_streams_or_without_an_itl_target_are_bounded_too() -> None:
    assert step_limit_s(TARGETS, Streams(1, 1, math.inf)) == 0.2
    targets = StepTargets.of(StepsConfig(), None)
    assert step_limit_s(targets, Streams(1, 1, math.inf)) == 0.2
    found = [Prompt(0, 100_000, 0, 0.0, False)]
    (grant,) = prompt_tokens(MODEL, targets, Streams(), found, 100_000)
    assert 1500 < grant < 2000


def test_a_step_whose_base_alone_exceeds_the_limit_still_computes_prompts_efficiently() -> None:
    slow = LatencyModel(0.5, 1e-3, 0.0, 0.5, 0.0, 0.0)
    found = [Prompt(0, 2000, 0, 0.0, running=True)]
    (grant,) = prompt_tokens(slow, TARGETS, Streams(), found, 2048)
    assert 450 < grant < 600
    (grant,) = prompt_tokens(slow, TARGETS, Streams(1, 10, TARGETS.stream_limit_s()), found, 2048)
    assert 45 < grant < 60


def test_streams_owe_what_they_would_save_in_their_next_tokens() -> None:
    """At 40 ms per step they would save 8.5 ms per token, so the longest gap is the limit."""
    aim_s = 0.05 * MEAN_MARGIN
    for saved_s, fixed_s, expected_s in (
        (0.0, 0.04, 0.15 * GAP_MARGIN),
        (-0.5, 0.04, aim_s - 0.5 + 60 * (aim_s - 0.04)),
        (0.0, 0.048, aim_s + 60 * (aim_s - 0.048)),
        (0.0, 0.049, aim_s),
    ):
        pace = StreamPace(0.0, 0, saved_s=saved_s)
        streams = Streams.of(1, 100, [pace], LONG_GAPS)
        assert step_limit_s(LONG_GAPS, streams, fixed_s) == pytest.approx(expected_s)
        # With the default gap, steps spend only saved time and borrow none.
        streams = Streams.of(1, 100, [pace], TARGETS)
        assert step_limit_s(TARGETS, streams, fixed_s) == pace.limit_s(TARGETS)


def test_late_prompts_borrow_only_from_streams_and_only_if_steps_take_most_of_the_target() -> None:
    late = Prompt(0, 8000, 0, 1.0, running=True, due_in_s=-1.0)
    streams = Streams(5, 500, limit_s=0.05, itl_s=0.05)
    for base_s, beside_s, alone_s in ((0.042, 0.135, 0.2), (0.03, 0.05, 0.2)):
        model = LatencyModel(0.04, 1e-4, 0.0, base_s, 1e-5, 0.0)
        for found, longest_s in ((streams, beside_s), (Streams(), alone_s)):
            (count,) = prompt_tokens(model, LONG_GAPS, found, [late], 10**6)
            step_s = model.mixed_step_s(count, 0, found.num_streams, found.num_kv_tokens)
            assert step_s == pytest.approx(longest_s, abs=0.002)


def test_no_time_is_borrowed_for_batch_prompts_and_late_ones() -> None:
    streams = Streams.of(1, 100, [StreamPace(0.0, 0)], LONG_GAPS)
    in_time, batch = (Prompt(0, 5000, priority, 0.0, running=True) for priority in (0, 1))
    late = in_time._replace(due_in_s=0.01)
    by_default = prompt_tokens(MODEL, TARGETS, streams, [batch], 8192)
    assert prompt_tokens(MODEL, LONG_GAPS, streams, [batch], 8192) == by_default
    assert prompt_tokens(MODEL, LONG_GAPS, streams, [late], 8192) == by_default
    (owed,) = prompt_tokens(MODEL, LONG_GAPS, streams, [in_time], 8192)
    assert owed > 2 * by_default[0]
    # Nor beside a short prompt in time, whose turn comes first.
    short = in_time._replace(num_left=64)
    for other in (batch, late, late._replace(running=False)):
        assert sum(prompt_tokens(MODEL, LONG_GAPS, streams, [short, other], 8192)) <= by_default[0]


def test_the_stream_with_the_tightest_target_decides_what_is_owed() -> None:
    paces = [StreamPace(0.0, 0), StreamPace(0.0, 0, 0.02)]
    streams = Streams.of(2, 100, paces, LONG_GAPS)
    assert step_limit_s(LONG_GAPS, streams, 0.01) == pytest.approx(0.06 * GAP_MARGIN)
    assert step_limit_s(LONG_GAPS, streams, 0.03) == pytest.approx(0.02 * MEAN_MARGIN)


def test_placement_expects_long_gaps_only_beside_fast_streams() -> None:
    assert LONG_GAPS.expected_limit_s(0.03, 0.02) == pytest.approx(0.15 * GAP_MARGIN)
    assert LONG_GAPS.expected_limit_s(0.04, 0.02) == LONG_GAPS.stream_limit_s()
    assert TARGETS.expected_limit_s(0.03, 0.02) == TARGETS.stream_limit_s()
    assert math.isinf(StepTargets().expected_limit_s(0.03, 0.02))


def test_borrowed_time_has_no_limit_if_steps_take_most_of_the_target() -> None:
    late = Streams(5, 500, limit_s=-0.4, itl_s=0.05)
    longest_s = 0.15 * GAP_MARGIN
    assert step_limit_s(LONG_GAPS, late, 0.046, 0.042) == pytest.approx(longest_s)
    assert step_limit_s(LONG_GAPS, late, 0.046, 0.02) < 0
    # No stream would catch up, whether prompts wait or not.
    assert step_limit_s(LONG_GAPS, late, 0.051, 0.042) == pytest.approx(longest_s)
    assert step_limit_s(TARGETS, late, 0.046, 0.042) == pytest.approx(late.limit_s)
    assert LONG_GAPS.expected_limit_s(0.046, 0.042) == pytest.approx(longest_s)
    assert TARGETS.expected_limit_s(0.046, 0.042) == TARGETS.stream_limit_s()
