"""What sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Three years stand for "for ever": infinity fits no message.
PositiveSeconds = Annotated[float, Field(gt=0, le=1e8)]
PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
