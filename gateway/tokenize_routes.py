"""The routes /tokenize, /detokenize and /tokenizer_info, compatible with vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.client.errors import from_baton
from baton.client.request import build
from baton.gateway import body_parser, error_responses, request_bodies
from baton.gateway.body_reader import BodyReader
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.cells import Cells
from baton.gateway.coordinator_queries import request_credential
from baton.gateway.error_responses import invalid_value, model_not_found
from baton.gateway.route_table import CountedRoute, RouteTable, json_endpoint
from baton.runtime.errors import InvalidArgument, RemoteError
from baton.runtime.prompts.chat_continuation import check_continuation
from baton.v1 import common_pb2

if TYPE_CHECKING:
    from baton.runtime.prompts.tokenization import Tokenizer

T = TypeVar("T")

# Texts that are tokenized at the same time; each may be megabytes long.
_MAX_CONCURRENT = 2
# Requests that are tokenized or wait. Each keeps its body, of at most http.max_body_bytes.
_MAX_REQUESTS = 64


class TokenizeBody(request_bodies.BodyModel):
    """Body of /tokenize: a text or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: request_bodies.Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: request_bodies.Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("prompt or messages is required, and not both")
        return self


class DetokenizeBody(request_bodies.BodyModel):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class TokenizeRoutes:
    """Serves the routes with the tokenizers of the cells' models.

    Args:
        cells: The cells behind the gateway.
        bodies: Reads the requests' bodies.
    """

    def __init__(self, cells: Cells, bodies: BodyReader) -> None:
        self._cells, self._bodies = cells, bodies
        self._free = asyncio.Semaphore(_MAX_CONCURRENT)
        # They run in the order of arrival, so that many of one caller would delay all others.
        self._slots = CallerSlots(
            _MAX_REQUESTS, "tokenizations", "gateway_full", max(1, _MAX_REQUESTS // 4)
        )

    def table(self) -> RouteTable:
        """Returns the routes."""
        tokenize, detokenize = (
            json_endpoint(self._bodies, answer) for answer in (self.tokenize, self.detokenize)
        )
        return [
            CountedRoute("/tokenize", tokenize, ("POST",)),
            CountedRoute("/detokenize", detokenize, ("POST",)),
            CountedRoute("/tokenizer_info", self._info),
        ]

    async def tokenize(self, body: bytes, headers: Mapping[str, str]) -> dict[str, object]:
        """Converts text or a chat to token IDs. Raises HttpError."""
        body_fields = body_parser.parse_body(body, TokenizeBody)
        if body_fields.messages is not None and not body_fields.messages:
            raise invalid_value("messages", [], "must not be empty")
        for index, message in enumerate(body_fields.messages or ()):
            if message.has_images:
                # Only a worker knows how many tokens an image has.
                allowed = "must have no images here; an answer's usage counts their tokens"
                raise invalid_value(f"messages[{index}].content", message.content, allowed)
        model, tokenizer = await self._served(body_fields.model, headers)
        try:
            found = await self._in_thread(lambda: _tokens(tokenizer, body_fields), headers)
        except InvalidArgument as error:
            raise error_responses.from_remote_error(from_baton(error)) from None
        except RemoteError as error:
            # A value that the gRPC request cannot hold.
            raise error_responses.from_remote_error(error) from None
        return {**found, "max_model_len": model.max_model_len or None}

    async def detokenize(self, body: bytes, headers: Mapping[str, str]) -> dict[str, object]:
        """Converts token IDs to text. Raises HttpError."""
        body_fields = body_parser.parse_body(body, DetokenizeBody)
        model, tokenizer = await self._served(body_fields.model, headers)
        size = model.vocab_size or tokenizer.vocab_size
        if body_fields.tokens and max(body_fields.tokens) >= size:
            index, bad = next((i, one) for i, one in enumerate(body_fields.tokens) if one >= size)
            allowed = f"must be below the vocabulary size of {size}"
            raise invalid_value(f"tokens[{index}]", bad, allowed)
        work = partial(tokenizer.decode, body_fields.tokens, False)
        return {"prompt": await self._in_thread(work, headers)}

    async def _info(self, request: Request) -> Response:
        """Answers with the settings of the first model's tokenizer."""
        _, tokenizer = await self._served(None, request.headers)
        return JSONResponse(tokenizer.info())

    async def _served(
        self, name: str | None, headers: Mapping[str, str]
    ) -> tuple[common_pb2.ModelDescription, Tokenizer]:
        shown = request_credential(headers)
        cell = (await self._cells.candidates(name, "", shown))[0]
        model = await cell.model.get(shown)
        check_served(name, model)
        return model, await cell.tokenizer.get(shown)

    async def _in_thread(self, work: Callable[[], T], headers: Mapping[str, str]) -> T:
        """Runs `work` in a thread, after the requests that came before.

        Raises:
            HttpError: Too many requests, of all callers or of this one, run and wait (429).
        """
        with self._slots.hold(request_credential(headers)):
            await self._free.acquire()
            working = asyncio.get_running_loop().run_in_executor(None, work)
            # A thread cannot be stopped: it counts until it ends, also if the client leaves.
            working.add_done_callback(lambda _: self._free.release())
            return await asyncio.shield(working)


def check_served(name: str | None, model: common_pb2.ModelDescription) -> None:
    """Raises HttpError if no model or adapter has this name; None is the base model."""
    names = [model.name, *(adapter.name for adapter in model.adapters)]
    if name is not None and name not in names:
        raise model_not_found(name, names)


def _tokens(tokenizer: Tokenizer, body_fields: TokenizeBody) -> dict[str, object]:
    ids = _ids(tokenizer, body_fields)
    strings = tokenizer.token_strings(ids) if body_fields.return_token_strs else None
    return {"count": len(ids), "tokens": ids, "token_strs": strings}


def _ids(tokenizer: Tokenizer, body_fields: TokenizeBody) -> list[int]:
    if body_fields.messages is None:
        assert body_fields.prompt is not None
        special = body_fields.add_special_tokens is not False
        return tokenizer.encode_text(body_fields.prompt, add_special_tokens=special).tolist()
    chat = build(
        [one.turn() for one in body_fields.messages],
        {
            "add_generation_prompt": body_fields.add_generation_prompt,
            "continue_final_message": body_fields.continue_final_message,
            "template_kwargs": body_fields.chat_template_kwargs,
            "tools": [tool.template_tool() for tool in body_fields.tools or ()],
        },
    ).chat
    check_continuation(chat)
    special = bool(body_fields.add_special_tokens)
    return tokenizer.encode_text(tokenizer.render(chat), add_special_tokens=special).tolist()
