"""Notes: messages from a worker's main process to its engine's scheduler, over a Unix socket.

A note carries the first token that a request waits for. The transfer service is not used for it,
because that would wake one more process. The messages are framed as on the control socket
(local_wire.py) and go in one direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from baton.kvtransfer import local_wire
from baton.kvtransfer.errors import TransferError
from baton.v1 import kv_transfer_pb2

_RECEIVE_BYTES = 2**16
# Most bytes that the writer keeps beside the socket's own buffer, which holds a few hundred notes.
_MAX_UNSENT_BYTES = 2**20


def path_beside(socket_path: str) -> str:
    """Returns the path of the notes' socket that belongs to a control socket."""
    return f"{socket_path}.n"


class NoteReader:
    """The scheduler's end: takes notes from the latest connection. One thread uses it.

    Args:
        socket_path: Path of the control socket.

    Raises:
        TransferError: The socket cannot be created.
    """

    def __init__(self, socket_path: str) -> None:
        self._path = path_beside(socket_path)
        self._listener = local_wire.bind(self._path)
        self._unpacker = local_wire.Unpacker()
        self._connection: socket.socket | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets that become readable when `take` may return notes."""
        return [self._listener, *([self._connection] if self._connection is not None else [])]

    def take(self) -> list[kv_transfer_pb2.LocalNote]:
        """Returns the notes since the last call, in order; never waits."""
        notes: list[kv_transfer_pb2.LocalNote] = []
        while self._connection is not None or self._accepted():
            assert self._connection is not None
            try:
                data = self._connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                if not self._accepted():
                    break
                continue
            except OSError:
                data = b""
            try:
                if not data:
                    raise TransferError("the writer of the notes has closed its end")
                for message in self._unpacker.feed(data):
                    notes.append(kv_transfer_pb2.LocalNote.FromString(message))
            except (TransferError, DecodeError):
                self._drop()
        return notes

    def close(self) -> None:
        """Idempotent."""
        self._drop()
        self._listener.close()
        Path(self._path).unlink(missing_ok=True)

    def _accepted(self) -> bool:
        """Accepts a new connection, which replaces the old one; returns whether there was one."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return False
        self._drop()
        connection.setblocking(False)
        self._connection, self._unpacker = connection, local_wire.Unpacker()
        return True

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class NoteWriter:
    """The main process's end. Only the constructor raises; `alive` says if it is connected.

    It never waits, because the engine does not read during a step. Notes that do not fit into the
    socket are kept, and the caller's event loop sends them later.

    Args:
        socket_path: Path of the control socket.

    Raises:
        OSError: No scheduler listens on the socket.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unsent = bytearray()
        # Event loop that calls `_send` when the socket has room; None while no notes are kept.
        self._loop: asyncio.AbstractEventLoop | None = None
        self.alive = True
        try:
            self._socket.connect(path_beside(socket_path))
            self._socket.setblocking(False)
        except OSError:
            self.close()
            raise

    def note(
        self, num_submitted: int, handoff_id: bytes = b"", token_ids: Iterable[int] = ()
    ) -> bool:
        """Sends a note to the engine's scheduler; see LocalNote in the contract.

        While notes are kept, a note with only a count is dropped: the next note holds the count.
        Returns False when the note is not sent: too many are kept, or the connection has ended.
        """
        if not self.alive:
            return False
        if self._unsent and not handoff_id:
            return True
        data = local_wire.encode(
            kv_transfer_pb2.LocalNote(
                num_submitted=num_submitted, handoff_id=handoff_id, token_ids=token_ids
            )
        )
        if len(self._unsent) + len(data) > _MAX_UNSENT_BYTES:
            return False
        self._unsent += data
        if self._loop is None:
            self._send()
        return self.alive

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_writer(self._socket, self._send)
        except OSError:
            self.close()
        else:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_writer(self._socket)

    def close(self) -> None:
        """Idempotent."""
        self.alive = False
        self._stop_waiting()
        with contextlib.suppress(OSError):
            self._socket.close()
