"""Notes from a worker's main process to its engine's scheduler, over a Unix socket of their own.

The first token that a request waits for goes this way: through the transfer service it would wake
one process more. Messages are the control socket's (local_wire.py), in one direction.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from baton.kvtransfer import local_wire
from baton.kvtransfer.errors import TransferError
from baton.v1 import kv_transfer_pb2

_RECEIVE_BYTES = 2**16
_TIMEOUT_S = 5.0


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

    Args:
        socket_path: of the control socket.

    Raises:
        OSError: nobody listens.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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

        Waits while the engine, in the middle of a step, has left many unread; False when they were
        not taken within bounds, or nobody reads them any more.
        """
        if not self.alive:
            return False
        data = memoryview(
            local_wire.encode(
                kv_transfer_pb2.LocalNote(
                    num_submitted=num_submitted, handoff_id=handoff_id, token_ids=token_ids
                )
            )
        )
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        # Half a message may be out: nothing can follow it.
                        self.close()
                        return False
                    select.select([], [self._socket], [], remaining)
        except OSError:
            self.close()
        return self.alive

    def close(self) -> None:
        """Idempotent."""
        self.alive = False
        with contextlib.suppress(OSError):
            self._socket.close()
