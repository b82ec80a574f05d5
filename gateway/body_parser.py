"""Parses and validates the JSON body of a request.

Unsupported and unknown fields are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.request_bodies import BodyModel
from baton.runtime.errors import shown
from baton.runtime.names import did_you_mean

B = TypeVar("B", bound=BodyModel)
M = TypeVar("M", bound=BaseModel)

_MAX_NAME_CHARS = 80

# Fields of OpenAI and vLLM that Baton does not support, with the values that have no effect and are
# therefore accepted.
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
    """Parses a body.

    Args:
        body: JSON in UTF-8.
        kind: Class that declares the body's fields.

    Raises:
        HttpError: The body is not a JSON object, or a field is wrong, unknown or not supported.
    """
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        message = f"the body is a JSON {type(values).__name__}; must be an object"
        raise HttpError(400, message, code="invalid_json")
    known = {field.alias or name for name, field in kind.model_fields.items()}
    values = {name: value for name, value in values.items() if _is_validated(name, value, known)}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explain(error, values) from None


def parse_as(body: bytes, kind: type[M]) -> M:
    """Parses a body with a class of another library, which decides about unknown fields.

    Raises:
        HttpError: The body is not JSON, or a field is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "json_invalid":
            raise HttpError(400, f"the body is not JSON: {reason}", code="invalid_json") from None
        path = ".".join(map(str, problem["loc"]))
        given = "" if problem["type"] == "missing" else f" is {shown(problem['input'])}"
        where = f"{path}{given}: " if path else ""
        raise HttpError(400, f"{where}{reason}", param=path or None) from None


def _is_validated(name: str, value: object, known: set[str]) -> bool:
    """Whether to validate a field; unsupported fields without effect (or null) are dropped.

    Raises:
        HttpError: The field is unknown or not supported.
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
    name = _shorten(name)
    hint = did_you_mean(name, known, cutoff=0.8)
    raise HttpError(400, f"{name}: unknown field{hint}", param=name, code="unknown_parameter")


def _explain(error: ValidationError, values: Any) -> HttpError:
    """Returns the first validation error, with the path of the wrong field in the body."""
    paths: dict[str, tuple[Any, list[str]]] = {}
    for problem in error.errors(include_url=False):
        path, value = _locate(problem["loc"], values)
        reason_text = problem["msg"].removeprefix("Value error, ")
        reason_text = reason_text[:1].lower() + reason_text[1:]
        if problem["type"] in ("extra_forbidden", "missing"):
            # The last part of the location is the missing or extra field.
            *above, name = problem["loc"]
            path = f"{_locate(above, values)[0]}.{_shorten(str(name))}".lstrip(".")
            missing = problem["type"] == "missing"
            reason_text = "it is required" if missing else "this server does not support it"
        paths.setdefault(path, (value, []))[1].append(reason_text)
    path, (value, reasons) = next(iter(paths.items()))
    reason = " or ".join(dict.fromkeys(reasons))
    if not path:
        return HttpError(400, reason, param=reason.split()[0], code="invalid_value")
    if reason == "it is required":
        return HttpError(400, f"{path} is missing; {reason}", param=path, code="missing_parameter")
    return invalid_value(path, value, reason)


def _locate(location: Sequence[int | str], values: Any) -> tuple[str, Any]:
    """Returns the path and the value in the body that a pydantic error location points to.

    The end of a location may name members of unions, which do not exist in the body; that part is
    ignored.
    """
    path = ""
    for part in location:
        try:
            values = values[part]
        except (LookupError, TypeError):
            break
        name = _shorten(str(part))
        path += f"[{part}]" if isinstance(part, int) else f".{name}" if path else name
    return path, values


def _shorten(name: str) -> str:
    """Shortens a field name for an error message: clients may send names of any length."""
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."
