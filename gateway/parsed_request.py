"""Converts a validated body and its headers to requests for the coordinator."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from baton.client import Prompt, RequestOptions
from baton.client.request import LaneName, SamplingOptions
from baton.gateway.error_responses import invalid_value
from baton.gateway.request_bodies import ChatBody, CompletionBody, GenerationBody, StreamOptions
from baton.runtime.names import is_request_id

# Headers of coding agents and proxies that name a session, in order of precedence.
SESSION_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "x-session-id", "session-id")
# The coordinator's limit for the ID of a session.
_MAX_SESSION_CHARS = 256
# OpenAI's default max_tokens of /v1/completions.
_DEFAULT_COMPLETION_TOKENS = 16
# Each choice is a request with images of its own.
_MAX_IMAGE_CHOICES = 8
# gRPC fields by the body field that a request used, in addition to error_responses.py.
_HTTP_NAMES = {
    "max_completion_tokens": "sampling.max_tokens",
    "top_logprobs": "sampling.logprobs",
    "structured_outputs": "sampling.structured_output",
    "request_id": "request_id",
    "session_id": "session_id",
}
# Body fields that become the client's options of the same name. The other two are converted: each
# choice has its own seed, and JSON holds the token ids of logit_bias as text.
_SAMPLING_FIELDS = tuple(
    name
    for name in GenerationBody.model_fields
    if name in SamplingOptions.__annotations__ and name not in ("seed", "logit_bias")
)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One HTTP generation request after parsing.

    Attributes:
        id: Request ID. If there are several choices, the ID of choice i has the suffix "-i".
        chat: Whether the request came by the chat route.
        lane: Lane of the request.
        prompts: Prompts; each prompt gets `n` choices.
        n: Number of choices per prompt.
        seed: Seed of a prompt's first choice; each further choice adds 1, as in vLLM.
        stream: Whether the response is a stream of server-sent events.
        include_usage: Send the token usage at the end of a stream.
        continuous_usage: Send the token usage in every chunk of a stream.
        num_logprobs: Number of most likely tokens per position to return; None: no logprobs.
        options: Options for the client, without the request ID and the seed.
        echo: Return the prompt in front of the output.
        only_prompt: Return the prompt without the output.
        num_prompt_logprobs: As num_logprobs, for the prompt's tokens.
        return_token_ids: Return the token IDs of prompts and outputs.
        names: HTTP names of gRPC fields for which the body may use two names.
    """

    id: str
    chat: bool
    lane: LaneName
    prompts: Sequence[Prompt]
    n: int
    seed: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    num_logprobs: int | None
    options: RequestOptions
    echo: bool = False
    only_prompt: bool = False
    num_prompt_logprobs: int | None = None
    return_token_ids: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_tokenizer(self) -> str | None:
        """Body field for which the gateway needs a tokenizer; None: no tokenizer is needed."""
        all_texts = all(isinstance(prompt, str) for prompt in self.prompts)
        if self.echo and (self.num_logprobs is not None or not all_texts):
            return "echo"
        all_ids = not self.chat and not any(isinstance(prompt, str) for prompt in self.prompts)
        return "return_token_ids" if self.return_token_ids and not all_ids else None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def has_valid_id(self) -> bool:
        """Whether the coordinator takes the IDs of all choices."""
        return is_request_id(self._choice_id(self.num_choices - 1))

    def choice_requests(self) -> Iterator[tuple[Prompt, RequestOptions]]:
        """Yields the prompt and client options of each choice, in order of the choice index."""
        for index in range(self.num_choices):
            options: RequestOptions = {**self.options, "request_id": self._choice_id(index)}
            if self.seed is not None:
                options["seed"] = self.seed + index % self.n
            yield self.prompts[index // self.n], options

    def _choice_id(self, index: int) -> str:
        return f"{self.id}-{index}" if self.num_choices > 1 else self.id


def new_request_id(prefix: str) -> str:
    """Generates an ID for a request without one."""
    return f"{prefix}-{secrets.token_hex(12)}"


def from_completion_body(
    body: CompletionBody, request_id: str, headers: Mapping[str, str]
) -> ParsedRequest:
    """Converts a /v1/completions body. Raises HttpError if a field or header is wrong."""
    options = _options(body, headers)
    if body.max_tokens is None:
        options["default_max_tokens"] = _DEFAULT_COMPLETION_TOKENS
    only_prompt = bool(body.echo) and body.max_tokens == 0
    if only_prompt:
        # The coordinator's minimum is 1; the gateway drops that token from the response.
        options["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise invalid_value("echo", True, "must be false in a stream with logprobs")
        options.setdefault("prompt_logprobs", body.logprobs)
    request = _build(body, request_id, headers, options, body.prompts(), body.logprobs)
    return replace(request, echo=bool(body.echo), only_prompt=only_prompt)


def from_chat_body(body: ChatBody, request_id: str, headers: Mapping[str, str]) -> ParsedRequest:
    """Converts a /v1/chat/completions body. Raises HttpError if a field or header is wrong."""
    options = _options(body, headers)
    if body.max_completion_tokens is not None:
        options["max_tokens"] = body.max_completion_tokens
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
    if body.template_kwargs:
        options["template_kwargs"] = body.template_kwargs
    if body.tools:
        options["tools"] = [tool.template_tool() for tool in body.tools]
    if not body.messages:
        raise invalid_value("messages", [], "must not be empty")
    turns = [message.turn() for message in body.messages]
    if any(one.has_images for one in body.messages):
        if body.return_token_ids:
            raise invalid_value("return_token_ids", True, "must be left out with images")
        if (body.n or 1) > _MAX_IMAGE_CHOICES:
            raise invalid_value("n", body.n, f"must be at most {_MAX_IMAGE_CHOICES} with images")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _build(body, request_id, headers, options, [turns], num_logprobs)


def _build(
    body: GenerationBody,
    request_id: str,
    headers: Mapping[str, str],
    options: RequestOptions,
    prompts: Sequence[Prompt],
    num_logprobs: int | None,
) -> ParsedRequest:
    lane = options["lane"] = _lane(body, headers)
    if num_logprobs is not None:
        options["logprobs"] = num_logprobs
    usage = body.stream_options or StreamOptions()
    return ParsedRequest(
        request_id,
        isinstance(body, ChatBody),
        lane,
        prompts,
        body.n or 1,
        body.seed,
        bool(body.stream),
        bool(usage.include_usage),
        bool(usage.include_usage and usage.continuous_usage_stats),
        num_logprobs,
        options,
        num_prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        names={
            grpc_field: name
            for name, grpc_field in _HTTP_NAMES.items()
            if getattr(body, name, None) is not None
        },
    )


def _options(body: GenerationBody, headers: Mapping[str, str]) -> RequestOptions:
    if body.stream and body.prompt_logprobs is not None:
        raise invalid_value("prompt_logprobs", body.prompt_logprobs, "must be left out in a stream")
    found: dict[str, Any] = {
        name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None
    }
    # As in vLLM: many clients always set max_tokens to the model's maximum length.
    found["cut_max_tokens"] = True
    for name, value in (
        ("model", body.model),
        # A later value of a name replaces an earlier one.
        ("session_id", session_in(headers)),
        ("session_id", body.session_id),
        ("session_id", body.prompt_cache_key),
        ("tenant", headers.get("x-baton-tenant")),
        ("authorization", headers.get("authorization")),
        ("traceparent", headers.get("traceparent")),
        ("timeout_s", timeout_s(headers)),
    ):
        if value is not None:
            found[name] = value
    if body.logit_bias:
        try:
            found["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        except ValueError:
            raise invalid_value("logit_bias", body.logit_bias, "keys must be token ids") from None
    return cast("RequestOptions", found | _structured(body))


def session_in(headers: Mapping[str, str]) -> str | None:
    """Returns the ID of the session that a request's headers name, if any."""
    named = next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)
    return session_id(named) if named is not None else None


def session_id(name: str) -> str:
    """Returns the ID of a session whose name may be longer than such an ID."""
    if len(name) <= _MAX_SESSION_CHARS:
        return name
    return hashlib.sha256(name.encode()).hexdigest()


def _structured(body: GenerationBody) -> dict[str, Any]:
    wanted, by_vllm = body.response_format, body.structured_outputs
    if wanted is not None and wanted.type != "text":
        if by_vllm is not None:
            allowed = "must be left out if response_format is set"
            raise invalid_value(
                "structured_outputs", by_vllm.model_dump(exclude_none=True), allowed
            )
        if wanted.json_schema is not None:
            return {"json_schema": wanted.json_schema.schema_}
        return {"json_object": True}
    if by_vllm is None:
        return {}
    found = by_vllm.model_dump(exclude_none=True)
    if "json_" in found:
        found["json_schema"] = found.pop("json_")
    if len(found) != 1:
        raise invalid_value(
            "structured_outputs",
            found,
            "must have exactly one of json, json_object, regex, choice, grammar",
        )
    return found


def _lane(body: GenerationBody, headers: Mapping[str, str]) -> LaneName:
    """Returns the lane: from the header, or batch if vLLM's `priority` is above 0 (less urgent)."""
    value = headers.get("x-baton-lane")
    if value is None:
        return "batch" if (body.priority or 0) > 0 else "interactive"
    if value not in ("interactive", "batch"):
        raise invalid_value("x-baton-lane", value, "must be interactive or batch")
    return cast("LaneName", value)


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Returns the timeout that a request's headers set, if any. Raises HttpError."""
    value = headers.get("x-baton-timeout-s")
    if value is None:
        return None
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise invalid_value("x-baton-timeout-s", value, "must be a positive number of seconds")
    return found
