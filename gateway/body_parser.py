"""Parses and validates the JSON body of a request.

Unsupported and unknown fields are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.fail_fast import FailFast
from baton.gateway.request_bodies import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, BodyModel
from baton.runtime.errors import shown
from baton.runtime.names import did_you_mean

B = TypeVar("B", bound=BodyModel)
M = TypeVar("M", bound=BaseModel)

_MAX_NAME_CHARS = 80
# Reasons in the error about one field; each member of a union gives one.
_MAX_REASONS = 4

# Fields of OpenAI and vLLM that Baton does not support, with the values that have no effect and are
# therefore accepted.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "moderation": (),
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
    values = json_object(body)
    known = {field.alias or name for name, field in kind.model_fields.items()}
    values = {name: value for name, value in values.items() if _is_validated(name, value, known)}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise explain(error, values) from None


def json_object(body: bytes) -> dict[str, Any]:
    """Parses a body that must be a JSON object. Raises HttpError."""
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        message = f"the body is a JSON {type(values).__name__}; must be an object"
        raise HttpError(400, message, code="invalid_json")
    return values


def json_body(values: dict[str, Any]) -> bytes:
    """Returns a body in UTF-8 without spaces, so that it is not longer than the parsed body.

    A body is checked against `http.max_body_bytes` again on its way through another route. Escapes
    would double the length of Chinese text, and spaces that of token IDs.
    """
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def parse_as(
    values: dict[str, Any],
    kind: FailFast[M],
    unsupported: Mapping[str, tuple[object, ...]],
    entries: Mapping[str, Callable[[int, Any], Any]],
) -> M:
    """Parses a body with a class of another library.

    Args:
        values: The body's JSON object.
        kind: Validator of the class that declares the body's fields; other fields are left out.
        unsupported: Fields that are refused, with their values that have no effect.
        entries: Lists whose entries are validated one by one, so that those behind a wrong entry
            cost nothing: the field's name, and a function of an entry's index and value. It returns
            the validated entry or None to leave the entry out, and raises HttpError or pydantic's
            ValidationError.

    Raises:
        HttpError: A field is wrong or not supported, or a list has too many entries.
    """
    for name, harmless in unsupported.items():
        value = values.get(name)
        if value is not None and value not in harmless:
            allowed = " or ".join([*map(json.dumps, harmless), "left out"])
            raise invalid_value(name, value, f"must be {allowed}")
    # Clients send null for a field that is not set, which not every field allows. This is also a
    # copy: some validators of vLLM replace fields.
    fields = _fields(kind.kind)
    given = {name: one for name, one in values.items() if one is not None and name in fields}
    check_length("tools", given.get("tools"), MAX_TOOLS)
    lists = {name: given[name] for name in entries if isinstance(given.get(name), list)}
    for name, entries_of_name in lists.items():
        check_length(name, entries_of_name, MAX_MESSAGES)
        _check_parts(name, entries_of_name)
    given |= {name: [] for name in lists}
    try:
        found = kind.validate(dict(given))
    except ValidationError as error:
        raise explain(error, values) from None
    except (TypeError, AttributeError, LookupError) as error:
        # Some validators of vLLM run before the types of the fields are checked.
        name = _field_with_wrong_type(given, kind)
        raise invalid_value(name, values.get(name), f"it has a wrong type ({error})") from None
    for name, entries_of_name in lists.items():
        validated = list[Any]()
        for index, entry in enumerate(entries_of_name):
            try:
                validated.append(entries[name](index, entry))
            except ValidationError as error:
                raise explain(error, values, (name, index)) from None
        setattr(found, name, [entry for entry in validated if entry is not None])
    return found


def check_length(path: str, value: Any, limit: int) -> None:
    """Raises HttpError if a value of the body is a list with more entries than the limit."""
    if isinstance(value, list) and len(value) > limit:
        message = f"{path} has {len(value)} entries; at most {limit}"
        raise HttpError(400, message, param=path, code="invalid_value")


def _check_parts(path: str, entries: list[Any]) -> None:
    """Raises HttpError if the lists in the entries of a list are too long together."""
    objects = [entry for entry in entries if isinstance(entry, dict)]
    lists = [value for entry in objects for value in entry.values() if isinstance(value, list)]
    if (num_parts := sum(map(len, lists))) > MAX_PARTS:
        message = f"{path} has {num_parts} parts in all; at most {MAX_PARTS}"
        raise HttpError(400, message, param=path, code="invalid_value")


def _fields(kind: type[BaseModel]) -> set[str]:
    return {name for key, field in kind.model_fields.items() for name in (key, field.alias or key)}


def _field_with_wrong_type(given: dict[str, Any], kind: FailFast[Any]) -> str:
    """Returns the field without which the validators can tell what is wrong, or "body"."""
    for name in given:
        try:
            kind.validate({other: one for other, one in given.items() if other != name})
        except ValidationError:
            return name
        except (TypeError, AttributeError, LookupError):
            continue
        return name
    return "body"


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


def explain(error: ValidationError, values: Any, at: tuple[int | str, ...] = ()) -> HttpError:
    """Returns the error that names the first wrong field, with its path in the body.

    A value of a union has one problem per member of the union. The most precise one counts: the
    deepest path, and of a field that is there rather than missing.

    Args:
        error: The problems.
        values: The body.
        at: Location in the body of the value that has the problems.
    """
    problems = error.errors(include_url=False)
    if not at:
        problems = [one for one in problems if one["loc"][:1] == problems[0]["loc"][:1]]
    found: dict[str, tuple[Any, bool, list[str]]] = {}
    for problem in _without_other_types(problems):
        path, value = _locate((*at, *problem["loc"]), values)
        reason_text = problem["msg"].removeprefix("Value error, ")
        reason_text = reason_text[:1].lower() + reason_text[1:]
        missing = problem["type"] == "missing"
        if problem["type"] in ("extra_forbidden", "missing"):
            # The last part of the location is the missing or extra field.
            *above, name = (*at, *problem["loc"])
            path = f"{_locate(above, values)[0]}.{_shorten(str(name))}".lstrip(".")
            reason_text = "it is required" if missing else "this server does not support it"
        found.setdefault(path, (value, missing, []))[2].append(reason_text)
    path = max(found, key=lambda path: (not found[path][1], path.count(".") + path.count("[")))
    value, missing, reasons = found[path]
    reason = " or ".join(list(dict.fromkeys(reasons))[:_MAX_REASONS])
    if not path:
        return HttpError(400, reason, param=reason.split()[0], code="invalid_value")
    if missing:
        return HttpError(400, f"{path} is missing; {reason}", param=path, code="missing_parameter")
    return invalid_value(path, value, reason)


def _without_other_types(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leaves out problems of union members with another `type` than the value, if one has this."""
    others = {
        one["loc"][:-1]
        for one in problems
        if one["type"] == "literal_error" and one["loc"][-1] == "type"
    }
    # Locations of members that have the value's type, or take values without a type.
    lengths = {len(one) for one in others}
    fitting = {one["loc"][:length] for one in problems for length in lengths} - others
    unions = {member[:-1] for member in fitting}
    left_out = {member for member in others if member[:-1] in unions}
    return [
        one for one in problems if left_out.isdisjoint(one["loc"][:length] for length in lengths)
    ]


def _locate(location: Sequence[int | str], values: Any) -> tuple[str, Any]:
    """Returns the path and the value in the body that a pydantic error location points to.

    A location may name members of unions, which do not exist in the body and are left out.
    """
    path = ""
    for part in location:
        try:
            values = values[part]
        except (LookupError, TypeError):
            continue
        name = _shorten(str(part))
        path += f"[{part}]" if isinstance(part, int) else f".{name}" if path else name
    return path, values


def _shorten(name: str) -> str:
    """Shortens a field name for an error message: clients may send names of any length."""
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."
