"""Base class and value types of configuration sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

# A field of one of these types must not set `ge` or `le` itself: pydantic checks only one bound of
# each kind, and takes the one of the type.
#
# Three years stand for "no limit", because protobuf durations cannot hold infinity.
PositiveSeconds = Annotated[float, Field(gt=0, le=1e8)]
PositiveInt = Annotated[int, Field(ge=1, le=2**63 - 1)]
# Numbers that are sent in 32-bit message fields.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]

# Workers of one pool; the maximum is far above what one coordinator can serve.
MAX_WORKERS = 10_000
NumWorkers = Annotated[int, Field(ge=0, le=MAX_WORKERS)]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors.

    A section, mapping or list whose content is commented out counts as absent: its value is null
    in YAML.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
