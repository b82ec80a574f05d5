"""Counts the LoRA adapters of vLLM's running requests, at most `max_loras` in one step.

vLLM counts only the adapters of running requests that get tokens in the step. Baton's scheduler may
give a running prompt no token in a step. Without that prompt's adapter in the count, vLLM could
start a request with one adapter too many, and its engine core would end when the prompt gets tokens
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class AdapterSlots:
    """The adapters that running requests use, and those of requests that may start.

    Attributes:
        max_loras: Largest number of adapters in a step; None: the engine has no adapters.
        in_use: The IDs that the adapters have in vLLM.
        num_counted: Number of requests, at the beginning of vLLM's list `running`, whose adapters
            are counted.
    """

    max_loras: int | None
    in_use: set[int] = field(default_factory=set)
    num_counted: int = 0

    @classmethod
    def of(cls, lora_config: Any, running: Sequence[Any]) -> AdapterSlots:
        """Counts the adapters of running requests; `lora_config` is vLLM's LoRAConfig, or None."""
        slots = cls(lora_config.max_loras if lora_config else None)
        slots.count_started(running)
        return slots

    def count_started(self, running: Sequence[Any]) -> None:
        """Counts the requests at the end of `running` that are not counted yet."""
        if self.max_loras is not None:
            self.in_use.update(map(_adapter, running[self.num_counted :]))
            self.in_use.discard(0)
            self.num_counted = len(running)

    def copy(self) -> AdapterSlots:
        """Returns equal slots; a request that takes one of them takes none here."""
        return replace(self, in_use=set(self.in_use))

    def has(self, request: Any) -> bool:
        """Whether a request can run beside those that are counted."""
        adapter = _adapter(request)
        return (
            self.max_loras is None
            or not adapter
            or adapter in self.in_use
            or len(self.in_use) < self.max_loras
        )

    def take(self, request: Any) -> bool:
        """Counts a request's adapter, if the request can run beside those that are counted."""
        if not self.has(request):
            return False
        if self.max_loras is not None and (adapter := _adapter(request)):
            self.in_use.add(adapter)
        return True


def _adapter(request: Any) -> int:
    """The adapter ID that a request has in vLLM; 0: it uses no adapter."""
    return int(request.lora_request.lora_int_id) if request.lora_request else 0
