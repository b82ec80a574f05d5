"""Converts OpenAI's Responses API to and from chat completions, with vLLM's converters.

Source: vllm/entrypoints/openai/responses/; https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from types import SimpleNamespace, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingEventProcessor,
    split_delta,
)
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_chat_messages_with_tool_call,
    construct_input_messages,
    construct_tool_dicts,
)
from vllm.exceptions import VLLMValidationError

from baton.client import Finished, Usage
from baton.gateway.body_parser import check_length, json_object, parse_as
from baton.gateway.converted_chat import TEXT, ConvertedStream, split_at_text
from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.fail_fast import FailFast
from baton.gateway.request_bodies import MAX_TOOLS
from baton.gateway.response_rendering import ResponseHead, finish_fields, usage
from baton.gateway.response_store import StoredResponse

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChoiceOutputParser

# Fields that chats have as well, under the same name.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
    "prompt_cache_key",
    "priority",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "include_reasoning",
)
# Fields that this gateway cannot honour, with their values that have no effect.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "cache_salt": (),
    "conversation": (),
    "ec_transfer_params": ({},),
    "enable_response_messages": (False,),
    "kv_transfer_params": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "previous_input_messages": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
_REQUEST = FailFast[ResponsesRequest](ResponsesRequest)
# Type of the items of a request's input, which is a text or a list of items.
_ITEM = get_args(get_args(ResponsesRequest.model_fields["input"].annotation)[1])[0]
_ANY = ""
# Tools that the client runs.
_TOOL_KINDS = ("function", "custom", "namespace")
# Types of the items of their calls.
_CALL_ITEMS = tuple(
    f"{tool}_call{end}" for tool in ("function", "custom_tool") for end in ("", "_output")
)
# How the types of the items of other tools' calls end, and such types that end otherwise.
_OTHER_ENDS = ("_call", "_call_output")
_OTHER_ITEMS = (
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "tool_search_output",
)
_LOGPROBS = "message.output_text.logprobs"
# Fields of a chat's turn.
_TURN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"}
# Types of the events with a part of a text.
_TEXT_DELTAS = ("response.output_text.delta", "response.reasoning_text.delta")


class ResponseConversion:
    """A request of /v1/responses.

    Args:
        body: The request's body.
        previous: Finds the response of `previous_response_id`; raises HttpError.
        item: Finds an output item of a stored response by its ID; None: it is not there.
        store: Takes the finished response, if the request allows to store it.

    Attributes:
        chat: The body of the chat completion.
        root_id: ID of the first response of the conversation.

    Raises:
        HttpError: The body is not a request of the Responses API, or not supported.
    """

    def __init__(
        self,
        body: bytes,
        previous: Callable[[str], StoredResponse],
        item: Callable[[str], dict[str, Any] | None],
        store: Callable[[StoredResponse], None],
    ) -> None:
        self._request = _parsed(body, item)
        self._store = store
        request, root = self._request, self._request.request_id
        history: Sequence[dict[str, Any]] = ()
        if request.previous_response_id is not None:
            before = previous(request.previous_response_id)
            history, root = before.messages, before.root_id
        self.root_id = root
        try:
            # vLLM would drop all system turns of the history. Only instructions do not carry over.
            added = construct_input_messages(request_input=request.input)
        except VLLMValidationError as error:
            raise _rejected(error) from None
        # The conversation without this request's instructions, as it is stored.
        self._conversation = _as_chat_turns([*history, *added])
        self.chat = self._chat()

    def _chat(self) -> dict[str, Any]:
        request = self._request
        turns = self._conversation
        if request.instructions:
            turns = _as_chat_turns([{"role": "system", "content": request.instructions}, *turns])
        found: dict[str, Any] = {"messages": turns, "request_id": request.request_id}
        given = request.model_dump(
            mode="json", exclude={"input", "tools"}, exclude_unset=True, exclude_none=True
        )
        found |= {name: given[name] for name in _SAME if name in given}
        # The responses of a chain share a prefix.
        found.setdefault("prompt_cache_key", request.session_id or self.root_id)
        if request.max_output_tokens is not None:
            found["max_completion_tokens"] = request.max_output_tokens
        if request.stream:
            found["stream"] = True
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        if tools:
            found["tools"] = [_without_unset(tool) for tool in tools]
            found["tool_choice"] = _tool_choice(given.get("tool_choice", "auto"))
            if request.parallel_tool_calls is not None:
                found["parallel_tool_calls"] = request.parallel_tool_calls
        elif given.get("tool_choice", "auto") not in ("auto", "none"):
            allowed = "must be auto or none, because none of the tools is a function"
            raise invalid_value("tool_choice", given["tool_choice"], allowed)
        if request.reasoning is not None and request.reasoning.effort is not None:
            found["reasoning_effort"] = request.reasoning.effort
        wanted = given.get("text", {}).get("format", {"type": "text"})
        if wanted["type"] == "json_schema":
            schema = request.text.format.schema_
            named = {"name": wanted.get("name", "response"), "schema": schema}
            found["response_format"] = {"type": "json_schema", "json_schema": named}
        elif wanted["type"] == "json_object":
            found["response_format"] = wanted
        if "structured_outputs" in given:
            constraints = given["structured_outputs"].items()
            # The defaults of all fields are among them.
            found["structured_outputs"] = {name: one for name, one in constraints if one}
        return found

    def whole(self, completion: dict[str, Any]) -> bytes:
        """Converts a chat completion to a response."""
        (choice,) = completion["choices"]
        message = choice["message"]
        calls = [
            FunctionCall(id=one["id"], **one["function"]) for one in message.get("tool_calls", ())
        ]
        items = build_response_output_items(
            message.get("reasoning"), message["content"], calls, None, self._request.tools
        )
        model, created, used = (completion[name] for name in ("model", "created", "usage"))
        found = self.finished(model, created, items, choice["finish_reason"], used)
        return json.dumps(_as_json(found)).encode()

    def stream(self, head: ResponseHead) -> ResponsesStream:
        """Begins a streamed response."""
        return ResponsesStream(self, self._request.tools, head)

    def finished(
        self,
        model: str,
        created: int,
        items: list[Any],
        reason: str | None,
        used: dict[str, Any],
    ) -> ResponsesResponse:
        """Returns the finished response, and stores it if the request allows it."""
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason or "", "completed")
        if status != "completed" and items and hasattr(items[-1], "status"):
            items[-1].status = "incomplete"
        found = self.response(model, created, items, status, used)
        if self._request.store:
            answered = construct_chat_messages_with_tool_call(items)
            turns = [*self._conversation, *_as_chat_turns(answered)]
            self._store(StoredResponse(found.id, self.root_id, turns, _as_json(found)))
        return found

    def response(
        self,
        model: str,
        created: int,
        items: list[Any],
        status: str,
        used: dict[str, Any] | None = None,
    ) -> ResponsesResponse:
        """Returns the response in vLLM's form, with the token counts of a chat completion."""
        request = self._request
        sampling = SimpleNamespace(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            max_tokens=request.max_output_tokens or 0,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logprobs=None,
        )
        return ResponsesResponse.from_request(
            request,
            sampling,
            model_name=model,
            created_time=created,
            output=items,
            status=status,
            usage=_usage(used) if used is not None else None,
        )


class ResponsesStream(ConvertedStream):
    """Renders the events of a streamed response, and of its only choice.

    vLLM's processor makes them from the deltas of a chat.

    Args:
        conversion: The request.
        tools: Its tools, in vLLM's form.
        head: Shared fields of the response.
    """

    def __init__(self, conversion: ResponseConversion, tools: Any, head: ResponseHead) -> None:
        super().__init__(head)
        self._conversion = conversion
        self._processor = SimpleStreamingEventProcessor(tools=tools)
        self._sequence_number, self._has_begun = 0, False
        self._reason: str | None = None

    def _converted(self, delta: dict[str, Any], finished: Finished | None) -> bytes:
        events = [] if self._has_begun else self._first_events()
        if finished is not None:
            ended = finish_fields(self._head.request, finished, self._parser)
            self._reason = ended["finish_reason"]
        self._text_field = ""
        for part in split_delta(DeltaMessage.model_validate(delta)):
            for event in self._emitted(part):
                events.append(self._event(event))
                if event.type in _TEXT_DELTAS and finished is None and len(delta) == 1:
                    (self._text_field,) = delta
                    self._split(event)
        return "".join(events).encode()

    def end(
        self, usages: Sequence[Usage], parsers: Sequence[ChoiceOutputParser | None] = ()
    ) -> bytes:
        """Like ResponseStream.end."""
        used = usage(self._head.request, usages, parsers)
        closing = self._processor.close_current()
        # The event that closes the last item has the item, too, and is rendered with its status.
        items = self._processor.output_items
        model, created = self._head.model, self._head.created
        found = self._conversion.finished(model, created, items, self._reason, used)
        events = [self._event(event) for event in closing]
        is_whole = found.status != "incomplete"
        kind = "response.completed" if is_whole else "response.incomplete"
        return "".join([*events, self._about(kind, found)]).encode()

    def failure(self, error: HttpError, request_id: str) -> bytes:
        """Like ResponseStream.failure: OpenAI's clients expect both events."""
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        told = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        event = f"event: error\ndata: {json.dumps(told | {'sequence_number': number})}\n\n"
        items = self._processor.output_items
        found = self._conversion.response(self._head.model, self._head.created, items, "failed")
        failure = {"code": "server_error", "message": str(error)}
        return f"{event}{self._about('response.failed', found, failure)}".encode()

    def close(self) -> None:
        """Ends the rendering: there is nothing to end."""

    def _text_event(self, text: str) -> bytes:
        self._processor.state.accumulated_text += text
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return f"{self._start}{quoted(text)}{self._end}{number}}}\n\n".encode()

    def _first_events(self) -> list[str]:
        self._has_begun = True
        model, created = self._head.model, self._head.created
        begun = self._conversion.response(model, created, [], "in_progress")
        return [
            self._about("response.created", begun),
            self._about("response.in_progress", begun),
        ]

    def _split(self, event: Any) -> None:
        """Splits the event of a delta with a text at its text, for the deltas that follow."""
        fields = event.model_dump(mode="json", by_alias=True, warnings=False)
        del fields["sequence_number"]
        start, end = split_at_text(fields | {"delta": TEXT})
        self._start = f"event: {event.type}\ndata: {start}"
        self._end = f'{end[:-1]},"sequence_number":'

    def _emitted(self, delta: DeltaMessage) -> list[Any]:
        processor: Any = self._processor
        state, call = processor.resolve_target_state(delta)
        if state.name == "NONE":
            return []
        events = []
        if processor.needs_transition(state, call):
            events = [*processor.close_current(), *processor.open(state, call)]
        return [*events, *processor.emit_delta(delta, None)]

    def _about(
        self, kind: str, response: ResponsesResponse, error: dict[str, str] | None = None
    ) -> str:
        """Renders an event that contains the whole response."""
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        # Without OpenAI's classes: vLLM's form of the response differs from OpenAI's (_as_json).
        found = _as_json(response) | {"error": error}
        event = {"response": found, "sequence_number": number, "type": kind}
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _event(self, event: Any) -> str:
        if hasattr(event, "sequence_number"):
            event.sequence_number = self._sequence_number
        self._sequence_number += 1
        data = event.model_dump_json(by_alias=True, warnings=False)
        return f"event: {event.type}\ndata: {data}\n\n"


def _usage(used: dict[str, Any]) -> ResponseUsage:
    cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reasoned = (used.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return ResponseUsage(
        input_tokens=used["prompt_tokens"],
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=used["completion_tokens"],
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoned),
        total_tokens=used["total_tokens"],
    )


def _as_json(response: ResponsesResponse) -> dict[str, Any]:
    found: dict[str, Any] = response.model_dump(mode="json", by_alias=True)
    # vLLM's form has a number here, OpenAI's has null without a limit.
    found["max_output_tokens"] = found["max_output_tokens"] or None
    return found | {"error": None}


def _as_chat_turns(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the turns in the form of the chat route.

    The parts of a message have other names in the Responses API. Instructions of developers are
    system texts, and most chat templates take one system turn, at the beginning. Later instructions
    keep their role: the coordinator knows which roles the chat template takes.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn = {name: one for name, one in _without_none(dict(message)).items() if name in _TURN}
        if turn["role"] == "developer" and all(one["role"] == "system" for one in turns):
            turn["role"] = "system"
        if isinstance(turn.get("content"), list):
            turn["content"] = [_as_chat_part(part) for part in turn["content"]]
        if len(turns) == 1 and turns[0]["role"] == turn["role"] == "system":
            turns[0]["content"] = _on_lines([*_parts(turns[0]), *_parts(turn)])
        else:
            turns.append(turn)
    return turns


def _as_chat_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


def _parts(turn: dict[str, Any]) -> list[Any]:
    content = turn.get("content", "")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _on_lines(parts: list[Any]) -> str | list[Any]:
    """Joins parts with line breaks if all are texts; a template may write parts without breaks."""
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else parts


def _tool_choice(choice: Any) -> Any:
    """Returns the tool choice of a chat. Raises HttpError if chats have none like it."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] not in ("function", "custom"):
        raise invalid_value("tool_choice.type", choice["type"], "must be function or custom")
    return {"type": "function", "function": {"name": choice["name"]}}


def _without_unset(tool: dict[str, Any]) -> dict[str, Any]:
    """Removes the fields of a tool and of its function that are not set.

    A null within the parameters is a part of their schema.
    """
    function = {name: one for name, one in tool["function"].items() if one is not None}
    return {name: one for name, one in tool.items() if one is not None} | {"function": function}


def _without_none(value: Any) -> Any:
    """Removes null fields, which the chat route would refuse in some places."""
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return value


def _parsed(body: bytes, item: Callable[[str], dict[str, Any] | None]) -> ResponsesRequest:
    values = json_object(body)
    wanted, tools = values.get("include"), values.get("tools")
    if isinstance(wanted, list):
        if _LOGPROBS in wanted:
            raise invalid_value("include", wanted, f"{_LOGPROBS} must be left out")
        # The rest are details of tools that run at OpenAI, and of reasoning.
        del values["include"]
    if isinstance(tools, list):
        # vLLM's class refuses tools of OpenAI that are newer than the class.
        values["tools"] = [one for one in tools if not _runs_at_openai(one)]
        inner = [tool.get("tools") for tool in tools if isinstance(tool, dict)]
        check_length(
            "tools", [one for some in inner if isinstance(some, list) for one in some], MAX_TOOLS
        )
        if tools and not values["tools"] and values.get("tool_choice") == "required":
            # vLLM's class would say that there are no tools.
            allowed = "must be auto or none, because none of the tools is a function"
            raise invalid_value("tool_choice", "required", allowed)
    try:
        return parse_as(values, _REQUEST, _UNSUPPORTED, {"input": _InputItems(item).validated})
    except VLLMValidationError as error:
        raise _rejected(error) from None


def _members(kind: Any) -> list[Any]:
    """Returns the members of a type that may be a union, also within `Annotated`."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for one in get_args(kind) for member in _members(one)]
    return [kind]


def _validated(item: Any) -> Any:
    """Returns an item in one of the forms that vLLM's class takes. Raises ValidationError."""
    kind = item.get("type") if isinstance(item, dict) else None
    found = _ITEM_VALIDATORS.get(kind) if isinstance(kind, str) else None
    return (found or _ITEM_VALIDATORS[_ANY]).validate(item)


def _item_validators() -> dict[str, FailFast[Any]]:
    """Returns the validators of items by their `type`; _ANY is the one of all types.

    An item has more than 50 possible classes, and a comparison with all of them takes 0.2 ms.
    """
    classes: dict[str, list[Any]] = {}
    for one in _members(_ITEM):
        # A typed dict, or a class of pydantic.
        if issubclass(one, BaseModel):
            kinds = one.model_fields["type"].annotation
        else:
            kinds = get_type_hints(one).get("type")
        for literal in _members(kinds):
            for kind in get_args(literal) if get_origin(literal) is Literal else ():
                classes.setdefault(kind, []).append(one)
    found = {_ANY: FailFast[Any](_ITEM)}
    for kind, members in classes.items():
        if kind == "reasoning":
            # The typed dict would take any parts: it checks them only when they are read.
            members = [one for one in members if issubclass(one, BaseModel)]
        found[kind] = FailFast(Annotated[Union[tuple(members)], *get_args(_ITEM)[1:]])  # noqa: UP007
    return found


_ITEM_VALIDATORS = _item_validators()


class _InputItems:
    """Validates the items of one request's input, in their order.

    Args:
        stored: Finds an output item of a stored response by its ID; None: it is not there.
    """

    def __init__(self, stored: Callable[[str], dict[str, Any] | None]) -> None:
        self._stored = stored
        # The calls that are left out, whose results must not stay alone.
        self._left_out: set[str] = set()

    def validated(self, index: int, sent: Any) -> Any:
        """Returns an item as vLLM's converter reads it; None: it is left out.

        Raises:
            HttpError: The item refers to one that is not stored, or is wrong.
            ValidationError: The item is wrong.
        """
        if not isinstance(sent, dict):
            return _validated(sent)
        # Clients send back items with null for a field that is not set.
        sent = {name: value for name, value in sent.items() if value is not None}
        found: Any = self._referenced(index, sent)
        if self._is_of_other_tool(found):
            return None
        content = found.get("content")
        if "role" in found:
            # vLLM's class takes an assistant's parts only with this type.
            found.setdefault("type", "message")
        is_answer = found.get("type") == "message" and found.get("role") == "assistant"
        if is_answer and isinstance(content, list):
            found = _assistant_turn(f"input[{index}].content", content)
        # Only OpenAI's models can read encrypted reasoning. The rest of it is for all models.
        is_encrypted = found.get("type") == "reasoning" and found.pop("encrypted_content", None)
        if is_encrypted and not (content or found.get("summary")):
            return None
        (found,) = ResponsesRequest.input_item_parsing({"input": [found]})["input"]
        return found if isinstance(found, BaseModel) else _validated(found)

    def _is_of_other_tool(self, item: dict[str, Any]) -> bool:
        """Whether an item belongs to a call of a tool that is left out of the request."""
        kind, call = item.get("type"), item.get("call_id")
        if not isinstance(kind, str):
            return False
        if kind not in _CALL_ITEMS and (kind in _OTHER_ITEMS or kind.endswith(_OTHER_ENDS)):
            if isinstance(call, str):
                self._left_out.add(call)
            return True
        # Codex sends the result of a local_shell_call as that of a function.
        return kind.endswith("_output") and isinstance(call, str) and call in self._left_out

    def _referenced(self, index: int, sent: dict[str, Any]) -> dict[str, Any]:
        """Returns an item, or a copy of the stored item that it refers to.

        Raises:
            HttpError: The item is not stored.
        """
        if not sent.keys() <= {"type", "id"}:
            return sent
        if sent.get("type", "item_reference") != "item_reference" or not isinstance(
            sent.get("id"), str
        ):
            return sent
        found = self._stored(sent["id"])
        if found is None:
            allowed = "no stored response has this item here, or not any more; send the item itself"
            raise invalid_value(f"input[{index}].id", sent["id"], allowed)
        return dict(found)


def _assistant_turn(path: str, parts: list[Any]) -> dict[str, Any]:
    """Returns an assistant's message whose content is the text of all its parts.

    vLLM's converter reads only the first part, and fails where this part is a refusal.

    Args:
        path: Path of the parts in the body.
        parts: The message's content.

    Raises:
        HttpError: A part is not a text.
    """
    texts = list[str]()
    for index, part in enumerate(parts):
        match part:
            case {"type": "output_text" | "input_text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                allowed = "must be an output_text with a text, or a refusal"
                raise invalid_value(f"{path}[{index}]", part, allowed)
    return {"type": "message", "role": "assistant", "content": "".join(texts)}


def _runs_at_openai(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in _TOOL_KINDS


def _rejected(error: VLLMValidationError) -> HttpError:
    param = error.parameter or "input"
    return HttpError(400, f"{param}: {error}", param=param, code="invalid_value")
