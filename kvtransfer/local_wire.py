"""Messages on the control socket: a 4-byte little-endian length and a protobuf message."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from baton.kvtransfer.errors import TransferError
from baton.v1 import kv_transfer_pb2

_LENGTH = struct.Struct("<I")
# A claim of a long prompt lists every frame that was received: 40 bytes each.
MAX_LOCAL_MESSAGE_BYTES = 16 * 2**20


def encode(message: kv_transfer_pb2.LocalRequest | kv_transfer_pb2.LocalReply) -> bytes:
    """One message, ready to be written to the socket."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Cuts a byte stream into messages; keeps at most one message's beginning."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds bytes; yields each message that is whole, without its length.

        Raises:
            TransferError: a length over MAX_LOCAL_MESSAGE_BYTES; the stream is of no use after it.
        """
        self._buffer += data
        start, end = 0, len(self._buffer)
        try:
            while end - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_LOCAL_MESSAGE_BYTES:
                    raise TransferError(
                        f"control message of {length} bytes; at most {MAX_LOCAL_MESSAGE_BYTES}"
                    )
                if end - start - _LENGTH.size < length:
                    break
                start += _LENGTH.size + length
                yield bytes(self._buffer[start - length : start])
        finally:
            del self._buffer[:start]
