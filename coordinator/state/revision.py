"""A revision: a name for a model and engine arguments, with which workers are launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.runtime.config import BatonConfig, parse
from baton.runtime.names import FIRST_REVISION


@dataclass(frozen=True, slots=True)
class Revision:
    """Launch configuration of a fleet's workers; it overrides the coordinator's configuration.

    Attributes:
        name: Name of the revision and of its fleet.
        model: Model path; empty: the configured model.
        engine_args: Engine arguments; they override the common ones and those of the pools.
    """

    name: str = FIRST_REVISION
    model: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def num_gpus(self, configured: int, stages: int = 1) -> int:
        """Returns the GPUs of one worker.

        Args:
            configured: GPUs of a configured worker.
            stages: Pipeline stages of a configured worker.
        """
        tp_size = self._size("tensor_parallel_size") or configured // stages
        return tp_size * (self._size("pipeline_parallel_size") or stages)

    def _size(self, name: str) -> int:
        """Returns a number of ranks; 0 if it is not set, or wrong, which vLLM itself reports."""
        size = self.engine_args.get(name)
        return size if isinstance(size, int) and size > 0 else 0

    def over(self, config: BatonConfig) -> BatonConfig:
        """Returns the configuration of its workers.

        Raises:
            ConfigError: The result is not a valid configuration.
        """
        values = config.model_dump(mode="json")
        values["worker"]["revision"] = self.name
        if self.model:
            # Requests keep using the served model's name.
            values |= {"model": self.model, "served_model_name": config.model_name}
        for pool in ("prefill", "decode"):
            values[pool]["engine_args"] |= self.engine_args
        return parse(values, f"revision {self.name}")
