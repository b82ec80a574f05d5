"""Prompts as text and token IDs, for responses that show them.

The gateway loads the model's tokenizer when a request first needs it.
"""

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
    from baton.runtime.prompts.tokenization import Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NO_TOKENIZER_STATUS = 501


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The parts of a prompt that a response shows; other parts are empty.

    Attributes:
        text: Text of the prompt, for `echo`.
        first_token: Text of the first token; logprobs contain the text of all other tokens.
        token_ids: Token IDs of the prompt.
    """

    text: str = ""
    first_token: str = ""
    token_ids: Sequence[int] = ()


class TokenizerResource(Generic[T]):
    """An object made from the model's tokenizer files on this host, when it is first needed.

    Args:
        model: The model description, fetched with each caller's credential.
        make: Makes the object from the files' directory or hub ID, in a thread. Raises ConfigError.
    """

    def __init__(
        self, model: PerCallerQuery[common_pb2.ModelDescription], make: Callable[[str], T]
    ) -> None:
        self._model, self._make = model, make
        self._path = ""
        self._cached: CachedQuery[T] | None = None

    async def get(self, authorization: str, field: str | None = None) -> T:
        """Returns the object.

        Args:
            authorization: Credential of the caller.
            field: Body field that needs the object; None: the route itself needs it.

        Raises:
            HttpError: The caller may not use the model, or its files are not on this host.
        """
        path = (await self._model.get(authorization)).tokenizer
        if self._cached is None or path != self._path:
            self._path, self._cached = (
                path,
                CachedQuery(lambda: self._make_in_thread(path), math.inf),
            )
        try:
            # The object is kept although the caller that began to load it may leave.
            return await asyncio.shield(self._cached.get())
        except HttpError as problem:
            if field is None or problem.status != _NO_TOKENIZER_STATUS:
                raise
            message = f"{field} is not supported here: {problem}"
            raise HttpError(400, message, param=field, code="unsupported_parameter") from None

    async def _make_in_thread(self, path: str) -> T:
        try:
            return await asyncio.to_thread(self._make, path)
        except ConfigError as error:
            _log.warning("cannot load the model's tokenizer: %s", error)
            message = "this gateway has no files of the model's tokenizer"
            raise HttpError(
                _NO_TOKENIZER_STATUS, message, kind="server_error", code="no_tokenizer"
            ) from None


ModelTokenizer: TypeAlias = "TokenizerResource[Tokenizer]"


def model_tokenizer(model: PerCallerQuery[common_pb2.ModelDescription]) -> ModelTokenizer:
    """Returns the lazily loaded tokenizer of a model."""
    return TokenizerResource(model, _tokenizer)


async def render_prompts(
    request: ParsedRequest, tokenizer: Tokenizer | None
) -> list[RenderedPrompt]:
    """Renders the parts of each prompt that the response shows.

    Args:
        request: A request that the coordinator has accepted: its prompts are valid.
        tokenizer: needed if `request.needs_tokenizer` is set, or an output parser reads the prompt.

    Raises:
        HttpError: The tokenizer of this gateway rejects a prompt.
    """
    if tokenizer is None:
        is_shown = request.echo or request.return_token_ids
        return [
            _render_received(prompt) if is_shown else RenderedPrompt() for prompt in request.prompts
        ]
    try:
        return await asyncio.to_thread(
            lambda: [_render(request, prompt, tokenizer) for prompt in request.prompts]
        )
    except InvalidArgument as error:
        raise HttpError(400, str(error), param="messages" if request.chat else "prompt") from None


def _tokenizer(path: str) -> Tokenizer:
    # Imported late: the import takes longer than the start of a gateway.
    from baton.runtime.prompts.tokenization import Tokenizer

    return Tokenizer(path)


def _render_received(prompt: Prompt) -> RenderedPrompt:
    """Renders a prompt as it was received, without a tokenizer."""
    if isinstance(prompt, str):
        return RenderedPrompt(prompt)
    return RenderedPrompt(token_ids=cast("Sequence[int]", prompt))


def _render(request: ParsedRequest, prompt: Prompt, tokenizer: Tokenizer) -> RenderedPrompt:
    ids = tokenizer.prompt_token_ids_blocking(build(prompt, request.options)).tolist()
    if not request.echo:
        return RenderedPrompt(token_ids=ids)
    text = prompt if isinstance(prompt, str) else tokenizer.decode(ids, False)
    return RenderedPrompt(text, tokenizer.decode(ids[:1], False), ids)
