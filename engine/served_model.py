"""The model that an engine serves, as Baton's configuration names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the settings with which an engine loads it.

    Attributes:
        model: Local directory or hub ID.
        served_name: Name of the model in requests.
        engine_args: The user's engine arguments, by vLLM's names (AsyncEngineArgs).
        adapters: Directory or hub ID of each LoRA adapter, by name.
    """

    model: str
    served_name: str
    engine_args: Mapping[str, Any]
    adapters: Mapping[str, str] = field(default_factory=dict)
