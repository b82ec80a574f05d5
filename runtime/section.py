"""What sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Three years stand for "for ever": infinity fits no message.
PositiveSeconds = Annotated[float, Field(gt=0, le=1e8)]
PositiveInt = Annotated[int, Field(ge=1, le=2**63 - 1)]
# What is told in messages, whose numbers have 32 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]

# Of one pool; the most is far beyond what one coordinator serves.
NumWorkers = Annotated[int, Field(ge=0, le=10_000)]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors.

    A section, mapping or list with nothing under its name, because all of it is commented out, is
    as good as absent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_parts(cls, values: Any) -> Any:
        if values is None:
            return {}
        if not isinstance(values, dict):
            return values
        parts = {
            name
            for name, field in cls.model_fields.items()
            if field.default_factory or isinstance(field.default, list | dict)
        }
        return {name: one for name, one in values.items() if one is not None or name not in parts}
