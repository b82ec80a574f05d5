"""Turns prompts into token IDs with a model's tokenizer and chat template, without weights."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors

from baton.runtime.config_error import ConfigError
from baton.runtime.errors import InvalidArgument, shown
from baton.runtime.prompts.chat_continuation import mark_end, up_to_mark
from baton.runtime.prompts.chat_templates import TEMPLATE_FILES, ChatTemplates
from baton.runtime.prompts.json_files import read_json
from baton.v1 import inference_pb2

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *TEMPLATE_FILES,
    "config.json",
    "generation_config.json",
)
_NUM_THREADS = 2
# A few milliseconds of work; longer texts are tokenized outside the event loop.
_MAX_INLINE_CHARS = 4096
# Approximate number of characters that a chat template adds to each message.
_AROUND_MESSAGE_CHARS = 32
# Errors that a chat template can raise on its input; some come from the sandbox.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Tokenizer:
    """Tokenizer of one model; close it when done.

    Attributes:
        max_model_len: Context length in tokens from config.json; None when it does not say.
        vocab_size: Vocabulary size from config.json, or else from the tokenizer.
        eos_token_id: End-of-sequence token of the tokenizer; None when it has none.
        extra_eos_token_ids: Further tokens that end an output, from generation_config.json.

    Raises:
        ConfigError: The model does not exist or has no tokenizer.json.
    """

    def __init__(self, model: str) -> None:
        directory = _model_directory(model)
        self._tokenizer = _read_tokenizer(directory, model)
        settings = read_json(directory / "tokenizer_config.json")
        specials = {**read_json(directory / "special_tokens_map.json"), **settings}
        self._special_tokens = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _token_text(specials.get(name))) is not None
        }
        _set_post_processor(self._tokenizer, settings, self._special_tokens)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._templates = ChatTemplates.read(directory, settings)
        default = self._templates.default
        source = default.source if default is not None else None
        self._settings = {**settings, **self._special_tokens, "chat_template": source}
        config = read_json(directory / "config.json")
        config = config.get("text_config", config)
        self.max_model_len = _positive(config.get("max_position_embeddings"))
        self.vocab_size = _positive(config.get("vocab_size")) or int(
            self._tokenizer.get_vocab_size(with_added_tokens=True)
        )
        self._max_token_chars = _max_token_chars(self._tokenizer)
        eos_token = self._special_tokens.get("eos_token")
        self.eos_token_id = (
            self._tokenizer.token_to_id(eos_token) if eos_token is not None else None
        )
        generation = read_json(directory / "generation_config.json").get("eos_token_id")
        every = generation if isinstance(generation, list) else [generation]
        self.extra_eos_token_ids = frozenset(
            one for one in every if isinstance(one, int) and one != self.eos_token_id
        )
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    def is_short(self, request: inference_pb2.GenerateRequest) -> bool:
        """Whether the request's prompt is short enough to be tokenized on the event loop."""
        if request.HasField("tokens"):
            return True
        chat = request.chat
        # The template may write out all of its arguments and tools.
        around = len(chat.template_kwargs) + len(chat.tools)
        for one in chat.messages:
            around += _AROUND_MESSAGE_CHARS + len(one.role) + len(one.fields)
            around += _AROUND_MESSAGE_CHARS * len(one.parts)
        return _num_chars(request) + around <= _MAX_INLINE_CHARS

    async def prompt_token_ids(self, request: inference_pb2.GenerateRequest) -> array[int]:
        """Token IDs of a request's prompt; long texts are tokenized in a thread.

        Raises:
            InvalidArgument: The model has no chat template, or its template refuses the messages.
        """
        if self.is_short(request):
            return self.prompt_token_ids_blocking(request)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self.prompt_token_ids_blocking, request
        )

    def prompt_token_ids_blocking(self, request: inference_pb2.GenerateRequest) -> array[int]:
        """Like `prompt_token_ids`, but blocks the calling thread."""
        if request.HasField("tokens"):
            # The slice makes a list first, because iterating over a message's field is slow.
            return array("I", request.tokens.ids[:])
        if request.HasField("text"):
            return self.encode_text(request.text)
        return self.encode_chat(request.chat)

    def min_tokens(self, request: inference_pb2.GenerateRequest) -> int:
        """Lower bound of the prompt's tokens without tokenizing it; 0 when unknown.

        Tokenizing takes seconds per megabyte, too long for a text far beyond the context length.
        """
        if self._max_token_chars is None:
            return 0
        return _num_chars(request) // self._max_token_chars

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """Token IDs of plain text, with the special tokens that the tokenizer adds to it."""
        # A batch of one text: unlike `encode`, it releases the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return array("I", encoding.ids)

    def encode_chat(self, chat: inference_pb2.ChatPrompt) -> array[int]:
        """Token IDs of messages through the chat template, which writes its own special tokens."""
        return self.encode_text(self.render(chat), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of some tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as written in the vocabulary, which differs from their text."""
        return [str(self._tokenizer.id_to_token(token_id)) for token_id in token_ids]

    def render(self, chat: inference_pb2.ChatPrompt) -> str:
        """Renders messages as the text of a prompt.

        Raises:
            InvalidArgument: The model has no chat template, or its template refuses the messages.
        """
        templates = self._templates
        template = templates.with_tools if chat.tools else templates.default
        if template is None:
            raise InvalidArgument(
                "chat",
                f"{len(chat.messages)} messages",
                "this model has no chat template; send text or tokens",
            )
        kwargs = json.loads(chat.template_kwargs) if chat.template_kwargs else {}
        messages = [_as_template_reads(one) for one in chat.messages]
        if not template.knows_developers and any(one["role"] == "developer" for one in messages):
            messages = _with_developers_as_system(messages)
        messages = [
            _with_parts(one) if template.reads_parts else _with_text(one) for one in messages
        ]
        add = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        try:
            continued = mark_end(messages) if chat.continue_final_message else None
            rendered = template.render(
                messages=messages,
                # Defined as None rather than undefined: templates test `is not none`.
                tools=json.loads(chat.tools) if chat.tools else None,
                documents=None,
                add_generation_prompt=add,
                **{**self._special_tokens, **kwargs},
            )
            return rendered if continued is None else up_to_mark(rendered, continued)
        except _TEMPLATE_ERRORS as error:
            raise InvalidArgument(
                "chat.messages",
                [message["role"] for message in messages],
                f"the model's chat template refuses them: {shown(str(error))}",
            ) from None

    def info(self) -> dict[str, Any]:
        """The settings of tokenizer_config.json, with the special tokens and the chat template."""
        left_out = ("vocab_file", "merges_file")
        return {
            name: value
            for name, value in self._settings.items()
            if value is not None and name not in left_out
        }

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _as_template_reads(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """A message as templates read it: with arguments of tool calls as objects, not as JSON text.

    Invalid JSON, which a model may have written, becomes {} so that the conversation can go on.

    Source: vllm/renderers/chat_utils.py, _postprocess_messages.
    """
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        found["content"] = [
            {"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text}
            for part in message.parts
        ]
    if not message.fields:
        return found
    found |= json.loads(message.fields)
    calls = found.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            function["arguments"] = _as_object(function.get("arguments"))
    return found


def _with_developers_as_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes one system message of all developer and system messages, and puts it first.

    OpenAI's clients send developer messages, also within a conversation. Most templates do not know
    the role, and refuse a system message after the first message.

    Source: vllm/renderers/hf.py, _convert_developer_to_system and _consolidate_system_messages.
    """
    instructions = [one for one in messages if one["role"] in ("developer", "system")]
    others = [one for one in messages if one["role"] not in ("developer", "system")]
    if len(instructions) == 1:
        return [{"role": "system", "content": instructions[0]["content"]}, *others]
    texts = [text for one in instructions if (text := _text(one["content"]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content as a list of parts.

    As in vLLM, a tool's result is a text: most templates with parts read results as text.

    Source: vllm/renderers/chat_utils.py, _parse_chat_message_content.
    """
    text = message["content"]
    if message["role"] == "tool":
        return _with_text(message)
    if not isinstance(text, str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its parts as one text, unless some of them are images.

    Source: vllm/renderers/chat_utils.py, _parse_chat_message_content_parts.
    """
    content = message["content"]
    if isinstance(content, str) or any(part["type"] == "image" for part in content):
        return message
    return {**message, "content": _text(content)}


def _as_object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (RecursionError, ValueError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _num_chars(request: inference_pb2.GenerateRequest) -> int:
    """Characters of the prompt's own text, without what a template adds."""
    in_messages = sum(
        len(message.content) + sum(len(part.text) for part in message.parts)
        for message in request.chat.messages
    )
    return len(request.text) + in_messages


def model_type(model: str) -> str:
    """Returns the kind of a model as its config.json names it, such as "llama"; empty: unknown.

    Raises:
        ConfigError: The model does not exist.
    """
    found = read_json(_model_directory(model) / "config.json").get("model_type")
    return found if isinstance(found, str) else ""


def _model_directory(model: str) -> Path:
    """Directory of a model's tokenizer files, downloaded when `model` is a hub ID."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ConfigError(f"model: {model} is a file; must be a directory or a hub id")
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ConfigError(f"model: no such directory: {model}")
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(_FILES)))
    except (OSError, ValueError, RuntimeError, huggingface_hub.errors.HfHubHTTPError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(
            f"model: {model} is not a local directory and cannot be fetched: {reason}"
        ) from None


def _read_tokenizer(directory: Path, model: str) -> Any:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model: {model} has no tokenizer.json")
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise ConfigError(f"model: {path} is not a tokenizer: {error}") from None


def _token_text(value: Any) -> str | None:
    """Text of a special token, which is given as text or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _set_post_processor(
    tokenizer: Any, settings: Mapping[str, Any], specials: Mapping[str, str]
) -> None:
    """Applies add_bos_token and add_eos_token, when given, as transformers' fast tokenizers do.

    Source: transformers, tokenization_utils_tokenizers.py, update_post_processor.
    """
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    added = []
    template = ["$A:0"]
    bos, eos = specials.get("bos_token"), specials.get("eos_token")
    if settings.get("add_bos_token") and bos is not None:
        template.insert(0, f"{bos}:0")
        added.append((bos, tokenizer.token_to_id(bos)))
    if settings.get("add_eos_token") and eos is not None:
        template.append(f"{eos}:0")
        added.append((eos, tokenizer.token_to_id(eos)))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=added)


def _max_token_chars(tokenizer: Any) -> int | None:
    """Longest token in characters, if tokens cover every byte of a text; otherwise None."""
    parts = tokenizer.pre_tokenizer
    if tokenizer.normalizer is not None or "ByteLevel" not in repr(parts):
        return None
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
