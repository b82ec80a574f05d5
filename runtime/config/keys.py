"""Lists the keys of the configuration with defaults and descriptions, for `baton config keys`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

from baton.runtime.config.baton_config import BatonConfig
from baton.runtime.section import Section


class Key(NamedTuple):
    """One configuration key.

    Attributes:
        name: Full name with sections, such as "lanes.batch.share".
        default: Default as in YAML; None also when the key is required.
        meaning: Description.
    """

    name: str
    default: Any
    meaning: str


def keys() -> list[Key]:
    """All keys, in the order that `baton config show` prints."""
    return list(_of(BatonConfig, ""))


def _of(section: type[Section], above: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _of(kind, f"{above}{name}.")
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield Key(f"{above}{name}", default, field.description or "")
        for part in get_args(kind):
            if isinstance(part, type) and issubclass(part, Section):
                item = "[]" if get_origin(kind) is list else ".NAME"
                yield from _of(part, f"{above}{name}{item}.")
