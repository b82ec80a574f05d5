"""The Unix sockets within a worker: each message is a 4-byte little-endian length and protobuf."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import Message

from baton.kvtransfer.errors import TransferError

_LENGTH = struct.Struct("<I")
MAX_LOCAL_MESSAGE_BYTES = 16 * 2**20
# Most received frames that one message lists, at 40 to 60 bytes each: the service and the engine's
# scheduler handle such a message in a fraction of a second.
MAX_LISTED_FRAMES = 2**15


def encode(message: Message) -> bytes:
    """Returns a message as the bytes to write to the socket."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


def bind(path: str) -> socket.socket:
    """Returns a listening socket that only this user can connect to; replaces a dead socket's file.

    Raises:
        TransferError: The socket cannot be created; the message names the path.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise OSError("exists and is not a socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    Path(path).unlink(missing_ok=True)
                else:
                    raise OSError("another service listens on it")
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise TransferError(f"control socket {path}: {error}") from None
    listener.setblocking(False)
    return listener


class Unpacker:
    """Cuts a byte stream into messages; keeps at most the beginning of one message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds bytes; yields each complete message, without its length.

        Raises:
            TransferError: A length exceeds MAX_LOCAL_MESSAGE_BYTES; the stream is unusable then.
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
