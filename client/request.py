"""Builds the protobuf message of a request from keyword arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from baton.client import errors
from baton.client.content_parts import content_parts
from baton.runtime.names import did_you_mean
from baton.v1 import common_pb2, inference_pb2

LaneName: TypeAlias = Literal["interactive", "batch"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat.

    Attributes:
        role: "system", "user", "assistant" or another role that the model's chat template knows.
        content: Text, or parts with images (content_parts.py); empty if the turn only calls tools.
        fields: Further fields that the chat template reads, named as in OpenAI's API:
            `tool_calls`, `tool_call_id`.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]] = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a request in milliseconds; 0: the lane's target applies.

    `ttft_ms_per_1k_tokens` is added to `ttft_ms` per 1,000 prompt tokens; it must be 0 without
    `ttft_ms`.
    """

    ttft_ms: int = 0
    itl_ms: int = 0
    ttft_ms_per_1k_tokens: int = 0


# Text, chat turns (also as OpenAI's dictionaries {"role": ..., "content": ...}), or token IDs.
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, Any]]


class SamplingOptions(TypedDict, total=False):
    """Sampling options, named as in vLLM. An option that is left out has the engine's default.

    At most one of `json_schema` and the options after it may be set; it constrains the output.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    bad_words: Sequence[str]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    prompt_logprobs: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    structural_tag: str | Mapping[str, Any]


class RequestOptions(SamplingOptions, total=False):
    """All options of a request.

    Attributes:
        model: Name of the base model or of a LoRA adapter; empty or left out: the base model.
        lane: "interactive" (default) or "batch", which may wait longer.
        slo: Latency targets; left out: the targets of the lane.
        timeout_s: Time limit from submission; then the request fails with DeadlineExceededError.
            Both the client and the coordinator enforce the limit.
        request_id: Request ID; left out: the coordinator assigns one.
        session_id: ID that the requests of one conversation share.
        default_max_tokens: Output limit of a request without max_tokens, cut to the room that the
            model's context leaves.
        cut_max_tokens: Cut max_tokens to the room that the model's context leaves, instead of
            refusing the request.
        add_generation_prompt: Whether a chat prompt ends with the start of the assistant's turn.
        continue_final_message: Whether the output continues the text of a chat's last message,
            which must be the assistant's; add_generation_prompt must be False then.
        template_kwargs: Additional variables of the model's chat template.
        tools: Tools that the model may call, in the form of OpenAI's API; calls arrive as text.
        authorization: Credential of this request, "Bearer ...".
        traceparent: W3C trace context.
        tenant: Tenant of the request; left out: the client's tenant.
        route: Route by which the request came to a gateway, for `baton explain`.
        retry_timeout_s: Time after submission in which a refused request is submitted again, if
            the coordinator says when to retry; 0: never. Left out: the client's setting.
    """

    model: str
    lane: LaneName
    slo: Slo | None
    timeout_s: float | None
    request_id: str
    session_id: str
    default_max_tokens: int
    cut_max_tokens: bool
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    authorization: str
    traceparent: str
    tenant: str
    route: str
    retry_timeout_s: float | None


# Ranges of protobuf integers.
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
}
# Options that other functions than `_set_option` set, or that only the client uses.
_SET_ELSEWHERE = (
    "lane",
    "add_generation_prompt",
    "continue_final_message",
    "template_kwargs",
    "tools",
    "retry_timeout_s",
)
_STRUCTURED = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")


def build(prompt: Prompt, options: RequestOptions) -> inference_pb2.GenerateRequest:
    """Builds the protobuf message. An option that is None counts as left out.

    Raises:
        InvalidArgumentError: The message cannot hold a value. (The coordinator validates the rest.)
        TypeError: An option is unknown.
    """
    request = inference_pb2.GenerateRequest()
    request.lane = _lane(options.get("lane") or "interactive")
    _set_prompt(request, prompt, options)
    for name, value in options.items():
        if name not in RequestOptions.__annotations__:
            hint = did_you_mean(name, RequestOptions.__annotations__)
            raise TypeError(f"unknown option {name!r}{hint}")
        if value is None or name in _SET_ELSEWHERE:
            continue
        path = f"sampling.{name}" if name in SamplingOptions.__annotations__ else name
        try:
            _set_option(request, name, value)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            if name == "authorization":
                # The credential is secret: the error must not contain it.
                raise errors.invalid(path, "...", "must be text in UTF-8") from None
            raise errors.invalid(path, value, _allowed(name, error)) from None
    chosen = [name for name in _STRUCTURED if options.get(name) is not None]
    if len(chosen) > 1:
        raise errors.invalid(
            "sampling.structured_output", chosen, "only one of these options may be set"
        )
    return request


def _allowed(name: str, error: Exception) -> str:
    """Returns what a field allows. For numbers out of range, protobuf's message lacks the range."""
    field = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name.get(name)
    if "out of range" in str(error) and field is not None and field.cpp_type in _RANGES:
        return "must be {} to {}".format(*_RANGES[field.cpp_type])
    return str(error)


def _set_prompt(
    request: inference_pb2.GenerateRequest, prompt: Prompt, options: RequestOptions
) -> None:
    if isinstance(prompt, str):
        try:
            request.text = prompt
        except UnicodeEncodeError:
            # The text was decoded from bytes that are not UTF-8 (surrogate escapes).
            raise errors.invalid("text", prompt, "must be valid UTF-8") from None
    elif isinstance(prompt, (bytes, bytearray)):
        # bytes are a sequence of integers, but not of token IDs.
        raise errors.invalid("prompt", prompt, "must be text, chat turns or token ids")
    elif len(prompt) > 0 and isinstance(prompt[0], (ChatMessage, Mapping)):
        turns = cast("Sequence[ChatMessage | Mapping[str, Any]]", prompt)
        request.chat.CopyFrom(_chat(turns, options))
    else:
        request.tokens.CopyFrom(_token_ids(cast("Sequence[int]", prompt)))


def _lane(lane: str) -> common_pb2.Lane.ValueType:
    lanes = {"interactive": common_pb2.LANE_INTERACTIVE, "batch": common_pb2.LANE_BATCH}
    if lane not in lanes:
        raise errors.invalid("lane", lane, f"must be one of {', '.join(lanes)}")
    return lanes[lane]


def _chat(
    turns: Sequence[ChatMessage | Mapping[str, Any]], options: RequestOptions
) -> inference_pb2.ChatPrompt:
    chat = inference_pb2.ChatPrompt()
    for index, turn in enumerate(turns):
        where = f"chat.messages[{index}]"
        try:
            message = turn if isinstance(turn, ChatMessage) else _message(turn)
            content = message.content
            added = chat.messages.add(
                role=message.role, content=content if isinstance(content, str) else ""
            )
        except (KeyError, TypeError, ValueError):
            allowed = "must have role and content: a text, or parts"
            raise errors.invalid(where, turn, allowed) from None
        if not isinstance(content, str):
            added.parts.extend(content_parts(where, content))
        if message.fields:
            added.fields = _as_json(f"{where}.fields", dict(message.fields))
    if (add := options.get("add_generation_prompt")) is not None:
        chat.add_generation_prompt = add
    chat.continue_final_message = bool(options.get("continue_final_message"))
    if kwargs := options.get("template_kwargs"):
        chat.template_kwargs = _as_json("chat.template_kwargs", dict(kwargs))
    if tools := options.get("tools"):
        chat.tools = _as_json("chat.tools", list(tools))
    return chat


def _message(turn: Mapping[str, Any]) -> ChatMessage:
    fields = dict(turn)
    role, content = fields.pop("role"), fields.pop("content", None)
    if content is None and fields.get("tool_calls"):
        # In OpenAI's API, a turn that only calls tools has no content.
        content = ""
    if not isinstance(content, (str, list, tuple)):
        raise TypeError
    return ChatMessage(role, content, fields)


def _as_json(field: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (RecursionError, TypeError, ValueError) as error:
        raise errors.invalid(field, value, str(error)) from None


def _token_ids(ids: Sequence[int]) -> inference_pb2.TokenIds:
    try:
        return inference_pb2.TokenIds(ids=ids)
    except (TypeError, ValueError):
        wrong = next((i for i in ids if not isinstance(i, int) or not 0 <= i < 2**32), ids)
        raise errors.invalid("tokens.ids", wrong, "must be non-negative integers") from None


def _set_option(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    sampling = request.sampling
    if name == "slo":
        slo = inference_pb2.Slo(
            ttft_ms=value.ttft_ms,
            itl_ms=value.itl_ms,
            ttft_ms_per_1k_tokens=value.ttft_ms_per_1k_tokens,
        )
        request.slo.CopyFrom(slo)
    elif name == "timeout_s":
        if not (math.isfinite(value) and value > 0 and math.isfinite(value * 1e9)):
            raise ValueError("must be a positive number of seconds")
        request.timeout.FromNanoseconds(math.ceil(value * 1e9))
    elif name not in SamplingOptions.__annotations__:
        setattr(request, name, value)
    elif name == "stop":
        sampling.stop.extend([value] if isinstance(value, str) else value)
    elif name in ("bad_words", "choice") and isinstance(value, str):
        # Without this check, each character of the string would become a word of its own.
        raise TypeError("must be a list of strings")
    elif name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
        getattr(sampling, name).extend(value)
    elif name == "logit_bias":
        sampling.logit_bias.update(value)
    elif name in ("json_schema", "structural_tag"):
        text = value if isinstance(value, str) else json.dumps(value)
        setattr(sampling.structured_output, name, text)
    elif name == "choice":
        sampling.structured_output.choice.values.extend(value)
    elif name in _STRUCTURED:
        setattr(sampling.structured_output, name, value)
    else:
        setattr(sampling, name, value)
