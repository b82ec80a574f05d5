"""Reads the lines of a batch's input file: JSON objects with custom_id, method, url and body.

Source: https://platform.openai.com/docs/guides/batch. A wrong line does not keep the others from
running; its error names the line.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pydantic_core

from baton.gateway.body_parser import json_body
from baton.runtime.errors import shown

_MAX_CUSTOM_ID_CHARS = 512
# Models of a file that are told apart; all further models count as the last one.
_MAX_MODELS = 16
# The object of a batch names a model; of a longer name it has only the beginning.
_MAX_MODEL_CHARS = 256
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of an input file.

    Attributes:
        number: Number of the line in the file, from 1.
        custom_id: The client's ID; None if the line has none that can be used.
        body: The request as JSON; empty if the line is wrong.
        code, message, param: The error of a wrong line; `code` is empty if the line is right.
        model: The model that the request names, if any.
        model_number: Number of the model in the file, from 0; see _MAX_MODELS.
    """

    number: int
    custom_id: str | None
    body: bytes = b""
    code: str = ""
    message: str = ""
    param: str | None = None
    model: str | None = None
    model_number: int = 0


class WrongFile(Exception):
    """The whole file cannot be a batch.

    Attributes:
        code: Code of the batch's error.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _WrongLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class InputParser:
    """Splits a file into lines and checks each of them.

    Args:
        endpoint: The url that each line must have.
        max_line_bytes: Limit of one line.
        max_lines: Limit of the file's lines.
        defaults: Fields of the body that a line has if it leaves them out.
    """

    def __init__(
        self,
        endpoint: str,
        max_line_bytes: int,
        max_lines: int,
        defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._endpoint, self._defaults = endpoint, defaults
        self._max_line_bytes, self._max_lines = max_line_bytes, max_lines
        self._rest, self._rest_is_too_long = bytearray(), False
        self._number, self._num_requests = 0, 0
        self._custom_ids: set[str] = set()
        self._model_numbers: dict[str | None, int] = {}

    def feed(self, chunk: bytes, *, last: bool) -> Iterator[InputLine]:
        """Yields the lines that a chunk of the file completes.

        Args:
            chunk: The next bytes of the file.
            last: Whether nothing follows, so that the last line needs no line end.

        Raises:
            WrongFile: The file has too many lines.
        """
        *whole, rest = chunk.split(b"\n")
        for part in [*whole, *([rest] if last else [])]:
            line, too_long = bytes(self._rest) + part, self._rest_is_too_long
            self._rest, self._rest_is_too_long = bytearray(), False
            self._number += 1
            if self._number > 2 * self._max_lines + 1:
                # Empty lines are no requests, but take time.
                raise self._too_many(2 * self._max_lines, " and empty lines")
            if self._number == 1:
                # Some editors and Windows programs begin a text file with it.
                line = line.removeprefix(codecs.BOM_UTF8)
            if too_long or line.strip():
                yield self._parsed(line, too_long or len(line) > self._max_line_bytes)
        if not last:
            self._rest += rest
        if len(self._rest) > self._max_line_bytes:
            # The rest of such a line is not needed, and must not fill the memory.
            self._rest, self._rest_is_too_long = bytearray(), True

    def _parsed(self, line: bytes, too_long: bool) -> InputLine:
        self._num_requests += 1
        if self._num_requests > self._max_lines:
            raise self._too_many(self._max_lines)
        custom_id: str | None = None
        try:
            if too_long:
                raise _WrongLine(
                    "invalid_request", f"the line is longer than {self._max_line_bytes} bytes"
                )
            values = _json_object(line)
            custom_id = _custom_id(values)
            body = self._body(values)
            if custom_id in self._custom_ids:
                allowed = "must be unique, and an earlier line has it"
                raise _WrongLine(
                    "duplicate_custom_id",
                    f"custom_id is {shown(custom_id)}; {allowed}",
                    "custom_id",
                )
            self._custom_ids.add(custom_id)
            named = body.get("model")
            model = named[:_MAX_MODEL_CHARS] if isinstance(named, str) else None
            return InputLine(
                self._number,
                custom_id,
                json_body(body),
                model=model,
                model_number=self._model_number(model),
            )
        except _WrongLine as problem:
            message = f"line {self._number}: {problem}"
            return InputLine(self._number, custom_id, b"", problem.code, message, problem.param)

    def _too_many(self, most: int, which: str = "") -> WrongFile:
        message = f"the file has more than {most} lines{which} (http.batches.max_lines)"
        return WrongFile("too_many_tasks", message)

    def _model_number(self, model: str | None) -> int:
        numbers = self._model_numbers
        if model not in numbers and len(numbers) < _MAX_MODELS - 1:
            numbers[model] = len(numbers)
        return numbers.get(model, _MAX_MODELS - 1)

    def _body(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the body; the route checks its fields later."""
        for name in values:
            if name not in _FIELDS:
                raise _WrongLine(
                    "unknown_parameter",
                    f"{shown(name)}: unknown field; a line has {', '.join(_FIELDS)}",
                    name[:_MAX_CUSTOM_ID_CHARS],
                )
        for name, wanted, code in (
            ("method", "POST", "invalid_method"),
            ("url", self._endpoint, "mismatched_url"),
        ):
            if values.get(name) != wanted:
                why = "" if name == "method" else ", the endpoint of the batch"
                raise _WrongLine(
                    code, f"{name} is {shown(values.get(name))}; must be {wanted!r}{why}", name
                )
        body = values.get("body")
        if not isinstance(body, dict):
            raise _WrongLine("invalid_request", f"body is {shown(body)}; must be an object", "body")
        if body.get("stream"):
            message = "body.stream is true; must be false or left out in a batch"
            raise _WrongLine("invalid_request", message, "body.stream")
        left_out = {name: one for name, one in self._defaults.items() if body.get(name) is None}
        return {**body, **left_out}


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        values = pydantic_core.from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise _WrongLine("invalid_json_line", f"not JSON: {error}") from None
    if not isinstance(values, dict):
        message = f"a JSON {type(values).__name__}; must be an object"
        raise _WrongLine("invalid_json_line", message)
    return values


def _custom_id(values: dict[str, Any]) -> str:
    custom_id = values.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_CUSTOM_ID_CHARS:
        allowed = f"must be a text of 1 to {_MAX_CUSTOM_ID_CHARS} characters"
        raise _WrongLine(
            "invalid_request", f"custom_id is {shown(custom_id)}; {allowed}", "custom_id"
        )
    return custom_id
