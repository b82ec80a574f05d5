"""Prompts as tokens and text, by the served model's tokenizer: read when it is first needed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

from baton.client.request import Prompt, build
from baton.gateway.coordinator_queries import CachedQuery, PerCallerQuery
from baton.gateway.error_responses import HttpError
from baton.gateway.parsed_request import ParsedRequest
from baton.runtime.config_error import ConfigError
from baton.runtime.errors import InvalidArgument
from baton.v1 import common_pb2

if TYPE_CHECKING:
    from baton.runtime.tokenization import Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NONE_HERE = 501


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What an answer shows of a prompt; what it does not is empty.

    Attributes:
        text: before the output's, with `echo`.
        first_token: its text; of the others the logprobs have it.
    """

    text: str = ""
    first_token: str = ""
    token_ids: Sequence[int] = ()


class TokenizerResource(Generic[T]):
    """What is made, when it is first needed, of the served model's tokenizer files on this host.

    Args:
        model: asked with each caller's credential.
        make: of the files' directory or hub id; works in a thread. Raises ConfigError.
    """

    def __init__(
        self, model: PerCallerQuery[common_pb2.ModelDescription], make: Callable[[str], T]
    ) -> None:
        self._model, self._make = model, make
        self._path = ""
        self._answer: CachedQuery[T] | None = None

    async def get(self, authorization: str, field: str | None = None) -> T:
        """Raises HttpError: the caller may not ask, or the files are not here.

        Args:
            authorization: of the caller.
            field: of the body, that needs it; None: the route itself does.
        """
        path = (await self._model.get(authorization)).tokenizer
        if self._answer is None or path != self._path:
            self._path, self._answer = path, CachedQuery(lambda: self._made(path), math.inf)
        try:
            return await self._answer.get()
        except HttpError as problem:
            if field is None or problem.status != _NONE_HERE:
                raise
            message = f"{field} is not supported here: {problem}"
            raise HttpError(400, message, param=field, code="unsupported_parameter") from None

    async def _made(self, path: str) -> T:
        try:
            return await asyncio.to_thread(self._make, path)
        except ConfigError as error:
            _log.warning("the model's tokenizer cannot be used here: %s", error)
            message = "this gateway has no files of the model's tokenizer"
            raise HttpError(_NONE_HERE, message, kind="server_error", code="no_tokenizer") from None


ModelTokenizer: TypeAlias = "TokenizerResource[Tokenizer]"


def model_tokenizer(model: PerCallerQuery[common_pb2.ModelDescription]) -> ModelTokenizer:
    """To show prompts as tokens."""
    return TokenizerResource(model, _tokenizer)


async def render_prompts(
    request: ParsedRequest, tokenizer: Tokenizer | None
) -> list[RenderedPrompt]:
    """Of each prompt, as far as the answer shows it; its tokens wherever there is a tokenizer.

    Args:
        request: taken by the coordinator, so its prompts are good and not too long.
        tokenizer: needed if `request.needs_tokenizer` is set, or an output parser reads the prompt.

    Raises:
        HttpError: they are not, by the files here.
    """
    if tokenizer is None:
        shows = request.echo or request.return_token_ids
        return [_plain(prompt) if shows else RenderedPrompt() for prompt in request.prompts]
    try:
        return await asyncio.to_thread(
            lambda: [_shown(request, prompt, tokenizer) for prompt in request.prompts]
        )
    except InvalidArgument as error:
        raise HttpError(400, str(error), param="messages" if request.chat else "prompt") from None


def _tokenizer(path: str) -> Tokenizer:
    # With what it imports it takes longer than a gateway to start.
    from baton.runtime.tokenization import Tokenizer

    return Tokenizer(path)


def _plain(prompt: Prompt) -> RenderedPrompt:
    """Of one that shows nothing but what came."""
    if isinstance(prompt, str):
        return RenderedPrompt(prompt)
    return RenderedPrompt(token_ids=cast("Sequence[int]", prompt))


def _shown(request: ParsedRequest, prompt: Prompt, tokenizer: Tokenizer) -> RenderedPrompt:
    ids = tokenizer.prompt_at_once(build(prompt, request.options)).tolist()
    if not request.echo:
        return RenderedPrompt(token_ids=ids)
    text = prompt if isinstance(prompt, str) else tokenizer.decode(ids, False)
    return RenderedPrompt(text, tokenizer.decode(ids[:1], False), ids)
