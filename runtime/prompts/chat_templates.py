"""Chat templates of a model directory, and which of them a chat is rendered with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.runtime.config_error import ConfigError
from baton.runtime.prompts.content_format import reads_parts
from baton.runtime.prompts.json_files import read_json

# Files of templates in a model directory, beside tokenizer_config.json.
TEMPLATE_FILES = (
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
    "processor_config.json",
)
_DEFAULT_FILE, _FURTHER_FILES, *_PROCESSOR_FILES = TEMPLATE_FILES
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One template.

    Attributes:
        source: Its text.
        knows_developers: Whether it knows the role `developer`; as in vLLM, it then has the name of
            the role as a string.
        reads_parts: Whether it reads the content of a message as a list of parts.
    """

    source: str
    knows_developers: bool
    reads_parts: bool
    _compiled: jinja2.Template

    @classmethod
    def compile(cls, directory: Path, source: str) -> ChatTemplate:
        """Raises ConfigError if the source is not a template."""
        environment = _environment()
        try:
            compiled = environment.from_string(source)
            in_parts = reads_parts(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"model: {directory} has a chat template with an error: {error}"
            ) from None
        knows_developers = any(f"{quote}developer{quote}" in source for quote in "'\"")
        return cls(source, knows_developers, in_parts, compiled)

    def render(self, **variables: Any) -> str:
        """Renders a chat; templates raise errors of many types on a chat that they do not take."""
        return self._compiled.render(variables)


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The templates of a model.

    Attributes:
        default: The template of chats without tools; None: the model has none.
        with_tools: The template of chats with tools; None: the model has none.
    """

    default: ChatTemplate | None
    with_tools: ChatTemplate | None

    @classmethod
    def read(cls, directory: Path, settings: Mapping[str, Any]) -> ChatTemplates:
        """Reads the templates of a model.

        As in vLLM, chats without tools take the template of the model's processor (for images), if
        it has one of its own. Only chats with tools then take the tokenizer's.

        Args:
            directory: The model's directory.
            settings: Its tokenizer_config.json.

        Raises:
            ConfigError: A template has an error.
        """
        sources = _sources(directory, settings)
        of_tokenizer = sources.get(_DEFAULT)
        of_processor = _processor_source(directory)
        # A model for texts only may have the files of the model that it was made from.
        if of_tokenizer is None or _has_processor(directory, settings):
            default = of_processor or of_tokenizer
        else:
            default = of_tokenizer
        with_tools = sources.get(_WITH_TOOLS) or of_tokenizer or of_processor
        found = {
            source: ChatTemplate.compile(directory, source)
            for source in (default, with_tools)
            if source is not None
        }
        return cls(
            found[default] if default is not None else None,
            found[with_tools] if with_tools is not None else None,
        )


def _sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates of the tokenizer by name.

    As in transformers, files replace the templates of the settings, and a further file that is
    named "default" replaces chat_template.jinja.

    Source: transformers, tokenization_utils_base.py, _from_pretrained and get_chat_template.
    """
    paths = {path.stem: path for path in directory.glob(_FURTHER_FILES)}
    if (path := directory / _DEFAULT_FILE).is_file():
        paths.setdefault(_DEFAULT, path)
    if paths:
        used = (name for name in (_DEFAULT, _WITH_TOOLS) if name in paths)
        return {name: _text(directory, paths[name]) for name in used}
    source = settings.get("chat_template")
    listed: list[Any] = [{"name": _DEFAULT, "template": source}]
    if isinstance(source, list):
        listed = source
    named = {one.get("name"): one.get("template") for one in listed}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _text(directory: Path, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model: {directory} has a chat template, {path.name}, that cannot be read: {error}"
        ) from None


def _has_processor(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a model directory is that of a model with a processor, for images or audio."""
    files = ("preprocessor_config.json", "processor_config.json")
    return "processor_class" in settings or any((directory / name).is_file() for name in files)


def _processor_source(directory: Path) -> str | None:
    """The template of the processor; the last of its files has precedence.

    Source: vllm/renderers/hf.py, resolve_chat_template; transformers, processing_utils.py,
    get_processor_dict.
    """
    found = [read_json(directory / name).get("chat_template") for name in _PROCESSOR_FILES]
    for source in reversed(found):
        if isinstance(source, str):
            return source
    path = directory / _DEFAULT_FILE
    return _text(directory, path) if path.is_file() else None


class _Generation(jinja2.ext.Extension):
    """The {% generation %} block (marks the assistant's text in training): renders its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares `tags` as a class attribute.

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Environment with the settings of transformers (utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(pattern: str) -> str:
        return datetime.now().astimezone().strftime(pattern)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
