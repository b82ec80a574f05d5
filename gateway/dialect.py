"""The interface of the generation routes to an API: how it is read, rendered and refused.

Each generation route has one dialect, which its endpoint (generation.py) asks for everything that
differs between APIs. To add an API, write a module with a `Dialect` and add it to `Gateway` in
app.py. An API whose requests are chats in another form derives from `ConvertedDialect`
(converted_chat.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from starlette.datastructures import Headers

from baton.client import Completion, Finished, Tokens, Usage
from baton.gateway.error_responses import HttpError
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt
from baton.gateway.request_bodies import ChatBody
from baton.gateway.response_rendering import ResponseHead

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChoiceOutputParser


class ChoiceRenderer(Protocol):
    """Renders the output of one choice of a streamed response."""

    def render(self, tokens: Tokens | None, finished: Finished | None) -> bytes:
        """Renders one event with tokens, the end, or both; b"" if there is nothing to send yet."""
        ...

    def delta_renderer(self, record: Callable[[], None]) -> Callable[[Tokens], bytes] | None:
        """Returns a function that calls `record` and renders a delta like `render`.

        The connection then calls this function for all deltas but the first one and the last one,
        without a task: this is the path of nearly all tokens.

        Returns:
            The function; None: all deltas must go through `render`.
        """
        ...


class ResponseStream(Protocol):
    """Renders one streamed response."""

    def choice(
        self,
        index: int,
        num_prompt_tokens: int,
        prompt: RenderedPrompt,
        parser: ChoiceOutputParser | None,
    ) -> ChoiceRenderer:
        """Returns the renderer of a choice.

        Args:
            index: Index of the choice.
            num_prompt_tokens: Number of tokens of the choice's prompt.
            prompt: The shown parts of the prompt.
            parser: Output parser of the choice; None: outputs are not parsed.
        """
        ...

    def end(
        self, usages: Sequence[Usage], parsers: Sequence[ChoiceOutputParser | None] = ()
    ) -> bytes:
        """Renders the end of the response, behind the last events of all choices."""
        ...

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """Renders the end of a response that has begun and fails."""
        ...

    def close(self) -> None:
        """Ends the rendering, also before the end of the response; idempotent."""
        ...


class DialectRequest(Protocol):
    """One request of an API.

    Attributes:
        chat: The chat that is generated for; None: the request has prompts.
        request_id: The request ID that the body names; None: it names none.
    """

    @property
    def chat(self) -> ChatBody | None: ...

    @property
    def request_id(self) -> str | None: ...

    def parsed(self, request_id: str, headers: Mapping[str, str]) -> ParsedRequest:
        """Converts the request for the coordinator. Raises HttpError.

        Args:
            request_id: ID of the request.
            headers: The headers, as `Dialect.headers` returns them.
        """
        ...

    def named(self, error: HttpError) -> HttpError:
        """Returns an error about the parsed request with the names that the API has for fields."""
        ...

    def whole(
        self,
        head: ResponseHead,
        completions: Sequence[Completion],
        prompts: Sequence[RenderedPrompt],
        parsers: Sequence[ChoiceOutputParser | None],
    ) -> bytes:
        """Renders the response of a request that does not stream.

        Args:
            head: Shared fields of the response.
            completions: Output of each choice, in order of the choice index.
            prompts: The shown parts of each prompt.
            parsers: Output parser of each choice; empty: outputs are not parsed.
        """
        ...

    def stream(self, head: ResponseHead) -> ResponseStream:
        """Begins a streamed response."""
        ...


class Dialect(ABC):
    """An API; by default with the errors and headers of OpenAI's API.

    Attributes:
        path: Path of the route, and its name in the metrics.
        id_prefix: How the IDs of requests without one begin.
        request_id_headers: Headers of a response that have the request's ID.
        lowers_effort: Whether the reasoning effort "none" stands for the lowest effort of a model
            that always reasons, which otherwise refuses it.
        batch_defaults: Fields of the body that a line of a batch has if it leaves them out.
    """

    path: ClassVar[str]
    id_prefix: ClassVar[str]
    request_id_headers: ClassVar[Sequence[bytes]] = (b"x-request-id",)
    lowers_effort: ClassVar[bool] = False
    batch_defaults: ClassVar[Mapping[str, object]] = {}

    @abstractmethod
    async def read(self, body: bytes, headers: Headers) -> DialectRequest:
        """Reads a body. Raises HttpError with the API's names of fields."""

    def headers(self, headers: Headers) -> Headers:
        """Returns a request's headers in the form of OpenAI's API."""
        return headers

    def error_body(self, error: HttpError, request_id: str) -> bytes:
        """Returns the body of an error response.

        Args:
            error: The error.
            request_id: ID of the request; may be empty.
        """
        return error.body()
