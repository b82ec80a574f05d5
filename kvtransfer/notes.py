"""Notes from a worker's main process to its engine's scheduler, over a Unix socket of their own.

The first token that a request waits for goes this way: through the transfer service it would wake
one process more. Messages are the control socket's (local_wire.py), in one direction.
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
# Kept by the writer, beside what the socket holds, which is a few hundred notes of one token.
_MAX_UNSENT_BYTES = 2**20


def path_beside(socket_path: str) -> str:
    """Of the notes of the engine beside a control socket."""
    return f"{socket_path}.n"


class NoteReader:
    """The scheduler's end: takes notes from whoever connected last. One thread uses it.

    Args:
        socket_path: of the control socket.

    Raises:
        TransferError: the socket cannot be made.
    """

    def __init__(self, socket_path: str) -> None:
        self._path = path_beside(socket_path)
        self._listener = local_wire.bind(self._path)
        self._unpacker = local_wire.Unpacker()
        self._connection: socket.socket | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """Readable when there may be something to take."""
        return [self._listener, *([self._connection] if self._connection is not None else [])]

    def take(self) -> list[kv_transfer_pb2.LocalNote]:
        """Those that have come since the last call, in order; never waits."""
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
                    raise TransferError("the notes' writer has gone")
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
        """Whether somebody else has connected, who then is the writer."""
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
    """The main process's end. Never raises once it is made: `alive` says whether anyone reads.

    It never waits either: an engine in the middle of a step reads nothing, for as long as the step
    takes. What does not fit into the socket is kept, and sent by the event loop of whoever notes.

    Args:
        socket_path: of the control socket.

    Raises:
        OSError: nobody listens.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unsent = bytearray()
        # Calls `_send` once more fits into the socket; None while nothing is kept.
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
        """Tells the engine's scheduler something; see LocalNote in the contract.

        While others are kept, a count alone is left out: the next one holds it. False when this one
        is not told: too many are kept, or nobody reads them any more.
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
