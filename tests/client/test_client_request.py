"""A request of the client across lost sessions."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client import Accepted, Finished, Tokens
from baton.client.client_request import TRANSITIONS, ClientRequest, RequestPhase
from baton.client.errors import make
from baton.v1 import inference_pb2
from tests.client.scripted_inference import accepted, delta, finished


@st.composite
def outputs(draw):
    """Draws the text of each token, and the numbers of tokens at which sessions are lost."""
    texts = draw(st.lists(st.text("aé\N{GRINNING FACE}", max_size=3), min_size=1, max_size=12))
    return texts, draw(st.lists(st.integers(0, len(texts)), max_size=6)), draw(st.randoms())


@given(outputs(), st.integers(1, 3))
def test_lost_sessions_do_not_change_the_output(output, max_buffered_events):
    """Coordinators repeat whole deltas and hold text back; the reader reads at random times."""
    texts, ends, chosen = output
    whole = "".join(texts)

    def send(request, until):
        message = request.message()
        num_known, num_chars = len(message.resume.token_ids), message.resume.num_text_chars
        assert list(message.resume.token_ids) == list(range(num_known))
        request.on_event(accepted(1, "r1"))
        if num_known:
            again = chosen.randrange(num_known)
            known = range(again, chosen.randint(again + 1, num_known))
            request.on_event(delta(1, again, known, "".join(texts[again : known.stop])))
        while num_known < until:
            upto = chosen.randint(num_known + 1, until)
            final = len("".join(texts[:upto]))
            to = final if upto == len(texts) else chosen.randint(min(num_chars, final), final)
            text = whole[num_chars:to]
            num_chars = max(num_chars, to)
            request.on_event(delta(1, num_known, range(num_known, upto), text))
            num_known = upto

    async def run():
        message = inference_pb2.GenerateRequest(text="x")
        request = ClientRequest(message, max_buffered_events=max_buffered_events, timeout_s=None)
        events = []
        for end in sorted(ends):
            send(request, end)
            request.on_session_lost(make(14, "lost"), 3600)
            while request.buffer and chosen.random() < 0.5:
                events.append(await request.next())
        send(request, len(texts))
        request.on_event(finished(1))
        while (event := await request.next()) is not None:
            events.append(event)
        return events

    first, *parts, last = asyncio.run(run())
    assert isinstance(first, Accepted)
    assert isinstance(last, Finished)
    assert [token for part in parts for token in part.token_ids] == list(range(len(texts)))
    assert "".join(part.text for part in parts) == whole
    for before, after in itertools.pairwise(parts):
        assert after.offset == before.offset + len(before.token_ids)


def test_tokens_for_a_slow_reader_are_joined_once(monkeypatch):
    joined, sizes = Tokens.joined, []
    monkeypatch.setattr(Tokens, "joined", lambda parts: sizes.append(len(parts)) or joined(parts))

    async def run():
        message = inference_pb2.GenerateRequest(text="x")
        request = ClientRequest(message, max_buffered_events=4, timeout_s=None)
        request.on_event(accepted(1, "r1"))
        for offset in range(100):
            request.on_event(delta(1, offset, [offset], "t"))
        request.on_event(finished(1))
        return await request.read()

    first, *parts, last = asyncio.run(run())
    assert [type(first), type(last)] == [Accepted, Finished]
    assert [token for part in parts for token in part.token_ids] == list(range(100))
    assert [len(part.token_ids) for part in parts] == [1, 1, 98]
    assert sizes == [98]


@pytest.mark.parametrize("old", RequestPhase)
@pytest.mark.parametrize("new", RequestPhase)
async def test_only_moves_of_the_table_are_allowed(old, new):
    message = inference_pb2.GenerateRequest(text="x")
    request = ClientRequest(message, max_buffered_events=4, timeout_s=None)
    request.phase = old
    if new in TRANSITIONS[old]:
        request._advance(new)
        assert request.phase is new
    else:
        with pytest.raises(ValueError, match=f"no move from {old.name} to {new.name}"):
            request._advance(new)
        assert request.phase is old
