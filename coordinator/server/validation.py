"""Validates requests before any other work.

Every check raises InvalidArgument with the field's name in the proto, its value, and the allowed
values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.runtime.config import CoordinatorConfig, LaneConfig
from baton.runtime.errors import ContextLengthExceeded, InvalidArgument, NotFound, shown
from baton.runtime.names import (
    REQUEST_IDS,
    REVISION_NAMES,
    TENANT_NAMES,
    is_request_id,
    is_revision,
    is_tenant,
)
from baton.runtime.prompts.chat_continuation import check_continuation
from baton.runtime.prompts.sampling import OPTIONAL_FIELDS, Range, given
from baton.v1 import common_pb2, inference_pb2

_ROUTE = re.compile(r"[A-Za-z0-9._/-]{1,64}")
_LANES = (common_pb2.LANE_UNSPECIFIED, common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH)
_MAX_SESSION_ID_CHARS = 256
# Longest texts of fields that no other check bounds; a waiting request keeps them in memory.
_MAX_AUTHORIZATION_CHARS = 16 * 2**10
_MAX_TRACEPARENT_CHARS = 512
_MAX_STOP_TOKEN_IDS = 256
_MAX_BAD_WORDS = 256
_MAX_LOGIT_BIASES = 1024
_MAX_CHOICES = 1024
_MAX_GRAMMAR_BYTES = 64 * 2**10
_MAX_MESSAGES = 4096
_MAX_PARTS = 16384
# Variables of chat templates, and fields of chat messages, that the coordinator sets itself.
# Renderers of vLLM and Transformers take a client's variables as keyword arguments. So variables
# must not have the name of another argument either: `chat_template`, for example, would replace the
# model's template by a program of the client.
_OWN_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_OWN_FIELDS = frozenset({"role", "content"})
# Limit of prompt logprobs, because a Finished event must fit one message.
_MAX_PROMPT_LOGPROB_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model; None: not known yet."""

    name: str
    max_model_len: int | None
    vocab_size: int | None
    adapters: frozenset[str] = frozenset()
    takes_images: bool | None = None


def check_request(
    request: inference_pb2.GenerateRequest,
    config: CoordinatorConfig,
    model: ModelLimits,
    *,
    sampling_is_known: bool = False,
) -> None:
    """Checks everything that does not need the tokenized prompt.

    Args:
        request: the client's request.
        config: limits of the coordinator.
        model: limits of the model.
        sampling_is_known: whether equal sampling parameters have passed the checks before.

    Raises:
        InvalidArgument: A field is invalid.
        NotFound: The requested model is neither the served model nor one of its adapters.
    """
    if request.model and request.model != model.name and request.model not in model.adapters:
        served = " and ".join([repr(model.name), *map(repr, sorted(model.adapters))])
        raise NotFound(f"model is {shown(request.model)}; this coordinator serves {served}")
    if request.request_id and not is_request_id(request.request_id):
        raise InvalidArgument("request_id", request.request_id, REQUEST_IDS)
    if len(request.session_id) > _MAX_SESSION_ID_CHARS:
        raise InvalidArgument(
            "session_id", request.session_id, f"at most {_MAX_SESSION_ID_CHARS} characters"
        )
    if request.route and not _ROUTE.fullmatch(request.route):
        raise InvalidArgument("route", request.route, "at most 64 characters of [A-Za-z0-9._/-]")
    if (num_chars := len(request.authorization)) > _MAX_AUTHORIZATION_CHARS:
        # The value is not named: it is a secret.
        found, allowed = f"{num_chars} characters", f"at most {_MAX_AUTHORIZATION_CHARS}"
        raise InvalidArgument("authorization", found, allowed)
    if len(request.traceparent) > _MAX_TRACEPARENT_CHARS:
        # Invalid ones are ignored, as the W3C's Trace Context says.
        request.ClearField("traceparent")
    if request.tenant and not is_tenant(request.tenant):
        raise InvalidArgument("tenant", request.tenant, TENANT_NAMES)
    if request.lane not in _LANES:
        raise InvalidArgument("lane", int(request.lane), "LANE_INTERACTIVE (1) or LANE_BATCH (2)")
    if request.HasField("timeout"):
        timeout = request.timeout
        if timeout.seconds < 0 or timeout.nanos < 0 or not (timeout.seconds or timeout.nanos):
            raise InvalidArgument(
                "timeout", f"{timeout.seconds + timeout.nanos / 1e9:g} s", "more than 0 s"
            )
    if request.slo.ttft_ms_per_1k_tokens and not request.slo.ttft_ms:
        raise InvalidArgument(
            "slo.ttft_ms_per_1k_tokens",
            request.slo.ttft_ms_per_1k_tokens,
            "must be 0 without slo.ttft_ms",
        )
    _check_prompt(request, config, model)
    if not sampling_is_known:
        _check_sampling(request.sampling, config, model)
    _check_resume(request, config, model)


def check_lengths(
    request: inference_pb2.GenerateRequest, num_prompt_tokens: int, model: ModelLimits
) -> None:
    """Checks limits that depend on the number of prompt tokens.

    Raises:
        InvalidArgument: The prompt is empty, or prompt and output exceed the context.
    """
    sampling, context = request.sampling, model.max_model_len
    field = request.WhichOneof("prompt") or "prompt"
    if num_prompt_tokens == 0:
        raise InvalidArgument(field, "0 tokens", "the prompt must have at least one token")
    num_entries = num_prompt_tokens * (sampling.prompt_logprobs + 1)
    if sampling.HasField("prompt_logprobs") and num_entries > _MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidArgument(
            "sampling.prompt_logprobs",
            sampling.prompt_logprobs,
            f"prompt tokens ({num_prompt_tokens}) x (prompt_logprobs + 1) must be at most "
            f"{_MAX_PROMPT_LOGPROB_ENTRIES}",
        )
    if context is None:
        return
    if num_prompt_tokens >= context:
        raise ContextLengthExceeded(field, num_prompt_tokens, context)
    room = context - num_prompt_tokens
    most = context if request.cut_max_tokens else room
    if sampling.HasField("max_tokens") and sampling.max_tokens > most:
        raise InvalidArgument(
            "sampling.max_tokens",
            sampling.max_tokens,
            f"at most {most}: prompt ({num_prompt_tokens} tokens) and output must fit the context "
            f"of {context} tokens",
        )
    if sampling.min_tokens > room:
        raise InvalidArgument(
            "sampling.min_tokens",
            sampling.min_tokens,
            f"at most {room}: prompt ({num_prompt_tokens} tokens) and output must fit the context "
            f"of {context} tokens",
        )
    if len(request.resume.token_ids) > room:
        raise InvalidArgument(
            "resume.token_ids",
            f"{len(request.resume.token_ids)} tokens",
            f"at most {room}: prompt ({num_prompt_tokens} tokens) and output must fit the context "
            f"of {context} tokens",
        )


def check_lane(
    request: inference_pb2.GenerateRequest, num_prompt_tokens: int, limits: LaneConfig, name: str
) -> None:
    """Checks the limits of the request's lane.

    Raises:
        InvalidArgument: The prompt or the output is too long for the lane.
    """
    limit = limits.max_prompt_tokens
    if limit is not None and num_prompt_tokens > limit:
        raise InvalidArgument(
            request.WhichOneof("prompt") or "prompt",
            f"{num_prompt_tokens} tokens",
            f"at most {limit} in the {name} lane",
        )
    limit = limits.max_output_tokens
    for field in ("max_tokens", "min_tokens"):
        value = getattr(request.sampling, field)
        if limit is not None and value > limit:
            raise InvalidArgument(f"sampling.{field}", value, f"at most {limit} in the {name} lane")


def _check_prompt(
    request: inference_pb2.GenerateRequest, config: CoordinatorConfig, model: ModelLimits
) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt", None, "must be one of text, chat and tokens")
    if kind == "text":
        if not request.text:
            raise InvalidArgument("text", "", "must not be empty")
        num_bytes = len(request.text.encode())
    elif kind == "tokens":
        ids = request.tokens.ids
        if not ids:
            raise InvalidArgument("tokens.ids", [], "must not be empty")
        num_bytes = 4 * len(ids)
    else:
        num_bytes = _check_chat(request.chat)
    if num_bytes > config.max_prompt_bytes:
        raise InvalidArgument(
            "tokens.ids" if kind == "tokens" else kind,
            f"{num_bytes} bytes",
            f"at most {config.max_prompt_bytes} bytes (a token id counts 4)",
        )
    if kind == "tokens":
        check_token_ids("tokens.ids", request.tokens.ids, model)


def _check_chat(chat: inference_pb2.ChatPrompt) -> int:
    """Checks a chat prompt; returns the number of bytes of its texts."""
    if not chat.messages:
        raise InvalidArgument("chat.messages", [], "must not be empty")
    if len(chat.messages) > _MAX_MESSAGES:
        raise InvalidArgument(
            "chat.messages", f"{len(chat.messages)} messages", f"at most {_MAX_MESSAGES}"
        )
    if (num_parts := sum(len(message.parts) for message in chat.messages)) > _MAX_PARTS:
        raise InvalidArgument("chat.messages", f"{num_parts} parts", f"at most {_MAX_PARTS} in all")
    num_bytes = 0
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgument(f"chat.messages[{index}].role", "", "must not be empty")
        num_bytes += len(message.role.encode()) + len(message.content.encode())
        if message.parts:
            num_bytes += _check_parts(f"chat.messages[{index}]", message)
        if message.fields:
            field = f"chat.messages[{index}].fields"
            num_bytes += _check_object(field, message.fields, _OWN_FIELDS)
    if chat.template_kwargs:
        num_bytes += _check_object("chat.template_kwargs", chat.template_kwargs, _OWN_VARIABLES)
    if chat.tools:
        num_bytes += _check_tools(chat.tools)
    check_continuation(chat)
    return num_bytes


def _check_parts(field: str, message: inference_pb2.ChatMessage) -> int:
    """Checks the content parts of a message; returns the number of bytes of their texts."""
    if message.content:
        raise InvalidArgument(f"{field}.content", message.content, "must be empty beside parts")
    for number, part in enumerate(message.parts):
        if part.WhichOneof("part") is None:
            raise InvalidArgument(f"{field}.parts[{number}]", None, "must be a text or an image")
    return sum(len(part.text.encode()) for part in message.parts)


def _check_object(field: str, text: str, own: frozenset[str]) -> int:
    """Checks a JSON object for the chat template; returns the number of bytes of its text."""
    found = _from_json(field, text)
    if not isinstance(found, dict):
        raise InvalidArgument(field, text, "must be a JSON object")
    if taken := own & found.keys():
        names = ", ".join(sorted(own))
        raise InvalidArgument(
            field,
            sorted(taken),
            f"must not have any of the names that the coordinator sets: {names}",
        )
    return len(text.encode())


def _check_tools(text: str) -> int:
    field = "chat.tools"
    found = _from_json(field, text)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise InvalidArgument(field, text, "must be a JSON array of objects")
    return len(text.encode())


def _from_json(field: str, text: str) -> Any:
    try:
        found = json.loads(text)
        # Rejects lone surrogates (\ud800 to \udfff), which tokenizers do not accept.
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, text, f"must be JSON text: {error}") from None
    return found


def _check_resume(
    request: inference_pb2.GenerateRequest, config: CoordinatorConfig, model: ModelLimits
) -> None:
    if not request.HasField("resume"):
        return
    resume, sampling = request.resume, request.sampling
    num_known = len(resume.token_ids)
    check_token_ids("resume.token_ids", resume.token_ids, model)
    if sampling.HasField("max_tokens") and num_known > sampling.max_tokens:
        raise InvalidArgument(
            "resume.token_ids",
            f"{num_known} tokens",
            f"at most sampling.max_tokens, which is {sampling.max_tokens}",
        )
    if resume.num_text_chars and not num_known:
        raise InvalidArgument(
            "resume.num_text_chars", resume.num_text_chars, "must be 0 without resume.token_ids"
        )
    if resume.revision and not is_revision(resume.revision):
        raise InvalidArgument("resume.revision", resume.revision, REVISION_NAMES)
    check_token_ids("resume.prompt_token_ids", resume.prompt_token_ids, model)
    if 4 * len(resume.prompt_token_ids) > config.max_prompt_bytes:
        raise InvalidArgument(
            "resume.prompt_token_ids",
            f"{len(resume.prompt_token_ids)} tokens",
            f"at most {config.max_prompt_bytes // 4}",
        )


def check_token_ids(field: str, ids: Sequence[int], model: ModelLimits) -> None:
    """Raises InvalidArgument if an ID is outside the vocabulary."""
    vocab_size = model.vocab_size
    # [:] copies the field into a list, because iterating over a protobuf field is slow.
    if vocab_size is None or not ids or max(ids[:]) < vocab_size:
        return
    index, bad = next((i, one) for i, one in enumerate(ids) if one >= vocab_size)
    raise InvalidArgument(
        f"{field}[{index}]", bad, f"must be below the vocabulary size of {vocab_size}"
    )


def _check_sampling(
    sampling: common_pb2.SamplingParams, config: CoordinatorConfig, model: ModelLimits
) -> None:
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens < 1:
            raise InvalidArgument("sampling.max_tokens", sampling.max_tokens, "at least 1")
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidArgument(
                "sampling.min_tokens",
                sampling.min_tokens,
                f"at most sampling.max_tokens, which is {sampling.max_tokens}",
            )
    for name, allowed in OPTIONAL_FIELDS.items():
        if allowed is not None and given(sampling, name):
            _check_number(f"sampling.{name}", getattr(sampling, name), allowed)
    if sampling.top_k < -1:
        raise InvalidArgument("sampling.top_k", sampling.top_k, "0 or -1 for all tokens, or more")
    _check_strings(
        "sampling.stop", sampling.stop, config.max_stop_strings, config.max_stop_string_chars
    )
    _check_strings(
        "sampling.bad_words", sampling.bad_words, _MAX_BAD_WORDS, config.max_stop_string_chars
    )
    _check_count("sampling.stop_token_ids", sampling.stop_token_ids, _MAX_STOP_TOKEN_IDS)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    if model.vocab_size is not None:
        _check_count("sampling.allowed_token_ids", sampling.allowed_token_ids, model.vocab_size)
    check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, model)
    _check_count("sampling.logit_bias", sampling.logit_bias, _MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        if model.vocab_size is not None and token_id >= model.vocab_size:
            raise InvalidArgument(
                "sampling.logit_bias",
                token_id,
                f"token ids must be below the vocabulary size of {model.vocab_size}",
            )
        if not -100.0 <= bias <= 100.0:
            raise InvalidArgument(f"sampling.logit_bias[{token_id}]", bias, "-100 to 100")
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, field)
        if value > config.max_logprobs:
            raise InvalidArgument(f"sampling.{field}", value, f"at most {config.max_logprobs}")
    if sampling.HasField("structured_output"):
        _check_structured(sampling.structured_output)


def _check_number(field: str, value: float, allowed: Range) -> None:
    low, high = allowed.low, allowed.high
    is_low = value < low or (allowed.excludes_low and value == low)
    if not math.isfinite(value) or value > high or is_low:
        above = f"more than {low:g}" if allowed.excludes_low else f"at least {low:g}"
        raise InvalidArgument(field, value, f"must be finite, {above} and at most {high:g}")


def _check_count(field: str, values: Sequence[object] | Iterable[object], limit: int) -> None:
    count = len(values)  # type: ignore[arg-type]  # Repeated and map fields have one.
    if count > limit:
        raise InvalidArgument(field, f"{count} entries", f"at most {limit}")


def _check_strings(field: str, values: Sequence[str], limit: int, max_chars: int) -> None:
    _check_count(field, values, limit)
    for index, value in enumerate(values):
        if not value:
            raise InvalidArgument(f"{field}[{index}]", "", "must not be empty")
        if len(value) > max_chars:
            raise InvalidArgument(
                f"{field}[{index}]", f"{len(value)} characters", f"at most {max_chars}"
            )


def _check_structured(output: common_pb2.StructuredOutput) -> None:
    field = "sampling.structured_output"
    kind = output.WhichOneof("constraint")
    if kind is None:
        raise InvalidArgument(
            field,
            None,
            "must be one of json_schema, json_object, regex, choice, grammar, structural_tag",
        )
    field = f"{field}.{kind}"
    if kind == "json_object":
        if not output.json_object:
            raise InvalidArgument(field, False, "must be true, or left out")
        return
    if kind == "choice":
        values = output.choice.values
        if not values:
            raise InvalidArgument(f"{field}.values", [], "must not be empty")
        _check_strings(f"{field}.values", values, _MAX_CHOICES, _MAX_GRAMMAR_BYTES)
        _check_grammar_bytes(f"{field}.values", sum(len(one.encode()) for one in values))
        return
    text: str = getattr(output, kind)
    if not text.strip():
        raise InvalidArgument(field, text, "must not be empty")
    _check_grammar_bytes(field, len(text.encode()))
    if kind == "json_schema":
        _check_schema(field, text)
    elif kind == "structural_tag" and not isinstance(_from_json(field, text), dict):
        raise InvalidArgument(field, text, "must be a JSON object")


def _check_grammar_bytes(field: str, num_bytes: int) -> None:
    if num_bytes > _MAX_GRAMMAR_BYTES:
        raise InvalidArgument(field, f"{num_bytes} bytes", f"at most {_MAX_GRAMMAR_BYTES}")


def _check_schema(field: str, text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, text, f"must be JSON text: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidArgument(
            field, text, f"must be a JSON object or boolean, not a {type(schema).__name__}"
        )
