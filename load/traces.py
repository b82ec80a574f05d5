"""Reads request traces, and scales, repeats and modulates them.

Three formats: Azure's CSV, Mooncake's JSON lines (also as a compact CSV), and a JSON list of
objects with start_time, prompt_len and output_len.
"""

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

# Tokens per block in Mooncake's hash_ids.
MOONCAKE_BLOCK_TOKENS = 512
_MAX_BLOCK_ID = 2**31
# Limit for the sum of the blocks of all requests; this many use several hundred MB of memory.
_MAX_BLOCKS = 2**23
# Limit for one prompt or output, several times the context length of any model.
MAX_TOKENS = 2**24
# Copies of a request in a scaled trace arrive within this many seconds of the original.
_COPY_SHIFT_S = 10.0
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_COLUMNS = ("timestamp_ms", "input_tokens", "output_tokens", "block_ids")


class TraceError(ValueError):
    """A trace cannot be read. The message names the file, the place and what is allowed."""


class Arrival(NamedTuple):
    """A request of a trace.

    Attributes:
        at_s: Arrival time in seconds since the trace began.
        block_ids: One ID per block of MOONCAKE_BLOCK_TOKENS prompt tokens. Prompts that begin with
            the same IDs share that prefix. Empty: the prompt shares nothing.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()

    def prompt(self, number: int) -> array[int]:
        """Returns token IDs; `number` makes the parts unique that are not shared."""
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
    """Reads a trace; detects the format. Returns arrivals in order of time, the first at 0 s.

    Raises:
        TraceError: the file cannot be read, or a row is wrong.
    """
    try:
        # Spreadsheet programs write a byte order mark at the start of a file.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: cannot be read: it is not UTF-8 text") from None
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
        lines = enumerate(text.splitlines(), start=1)
        values = [_json(line, path, number) for number, line in lines if line.strip()]
        return _mooncake(values, path)
    return _csv(text, path)


def _csv(text: str, path: Path) -> Iterator[Arrival]:
    lines = text.splitlines()
    rows = csv.DictReader(lines, restval="")
    columns = set(rows.fieldnames or ())
    if columns >= set(_AZURE_COLUMNS):
        return _azure(rows, path)
    if columns >= set(_MOONCAKE_COLUMNS):
        return _mooncake(list(_expanded(path, rows)), path)
    raise TraceError(
        f"{path}: neither JSON nor a CSV with the columns {', '.join(_AZURE_COLUMNS)}, or "
        f"{', '.join(_MOONCAKE_COLUMNS)}; its first line is {(lines or [''])[0][:60]!r}"
    )


def _expanded(path: Path, rows: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Expands the compact CSV form of Mooncake's trace, which writes runs of hash_ids as ranges."""
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
                    f"lower ID first, and at most {_MAX_BLOCKS} blocks in the whole trace"
                )
        yield {
            "timestamp": at_ms,
            "input_length": row["input_tokens"],
            "output_length": row["output_tokens"],
            "hash_ids": [one for first, last in ranges for one in range(first, last + 1)],
        }


def _azure(rows: csv.DictReader[str], path: Path) -> Iterator[Arrival]:
    for row in rows:
        place = f"{path}:{rows.line_num}"
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
        except ValueError:
            raise TraceError(
                f"{place}: TIMESTAMP is {row['TIMESTAMP']!r:.60}; must be a date and time"
            ) from None
        # Azure's times are UTC; the trace of 2024 writes the zone, the trace of 2023 does not.
        at_s = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
        yield _arrival(place, at_s, row["ContextTokens"], row["GeneratedTokens"])


def _mooncake(rows: Sequence[Any], path: Path) -> Iterator[Arrival]:
    # Requests of one interval have the same time stamp; they are spread evenly over the interval.
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
        place = f"{path}: request {number}"
        one = _arrival(place, at_s, row.get("input_length"), row.get("output_length"))
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
        place = f"{path}: request {number}"
        if not isinstance(row, dict):
            raise TraceError(f"{place} is {row!r:.60}; must be an object")
        at_s = _number(path, number, row, "start_time")
        yield _arrival(place, at_s, row.get("prompt_len"), row.get("output_len"))


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


def _arrival(place: str, at_s: float, prompt: Any, output: Any) -> Arrival:
    lengths = []
    for name, value in (("prompt", prompt), ("output", output)):
        length = _whole(value)
        if length is None or not 1 <= length <= MAX_TOKENS:
            raise TraceError(
                f"{place}: its {name} has {value!r:.60} tokens; must be a whole number from 1 to "
                f"{MAX_TOKENS}"
            )
        lengths.append(length)
    return Arrival(at_s, lengths[0], lengths[1])


def _whole(value: Any) -> int | None:
    """Returns a whole number; None for another value.

    A float of a whole number counts: pandas writes whole numbers so in a column with empty cells.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() else None


def longest(arrivals: Sequence[Arrival]) -> int:
    """Returns the prompt and output tokens of the longest request."""
    return max(one.num_prompt_tokens + one.num_output_tokens for one in arrivals)


def shared_prompt_tokens(arrivals: Sequence[Arrival], block_size_tokens: int) -> tuple[int, int]:
    """Counts the prompt tokens that one infinite prefix cache would have served.

    Args:
        arrivals: Requests in order of time.
        block_size_tokens: Tokens per block of the cache; only whole blocks are shared.

    Returns:
        Prompt tokens in blocks that an earlier prompt had too, and all prompt tokens.
    """
    # Longest part of each of the trace's blocks that a prompt had.
    seen: dict[int, int] = {}
    num_shared = num_tokens = 0
    for one in arrivals:
        shared, is_prefix = 0, True
        for index, block in enumerate(one.block_ids):
            had = max(
                0, min(MOONCAKE_BLOCK_TOKENS, one.num_prompt_tokens - index * MOONCAKE_BLOCK_TOKENS)
            )
            before = min(seen.get(block, 0), had)
            if is_prefix:
                shared += before
                is_prefix = before == MOONCAKE_BLOCK_TOKENS
            seen[block] = max(seen.get(block, 0), had)
        # The last token is always computed.
        shared = min(shared, one.num_prompt_tokens - 1)
        num_shared += shared // block_size_tokens * block_size_tokens
        num_tokens += one.num_prompt_tokens
    return num_shared, num_tokens


def scaled(arrivals: Sequence[Arrival], factor: float, seed: int = 0) -> list[Arrival]:
    """Returns a trace with `factor` times as many requests and the same shape over time.

    Each request is copied `factor` times; the fractional part is decided at random. Copies arrive
    within ten seconds of the original. The n-th copies of two requests share the prefixes that the
    originals share; copies with different n share only block 0.

    Raises:
        ValueError: the factor is not finite or not more than 0, leaves no request, or needs more
            block IDs than exist.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"--factor is {factor}; must be finite and more than 0")
    # Distance between the block IDs of the n-th and the (n+1)-th copies.
    stride = 1 + max((block for one in arrivals for block in one.block_ids), default=0)
    if stride > 1 and factor > (most := _MAX_BLOCK_ID // stride):
        raise ValueError(
            f"--factor is {factor:g}; must be at most {most} for block IDs below {stride}"
        )
    chance = random.Random(seed)
    found = list[Arrival]()
    for one in arrivals:
        whole, rest = divmod(factor, 1)
        for copy in range(int(whole) + (chance.random() < rest)):
            shift_s = 0.0 if not copy else chance.uniform(-_COPY_SHIFT_S, _COPY_SHIFT_S)
            # All requests of Mooncake's traces share block 0.
            blocks = tuple(block and block + copy * stride for block in one.block_ids)
            found.append(one._replace(at_s=max(0.0, one.at_s + shift_s), block_ids=blocks))
    if not found:
        raise ValueError(f"--factor is {factor:g}, which leaves none of {len(arrivals)} requests")
    return sorted(found, key=lambda one: one.at_s)


def repeated(arrivals: Sequence[Arrival], until_s: float) -> list[Arrival]:
    """Repeats the trace until `until_s` seconds."""
    length_s = arrivals[-1].at_s + 1.0
    rounds = range(int(until_s / length_s) + 1)
    every = (one._replace(at_s=one.at_s + length_s * turn) for turn in rounds for one in arrivals)
    return [one for one in every if one.at_s < until_s]


def tidal(
    arrivals: Sequence[Arrival], period_s: float, lowest: float, seed: int = 0
) -> list[Arrival]:
    """Removes requests so that the load follows a cosine wave, like a daily cycle.

    Args:
        arrivals: The trace, in order of time.
        period_s: Seconds from one maximum of the load to the next; the trace begins at a minimum.
        lowest: Share of the load that remains at a minimum, 0 to 1.
        seed: Seed of the random choice of the removed requests.
    """
    chance = random.Random(seed)
    kept = []
    for one in arrivals:
        height = (1 - math.cos(2 * math.pi * one.at_s / period_s)) / 2
        if chance.random() < lowest + (1 - lowest) * height:
            kept.append(one)
    return kept
