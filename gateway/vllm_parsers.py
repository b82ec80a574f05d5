"""Extracts tool calls and reasoning from a model's output with vLLM's parsers.

Each model has its own format, and vLLM has a parser for each of them. A parser in the gateway sees
the whole output of a choice, also if several workers produced it after a recovery.

Source: vllm/entrypoints/openai/chat_completion/serving.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from baton.client import RequestOptions, Tokens
from baton.gateway import error_responses, harmony, harmony_parsers
from baton.gateway.body_parser import explain
from baton.gateway.coordinator_queries import PerCallerQuery
from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.fail_fast import FailFast
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import TokenizerResource
from baton.gateway.request_bodies import ChatBody
from baton.runtime.config_error import ConfigError
from baton.runtime.prompts.tokenization import model_type
from baton.v1 import common_pb2

# The body fields that vLLM's parsers read.
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
# Fields of vLLM's structured outputs, by the names of the client's options.
_CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_REQUEST = FailFast[ChatCompletionRequest](ChatCompletionRequest)
# Options that a chat template reads.
_TEMPLATE_OPTIONS = dict.fromkeys(("tools", "template_kwargs", "add_generation_prompt"))


@dataclass(frozen=True, slots=True)
class OutputParserNames:
    """Names of vLLM's parsers; empty: no parser.

    Raises:
        ConfigError: vLLM has no parser of that name.
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
    """Makes output parsers for the model of a cell, whose tokenizer is loaded when first needed.

    Args:
        names: Names of the parsers.
        model: The model description, fetched with each caller's credential.
    """

    def __init__(
        self, names: OutputParserNames, model: PerCallerQuery[common_pb2.ModelDescription]
    ) -> None:
        self._names, self._model = names, model
        self._parsers = TokenizerResource(model, lambda path: OutputParsers(names, path))

    async def chat(
        self, body: ChatBody, authorization: str, *, lowers_effort: bool = False
    ) -> ChatOutputParser | None:
        """Returns the output parser of one request; None: its outputs are not parsed.

        Args:
            body: The request's body.
            authorization: Credential of the caller.
            lowers_effort: Whether a model that always reasons takes the effort "none" as "low".

        Raises:
            HttpError: vLLM rejects the request, or the tokenizer is not on this host.
        """
        # A gpt-oss model has both parsers, even if one of them is not configured.
        if not await self._serves_harmony(authorization):
            if body.may_call and not self._names.tool_call_parser:
                raise error_responses.tools_unsupported()
            if not (self._names.reasoning_parser or body.may_call):
                return None
        parsers = await self._parsers.get(authorization)
        return await parsers.chat(body, lowers_effort=lowers_effort)

    async def _serves_harmony(self, authorization: str) -> bool:
        """Whether the model is known to be gpt-oss."""
        try:
            path = (await self._model.get(authorization)).tokenizer
        except HttpError:
            # The request itself meets the same error, and may then go to another cell.
            return False
        return _is_harmony(path)


class OutputParsers:
    """Makes output parsers for one tokenizer.

    Args:
        names: Names of the parsers.
        path: Directory or hub ID of the model's tokenizer.

    Attributes:
        names: Names of the parsers in use; a gpt-oss model has its own also if not configured.

    Raises:
        ConfigError: The tokenizer is not on this host or lacks a token that a parser needs.
        HttpError: The configured parsers cannot read the outputs of this model.
    """

    def __init__(self, names: OutputParserNames, path: str) -> None:
        # Downloads the files of a hub ID if they are missing.
        self._is_harmony = model_type(path) == harmony_parsers.MODEL_TYPE
        self._model_config = _model_config(path)
        self.names = names = _harmony_names(names) if self._is_harmony else names
        self._path = path
        try:
            self._tokenizer = get_tokenizer(path)
            self._make = self._parser_class(names)
        # Many libraries raise here: missing file, unreachable hub, missing token.
        except Exception as error:
            raise ConfigError(f"parsers for {path}: {error}") from error

    async def chat(self, body: ChatBody, *, lowers_effort: bool = False) -> ChatOutputParser | None:
        """Returns the output parser of one request; None: its outputs are not parsed.

        Arguments as in ModelOutputParsers.chat.

        Raises:
            HttpError: vLLM rejects the request.
        """
        if not self._is_harmony:
            parsers = self._without_reasoning if self._continues_answer(body) else self
            return parsers._of_template(body) if parsers is not None else None
        if body.continue_final_message:
            allowed = "must not be assistant: gpt-oss begins each of its answers anew"
            raise invalid_value(f"messages[{len(body.messages) - 1}].role", "assistant", allowed)
        if lowers_effort and body.reasoning_effort == "none":
            # As vLLM does for Anthropic's clients: gpt-oss always reasons.
            body = body.model_copy(update={"reasoning_effort": "low"})
        request = self._request(body)
        try:
            # In a thread: a chat may be megabytes long.
            prompt = await asyncio.to_thread(harmony.prompt_token_ids, request)
        except VLLMValidationError as error:
            raise _rejected(str(error), error.parameter or "messages") from None
        except ValueError as error:
            raise _rejected(str(error), "messages") from None
        return ChatOutputParser(self, request, needs_prompt=False, prompt=prompt)

    def _of_template(self, body: ChatBody) -> ChatOutputParser:
        """Returns the output parser of a chat that the coordinator renders by a template."""
        request, needs_prompt = self._request(body), bool(self.names.reasoning_parser)
        return ChatOutputParser(self, request, needs_prompt=needs_prompt)

    def _continues_answer(self, body: ChatBody) -> bool:
        """Whether the output continues an answer: its text has begun, so the reasoning is over.

        vLLM's parsers would take such an output for reasoning: it has no end of the reasoning.
        """
        text = body.continued_text
        if text is None or not self.names.reasoning_parser:
            return False
        reasoning = self._make(self._tokenizer).reasoning_parser
        begin, end = reasoning.reasoning_start_str, reasoning.reasoning_end_str
        # The client may have begun the reasoning, too.
        return not begin or text.rfind(begin) <= (text.rfind(end) if end else -1)

    @functools.cached_property
    def _without_reasoning(self) -> OutputParsers | None:
        """Parsers of the same outputs without reasoning; None: there is nothing else to parse."""
        if not self.names.tool_call_parser:
            return None
        found = copy.copy(self)
        found.names = replace(self.names, reasoning_parser="")
        found._make = self._parser_class(found.names)
        return found

    def _parser_class(self, names: OutputParserNames) -> Any:
        return ParserManager.get_parser(
            tool_parser_name=names.tool_call_parser or None,
            reasoning_parser_name=names.reasoning_parser or None,
            enable_auto_tools=bool(names.tool_call_parser),
            model_name=self._path,
            is_harmony=self._is_harmony,
            tokenizer=self._tokenizer,
        )

    def _request(self, body: ChatBody) -> Any:
        """Returns vLLM's form of a request, as adjusted by the parsers. Raises HttpError."""
        fields = body.model_dump(include=_READ_BY_PARSERS, exclude_none=True, by_alias=True)
        kwargs = body.template_kwargs
        for message in fields["messages"]:
            for index, call in enumerate(message.get("tool_calls", ())):
                _complete_call(call, index)
        if not body.tools:
            # vLLM refuses an empty list, which clients send when a chat has no tools.
            fields = {name: fields[name] for name in fields.keys() - {"tools", "tool_choice"}}
        if "json_schema" in fields.get("response_format", {}):
            # Without parsers, a schema needs no name either.
            fields["response_format"]["json_schema"].setdefault("name", "response")
        try:
            request = _REQUEST.validate({**fields, "chat_template_kwargs": kwargs})
            return self._parser(request).adjust_request(request)
        except ValidationError as error:
            raise explain(error, fields) from None
        except VLLMValidationError as error:
            raise _rejected(str(error), error.parameter or "tools") from None
        except ValueError as error:
            # Raised by a tool parser, which only reads the request's tools.
            raise _rejected(str(error), "tools") from None

    def choice(self, request: Any, prompt_token_ids: Sequence[int]) -> ChoiceOutputParser:
        """Makes the output parser of one choice."""
        return ChoiceOutputParser(self._parser(request), request, prompt_token_ids, self.names)

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
    """Parses the outputs of one chat request.

    Attributes:
        request: vLLM's form of the request, as adjusted by the parsers.
        needs_prompt: Whether the parsers need the prompt's token IDs: the end of the prompt may
            begin the reasoning.
        prompt: Token IDs of the chat if the coordinator cannot render it by a template; else None.
    """

    _parsers: OutputParsers
    request: Any
    needs_prompt: bool
    prompt: list[int] | None = None

    def adjust_request(self, request: ParsedRequest) -> ParsedRequest:
        """Returns the request with the options that the parsers need (special tokens, grammars)."""
        request = replace(request, options=cast("RequestOptions", self._options(request.options)))
        if self.prompt is not None:
            request = replace(request, prompts=[self.prompt])
        if self.request.tools:
            # If a worker rejects the grammar made from the tools, the error names `tools`.
            request = replace(
                request, names={**request.names, "sampling.structured_output": "tools"}
            )
        if self.request.include_reasoning:
            return request
        # Logprobs and token IDs would reveal the reasoning.
        return replace(request, num_logprobs=None, return_token_ids=False)

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        left_out = _CONSTRAINTS if self.prompt is None else {**_CONSTRAINTS, **_TEMPLATE_OPTIONS}
        found = {name: value for name, value in options.items() if name not in left_out}
        if not self.request.skip_special_tokens:
            found["skip_special_tokens"] = False
        constraints = self.request.extract_structured_outputs()
        if constraints is not None:
            for option, vllm_field in _CONSTRAINTS.items():
                if (value := getattr(constraints, vllm_field)) is not None:
                    found[option] = value
        return found

    def choices(self, count: int, prompt_token_ids: Sequence[int]) -> list[ChoiceOutputParser]:
        """Makes one parser per choice: parsers keep state."""
        return [self._parsers.choice(self.request, prompt_token_ids) for _ in range(count)]


class ChoiceOutputParser:
    """Parses the output of one choice, either delta by delta or as a whole."""

    def __init__(
        self, parser: Any, request: Any, prompt_token_ids: Sequence[int], names: OutputParserNames
    ) -> None:
        self._parser, self._request = parser, request
        self._prompt_token_ids = list(prompt_token_ids)
        self._names = names
        self._token_ids: list[int] = []
        self._counter: ReasoningCounter | None = None
        self._has_called = False
        parser.set_prompt_token_ids(self._prompt_token_ids)

    def delta(self, tokens: Tokens | None, *, finished: bool) -> dict[str, Any] | None:
        """Parses the next tokens of a stream; None: there is nothing to send yet."""
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
        fields: dict[str, Any] = message.model_dump(exclude_none=True)
        for call in fields.get("tool_calls", ()):
            self._has_called = True
            if "name" in call.get("function", ()):
                # As at OpenAI: some clients add later arguments to this text.
                call["function"].setdefault("arguments", "")
        return fields

    def message(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """Parses a whole output; returns the assistant's message."""
        self._token_ids = list(token_ids)
        reasoning, content, calls = self._parser.parse(
            text,
            self._request,
            enable_auto_tools=bool(self._names.tool_call_parser),
            model_output_token_ids=self._token_ids,
        )
        fields: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning and self._request.include_reasoning:
            fields["reasoning"] = reasoning
        if calls:
            calls = maybe_filter_parallel_tool_calls(calls, self._request)
            fields["tool_calls"] = [
                {
                    "id": call.id or make_tool_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        self._has_called = bool(calls)
        return fields

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns "tool_calls" if the model chose to call tools, as in OpenAI's API."""
        chose = self._request.tool_choice in (None, "auto", "required")
        return "tool_calls" if reason == "stop" and self._has_called and chose else reason

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None: there is no reasoning parser."""
        if not self._names.reasoning_parser:
            return None
        if self._counter is None and (marks := _marked_by(self._parser.reasoning_parser)):
            self._counter = ReasoningCounter(*marks, self._prompt_token_ids)
        if self._counter is not None:
            return self._counter.count(self._token_ids)
        return int(self._parser.count_reasoning_tokens(self._token_ids))


class ReasoningCounter:
    """Counts the reasoning tokens of an output whose reasoning has a token before and behind it.

    Unlike vLLM's count, it sees reasoning that the chat template has opened at the end of the
    prompt, and reads each token once, however often the usage is sent.

    Args:
        start: ID of the token before reasoning.
        end: ID of the token behind reasoning.
        prompt_token_ids: The prompt.
    """

    def __init__(self, start: int, end: int, prompt_token_ids: Sequence[int]) -> None:
        self._start, self._end = start, end
        last = next((one for one in reversed(prompt_token_ids) if one in (start, end)), end)
        self._is_open = last == start
        self._num_seen = self._num_reasoning = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Returns the number of reasoning tokens.

        Args:
            token_ids: The output so far, which begins with the output of earlier calls.
        """
        for one in token_ids[self._num_seen :]:
            if one in (self._start, self._end):
                self._is_open = one == self._start
            else:
                self._num_reasoning += self._is_open
        self._num_seen = len(token_ids)
        return self._num_reasoning


def _marked_by(parser: Any) -> tuple[int, int] | None:
    """Returns the tokens before and behind reasoning; None: the parser counts in its own way."""
    # The parser of DeepSeek V3 passes everything on to another one.
    parser = getattr(parser, "_parser", parser)
    counts = getattr(type(parser), "count_reasoning_tokens", None)
    if counts is not BaseThinkingReasoningParser.count_reasoning_tokens:
        return None
    return parser.start_token_id, parser.end_token_id


def _complete_call(call: dict[str, Any], index: int) -> None:
    """Gives an earlier tool call the fields that vLLM's class requires and clients leave out.

    Chat templates get the call as the client has sent it.

    Args:
        call: The call; changed.
        index: Place of the call in its turn.
    """
    call.setdefault("id", f"call_{index}")
    arguments = call["function"].get("arguments", {})
    if not isinstance(arguments, str):
        call["function"]["arguments"] = json.dumps(arguments)


def _harmony_names(names: OutputParserNames) -> OutputParserNames:
    """Returns the parsers of a gpt-oss model. Raises HttpError if another parser is configured."""
    try:
        return OutputParserNames(**harmony_parsers.checked_names(names))
    except ConfigError as error:
        message = f"this gateway cannot serve its model: {error}"
        raise HttpError(501, message, kind="server_error", code="wrong_parser") from None


def _rejected(reason: str, param: str) -> HttpError:
    reason = reason.removeprefix("Value error, ")
    return HttpError(400, f"{param}: {reason}", param=param, code="invalid_value")


def _is_harmony(path: str) -> bool:
    """Whether a model is gpt-oss, as far as the files on this host tell."""
    return bool(_model_config(path).hf_config.model_type == harmony_parsers.MODEL_TYPE)


def _model_config(path: str) -> SimpleNamespace:
    """Returns the fields of vLLM's ModelConfig that parsers read, from the model's config.json."""
    file = _config_file(path)
    config = _read_config(file) if file is not None else {}
    kind = SimpleNamespace(model_type=config.get("model_type"))
    text = SimpleNamespace(model_type=config.get("text_config", config).get("model_type"))
    (architecture,) = config.get("architectures", [None])[:1] or [None]
    return SimpleNamespace(hf_config=kind, hf_text_config=text, architecture=architecture)


def _config_file(path: str) -> Path | None:
    """Returns the config.json of a model's directory, or of a hub ID if it was downloaded."""
    file = Path(path) / "config.json"
    if file.is_file():
        return file
    with contextlib.suppress(HFValidationError):
        found = huggingface_hub.try_to_load_from_cache(path, file.name)
        return Path(found) if isinstance(found, str) else None
    return None


@functools.lru_cache
def _read_config(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
