"""Converts Anthropic's Messages API to and from chat completions, with vLLM's converters.

Source: vllm/entrypoints/anthropic/serving.py; https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, get_args

import partial_json_parser
from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicCountTokensRequest,
    AnthropicMessage,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from baton.client import Finished, Usage
from baton.gateway.anthropic_route import error_body
from baton.gateway.body_parser import check_length, json_object, parse_as
from baton.gateway.converted_chat import TEXT, ConvertedStream, split_at_text
from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.fail_fast import FailFast
from baton.gateway.parsed_request import session_id
from baton.gateway.request_bodies import MAX_PARTS, template_kwargs
from baton.gateway.response_rendering import ResponseHead, finish_fields, usage

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChoiceOutputParser

# The conversions use no attribute of the instance, whose constructor needs an engine.
_CONVERTER: Any = object.__new__(AnthropicServingMessages)
# Fields of the converted request that the chat route does not have. A thinking budget is a hint:
# models end their reasoning themselves.
_LEFT_OUT = ("thinking_token_budget", "max_completion_tokens")
# Fields that this gateway cannot honour, with their values that have no effect.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "compaction": (),
    "container": (),
    "mcp_servers": ([],),
    # A conversation that the server keeps: the next request has only its new turns.
    "thread": (),
}
_REQUEST = FailFast[AnthropicMessagesRequest](AnthropicMessagesRequest)
_COUNT_REQUEST = FailFast[AnthropicCountTokensRequest](AnthropicCountTokensRequest)
_MESSAGE = FailFast[AnthropicMessage](AnthropicMessage)
# Fields of a chat whose output continues its last turn.
_CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
# Content of a tool's result that the converter reads; it drops the rest without an error.
_RESULT_PARTS = ("text", "image", "tool_reference")
# Types of the blocks that vLLM's class takes.
_BLOCKS = get_args(AnthropicContentBlock.model_fields["type"].annotation)
# How the types of blocks of tools at Anthropic end, such as web_search_tool_result, mcp_tool_use.
_OF_SERVER_TOOLS = ("_tool_use", "_tool_result")
# Text of an assistant's turn that has neither a text nor calls, such as a thought that was cut off.
_NO_TEXT = "[no text]"
# How an event with a part of a content block begins, and the fields with a text by those of chats.
_BLOCK_DELTA = "event: content_block_delta\ndata: "
_TEXT_FIELDS = {"content": "text", "reasoning": "thinking"}
_DONE = "data: [DONE]"


class MessageConversion:
    """A request of /v1/messages.

    Args:
        body: The request's body.

    Attributes:
        chat: The body of the chat completion.

    Raises:
        HttpError: The body is not a request of the Messages API.
    """

    def __init__(self, body: bytes) -> None:
        values = _values(body)
        # vLLM's class takes four of them at most. The coordinator has a limit of its own.
        stop = values.pop("stop_sequences", None)
        request = parse_as(values, _REQUEST, _UNSUPPORTED, _entries(values))
        self.chat = _converted(request)
        if stop is not None:
            self.chat["stop"] = stop
        user = (request.metadata or {}).get("user_id")
        if isinstance(user, str) and user:
            # Claude Code names its session there. Its requests share a prefix.
            self.chat["prompt_cache_key"] = session_id(user)

    def whole(self, completion: dict[str, Any]) -> bytes:
        """Converts a chat completion to a message."""
        validated = ChatCompletionResponse.model_validate(completion)
        choice = validated.choices[0]
        for call in choice.message.tool_calls:
            arguments = _as_object(call.function.arguments, choice.finish_reason == "length")
            call.function.arguments = json.dumps(arguments)
        converted = _CONVERTER.messages_full_converter(validated)
        found: dict[str, Any] = converted.model_dump(exclude_none=True)
        # Clients expect these fields, also if they are null.
        found |= {name: getattr(converted, name) for name in ("stop_reason", "stop_sequence")}
        return json.dumps(found).encode()

    def stream(self, head: ResponseHead) -> MessageStream:
        """Begins a streamed message."""
        return MessageStream(head)


class MessageStream(ConvertedStream):
    """Renders the events of a streamed message, and of its only choice.

    vLLM's converter renders them from the chunks of a chat. It keeps nothing of the events that are
    rendered without it.

    Args:
        head: Shared fields of the response.
    """

    def __init__(self, head: ResponseHead) -> None:
        super().__init__(head)
        self._converter, self._has_begun = _StreamConverter(), False
        self._arguments = _StreamedArguments()

    def end(
        self, usages: Sequence[Usage], parsers: Sequence[ChoiceOutputParser | None] = ()
    ) -> bytes:
        """Like ResponseStream.end."""
        used = usage(self._head.request, usages, parsers)
        events = [*self._converter.convert(self._chunk([], used)), *self._converter.convert(_DONE)]
        return "".join(events).encode()

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """Like ResponseStream.failure."""
        return b"event: error\ndata: " + error_body(500, error, request_id) + b"\n\n"

    def close(self) -> None:
        """Ends the converter; idempotent."""
        self._converter.close()

    def _text_event(self, text: str) -> bytes:
        return f"{self._start}{quoted(text)}{self._end}".encode()

    def _converted(self, delta: dict[str, Any], finished: Finished | None) -> bytes:
        end = finish_fields(self._head.request, finished, self._parser) if finished else None
        events = []
        if not self._has_begun:
            self._has_begun = True
            # The converter makes the message's start from the first chunk and drops its content.
            only_prompt = Usage(self._num_prompt_tokens, 0, 0)
            used = usage(self._head.request, [only_prompt], [self._parser])
            first = {"index": 0, "delta": {"role": "assistant"}}
            events += self._converter.convert(self._chunk([first], used))
        choice = {"index": 0, "delta": self._arguments.checked(delta), **(end or {})}
        events += self._converter.convert(self._chunk([choice], None))
        self._text_field = ""
        if end is None and len(delta) == 1 and events:
            (field,) = delta
            if field in _TEXT_FIELDS and self._split(events[-1], _TEXT_FIELDS[field]):
                self._text_field = field
        return "".join(events).encode()

    def _chunk(self, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> str:
        """Renders a chunk of a chat for the converter."""
        fields = self._head.fields("chat.completion.chunk")
        return f"data: {json.dumps({**fields, 'choices': choices, 'usage': used})}"

    def _split(self, event: str, text_field: str) -> bool:
        """Splits the event of a delta with a text at its text, for the deltas that follow.

        Returns:
            Whether the event has a text: the converter holds back a text after a tool call.
        """
        if not event.startswith(_BLOCK_DELTA):
            return False
        found = json.loads(event.removeprefix(_BLOCK_DELTA))
        if text_field not in found["delta"]:
            return False
        found["delta"][text_field] = TEXT
        start, end = split_at_text(found)
        self._start, self._end = f"{_BLOCK_DELTA}{start}", f"{end}\n\n"
        return True


class _StreamedArguments:
    """Leaves out streamed arguments of tool calls that are no JSON object, as `_as_object` does.

    Anthropic's clients parse the arguments while they arrive, and fail with those that are no JSON.
    """

    def __init__(self) -> None:
        # By the index of a call with arguments: whether they begin an object.
        self._are_objects: dict[int, bool] = {}

    def checked(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Returns a chat's delta without the arguments that are left out."""
        if "tool_calls" not in delta:
            return delta
        return {**delta, "tool_calls": [self._checked_call(one) for one in delta["tool_calls"]]}

    def _checked_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function") or {}
        arguments: str = function.get("arguments") or ""
        index = call["index"]
        if index not in self._are_objects:
            # Clients cannot parse white space alone.
            arguments = arguments.lstrip()
            if arguments:
                self._are_objects[index] = arguments.startswith("{")
        kept = arguments if self._are_objects.get(index) else ""
        return {**call, "function": {**function, "arguments": kept}}


class _StreamConverter:
    """vLLM's converter of streamed chats, without a task: it waits for nothing but chunks."""

    def __init__(self) -> None:
        self._chunks: deque[str] = deque()
        self._events: Any = _CONVERTER.message_stream_converter(self._taken())
        # The next event, for which the converter waits; None: there is no further event.
        self._next: Any = anext(self._events)

    def convert(self, chunk: str) -> list[str]:
        """Returns the events of a chunk."""
        self._chunks.append(chunk)
        events = list[str]()
        while self._next is not None:
            try:
                self._next.send(None)
                break
            except StopIteration as event:
                events.append(event.value)
                self._next = anext(self._events)
            except StopAsyncIteration:
                self._next = None
        return events

    def close(self) -> None:
        """Ends the converter; idempotent."""
        if self._next is not None:
            # As in a cancelled task. Python does not pass GeneratorExit on to `_taken`.
            with contextlib.suppress(asyncio.CancelledError):
                self._next.throw(asyncio.CancelledError)
            self._next = None

    async def _taken(self) -> AsyncIterator[str]:
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            await _pause()


@types.coroutine
def _pause() -> Generator[None]:
    """Returns to the caller of `send`."""
    yield


def tokenize_body(body: bytes) -> dict[str, Any]:
    """Converts the body of /v1/messages/count_tokens to that of /tokenize.

    Raises:
        HttpError: The body is not a request of the Messages API.
    """
    values = _values(body)
    request = parse_as(values, _COUNT_REQUEST, _UNSUPPORTED, _entries(values))
    chat = _converted(request, counts=True)
    # As the chat route renders the prompt.
    chat["chat_template_kwargs"] = template_kwargs(
        chat.get("chat_template_kwargs"), chat.get("reasoning_effort")
    )
    wanted = ("model", "messages", "tools", "chat_template_kwargs", *_CONTINUED)
    return {name: chat[name] for name in wanted if name in chat}


def _entries(values: dict[str, Any]) -> dict[str, Callable[[int, Any], AnthropicMessage]]:
    """Returns the validators of the entries of a body's lists."""
    messages = values.get("messages")
    num_earlier = len(messages) - 1 if isinstance(messages, list) else 0
    match messages:
        # The begin of the answer, behind the question.
        case [*_, {"role": "assistant"}]:
            num_earlier -= 1

    def message(index: int, sent: Any) -> AnthropicMessage:
        return _MESSAGE.validate(_without_unknown_blocks(sent) if index < num_earlier else sent)

    return {"messages": message}


def _without_unknown_blocks(message: Any) -> Any:
    """Returns a message of an earlier turn without blocks that this gateway cannot render.

    A client cannot take them back, for example after a change of the model within a conversation.
    A text says which block is left out. Calls of tools that run at Anthropic, and their results,
    leave no trace, because the assistant's text that follows has what they found.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    found = list[Any]()
    left_out = list[dict[str, str]]()
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind in _BLOCKS:
            found.append(block)
            continue
        left_out.append({"type": "text", "text": f"[{kind} left out]"})
        if not kind.endswith(_OF_SERVER_TOOLS):
            found.append(left_out[-1])
    # A turn must not be empty: many chat templates expect user and assistant in turn.
    return {**message, "content": found or left_out[:1]}


def _values(body: bytes) -> dict[str, Any]:
    """Returns the fields of a body, with their present names; checks its tools."""
    values = json_object(body)
    _check_tools(values.get("tools"))
    check_length("system", values.get("system"), MAX_PARTS)
    # The former name of output_config.format.
    if (wanted := values.pop("output_format", None)) is not None:
        config = values.get("output_config")
        values["output_config"] = {"format": wanted, **(config if isinstance(config, dict) else {})}
    return values


def _check_tools(tools: Any) -> None:
    """Raises HttpError if a tool runs at Anthropic or is known to Claude: it has no schema."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom") and "input_schema" not in tool:
            allowed = "must be custom, because this server runs no tools"
            raise invalid_value(f"tools[{index}].type", kind, allowed)


def _as_object(arguments: str, is_cut_off: bool) -> dict[str, Any]:
    """Returns the arguments of a tool call as a JSON object, as the Messages API has them.

    The end of arguments that are cut off is added. Arguments that are no object become an empty
    one, which lacks what the tool needs: the client refuses the call and tells the model so.
    """
    found: Any = None
    try:
        found = json.loads(arguments)
    except ValueError:
        # The library raises IndexError for some texts that are no JSON.
        with contextlib.suppress(ValueError, IndexError):
            found = partial_json_parser.loads(arguments) if is_cut_off else None
    return found if isinstance(found, dict) else {}


def _converted(
    request: AnthropicMessagesRequest | AnthropicCountTokensRequest, *, counts: bool = False
) -> dict[str, Any]:
    """Returns the body of a chat completion.

    Args:
        request: The request.
        counts: Whether only tokens are counted. A last turn of the assistant that could not be
            continued then counts as a finished one.
    """
    _check_results(request.messages)
    _check_user_turns(request.messages)
    _separate_system_texts(request)
    try:
        # Most chat templates refuse a system turn after the first one.
        chat = AnthropicServingMessages.to_chat_completion_request(
            request, merge_inline_system=True
        )
    except ValueError as error:
        raise HttpError(400, str(error), code="invalid_value") from None
    found: dict[str, Any] = chat.model_dump(
        mode="json", exclude_unset=True, exclude_none=True, by_alias=True
    )
    turns = map(_with_text, _with_references_as_text(found["messages"]))
    found["messages"] = _with_images_last(turns)
    try:
        is_begun = _has_prefill(request)
    except HttpError:
        if not counts:
            raise
        is_begun = False
    if is_begun:
        found |= _CONTINUED
    return {name: value for name, value in found.items() if name not in _LEFT_OUT}


def _has_prefill(request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> bool:
    """Whether the last turn is the begin of the answer (a prefill).

    Raises:
        HttpError: It cannot be continued.
    """
    if not request.messages or request.messages[-1].role != "assistant":
        return False
    turn, content = f"messages[{len(request.messages) - 1}]", request.messages[-1].content
    if request.thinking is not None and request.thinking.type != "disabled":
        allowed = "must be user with thinking, because an answer that has begun has no thinking"
        raise invalid_value(f"{turn}.role", "assistant", allowed)
    blocks = content if isinstance(content, list) else []
    for index, block in enumerate(blocks):
        if block.type not in ("text", "thinking", "redacted_thinking"):
            allowed = "must be text in a last turn of the assistant, which the answer continues"
            raise invalid_value(f"{turn}.content[{index}].type", block.type, allowed)
    text = content if isinstance(content, str) else blocks[-1].text if blocks else None
    if not text:
        allowed = "must end with text in a last turn of the assistant, which the answer continues"
        raise invalid_value(f"{turn}.content", text, allowed)
    if text != text.rstrip():
        # In Anthropic's words. Models rarely continue well after the token of a space.
        allowed = "final assistant content cannot end with trailing whitespace"
        raise invalid_value(f"{turn}.content", text, allowed)
    return True


def _separate_system_texts(
    request: AnthropicMessagesRequest | AnthropicCountTokensRequest,
) -> None:
    """Ends system texts with a line break where the next one would continue their last word.

    The converter joins them without anything in between.
    """
    # Objects with a text, and the name of its attribute.
    found = list[tuple[Any, str]]()
    holders: list[tuple[Any, str]] = [(request, "system")]
    holders += ((turn, "content") for turn in request.messages if turn.role == "system")
    for holder, name in holders:
        content = getattr(holder, name)
        if isinstance(content, str):
            found.append((holder, name))
        else:
            found += ((block, "text") for block in content or () if block.type == "text")
    texts = [one for one in found if getattr(*one) and not _is_left_out(getattr(*one))]
    for (holder, name), following in pairwise(texts):
        text: str = getattr(holder, name)
        if not (text[-1].isspace() or getattr(*following)[0].isspace()):
            setattr(holder, name, f"{text}\n")


def _is_left_out(text: str) -> bool:
    """Whether the converter leaves out a system text: it is Claude Code's billing header."""
    return text.startswith("x-anthropic-billing-header")


def _check_results(messages: Sequence[AnthropicMessage]) -> None:
    """Handles parts of tools' results that the converter would drop.

    Raises:
        HttpError: The last message has one. In earlier ones, which a client cannot take back, a
            text says that it is left out. Or a part has a field of a wrong type.
    """
    for number, message in enumerate(messages):
        blocks = message.content if isinstance(message.content, list) else []
        for index, block in enumerate(blocks):
            parts = block.content if isinstance(block.content, list) else []
            for place, part in enumerate(parts):
                path = f"messages[{number}].content[{index}].content[{place}]"
                kind = part.get("type")
                if kind in _RESULT_PARTS:
                    _check_fields(path, part)
                elif number < len(messages) - 1:
                    parts[place] = {"type": "text", "text": f"[{kind} left out]"}
                else:
                    allowed = f"must be {' or '.join(_RESULT_PARTS)}"
                    raise invalid_value(f"{path}.type", kind, allowed)


def _check_user_turns(messages: Sequence[AnthropicMessage]) -> None:
    """Raises HttpError if a turn of the user has no content, as Anthropic's servers do.

    The converter would leave out such a turn, or make an empty one of it. It would also leave out
    images without a source.
    """
    for number, message in enumerate(messages):
        content = message.content
        if message.role != "user":
            continue
        if isinstance(content, str):
            is_empty = not content
        else:
            for place, block in enumerate(content):
                # The converter would leave it out.
                if block.type == "image" and not block.source:
                    path = f"messages[{number}].content[{place}].source"
                    raise invalid_value(path, block.source, "must be an object with the image")
            is_empty = not any(
                block.text if block.type == "text" else block.type in ("image", "tool_result")
                for block in content
            )
        if is_empty:
            given = content if isinstance(content, str) else [block.type for block in content]
            allowed = "must have a text that is not empty, an image or a tool_result"
            raise invalid_value(f"messages[{number}].content", given, allowed)


def _with_text(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns a turn with a text in place of an assistant's empty content.

    A client cannot take such an earlier turn back. Some chat templates, such as Mistral's, refuse
    an empty turn of the assistant, and many expect user and assistant in turn.
    """
    if turn["role"] != "assistant" or turn.get("content") or turn.get("tool_calls"):
        return turn
    return {**turn, "content": _NO_TEXT}


def _check_fields(path: str, part: dict[str, Any]) -> None:
    """Raises HttpError if a part of a result has a field of another type than the converter reads.

    vLLM's class takes any objects as parts.
    """
    if part["type"] == "text" and not isinstance(part.get("text", ""), str):
        raise invalid_value(f"{path}.text", part["text"], "must be a text")
    if part["type"] == "image" and not isinstance(part.get("source", {}), dict):
        raise invalid_value(f"{path}.source", part["source"], "must be an object")


def _with_references_as_text(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Renders references to tools, which chat templates do not know, as text.

    vLLM's converter puts them into a second turn for the same result. The tools themselves are in
    the prompt, also those that the agent loads later.
    """
    nothing: dict[str, Any] = {}
    for turn, after in zip_longest(turns, turns[1:], fillvalue=nothing):
        content = turn.get("content")
        if turn["role"] == "tool" and isinstance(content, list):
            names = [part["name"] for part in content if part.get("type") == "tool_reference"]
            text = "\n".join(f"<tool_reference>{name}</tool_reference>" for name in names)
            yield {**turn, "content": text}
        elif not (_is_empty_result(turn) and after.get("tool_call_id") == turn["tool_call_id"]):
            yield turn


def _with_images_last(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts the images of tools' results behind all results of the same turn.

    vLLM's converter puts the images of each result into a user turn behind it. Chat templates and
    models expect the results of parallel calls one after the other.
    """
    found, images = list[dict[str, Any]](), list[dict[str, Any]]()
    for turn in turns:
        if turn["role"] == "user" and found and found[-1]["role"] == "tool" and _has_images(turn):
            images.append(turn)
            continue
        if turn["role"] != "tool":
            found += images
            images = []
        found.append(turn)
    return found + images


def _has_images(turn: dict[str, Any]) -> bool:
    """Whether a turn has images and nothing else."""
    content = turn.get("content")
    parts = content if isinstance(content, list) else []
    return bool(parts) and all(part.get("type") == "image_url" for part in parts)


def _is_empty_result(turn: dict[str, Any]) -> bool:
    return turn["role"] == "tool" and not turn.get("content")
