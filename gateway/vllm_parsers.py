"""Calls of tools, and what was reasoned, out of the text that a model wrote: by vLLM's parsers.

Every model writes them in a way of its own, and vLLM has a parser for each. They see a choice's
whole output, whichever workers it came from: a recovery cannot cut one off.

Source: vllm/entrypoints/openai/chat_completion/serving.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from baton.client import RequestOptions, Tokens
from baton.gateway import error_responses
from baton.gateway.coordinator_queries import PerCallerQuery
from baton.gateway.error_responses import HttpError
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import TokenizerResource
from baton.gateway.request_bodies import ChatBody
from baton.runtime.config_error import ConfigError
from baton.v1 import common_pb2

# What a request says that matters to parsers, and nothing that the coordinator checks.
_READ_BY_PARSERS = {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
    "response_format",
    "structured_outputs",
    "skip_special_tokens",
    "reasoning_effort",
}
# Fields of vLLM's structured outputs, by the client's options.
_CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True, slots=True)
class OutputParserNames:
    """Of vLLM's parsers; empty: none.

    Raises:
        ConfigError: vLLM has none of that name.
    """

    tool_call_parser: str
    reasoning_parser: str

    def __post_init__(self) -> None:
        for key, name, known in (
            ("tool_call_parser", self.tool_call_parser, ToolParserManager.list_registered()),
            ("reasoning_parser", self.reasoning_parser, ReasoningParserManager.list_registered()),
        ):
            if name and name not in known:
                raise ConfigError(f"{key}: is {name!r}; must be one of {', '.join(known)}")


class ModelOutputParsers:
    """Those of the model that the coordinator serves.

    Args:
        names: of the parsers.
        model: asked with each caller's credential.
    """

    def __init__(
        self, names: OutputParserNames, model: PerCallerQuery[common_pb2.ModelDescription]
    ) -> None:
        self._names = names
        self._parsers = TokenizerResource(model, lambda path: OutputParsers(names, path))

    async def chat(self, body: ChatBody, authorization: str) -> ChatOutputParser | None:
        """What one request needs of them; None: its outputs are as they are written.

        Raises:
            HttpError: vLLM refuses what it asks for, or the tokenizer is not here.
        """
        if body.may_call and not self._names.tool_call_parser:
            raise error_responses.tools_unsupported()
        if not (self._names.reasoning_parser or body.may_call):
            return None
        return (await self._parsers.get(authorization)).chat(body)


class OutputParsers:
    """Those of one model's tokenizer.

    Args:
        names: of the parsers.
        path: of the model's tokenizer, a directory or hub id.

    Raises:
        ConfigError: the tokenizer is not here, or lacks what the parsers need.
    """

    def __init__(self, names: OutputParserNames, path: str) -> None:
        self._names = names
        try:
            self._tokenizer = get_tokenizer(path)
            self._make = ParserManager.get_parser(
                tool_parser_name=names.tool_call_parser or None,
                reasoning_parser_name=names.reasoning_parser or None,
                enable_auto_tools=bool(names.tool_call_parser),
                model_name=path,
                tokenizer=self._tokenizer,
            )
        # Of many libraries: a missing file, a hub that does not answer, no such token.
        except Exception as error:
            raise ConfigError(f"parsers for {path}: {error}") from error
        self._model_config = _model_config(path)

    def chat(self, body: ChatBody) -> ChatOutputParser:
        """What one request needs of them. Raises HttpError: vLLM refuses what it asks for."""
        said = body.model_dump(include=_READ_BY_PARSERS, exclude_none=True, by_alias=True)
        kwargs = body.template_kwargs
        try:
            request = ChatCompletionRequest.model_validate({**said, "chat_template_kwargs": kwargs})
            request = self._parser(request).adjust_request(request)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise _refused(first["msg"], ".".join(map(str, first["loc"]))) from None
        except VLLMValidationError as error:
            raise _refused(str(error), error.parameter or "tools") from None
        except ValueError as error:
            # Of a parser, which reads no more of a request than its tools.
            raise _refused(str(error), "tools") from None
        return ChatOutputParser(self, request, bool(self._names.reasoning_parser))

    def choice(self, request: Any, prompt_token_ids: Sequence[int]) -> ChoiceOutputParser:
        return ChoiceOutputParser(self._parser(request), request, prompt_token_ids, self._names)

    def _parser(self, request: Any) -> Any:
        add = request.add_generation_prompt
        kwargs = {"add_generation_prompt": add, **(request.chat_template_kwargs or {})}
        return self._make(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=kwargs,
            model_config=self._model_config,
        )


@dataclass(frozen=True, slots=True)
class ChatOutputParser:
    """One request whose outputs are parsed.

    Attributes:
        request: as vLLM's parsers have changed it.
        needs_prompt: to know whether the prompt's end begins to reason.
    """

    _parsers: OutputParsers
    request: Any
    needs_prompt: bool

    def adjust_request(self, request: ParsedRequest) -> ParsedRequest:
        """With what the parsers need: marks in the text, calls by a grammar."""
        request = replace(request, options=cast("RequestOptions", self._options(request.options)))
        if self.request.tools:
            # What workers refuse of a grammar that was made of them.
            request = replace(
                request, names={**request.names, "sampling.structured_output": "tools"}
            )
        if self.request.include_reasoning:
            return request
        # They would show what was reasoned.
        return replace(request, num_logprobs=None, return_token_ids=False)

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in options.items() if name not in _CONSTRAINTS}
        if not self.request.skip_special_tokens:
            found["skip_special_tokens"] = False
        constraints = self.request.extract_structured_outputs()
        if constraints is not None:
            for ours, theirs in _CONSTRAINTS.items():
                if (value := getattr(constraints, theirs)) is not None:
                    found[ours] = value
        return found

    def choices(self, count: int, prompt_token_ids: Sequence[int]) -> list[ChoiceOutputParser]:
        """One per choice, since they keep state."""
        return [self._parsers.choice(self.request, prompt_token_ids) for _ in range(count)]


class ChoiceOutputParser:
    """The output of one choice, as a stream's deltas or as a whole."""

    def __init__(
        self, parser: Any, request: Any, prompt_token_ids: Sequence[int], names: OutputParserNames
    ) -> None:
        self._parser, self._request = parser, request
        self._prompt_token_ids = list(prompt_token_ids)
        self._names = names
        self._token_ids: list[int] = []
        self._has_called = False
        parser.set_prompt_token_ids(self._prompt_token_ids)

    def delta(self, tokens: Tokens | None, *, finished: bool) -> dict[str, Any] | None:
        """What a stream says with some tokens; None: nothing yet."""
        token_ids = list(tokens.token_ids) if tokens is not None else []
        self._token_ids += token_ids
        message = self._parser.parse_delta(
            delta_text=tokens.text if tokens is not None else "",
            delta_token_ids=token_ids,
            request=self._request,
            prompt_token_ids=self._prompt_token_ids,
            finished=finished,
        )
        if message is None:
            return None
        message = maybe_filter_parallel_tool_calls(message, self._request)
        said: dict[str, Any] = message.model_dump(exclude_none=True)
        self._has_called |= "tool_calls" in said
        return said

    def message(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """A whole output as the assistant's turn."""
        self._token_ids = list(token_ids)
        reasoning, content, calls = self._parser.parse(
            text,
            self._request,
            enable_auto_tools=bool(self._names.tool_call_parser),
            model_output_token_ids=self._token_ids,
        )
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning and self._request.include_reasoning:
            said["reasoning"] = reasoning
        if calls:
            calls = maybe_filter_parallel_tool_calls(calls, self._request)
            said["tool_calls"] = [
                {
                    "id": call.id or make_tool_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        self._has_called = bool(calls)
        return said

    def finish_reason(self, reason: str | None) -> str | None:
        """As in OpenAI's API: calls are a reason of their own, unless one was told to be made."""
        chose = self._request.tool_choice in (None, "auto", "required")
        return "tool_calls" if reason == "stop" and self._has_called and chose else reason

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Of the tokens so far; None: nobody tells them apart."""
        if not self._names.reasoning_parser:
            return None
        return int(self._parser.count_reasoning_tokens(self._token_ids))


def _refused(reason: str, param: str) -> HttpError:
    reason = reason.removeprefix("Value error, ")
    return HttpError(400, f"{param}: {reason}", param=param, code="invalid_value")


def _model_config(path: str) -> SimpleNamespace:
    """What parsers read of vLLM's, without vLLM's reading all of a model's files: its kind."""
    config: dict[str, Any] = {}
    if (file := Path(path) / "config.json").is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
    kind = SimpleNamespace(model_type=config.get("model_type"))
    text = SimpleNamespace(model_type=config.get("text_config", config).get("model_type"))
    (architecture,) = config.get("architectures", [None])[:1] or [None]
    return SimpleNamespace(hf_config=kind, hf_text_config=text, architecture=architecture)
