"""Reads a configuration, with errors that name the key, and writes one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from baton.runtime.config.baton_config import BatonConfig
from baton.runtime.config_error import ConfigError, what_is_allowed
from baton.runtime.names import did_you_mean

_SECRET_KEY = re.compile(
    r"(^|[_-])(token|secret|passw(or)?d|passphrase|credentials?|(api|access|private|secret)[_-]?keys?)$",
    re.I,
)
# vLLM's arguments are replaced one by one, also by null and by mappings, which are their values.
_ENGINE_ARGS = "engine_args"
_PASSWORD = re.compile(r"//[^/@\s]+@")


class _Loader(yaml.SafeLoader):
    """Refuses values that contain themselves, and a repeated key (YAML would drop the first)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:
            problem = "found a value that contains itself"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Checked in the text as written: after `<<` is merged, overridden keys appear twice.
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key in (one for one, _ in node.value if one.tag == "tag:yaml.org,2002:str"):
            if key.value in seen:
                problem = f"found the key {key.value!r} a second time"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


def parse(values: Mapping[str, Any], source: str) -> BatonConfig:
    """Builds a configuration from plain values.

    Args:
        values: Nested like the file.
        source: File name or "command line", for error messages.

    Raises:
        ConfigError: One line per invalid key.
    """
    try:
        return BatonConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"{source}: {line}" for line in _explain(error)]
        raise ConfigError("\n".join(lines)) from None


def load(path: str | None, overrides: Mapping[str, Any] | None = None) -> BatonConfig:
    """Reads a YAML file and applies overrides to its values.

    Args:
        path: Path of the file; "-" means standard input, None means defaults only.
        overrides: Nested like the file; None values are ignored, except those of engine arguments.

    Raises:
        ConfigError: The file is unreadable or not YAML, or a key is invalid or unknown.
    """
    values: Any = {}
    if path is not None:
        try:
            raw = _standard_input() if path == "-" else Path(path).read_bytes()
            values = yaml.load(raw.decode(), _Loader) or {}
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: cannot be read: it is not text in UTF-8") from None
        except RecursionError:
            raise ConfigError(f"{path}: is nested too deeply") from None
        except (yaml.YAMLError, ValueError) as error:
            # ValueError: a date that does not exist.
            raise ConfigError(f"{path}: not YAML: {_problem_and_place(error)}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: is a {type(values).__name__}; must be a mapping of keys")
    return parse(_merged(values, overrides or {}), path or "command line")


def _problem_and_place(error: yaml.YAMLError | ValueError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        problem = ": ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark
        return f"{problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).replace(' in "<unicode string>",', " at").split())


def _standard_input() -> bytes:
    """Content of standard input. Raises OSError when it is closed."""
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return sys.stdin.buffer.read()


def dump(config: BatonConfig) -> str:
    """The effective configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def shown(config: BatonConfig) -> str:
    """The effective configuration as YAML for people, with likely secrets replaced by ***."""
    return yaml.safe_dump(_without_secrets(config.model_dump(mode="json")), sort_keys=False)


def _without_secrets(value: Any, key: str = "") -> Any:
    """Hides secrets in engine arguments and Ray's env_vars (hf_token), and passwords in URLs."""
    if isinstance(value, dict):
        return {name: _without_secrets(one, str(name)) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_secrets(one, key) for one in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET_KEY.search(key):
        return "***"
    return _PASSWORD.sub("//***@", value)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            section = {} if merged.get(key) is None else merged[key]
            # The validation reports a section that is no mapping, so it stays as it is.
            if not isinstance(section, Mapping):
                merged[key] = section
            elif key == _ENGINE_ARGS:
                merged[key] = {**section, **value}
            else:
                merged[key] = _merged(section, value)
        elif value is not None:
            merged[key] = value
    return merged


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        key = ".".join(path)
        if problem["type"] == "extra_forbidden":
            yield f"{key}: unknown key{_nearest(path)}"
        elif problem["type"] == "missing":
            yield f"{key}: is missing"
        elif not path:
            yield what_is_allowed(problem["msg"])
        elif path[0] == "security":
            # The value is not shown, because a secret may have been written there by mistake.
            yield f"{key}: {what_is_allowed(problem['msg'])}"
        else:
            value = "null" if problem["input"] is None else repr(problem["input"])
            yield f"{key}: is {value}; {_allowed(problem['type'], problem['msg'])}"


def _allowed(kind: str, said: str) -> str:
    if kind in ("model_type", "dict_type"):
        return "must be a mapping of keys"
    said = what_is_allowed(said)
    return said[:1].lower() + said[1:]


def _nearest(path: list[str]) -> str:
    section: Any = BatonConfig
    for part in path[:-1]:
        known = get_args(section)
        section = known[-1] if known else section.model_fields[part].annotation
    hint = did_you_mean(path[-1], section.model_fields, cutoff=0.5)
    return hint or f"; known: {', '.join(section.model_fields)}"
