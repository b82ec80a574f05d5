"""Reading a configuration, with errors that name the key, and writing it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from baton.runtime.config.whole import BatonConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.names import did_you_mean

_SECRET_KEY = re.compile(
    r"(^|[_-])(token|secret|passw(or)?d|passphrase|credentials?|(api|access|private|secret)[_-]?keys?)$",
    re.I,
)
_PASSWORD = re.compile(r"//[^/@\s]+@")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: of the first nothing would be left. And circles."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:
            problem = "found a value that contains itself"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        # As it is written: later, what `<<` brings stands beside what lies over it.
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

    Raises:
        ConfigError: with one line per wrong key.
    """
    try:
        return BatonConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"{source}: {line}" for line in _explain(error)]
        raise ConfigError("\n".join(lines)) from None


def load(path: str | None, overrides: Mapping[str, Any] | None = None) -> BatonConfig:
    """Reads a YAML file ("-" is standard input, None is defaults) and lays overrides over it.

    Args:
        path: of the file.
        overrides: nested like the file; None values are left out.

    Raises:
        ConfigError: unreadable file, not YAML, wrong or unknown keys.
    """
    values: Any = {}
    if path is not None:
        try:
            raw = _standard_input() if path == "-" else Path(path).read_bytes()
            values = yaml.load(raw.decode(), _Loader) or {}
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: cannot be read: it is no text in UTF-8") from None
        except RecursionError:
            raise ConfigError(f"{path}: is nested too deeply") from None
        except (yaml.YAMLError, ValueError) as error:
            # ValueError: of a date that is none.
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: is a {type(values).__name__}; must be a mapping of keys")
    return parse(_merged(values, overrides or {}), path or "command line")


def _standard_input() -> bytes:
    """Raises OSError: it is closed."""
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return sys.stdin.buffer.read()


def dump(config: BatonConfig) -> str:
    """The effective configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def shown(config: BatonConfig) -> str:
    """The same for people: what looks like a secret is left out."""
    return yaml.safe_dump(_without_secrets(config.model_dump(mode="json")), sort_keys=False)


def _without_secrets(value: Any, key: str = "") -> Any:
    """Engine arguments and Ray's env_vars may hold some (hf_token), and addresses a password."""
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
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        elif isinstance(value, Mapping):
            merged[key] = _merged({}, value)
        elif value is not None:
            merged[key] = value
    return merged


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        key = ".".join(path)
        if problem["type"] == "extra_forbidden":
            yield f"{key}: unknown key{_nearest(path)}"
        elif not path:
            yield problem["msg"].removeprefix("Value error, ")
        elif path[0] == "security":
            # A secret may stand there by mistake.
            yield f"{key}: {problem['msg'].removeprefix('Value error, ')}"
        else:
            value = "null" if problem["input"] is None else repr(problem["input"])
            yield f"{key}: is {value}; {_allowed(problem['type'], problem['msg'])}"


def _allowed(kind: str, said: str) -> str:
    if kind in ("model_type", "dict_type"):
        return "must be a mapping of keys"
    said = said.removeprefix("Value error, ").replace("Input should be", "must be")
    return said[:1].lower() + said[1:]


def _nearest(path: list[str]) -> str:
    section: Any = BatonConfig
    for part in path[:-1]:
        known = get_args(section)
        section = known[-1] if known else section.model_fields[part].annotation
    hint = did_you_mean(path[-1], section.model_fields, cutoff=0.5)
    return hint or f"; known: {', '.join(section.model_fields)}"
