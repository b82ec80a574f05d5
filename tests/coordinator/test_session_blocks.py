"""Blocks of sessions: what a session alone has had is deleted with it, and memory is bounded."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.state.requests import SessionKey
from baton.coordinator.state.session_blocks import SessionBlocks
from baton.runtime.errors import InvalidArgument, NotFound
from baton.runtime.prompts.block_hashes import block_hashes

MINE, OTHERS = SessionKey("default", "mine"), SessionKey("default", "others")


def chain(*tokens: int) -> array[int]:
    """Hashes of a prompt with one token per block."""
    return block_hashes(tokens, 1)


def test_a_turn_replaces_the_turn_that_it_continues():
    blocks = SessionBlocks()
    for prompt in ((1, 2), (1, 2, 3), (1,), (1, 2, 3, 4), (1, 2, 9)):
        blocks.add(MINE, chain(*prompt))
        blocks.check_integrity()
    taken = blocks.take("mine")
    assert taken.hashes == {*chain(1, 2, 3, 4), *chain(1, 2, 9)}
    assert len(taken.chains) == 2
    assert not len(blocks)


def test_blocks_of_other_sessions_are_kept_until_the_last_one_is_taken():
    blocks = SessionBlocks()
    blocks.add(MINE, chain(1, 2, 3, 4))
    blocks.add(OTHERS, chain(1, 2, 5))
    taken = blocks.take("mine", "default")
    assert taken.hashes == set(chain(1, 2, 3, 4)[2:])
    assert taken.num_shared == 2
    assert blocks.take("others").hashes == set(chain(1, 2, 5))
    # A worker may have kept blocks.
    blocks.put_back(taken)
    assert blocks.take("mine").hashes == set(chain(1, 2, 3, 4))


def test_an_unknown_session_and_one_of_several_tenants_are_refused():
    blocks = SessionBlocks()
    blocks.add(MINE, chain(1))
    blocks.add(SessionKey("search", "mine"), chain(2))
    # A prompt without a full block leaves nothing behind.
    blocks.add(OTHERS, chain())
    for session, tenant in (("others", ""), ("mine", "chat")):
        with pytest.raises(NotFound, match=session):
            blocks.take(session, tenant)
    with pytest.raises(InvalidArgument, match="name one: default, search"):
        blocks.take("mine")
    assert blocks.take("mine", "search").hashes == set(chain(2))
    assert blocks.take("mine").hashes == set(chain(1))


def test_the_sessions_used_least_recently_are_forgotten():
    blocks = SessionBlocks(max_blocks=6, max_sessions=3)
    keys = [SessionKey("default", f"s{number}") for number in range(4)]
    for number, key in enumerate(keys[:3]):
        blocks.add(key, chain(number, number))
    blocks.add(keys[0], chain(0))
    blocks.add(keys[3], chain(3))
    blocks.check_integrity()
    with pytest.raises(NotFound):
        blocks.take("s1")
    blocks.add(keys[3], chain(3, 3, 3))
    with pytest.raises(NotFound):
        blocks.take("s2")
    assert len(blocks) == 2
    for number in range(300):
        blocks.add(keys[0], chain(0, number))
    blocks.check_integrity()


_PROMPTS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(st.sampled_from("abc"), _PROMPTS), max_size=30))
def test_exactly_the_blocks_that_no_other_session_has_are_taken(requests):
    blocks, known = SessionBlocks(), {"a": set(), "b": set(), "c": set()}
    for session, prompt in requests:
        blocks.add(SessionKey("default", session), chain(*prompt))
        known[session].update(chain(*prompt))
        blocks.check_integrity()
    for session in "abc":
        own, others = known.pop(session), set[int]().union(*known.values())
        if own:
            taken = blocks.take(session)
            assert taken.hashes == own - others
            assert taken.num_shared == len(own & set().union(*known.values()))
        blocks.check_integrity()
