"""The chunks of a stream contain the same as the full response."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client import Completion, Finished, LatencyBudget, TokenLogprob, Tokens, Usage
from baton.gateway import response_rendering
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt

BUDGET = LatencyBudget((), 0.0, 0.0, 0.0, 0.0)
# All characters that protobuf strings can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
LOGPROB = st.floats(max_value=0.0, allow_nan=False)


@st.composite
def deltas(draw, logprobs):
    """Draws the deltas of one output; logprobs have the chosen and the two most likely tokens."""
    found, offset = [], 0
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 3))
        positions = ()
        if logprobs:
            positions = tuple(
                tuple(
                    TokenLogprob(token, draw(LOGPROB), rank, draw(TEXT))
                    for token, rank in ((7, draw(st.integers(1, 9))), (8, 1), (9, 2))
                )
                for _ in range(count)
            )
        found.append(Tokens((1,) * count, draw(TEXT), offset, positions))
        offset += count
    return found


def parsed_request_of(*, chat, num_logprobs, include_usage=False, continuous_usage=False, stop=()):
    usage = include_usage, continuous_usage
    options = {"stop": stop}
    return ParsedRequest(
        "id", chat, "interactive", ["x"], 1, None, True, *usage, num_logprobs, options, {}
    )


def parsed(chunk):
    """Parses the single event of a chunk, which must not contain any kind of line break."""
    text = chunk.decode()
    assert text.endswith("\n\n")
    assert len(text.rstrip("\n").splitlines()) == 1
    return json.loads(text.removeprefix("data: "))


@pytest.mark.parametrize("num_logprobs", [None, 2])
@pytest.mark.parametrize("chat", [False, True])
@given(data=st.data())
def test_the_joined_chunks_equal_the_full_response(chat, num_logprobs, data):
    parts = data.draw(deltas(num_logprobs is not None))
    num_tokens = sum(len(part.token_ids) for part in parts)
    finished = Finished("length", "", Usage(3, num_tokens, 1), BUDGET)
    head = response_rendering.ResponseHead(
        parsed_request_of(chat=chat, num_logprobs=num_logprobs), "m", 1
    )
    chunks = response_rendering.ChunkRenderer(head, 0, 3, RenderedPrompt())
    seen = [parsed(chunks.render(part, None)) for part in parts[:-1]]
    seen.append(parsed(chunks.render(parts[-1], finished)))
    whole = response_rendering.full_response(
        head,
        [
            Completion(
                "id",
                "m",
                "".join(part.text for part in parts),
                tuple(token for part in parts for token in part.token_ids),
                tuple(entry for part in parts for entry in part.logprobs),
                finished,
            )
        ],
        [RenderedPrompt()],
    )
    whole = json.loads(json.dumps(whole, allow_nan=False))
    choices = [one["choices"][0] for one in seen]
    (choice,) = whole["choices"]
    if chat:
        assert "".join(one["delta"]["content"] for one in choices) == choice["message"]["content"]
        assert [one["delta"].get("role") for one in choices[:2]] == ["assistant", None][
            : len(choices)
        ]
    else:
        assert "".join(one["text"] for one in choices) == choice["text"]
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]
    assert whole["usage"]["total_tokens"] == 3 + num_tokens
    for key in choice["logprobs"] or ():
        joined = [one for chunk in choices for one in chunk["logprobs"][key]]
        assert joined == choice["logprobs"][key]


@pytest.mark.parametrize(
    ("stop", "asked", "shown"),
    [("", (), None), ("END", ("END",), "END"), ("12", (), 12), ("12", ("12",), "12")],
)
def test_stop_reason(stop, asked, shown):
    finished = Finished("stop", stop, Usage(1, 1, 0), BUDGET)
    head = response_rendering.ResponseHead(
        parsed_request_of(chat=False, num_logprobs=None, stop=asked), "m", 1
    )
    chunk = parsed(
        response_rendering.ChunkRenderer(head, 0, 3, RenderedPrompt()).render(None, finished)
    )
    assert chunk["choices"][0]["stop_reason"] == shown


def test_include_usage_adds_usage_to_every_chunk():
    head = response_rendering.ResponseHead(
        parsed_request_of(chat=True, num_logprobs=None, include_usage=True), "m", 1
    )
    chunk = parsed(
        response_rendering.ChunkRenderer(head, 0, 3, RenderedPrompt()).render(
            Tokens((1,), "a", 0), None
        )
    )
    assert chunk["usage"] is None
    last = parsed(response_rendering.usage_chunk(head, [Usage(3, 4, 1)]))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_continuous_usage_counts_the_tokens_so_far():
    asked = parsed_request_of(
        chat=False, num_logprobs=None, include_usage=True, continuous_usage=True
    )
    chunks = response_rendering.ChunkRenderer(
        response_rendering.ResponseHead(asked, "m", 1), 0, 3, RenderedPrompt()
    )
    finished = Finished("length", "", Usage(3, 3, 0), BUDGET)
    seen = [
        parsed(chunk)["usage"]
        for chunk in (
            chunks.render(Tokens((1, 2), "a", 0), None),
            chunks.render(Tokens((3,), "b", 2), finished),
        )
    ]
    assert [(one["completion_tokens"], one["total_tokens"]) for one in seen] == [(2, 5), (3, 6)]
