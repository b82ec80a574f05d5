"""Content parts of a chat message, in the form of OpenAI's API, as protobuf messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from baton.client import errors
from baton.v1 import inference_pb2

_DATA_URLS = "must be a data URL: data:image/png;base64,..."


def content_parts(
    where: str, parts: Sequence[Mapping[str, Any]]
) -> list[inference_pb2.ContentPart]:
    """Converts the parts of a message.

    Args:
        where: Path of the message, for errors.
        parts: `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url": ...}}`
            with a data URL, or `{"type": "image", "image": ...}` with the bytes of a file.

    Raises:
        InvalidArgumentError: A part has another form.
    """
    return [_part(f"{where}.parts[{index}]", part) for index, part in enumerate(parts)]


def _part(where: str, part: Mapping[str, Any]) -> inference_pb2.ContentPart:
    match part:
        case {"type": "text", "text": str(text)}:
            return inference_pb2.ContentPart(text=text)
        case {"type": "image", "image": bytes(data)}:
            return inference_pb2.ContentPart(image=data)
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            return inference_pb2.ContentPart(image=_file(f"{where}.image_url.url", url))
    allowed = "must be a part of type text, image_url or image with its text, data URL or bytes"
    raise errors.invalid(where, part, allowed)


def _file(where: str, url: str) -> bytes:
    """Returns the file in a data URL."""
    head, comma, encoded = url.partition(",")
    if not head.lower().startswith("data:") or not comma:
        # Fetching a URL that a caller chooses would let callers reach this network's own servers.
        raise errors.invalid(where, url, f"{_DATA_URLS}; other URLs are not fetched")
    if not head.lower().endswith(";base64"):
        raise errors.invalid(where, url, _DATA_URLS)
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise errors.invalid(where, url, f"is not base64: {error}") from None
