"""Images in prompts: their IDs, and the keys by which KV blocks and digests depend on them.

In a prompt's token IDs an image is a run of placeholders, the same for every image. So a name of a
prompt, or of a block of it, must depend on its images too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

from baton.v1 import common_pb2, inference_pb2

# An image that a block has tokens of: its ID, and the index of its first token relative to the
# block's first; negative if the image begins in an earlier block.
ImageKey: TypeAlias = tuple[str, int]

# First bytes of the file formats that are accepted, with the formats' names.
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
}
FORMATS = "PNG, JPEG, WebP or GIF"


def image_id(data: bytes) -> str:
    """Returns the ID of an image's file, which is equal in every process."""
    return hashlib.sha256(data).hexdigest()


def image_format(data: bytes) -> str | None:
    """Returns the format of an image's file by its first bytes; None: it is not accepted."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for begin, name in _SIGNATURES.items() if data.startswith(begin)), None)


def images_of(chat: inference_pb2.ChatPrompt) -> list[bytes]:
    """Returns the files of a chat's images, in order."""
    return [
        part.image for message in chat.messages for part in message.parts if part.HasField("image")
    ]


def block_keys(
    images: Sequence[common_pb2.PromptImage],
    first_token: int,
    num_tokens: int,
    block_size_tokens: int,
) -> list[list[ImageKey]]:
    """Returns for each full block of a range of tokens the images that it has tokens of.

    Args:
        images: Images of the whole prompt, in order.
        first_token: Index of the range's first token in the prompt.
        num_tokens: Number of tokens in the range.
        block_size_tokens: Tokens per block.
    """
    keys: list[list[ImageKey]] = [[] for _ in range(num_tokens // block_size_tokens)]
    for image in images:
        begin = image.offset - first_token
        last = begin + image.num_tokens - 1
        if last < 0 or not image.num_tokens:
            continue
        for block in range(max(0, begin) // block_size_tokens, last // block_size_tokens + 1):
            if block < len(keys):
                keys[block].append((image.id, begin - block * block_size_tokens))
    return keys


def keyed_tokens(
    prompt_token_ids: Sequence[int], images: Sequence[common_pb2.PromptImage]
) -> array[int]:
    """Returns a prompt in which the placeholders of different images differ, for hashing only."""
    tokens = array("I", prompt_token_ids)
    for image in images:
        key = xxhash.xxh3_64_intdigest(image.id.encode()) & 0xFFFFFFFF
        for index in range(image.offset, min(image.offset + image.num_tokens, len(tokens))):
            tokens[index] = (key + index - image.offset) & 0xFFFFFFFF
    return tokens


def end_of_images(images: Sequence[common_pb2.PromptImage]) -> int:
    """Returns the number of prompt tokens up to the end of the last image; 0 without images."""
    return max((image.offset + image.num_tokens for image in images), default=0)
