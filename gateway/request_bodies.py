"""The fields of requests' bodies: OpenAI's, and vLLM's own beside them.

Whether values make sense to the model is the coordinator's to say.

Source: https://platform.openai.com/docs/api-reference; vllm/entrypoints/openai/*/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from baton.gateway.error_responses import invalid_value
from baton.runtime.errors import shown

T = TypeVar("T")

# A body has room for millions of wrong entries, and describing each takes time: of a list only the
# first wrong entry is told, and objects with more fields than any can have are refused unread.
_FailsFast = Annotated[list[T], Field(fail_fast=True)]
_MAX_FIELDS = 64
# As many as a coordinator takes.
_MAX_MESSAGES, _MAX_LOGIT_BIASES = 4096, 1024
_MAX_TOOLS = 1024


class BodyModel(BaseModel):
    """An object of a body, or the whole of it."""

    # Strict: "5" is no number and 1 no boolean.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _is_small(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > _MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields, of which some are unknown")
        return value


class StreamOptions(BodyModel):
    include_usage: bool | None = None
    # Of vLLM: with every chunk what there was of its choice so far.
    continuous_usage_stats: bool | None = None
    # Of OpenAI: padding against eavesdroppers, which a private server leaves out.
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
                "json_schema.schema must be there with type json_schema, and only then"
            )
        return self


class StructuredOutputs(BodyModel):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: _FailsFast[str] | None = None
    grammar: str | None = None


class GenerationBody(BodyModel):
    """What both routes take."""

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
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _FailsFast[int] | None = None
    bad_words: _FailsFast[str] | None = None
    # Empty it would allow no token, and to the coordinator it is as good as absent.
    allowed_token_ids: Annotated[_FailsFast[int], Field(min_length=1)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    # It comes back in a header.
    request_id: Annotated[str, Field(pattern=r"\A[A-Za-z0-9._:-]{1,128}\z")] | None = None
    # Requests that share it find their KV cache again.
    prompt_cache_key: str | None = None
    # The same, as vLLM calls it.
    session_id: str | None = None
    # Accepted, and of no consequence here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _has_few(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > _MAX_LOGIT_BIASES:
            raise ValueError(f"has {len(value)} entries; at most {_MAX_LOGIT_BIASES}")
        return value

    @model_validator(mode="after")
    def _streams_what_it_says(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


class CompletionBody(GenerationBody):
    prompt: Any
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    # The coordinator adds them to texts, and leaves those of chats to the template.
    add_special_tokens: Literal[True] | None = None

    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Texts, or prompts of token ids; at least one.

        Raises:
            HttpError: it is something else.
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


class Function(BodyModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    # A JSON schema.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BodyModel):
    """What the model may call."""

    type: Literal["function"]
    function: Function

    def described(self) -> dict[str, Any]:
        """As the chat template reads it: what is not said is null, as in vLLM, but for `strict`."""
        found = self.model_dump()
        if self.function.strict is None:
            del found["function"]["strict"]
        return found


class NamedFunction(BodyModel):
    name: str


class NamedTool(BodyModel):
    """The one that it is to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(BodyModel):
    name: str
    # As the model wrote them, which should be a JSON object.
    arguments: str | dict[str, Any] | None = None


class ToolCall(BodyModel):
    """Of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    # Of a stream's chunks, which some clients put together and send back.
    index: int | None = None
    function: CalledFunction


class Message(BodyModel):
    """One turn of a chat."""

    role: str
    content: str
    name: str | None = None
    tool_calls: _FailsFast[ToolCall] | None = None
    # Whose result a turn of role "tool" is.
    tool_call_id: str | None = None
    # Of an earlier answer, as vLLM calls it now and as it did.
    reasoning: str | None = None
    reasoning_content: str | None = None

    def turn(self) -> dict[str, Any]:
        """As the chat template reads it; reasoning by both names, since templates differ."""
        turn = self.model_dump(exclude_none=True)
        for call in turn.get("tool_calls", ()):
            call.pop("index", None)
        reasoned = turn.get("reasoning", turn.get("reasoning_content"))
        return turn | ({"reasoning": reasoned, "reasoning_content": reasoned} if reasoned else {})

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Answers come back as turns, with all their empty fields."""
        if not isinstance(value, Mapping):
            return value
        kept = {key: one for key, one in value.items() if one not in (None, [])}
        return {"content": "", **kept}

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        texts = []
        for index, part in enumerate(value):
            if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                raise ValueError(f"part {index} is {shown(part)}; must be an object with a type")
            if part["type"] != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"part {index} has type {shown(part['type'])}; only text is served"
                )
            texts.append(part["text"])
        # As vLLM joins them for templates that take plain text.
        return "\n".join(texts)


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=_MAX_MESSAGES)]


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=_MAX_TOOLS)]


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Literal[False] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    # Of vLLM: whether what was reasoned is shown.
    include_reasoning: bool | None = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template, with what follows from the effort, as in vLLM."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
            kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
        return kwargs

    @property
    def chosen_tool(self) -> str | None:
        """The tool that is to be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def may_call(self) -> bool:
        """Whether tools are there to be called, as they are unless it is said otherwise."""
        return bool(self.tools) and self.tool_choice != "none"

    @model_validator(mode="after")
    def _has_chosen_tool(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools or ()]
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice needs tools")
        if self.chosen_tool is not None and self.chosen_tool not in names:
            raise ValueError(f"tool_choice names {shown(self.chosen_tool)}, which is none of tools")
        return self

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
