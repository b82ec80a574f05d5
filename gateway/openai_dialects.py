"""OpenAI's Chat Completions and (legacy) Completions API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from baton.client import Completion, Usage
from baton.gateway import parsed_request, response_rendering
from baton.gateway.body_parser import parse_body
from baton.gateway.dialect import Dialect
from baton.gateway.error_responses import HttpError
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt
from baton.gateway.request_bodies import ChatBody, CompletionBody
from baton.gateway.response_rendering import DONE, ChunkRenderer, ResponseHead

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChoiceOutputParser

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Completions(Dialect):
    """The dialect of /v1/completions."""

    path, id_prefix = COMPLETIONS, "cmpl"

    async def read(self, body: bytes, headers: Headers) -> CompletionRequest:
        return CompletionRequest(parse_body(body, CompletionBody))


class Chat(Dialect):
    """The dialect of /v1/chat/completions."""

    path, id_prefix = CHAT, "chatcmpl"

    async def read(self, body: bytes, headers: Headers) -> ChatRequest:
        return ChatRequest(parse_body(body, ChatBody))


class _OpenAIRequest:
    """The responses that both APIs have."""

    __slots__ = ()

    def named(self, error: HttpError) -> HttpError:
        return error

    def whole(
        self,
        head: ResponseHead,
        completions: Sequence[Completion],
        prompts: Sequence[RenderedPrompt],
        parsers: Sequence[ChoiceOutputParser | None],
    ) -> bytes:
        found = response_rendering.full_response(head, completions, prompts, parsers)
        return json.dumps(found).encode()

    def stream(self, head: ResponseHead) -> OpenAIStream:
        return OpenAIStream(head)


@dataclass(frozen=True, slots=True)
class CompletionRequest(_OpenAIRequest):
    """A request of /v1/completions."""

    body: CompletionBody

    @property
    def chat(self) -> None:
        return None

    @property
    def request_id(self) -> str | None:
        return self.body.request_id

    def parsed(self, request_id: str, headers: Mapping[str, str]) -> ParsedRequest:
        return parsed_request.from_completion_body(self.body, request_id, headers)


@dataclass(frozen=True, slots=True)
class ChatRequest(_OpenAIRequest):
    """A request of /v1/chat/completions."""

    chat: ChatBody

    @property
    def request_id(self) -> str | None:
        return self.chat.request_id

    def parsed(self, request_id: str, headers: Mapping[str, str]) -> ParsedRequest:
        return parsed_request.from_chat_body(self.chat, request_id, headers)


@dataclass(frozen=True, slots=True)
class OpenAIStream:
    """The chunks of a streamed response."""

    head: ResponseHead

    def choice(
        self,
        index: int,
        num_prompt_tokens: int,
        prompt: RenderedPrompt,
        parser: ChoiceOutputParser | None,
    ) -> ChunkRenderer:
        return ChunkRenderer(self.head, index, num_prompt_tokens, prompt, parser)

    def end(
        self, usages: Sequence[Usage], parsers: Sequence[ChoiceOutputParser | None] = ()
    ) -> bytes:
        if not self.head.request.include_usage:
            return DONE
        return response_rendering.usage_chunk(self.head, usages, parsers) + DONE

    def failure(self, error: HttpError, request_id: str) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def close(self) -> None:
        """Ends the rendering: there is nothing to end."""
