"""The JSON fields of request bodies: OpenAI's fields and vLLM's extensions.

The coordinator checks whether values fit the model.

Source: https://platform.openai.com/docs/api-reference; vllm/entrypoints/openai/*/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from baton.gateway.error_responses import invalid_value
from baton.runtime.errors import shown

T = TypeVar("T")

# A body may contain millions of wrong entries, and describing each one takes time. Therefore only
# the first wrong entry of a list is reported, and objects with too many fields are refused unread.
_FailsFast = Annotated[list[T], Field(fail_fast=True)]
_MAX_FIELDS = 64
# The coordinator's limits.
MAX_MESSAGES, _MAX_LOGIT_BIASES = 4096, 1024
MAX_TOOLS = 1024
# Parts of all turns of another API: to validate one takes up to 20 us.
MAX_PARTS = 16384
# Fields that clients send with tools, earlier turns and their tool calls, because the answer of
# another server had them or to mark a part of the prompt for a cache. No chat template reads them.
# The text of `reasoning_details` and `thinking_blocks` is also in the turn's reasoning.
_UNREAD_FIELDS = frozenset(
    {
        "annotations",
        "cache_control",
        "copilot_cache_control",
        "extra_content",
        "parsed",
        "parsed_arguments",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    }
)


class BodyModel(BaseModel):
    """Base class of a body and of the JSON objects in it."""

    # Strict: "5" is not accepted as a number, nor 1 as a boolean.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _is_small(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > _MAX_FIELDS:
            raise ValueError(
                f"has {len(value)} fields, some of them unknown; at most {_MAX_FIELDS}"
            )
        return value


class StreamOptions(BodyModel):
    include_usage: bool | None = None
    # vLLM: send the usage of a choice so far with each of its chunks.
    continuous_usage_stats: bool | None = None
    # OpenAI: padding against eavesdroppers. Accepted and ignored.
    include_obfuscation: bool | None = None


class JsonSchema(BodyModel):
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BodyModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        given = self.json_schema is not None and self.json_schema.schema_ is not None
        if (self.type == "json_schema") is not given:
            raise ValueError(
                "json_schema.schema is required with type json_schema and not allowed otherwise"
            )
        return self


class StructuredOutputs(BodyModel):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: _FailsFast[str] | None = None
    grammar: str | None = None


class GenerationBody(BodyModel):
    """Fields that both generation routes accept."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | _FailsFast[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's extensions.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _FailsFast[int] | None = None
    bad_words: _FailsFast[str] | None = None
    # An empty list is refused: it would allow no token, but gRPC cannot tell it from an absent one.
    allowed_token_ids: Annotated[_FailsFast[int], Field(min_length=1)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    # Returned in the header x-request-id.
    request_id: Annotated[str, Field(pattern=r"\A[A-Za-z0-9._:-]{1,128}\z")] | None = None
    # Requests with the same key share their KV cache in the prefix cache.
    prompt_cache_key: str | None = None
    # vLLM's name of prompt_cache_key.
    session_id: str | None = None
    # Accepted and ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _has_few_entries(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > _MAX_LOGIT_BIASES:
            raise ValueError(f"has {len(value)} entries; at most {_MAX_LOGIT_BIASES}")
        return value

    @model_validator(mode="after")
    def _requires_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


class CompletionBody(GenerationBody):
    prompt: Any
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    # The coordinator always adds special tokens to text; in chats the template adds them.
    add_special_tokens: Literal[True] | None = None

    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Returns the prompts, as text or token IDs; at least one.

        Raises:
            HttpError: `prompt` has another type.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _are_ids(prompt):
                return [prompt]
            if all(isinstance(one, str) or (_are_ids(one) and one) for one in prompt):
                return prompt
        allowed = "must be a text, a list of texts, token ids, or a list of lists of token ids"
        raise invalid_value("prompt", prompt, allowed)


class LenientModel(BodyModel):
    """Base class of turns, tool calls and tools, which clients send in many forms."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unread_fields(cls, value: Any) -> Any:
        """Drops empty and unread fields, which clients send when they return an earlier answer."""
        if not isinstance(value, Mapping):
            return value
        return {
            key: one
            for key, one in value.items()
            if one not in (None, []) and key not in _UNREAD_FIELDS
        }


class Function(LenientModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    # JSON schema of the arguments.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # vLLM: an agent loads the tool later. Chat templates may leave out such a tool.
    defer_loading: bool | None = None


class Tool(LenientModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def template_tool(self) -> dict[str, Any]:
        """Returns the tool for the chat template; as in vLLM, absent fields are null."""
        found = self.model_dump()
        for name in ("strict", "defer_loading"):
            if found["function"][name] is None:
                del found["function"][name]
        return found


class NamedFunction(BodyModel):
    name: str


class NamedTool(BodyModel):
    """The tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(LenientModel):
    name: str
    # As the model wrote them; normally a JSON object.
    arguments: str | dict[str, Any] | None = None


class ToolCall(LenientModel):
    """A tool call in an earlier assistant turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    # Some clients join the chunks of a stream and send this field back.
    index: int | None = None
    function: CalledFunction


class Message(LenientModel):
    """One turn of a chat."""

    role: str
    # Parts if there are several, or if some are images: the coordinator knows whether the chat
    # template reads parts, and joins texts for the other templates.
    content: str | list[dict[str, Any]] = ""
    name: str | None = None
    tool_calls: _FailsFast[ToolCall] | None = None
    # ID of the tool call whose result this turn (role "tool") contains.
    tool_call_id: str | None = None
    # Reasoning of an earlier assistant turn, by vLLM's current and former names.
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def has_images(self) -> bool:
        """Whether some parts of the content are images."""
        return isinstance(self.content, list) and any(
            part["type"] == "image_url" for part in self.content
        )

    def turn(self) -> dict[str, Any]:
        """Returns the turn for the chat template, with the reasoning by both of its names."""
        turn = self.model_dump(exclude_none=True)
        for call in turn.get("tool_calls", ()):
            call.pop("index", None)
        reasoned = turn.get("reasoning", turn.get("reasoning_content"))
        return turn | ({"reasoning": reasoned, "reasoning_content": reasoned} if reasoned else {})

    @model_validator(mode="before")
    @classmethod
    def _with_refusal_as_content(cls, value: Any) -> Any:
        """Makes the text of an assistant turn that refused, which has no content, its content."""
        if not isinstance(value, Mapping) or not isinstance(value.get("refusal"), str):
            return value
        kept = {key: one for key, one in value.items() if key != "refusal"}
        return {**kept, "content": value.get("content") or value["refusal"]}

    @field_validator("content", mode="before")
    @classmethod
    def _as_text_or_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        parts = [_content_part(index, part) for index, part in enumerate(value)]
        if len(parts) > 1 or any(part["type"] == "image_url" for part in parts):
            return parts
        return parts[0]["text"] if parts else ""


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    # vLLM: the output continues the last message.
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Literal[False] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    # vLLM: whether the response includes the reasoning.
    include_reasoning: bool | None = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template, including those set by reasoning_effort, as in vLLM."""
        return template_kwargs(self.chat_template_kwargs, self.reasoning_effort)

    @property
    def chosen_tool(self) -> str | None:
        """Name of the tool that the model must call; None: the model chooses."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def may_call(self) -> bool:
        """Whether the model may call tools; tool_choice is "auto" by default."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def continued_text(self) -> str | None:
        """Text that the output continues; None: the output begins a new message."""
        if not (self.continue_final_message and self.messages):
            return None
        content = self.messages[-1].content
        if isinstance(content, str):
            return content
        return "\n".join(part["text"] for part in content if part["type"] == "text")

    @model_validator(mode="after")
    def _has_chosen_tool(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools or ()]
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice needs tools")
        if self.chosen_tool is not None and self.chosen_tool not in names:
            raise ValueError(f"tool_choice names {shown(self.chosen_tool)}, which is not in tools")
        return self

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


def template_kwargs(kwargs: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Returns variables of the chat template with those that reasoning_effort sets, as in vLLM."""
    found = dict(kwargs or {})
    if effort is not None:
        found["reasoning_effort"] = effort
        found.setdefault("enable_thinking", effort != "none")
    return found


def _content_part(index: int, part: Any) -> dict[str, Any]:
    """Returns a part of a message's content as {"type", "text"} or {"type", "image_url"}."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ValueError(f"part {index} is {shown(part)}; must be an object with a type")
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
    raise ValueError(
        f"part {index} has type {shown(part['type'])}; must be text with a text, or image_url with "
        "a data URL"
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
