"""Resumed requests whose known tokens are already the whole output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.core.resumed_stop import known_stop
from baton.coordinator.state import events as ev
from baton.v1 import common_pb2

EOS, MORE = 2, 3


def decode(token_ids, skips) -> str:
    """Decodes token 10 as "a", 11 as "b" and so on; tokens below 10 are special, with text "#"."""
    special = "" if skips else "#"
    return "".join(special if one < 10 else chr(ord("a") + one - 10) for one in token_ids)


def stop_of(token_ids, **sampling):
    params = common_pb2.SamplingParams(**sampling)
    return known_stop(token_ids, params, EOS, {MORE}, decode)


@pytest.mark.parametrize(
    ("token_ids", "sampling", "stop"),
    [
        ([], {}, None),
        ([10, EOS], {}, ""),
        ([10, EOS], {"ignore_eos": True}, None),
        ([10, EOS], {"min_tokens": 3}, None),
        ([10, EOS], {"min_tokens": 2}, ""),
        ([10, MORE], {}, "3"),
        ([10, MORE], {"ignore_eos": True}, None),
        ([10, 11], {"stop_token_ids": [11]}, "11"),
        ([10, 11], {"stop_token_ids": [11], "min_tokens": 3}, None),
        ([11, 10], {"stop_token_ids": [11]}, None),
        ([10, 11, 12], {"stop": ["c"]}, "c"),
        ([10, 11, 12], {"stop": ["x", "bc", "c"]}, "bc"),
        ([10, 11, 12], {"stop": ["bc"], "min_tokens": 3}, None),
        # The stop string ended before min_tokens, where it does not count.
        ([10, 11, 12], {"stop": ["ab"], "min_tokens": 2}, None),
        ([10, 11, 12], {"stop": ["abcd"]}, None),
        ([10, 5], {"stop": ["a#"], "skip_special_tokens": False}, "a#"),
        ([10, 5], {"stop": ["a#"]}, None),
    ],
)
def test_known_stop_returns_the_stop_reason_of_known_tokens(token_ids, sampling, stop):
    assert stop_of(token_ids, **sampling) == stop


@given(
    token_ids=st.lists(st.integers(10, 12), min_size=1, max_size=60),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 5),
)
def test_stop_strings_match_at_the_same_token_as_on_the_worker(token_ids, stops, min_tokens):
    sampling = {"stop": stops, "min_tokens": min_tokens}
    for count, _ in enumerate(token_ids, start=1):
        text = decode(token_ids[:count], True)
        matched = count > min_tokens and any(text.endswith(stop) for stop in stops)
        assert (stop_of(token_ids[:count], **sampling) is not None) == matched
        if matched:
            break


def test_a_resumed_request_whose_output_has_stopped_ends_at_once(world):
    to = world.submit(known_token_ids=[7, 8], known_text_chars=2, known_stop="x")
    finished = world.last(to)
    assert (finished.reason, finished.stop) == (common_pb2.FINISH_REASON_STOP, "x")
    assert finished.usage.completion_tokens == 2
    assert world.commands == {}
    assert not [one for one in world.sent[to] if isinstance(one, ev.SendDeltas)]
