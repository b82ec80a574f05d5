"""Recognizes the chunks of a streamed chat that differ only in their text.

Nearly all chunks of a stream differ from the previous chunk in one JSON string: the text or the
reasoning. An event of another API that is made from such a chunk can be rendered from this string
and from constant parts, at a tenth of the cost of vLLM's converters.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# Stands for the text in an event that is rendered once, to be split into its constant parts.
TEXT = "<text>"
# The delta of a chunk with nothing but a text. No quotation mark in a JSON string is unescaped, so
# this matches only the delta itself.
_DELTA = re.compile(r'"delta":\{"(?:content|reasoning)":(?=")')
# A chunk may have the token counts so far, which differ from chunk to chunk and come last.
_USAGE = '"usage":'
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class PlainChunks:
    """The chunks that are equal to one chunk but for its text.

    Attributes:
        start: The chunk before the text's opening quotation mark.
        end: The chunk from behind the text's closing quotation mark up to the token counts.
    """

    start: str
    end: str

    @classmethod
    def like(cls, chunk: str) -> PlainChunks | None:
        """Returns the chunks like this one; None: it has something else than a text, or an end."""
        found = _DELTA.search(chunk)
        if found is None:
            return None
        _, end = _decode(chunk, found.end())
        rest, _, _ = chunk[end:].partition(_USAGE)
        if not rest.startswith("}") or '"finish_reason":null' not in rest:
            return None
        return cls(chunk[: found.end()], rest)

    def text(self, chunk: str) -> str | None:
        """Returns the text of a chunk; None: it is not one of these chunks, or has no text."""
        if not chunk.startswith(self.start):
            return None
        text, end = _decode(chunk, len(self.start))
        return text if text and chunk.startswith(self.end, end) else None


def split_at_text(event: dict[str, Any]) -> tuple[str, str]:
    """Renders an event whose text is TEXT; returns the parts before and after the quoted text."""
    start, _, end = json.dumps(event, separators=(",", ":")).partition(json.dumps(TEXT))
    return start, end
