"""A revision: a name for a model and engine arguments together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.runtime.config import BatonConfig, parse
from baton.runtime.names import FIRST_REVISION


@dataclass(frozen=True, slots=True)
class Revision:
    """What its workers are started with, over the configuration.

    Attributes:
        model: empty: the configured one.
        engine_args: over the common ones and those of the pools.
    """

    name: str = FIRST_REVISION
    model: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def num_gpus(self, configured: int) -> int:
        """Of one worker, where one of the configuration has so many."""
        size = self.engine_args.get("tensor_parallel_size")
        # What is wrong with another size vLLM says.
        return size if isinstance(size, int) and size > 0 else configured

    def over(self, config: BatonConfig) -> BatonConfig:
        """The configuration of its workers.

        Raises:
            ConfigError: it makes no sense.
        """
        values = config.model_dump(mode="json")
        values["worker"]["revision"] = self.name
        if self.model:
            # Requests go on calling it what they did.
            values |= {"model": self.model, "served_model_name": config.model_name}
        for pool in ("prefill", "decode"):
            values[pool]["engine_args"] |= self.engine_args
        return parse(values, f"revision {self.name}")
