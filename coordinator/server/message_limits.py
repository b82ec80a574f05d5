"""Sizes of messages: decoding of clients' messages, and the limit of commands to workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from baton.runtime.config import BatonConfig
from baton.runtime.network import rpc

M = TypeVar("M", bound=Message)

# Bytes of a message's memory that may be kept in vain, because decoding again costs more.
_MAX_WASTED_BYTES = 2**14
# Largest encoded size of a token ID; a vocabulary has at most two million tokens.
TOKEN_BYTES = 3
# Room for a command's fields beside its prompt and images.
_OTHER_BYTES = 2 * 2**20


def max_command_bytes(config: BatonConfig) -> int:
    """Limit of one command to a worker, in bytes: every valid request fits.

    A prompt may have one token per byte of text. With images, the command has the chat's text too.
    """
    text, images = config.coordinator.max_prompt_bytes, config.images.max_bytes
    return max(rpc.MAX_MESSAGE_BYTES, (TOKEN_BYTES + 1) * text + images + _OTHER_BYTES)


def decoder(kind: type[M]) -> Callable[[bytes], M]:
    """Returns a function that decodes a message and drops all fields that this version lacks.

    Parts of a request are copied into commands and kept while the request waits. No limit applies
    to unknown fields, so they would make both of any size.
    """

    def decode(encoded: bytes) -> M:
        message = kind.FromString(encoded)
        message.DiscardUnknownFields()
        if len(encoded) > _MAX_WASTED_BYTES and message.ByteSize() + _MAX_WASTED_BYTES < len(
            encoded
        ):
            # The dropped fields would stay in memory for as long as the message.
            message = kind.FromString(message.SerializeToString())
        return message

    return decode
