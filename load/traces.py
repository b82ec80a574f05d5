"""Traces: Azure's CSV, Mooncake's JSON lines, plain JSON of start_time, prompt_len, output_len."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

# Of Mooncake's hash_ids.
MOONCAKE_BLOCK_TOKENS = 512
_MAX_BLOCK_ID = 2**31
# Of all requests of a trace, each with its own; what is kept of them takes some hundred MB.
_MAX_BLOCKS = 2**23
# Of one prompt or output; several times what models take.
_MAX_TOKENS = 2**24
_APART_S = 10.0
_OF_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_OF_MOONCAKE = ("timestamp_ms", "input_tokens", "output_tokens", "block_ids")


class TraceError(ValueError):
    """A trace that cannot be read; names the file, the place and what is expected."""


class Arrival(NamedTuple):
    """One request.

    Attributes:
        at_s: since the trace began.
        block_ids: of blocks of MOONCAKE_BLOCK_TOKENS: equal ones are equal prefixes; none: the
            prompt shares nothing.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()

    def prompt(self, number: int) -> array[int]:
        """Token ids; `number` tells prompts apart that share nothing."""
        if not self.block_ids:
            tokens = array("I", (1,)) * self.num_prompt_tokens
            tokens[0] = number
            return tokens
        tokens = array("I")
        for block in self.block_ids:
            tokens += array("I", (block,)) * MOONCAKE_BLOCK_TOKENS
        missing = self.num_prompt_tokens - len(tokens)
        if missing > 0:
            tokens.extend(itertools.repeat(2**31 + number, missing))
        return tokens[: self.num_prompt_tokens]


def read(path: Path) -> list[Arrival]:
    """Arrivals in order, the first at 0; by the file's own form.

    Raises:
        TraceError: the file cannot be read, or a row is wrong.
    """
    try:
        # Spreadsheets begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: cannot be read: it is no text in UTF-8") from None
    try:
        found = sorted(_rows(text, path), key=lambda one: one.at_s)
    except csv.Error as error:
        raise TraceError(f"{path}: not a CSV: {error}") from None
    if not found:
        raise TraceError(f"{path}: has no request")
    first = found[0].at_s
    return [one._replace(at_s=one.at_s - first) for one in found]


def _rows(text: str, path: Path) -> Iterator[Arrival]:
    start = text.lstrip()[:1]
    if start == "[":
        return _plain(text, path)
    if start == "{":
        lines = [line for line in text.splitlines() if line.strip()]
        values = [_json(line, path, number) for number, line in enumerate(lines, start=1)]
        return _mooncake(values, path)
    return _csv(text, path)


def _csv(text: str, path: Path) -> Iterator[Arrival]:
    lines = text.splitlines()
    rows = csv.DictReader(lines, restval="")
    columns = set(rows.fieldnames or ())
    if columns >= set(_OF_AZURE):
        return _azure(rows, path)
    if columns >= set(_OF_MOONCAKE):
        return _mooncake(list(_unfolded(path, rows)), path)
    raise TraceError(
        f"{path}: neither JSON nor a CSV with the columns {', '.join(_OF_AZURE)}, or "
        f"{', '.join(_OF_MOONCAKE)}; its first line is {(lines or [''])[0][:60]!r}"
    )


def _unfolded(path: Path, rows: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Mooncake's trace with runs of hash_ids as ranges: a fraction of the size."""
    num_blocks = 0
    for number, row in enumerate(rows, start=1):
        try:
            at_ms = float(row["timestamp_ms"])
            runs = [run.partition("-") for run in row["block_ids"].split()]
            ranges = [(int(first), int(last or first)) for first, _, last in runs]
        except ValueError:
            raise TraceError(
                f"{path}: request {number}: timestamp_ms is {row['timestamp_ms']!r:.60}, block_ids "
                f"are {row['block_ids']!r:.60}; must be a number, and numbers or ranges such as 3-7"
            ) from None
        for first, last in ranges:
            num_blocks += last - first + 1
            if first > last or num_blocks > _MAX_BLOCKS:
                raise TraceError(
                    f"{path}: request {number}: block_ids have {first}-{last}; must be the "
                    f"lower one first, and at most {_MAX_BLOCKS} blocks in the whole trace"
                )
        yield {
            "timestamp": at_ms,
            "input_length": row["input_tokens"],
            "output_length": row["output_tokens"],
            "hash_ids": [one for first, last in ranges for one in range(first, last + 1)],
        }


def _azure(rows: Iterable[dict[str, str]], path: Path) -> Iterator[Arrival]:
    for number, row in enumerate(rows, start=2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
        except ValueError:
            raise TraceError(
                f"{path}:{number}: TIMESTAMP is {row['TIMESTAMP']!r}; must be a date and time"
            ) from None
        # Azure's are UTC; those of 2024 say so.
        at_s = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
        yield _arrival(path, number, at_s, row["ContextTokens"], row["GeneratedTokens"])


def _mooncake(rows: Sequence[Any], path: Path) -> Iterator[Arrival]:
    # Several requests have the time stamp of their interval: they are spread over it.
    stamps = sorted({_number(path, n, row, "timestamp") for n, row in enumerate(rows, 1)})
    next_of = dict(itertools.pairwise(stamps))
    count: dict[float, int] = {}
    for row in rows:
        count[row["timestamp"]] = count.get(row["timestamp"], 0) + 1
    seen: dict[float, int] = {}
    for number, row in enumerate(rows, start=1):
        stamp = row["timestamp"]
        index = seen[stamp] = seen.get(stamp, -1) + 1
        span = min(next_of.get(stamp, stamp + 3000) - stamp, 3000)
        at_s = (stamp + span * index / count[stamp]) / 1e3
        blocks = _blocks(path, number, row.get("hash_ids") or ())
        one = _arrival(path, number, at_s, row.get("input_length"), row.get("output_length"))
        yield one._replace(block_ids=blocks)


def _blocks(path: Path, number: int, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, list | tuple) and all(
        type(one) is int and 0 <= one < _MAX_BLOCK_ID for one in ids
    ):
        return tuple(ids)
    raise TraceError(
        f"{path}: request {number}: hash_ids is {ids!r:.60}; must be a list of whole numbers from "
        f"0 to {_MAX_BLOCK_ID - 1}"
    )


def _plain(text: str, path: Path) -> Iterator[Arrival]:
    rows = _json(text, path, 1)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise TraceError(f"{path}: request {number} is {row!r:.60}; must be an object")
        at_s = _number(path, number, row, "start_time")
        yield _arrival(path, number, at_s, row.get("prompt_len"), row.get("output_len"))


def _json(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from None


def _number(path: Path, number: int, row: Any, key: str) -> float:
    value = row.get(key) if isinstance(row, dict) else None
    found = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            found = float(value)
    if not math.isfinite(found):
        raise TraceError(f"{path}: request {number}: {key} is {value!r:.60}; must be a number")
    return found


def _arrival(path: Path, number: int, at_s: float, prompt: Any, output: Any) -> Arrival:
    lengths = []
    for name, value in (("prompt", prompt), ("output", output)):
        try:
            length = int(value)
        except (TypeError, ValueError, OverflowError):
            length = 0
        if not 1 <= length <= _MAX_TOKENS:
            raise TraceError(
                f"{path}: request {number}: its {name} has {value!r:.60} tokens; must be 1 to "
                f"{_MAX_TOKENS}"
            )
        lengths.append(length)
    return Arrival(at_s, lengths[0], lengths[1])


def scaled(arrivals: Sequence[Arrival], factor: float, seed: int = 0) -> list[Arrival]:
    """The same load over time, `factor` times as many requests.

    Each request comes as often as the factor says, a fraction by chance; copies come within ten
    seconds of it, since other users do not all come at once. Of prefixes a copy shares with other
    copies of its turn what the originals share among themselves.

    Raises:
        ValueError: the factor is not more than 0, leaves nothing, or needs more block ids than
            there are.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"--factor is {factor}; must be finite and more than 0")
    # Of one turn, from those of the next.
    apart = 1 + max((block for one in arrivals for block in one.block_ids), default=0)
    if apart > 1 and factor > (most := _MAX_BLOCK_ID // apart):
        raise ValueError(f"--factor is {factor:g}; at most {most} for block ids below {apart}")
    chance = random.Random(seed)
    found = list[Arrival]()
    for one in arrivals:
        whole, rest = divmod(factor, 1)
        for copy in range(int(whole) + (chance.random() < rest)):
            shift_s = 0.0 if not copy else chance.uniform(-_APART_S, _APART_S)
            # Block 0 is the one that all share.
            blocks = tuple(block and block + copy * apart for block in one.block_ids)
            found.append(one._replace(at_s=max(0.0, one.at_s + shift_s), block_ids=blocks))
    if not found:
        raise ValueError(f"--factor is {factor:g}; leaves none of {len(arrivals)} requests")
    return sorted(found, key=lambda one: one.at_s)


def repeated(arrivals: Sequence[Arrival], until_s: float) -> list[Arrival]:
    """The trace again and again, until so many seconds."""
    length_s = arrivals[-1].at_s + 1.0
    rounds = range(int(until_s / length_s) + 1)
    every = (one._replace(at_s=one.at_s + length_s * turn) for turn in rounds for one in arrivals)
    return [one for one in every if one.at_s < until_s]


def tidal(
    arrivals: Sequence[Arrival], period_s: float, lowest: float, seed: int = 0
) -> list[Arrival]:
    """Thins a trace so that its load falls to a share of itself and rises again, as over a day.

    Args:
        arrivals: the trace, in order of time.
        period_s: seconds from one maximum of the load to the next; the trace begins at a minimum.
        lowest: share of the load that is left at a minimum, 0 to 1.
        seed: of the random choice of the requests that are left out.
    """
    chance = random.Random(seed)
    kept = []
    for one in arrivals:
        height = (1 - math.cos(2 * math.pi * one.at_s / period_s)) / 2
        if chance.random() < lowest + (1 - lowest) * height:
            kept.append(one)
    return kept
