"""Checks that the installed vLLM has the private names that Baton uses.

Baton uses names that vLLM does not document and may change in any version. Each user of such names
lists them and calls `require` at the start of the engine, so that another vLLM is refused by name
instead of failing in a step.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

import vllm


def require(
    missing: Sequence[str], user: str, *, or_else: str = "", error: type[Exception] = ValueError
) -> None:
    """Refuses the installed vLLM if it lacks names.

    Args:
        missing: The names that it lacks, from the functions of this module.
        user: Part of Baton that uses the names, with its verb: "Baton's scheduler uses".
        or_else: How users can do without this part; empty: they cannot.
        error: Type of the error.

    Raises:
        Exception: An `error`; names are missing.
    """
    if missing:
        way_out = f", or {or_else}" if or_else else ""
        raise error(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}, which {user}; install the "
            f"version that Baton requires{way_out}"
        )


def missing_members(uses: Mapping[type, Iterable[str]]) -> list[str]:
    """Returns the methods, properties and fields that classes lack."""
    return [
        f"{owner.__name__}.{name}"
        for owner, names in uses.items()
        for name in names
        if not hasattr(owner, name)
        and not any(name in inspect.get_annotations(base) for base in owner.__mro__)
    ]


def missing_assignments(uses: Mapping[type, Iterable[str]]) -> list[str]:
    """Returns the attributes that the code of classes does not assign.

    It looks into the code, so that it can run before there are instances.
    """
    return [
        f"{owner.__name__}.{name}"
        for owner, names in uses.items()
        for name in names
        if not re.search(rf"\bself\.{name}\b[^=\n]*=[^=]", _source(owner))
    ]


def missing_attributes(owner: object, names: Iterable[str]) -> list[str]:
    """Returns the attributes that an instance or a module lacks."""
    owner_name = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__
    return [f"{owner_name}.{name}" for name in names if not hasattr(owner, name)]


def changed_methods(owner: type, parameters: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the methods that a class lacks or whose parameters differ.

    Args:
        owner: The class.
        parameters: Names of the expected parameters of each method, with "self".
    """
    return [
        f"{owner.__name__}.{name}({', '.join(expected)})"
        for name, expected in parameters.items()
        if (method := getattr(owner, name, None)) is None
        or list(inspect.signature(method).parameters) != list(expected)
    ]


@functools.cache
def _source(owner: type) -> str:
    """Returns the code of a class, which takes tens of milliseconds to find."""
    return inspect.getsource(owner)
