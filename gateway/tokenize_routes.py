"""The routes /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, model_validator

from baton.client.request import build
from baton.gateway import bodies, parsing, problems
from baton.gateway.cells import Cells
from baton.gateway.problems import Problem, no_such_model, wrong
from baton.gateway.questions import credential
from baton.runtime.errors import InvalidArgument, RemoteError
from baton.v1 import common_pb2

if TYPE_CHECKING:
    from baton.runtime.tokenization import Tokenizer

T = TypeVar("T")

# A text may be megabytes long: what is more waits.
_MAX_AT_ONCE = 2


class TokenizeBody(bodies.Part):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: bodies.Messages | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: bodies.Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("prompt or messages must be there, one of them")
        return self


class DetokenizeBody(bodies.Part):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class TokenizeRoutes:
    """What answers both.

    Args:
        cells: whose models' tokenizers these are.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._free = asyncio.Semaphore(_MAX_AT_ONCE)

    async def tokenize(self, body: bytes, headers: Mapping[str, str]) -> dict[str, object]:
        """Raises Problem."""
        asked = parsing.parse(body, TokenizeBody)
        if asked.messages is not None and not asked.messages:
            raise wrong("messages", [], "must not be empty")
        model, tokenizer = await self._served(asked.model, headers)
        try:
            found = await self._in_thread(lambda: _tokens(tokenizer, asked))
        except InvalidArgument as error:
            raise Problem(400, str(error), param="messages", code="invalid_value") from None
        except RemoteError as error:
            # What no message can hold.
            raise problems.of(error) from None
        return {**found, "max_model_len": model.max_model_len or None}

    async def detokenize(self, body: bytes, headers: Mapping[str, str]) -> dict[str, object]:
        """Raises Problem."""
        asked = parsing.parse(body, DetokenizeBody)
        model, tokenizer = await self._served(asked.model, headers)
        size = model.vocab_size or tokenizer.vocab_size
        if asked.tokens and max(asked.tokens) >= size:
            index, bad = next((i, one) for i, one in enumerate(asked.tokens) if one >= size)
            allowed = f"must be below the vocabulary size of {size}"
            raise wrong(f"tokens[{index}]", bad, allowed)
        return {"prompt": await self._in_thread(lambda: tokenizer.decode(asked.tokens, False))}

    async def _served(
        self, name: str | None, headers: Mapping[str, str]
    ) -> tuple[common_pb2.ModelDescription, Tokenizer]:
        shown = credential(headers)
        cell = (await self._cells.of(name, "", shown))[0]
        model = await cell.model.get(shown)
        check_served(name, model)
        return model, await cell.tokenizer.get(shown)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._free:
            return await asyncio.to_thread(work)


def check_served(name: str | None, model: common_pb2.ModelDescription) -> None:
    """Raises Problem when there is no model of that name; None is the base model."""
    names = [model.name, *(adapter.name for adapter in model.adapters)]
    if name is not None and name not in names:
        raise no_such_model(name, names)


def _tokens(tokenizer: Tokenizer, asked: TokenizeBody) -> dict[str, object]:
    ids = _ids(tokenizer, asked)
    strings = tokenizer.token_strings(ids) if asked.return_token_strs else None
    return {"count": len(ids), "tokens": ids, "token_strs": strings}


def _ids(tokenizer: Tokenizer, asked: TokenizeBody) -> list[int]:
    if asked.messages is None:
        assert asked.prompt is not None
        special = asked.add_special_tokens is not False
        return tokenizer.encode_text(asked.prompt, add_special_tokens=special).tolist()
    chat = build(
        [one.turn() for one in asked.messages],
        {
            "add_generation_prompt": asked.add_generation_prompt,
            "template_kwargs": asked.chat_template_kwargs,
            "tools": [tool.described() for tool in asked.tools or ()],
        },
    ).chat
    special = bool(asked.add_special_tokens)
    return tokenizer.encode_text(tokenizer.render(chat), add_special_tokens=special).tolist()
