"""Errors of the chat route name the fields of the API that the client uses."""

import pytest

from baton.gateway.anthropic_route import Messages
from baton.gateway.converted_chat import with_names
from baton.gateway.error_responses import HttpError
from baton.gateway.responses_route import Responses


@pytest.mark.parametrize(
    ("dialect", "param", "message", "told", "named"),
    [
        (
            Responses,
            "max_completion_tokens",
            "max_completion_tokens is 0; must be at least 1",
            "max_output_tokens",
            "max_output_tokens is 0; must be at least 1",
        ),
        (
            Responses,
            "messages",
            "messages is []; must not be empty",
            "input",
            "input is []; must not be empty",
        ),
        (
            Responses,
            "messages[2].content[1]",
            "messages[2].content[1] is 'x'; must be an image",
            "input",
            "input: content[1] is 'x'; must be an image",
        ),
        (
            Messages,
            "messages[2]",
            "messages[2] is 'x'; must be a turn",
            "messages",
            "messages is 'x'; must be a turn",
        ),
        (
            Messages,
            "stop[0]",
            "stop[0] is ''; must not be empty",
            "stop_sequences[0]",
            "stop_sequences[0] is ''; must not be empty",
        ),
        # Another field, although its name begins like `stop`.
        (
            Messages,
            "stop_token_ids",
            "stop_token_ids is 5",
            "stop_token_ids",
            "stop_token_ids is 5",
        ),
        (
            Responses,
            "messages",
            "the prompt has 9 tokens; at most 8",
            "input",
            "the prompt has 9 tokens; at most 8",
        ),
        (Responses, None, "no worker", None, "no worker"),
    ],
)
def test_errors_have_the_names_of_the_api(dialect, param, message, told, named):
    error = HttpError(429, message, param=param, code="c", retry_after_s=2.0)
    found = with_names(error, dialect.names)
    assert (found.param, str(found)) == (told, named)
    assert found.fields() == {**error.fields(), "param": told, "message": named}
    assert (found.status, found.headers()) == (429, error.headers())
