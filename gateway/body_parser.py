"""From the bytes of a request's body to its fields, or to what is wrong with it.

A field that cannot be honoured is refused by name, and so is one that nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.request_bodies import BodyModel
from baton.runtime.errors import shown
from baton.runtime.names import did_you_mean

B = TypeVar("B", bound=BodyModel)

_MAX_NAME_CHARS = 80

# Fields of OpenAI and vLLM that Baton does not carry out, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "prediction": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


def parse_body(body: bytes, kind: type[B]) -> B:
    """Reads a body.

    Args:
        body: JSON.
        kind: the fields that it may have.

    Raises:
        HttpError: it is no JSON, or a field of it is wrong, unknown or not supported.
    """
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        what = f"the body is a JSON {type(values).__name__}; must be an object"
        raise HttpError(400, what, code="invalid_json")
    known = {field.alias or name for name, field in kind.model_fields.items()}
    values = {name: value for name, value in values.items() if _is_looked_at(name, value, known)}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explained(error, values) from None


def _is_looked_at(name: str, value: object, known: set[str]) -> bool:
    """Whether a field is to be checked: it is known, and asks for something; null does not.

    Raises:
        HttpError: it is unknown, or not supported.
    """
    if name in known:
        return True
    if value is None or value in UNSUPPORTED.get(name, ()):
        return False
    if name in UNSUPPORTED:
        raise HttpError(
            400,
            f"{name} is {shown(value)}; this server does not support it",
            param=name,
            code="unsupported_parameter",
        )
    name = _short(name)
    hint = did_you_mean(name, known, cutoff=0.8)
    raise HttpError(400, f"{name}: unknown field{hint}", param=name, code="unknown_parameter")


def _explained(error: ValidationError, values: Any) -> HttpError:
    """The first thing that is wrong with a body, by its path there."""
    paths: dict[str, tuple[Any, list[str]]] = {}
    for problem in error.errors(include_url=False):
        path, value = _found(problem["loc"], values)
        said = problem["msg"].removeprefix("Value error, ")
        said = said[:1].lower() + said[1:]
        if problem["type"] in ("extra_forbidden", "missing"):
            # Its last part leads to nothing that is there, or should be.
            *above, name = problem["loc"]
            path = f"{_found(above, values)[0]}.{_short(str(name))}".lstrip(".")
            missing = problem["type"] == "missing"
            said = "it is required" if missing else "this server does not support it"
        paths.setdefault(path, (value, []))[1].append(said)
    path, (value, reasons) = next(iter(paths.items()))
    reason = " or ".join(dict.fromkeys(reasons))
    if not path:
        return HttpError(400, reason, param=reason.split()[0], code="invalid_value")
    if reason == "it is required":
        return HttpError(400, f"{path} is missing; {reason}", param=path, code="missing_parameter")
    return invalid_value(path, value, reason)


def _found(location: Sequence[int | str], values: Any) -> tuple[str, Any]:
    """Where a location of pydantic's leads, and what is there.

    It is followed as far as it leads into the body: behind that it names members of unions.
    """
    path = ""
    for part in location:
        try:
            values = values[part]
        except (LookupError, TypeError):
            break
        name = _short(str(part))
        path += f"[{part}]" if isinstance(part, int) else f".{name}" if path else name
    return path, values


def _short(name: str) -> str:
    """A field's name, which a client may have made as long as it likes, as errors show it."""
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."
