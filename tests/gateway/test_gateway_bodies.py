"""Whatever a body says, it becomes requests or an error that says what is wrong."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.client.request import build
from baton.gateway import asks, bodies, parsing, problems
from baton.gateway.problems import Problem
from baton.runtime.errors import RemoteError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KINDS = {
    bodies.CompletionBody: (asks.of_completion, {"prompt": "x"}),
    bodies.ChatBody: (asks.of_chat, {"messages": [{"role": "user", "content": "x"}]}),
}


def fields(kind):
    names = [field.alias or name for name, field in kind.model_fields.items()]
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=8), VALUES, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_json_is_requests_or_a_problem(kind, data):
    ask_of, least = KINDS[kind]
    body = json.dumps({**least, **data.draw(fields(kind))}).encode()
    outcome = submitted(body, kind, ask_of)
    if outcome is not None:
        assert outcome.status == 400
        assert json.loads(outcome.body())["error"]["message"] == str(outcome) != ""


def submitted(body, kind, ask_of):
    """What is wrong with a body; None when it becomes requests."""
    try:
        ask = ask_of(parsing.parse(body, kind), "id", {})
        for prompt, options in itertools.islice(ask.requests(), 4):
            build(prompt, options)
    except Problem as problem:
        return problem
    except RemoteError as error:
        # What does not fit the message.
        return problems.of(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=64))
def test_any_bytes_are_a_problem(kind, body):
    with pytest.raises(Problem) as caught:
        parsing.parse(body, kind)
    assert caught.value.status == 400


MANY = 5000
MANY_WRONG = {
    "messages": [1] * MANY,
    "logit_bias": {str(index): "" for index in range(MANY)},
    "response_format": {"type": "text", **{f"x{index}": 1 for index in range(MANY)}},
    "structured_outputs": {"choice": [1] * MANY},
    **dict.fromkeys(("stop", "bad_words"), [1] * MANY),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), [""] * MANY),
}


@pytest.mark.parametrize("name", MANY_WRONG)
def test_of_many_that_are_wrong_one_is_told(name):
    """What is said of each would take the event loop minutes in the largest body."""
    least = KINDS[bodies.ChatBody][1]
    with pytest.raises(ValidationError) as caught:
        bodies.ChatBody.model_validate({**least, name: MANY_WRONG[name]})
    # In a union something of each kind.
    assert caught.value.error_count() <= 2
    with pytest.raises(Problem, match=f"^{name}"):
        parsing.parse(json.dumps({**least, name: MANY_WRONG[name]}).encode(), bodies.ChatBody)


@pytest.mark.parametrize("above", [None, "structured_outputs", "logit_bias"])
def test_long_names_come_back_shortened(above):
    wrong = {"n" * MANY: ""}
    body = {"prompt": "x"} | (wrong if above is None else {above: wrong})
    with pytest.raises(Problem) as caught:
        parsing.parse(json.dumps(body).encode(), bodies.CompletionBody)
    assert "n" * 60 in caught.value.param
    assert len(caught.value.body()) < 1000


def test_no_more_turns_are_read_than_are_taken():
    turns = [{"role": "user", "content": "x"}] * MANY
    with pytest.raises(Problem, match=r"^messages is .*at most 4096"):
        parsing.parse(json.dumps({"messages": turns}).encode(), bodies.ChatBody)


@given(name=st.sampled_from(sorted(parsing.UNSUPPORTED)), value=VALUES)
def test_what_is_not_carried_out_is_named_unless_it_changes_nothing(name, value):
    body = json.dumps({**KINDS[bodies.ChatBody][1], name: value}).encode()
    if value is None or value in parsing.UNSUPPORTED[name]:
        parsing.parse(body, bodies.ChatBody)
        return
    with pytest.raises(Problem) as caught:
        parsing.parse(body, bodies.ChatBody)
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
