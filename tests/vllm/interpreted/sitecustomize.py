"""Has vLLM take Triton's interpreter for a GPU's compiler, so that its second runner runs on CPUs.

Python imports this in every process that has this folder in PYTHONPATH, before anything else.
"""

from __future__ import annotations

from typing import Any

from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder as Builder


class Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class Backend:
    driver = Driver


# vLLM asks whether one is active, and on CPUs for that of this name.
backends.clear()
backends["cpu"] = Backend

# The interpreter makes integers of a scalar condition and others, and then takes booleans only.
masked_load, masked_store = Builder.create_masked_load, Builder.create_masked_store


def load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
    mask.data = mask.data.astype(bool)
    return masked_load(self, ptrs, mask, *others)


def store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
    mask.data = mask.data.astype(bool)
    return masked_store(self, ptrs, value, mask, *others)


Builder.create_masked_load, Builder.create_masked_store = load, store
