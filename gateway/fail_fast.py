"""Validates values with the types of other libraries, with a bounded number of problems."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import pydantic_core
from pydantic import TypeAdapter

T = TypeVar("T")

# Types of core schemas with any number of entries.
_COLLECTIONS = ("list", "dict", "tuple", "set", "frozenset", "generator")
# Parts of a core schema that hold no schemas of values.
_OTHER_PARTS = ("metadata", "serialization", "default")


class FailFast(Generic[T]):
    """Validator that stops at the first wrong entry of each list and object in a value.

    pydantic describes every wrong entry of a list, once per member of a union: 9 KB of JSON can
    have 180,000 problems. Here the types alone limit their number, not the value.

    Args:
        kind: The type: a class, or an annotation such as a union.

    Attributes:
        kind: The type.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        adapter = TypeAdapter[T](kind)
        # Classes of the openai package build their schemas when they are first used.
        adapter.rebuild()
        # Validators of the classes inside this one were built before and would not stop.
        self._validator = pydantic_core.SchemaValidator(
            _stopping(adapter.core_schema), _use_prebuilt=False
        )

    def validate(self, value: Any) -> T:
        """Returns the validated value. Raises pydantic's ValidationError."""
        found: T = self._validator.validate_python(value)
        return found


def _stopping(schema: Any) -> Any:
    """Returns a copy of a core schema whose collections stop at the first wrong entry."""
    if isinstance(schema, dict):
        # A dict without a type holds the schemas of fields, by their names.
        kind = schema.get("type")
        kept = _OTHER_PARTS if isinstance(kind, str) else ()
        found = {name: part if name in kept else _stopping(part) for name, part in schema.items()}
        if kind in _COLLECTIONS:
            found["fail_fast"] = True
        return found
    if isinstance(schema, list | tuple):
        return type(schema)(_stopping(part) for part in schema)
    return schema
