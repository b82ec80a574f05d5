"""The service's end of the control socket: connections, and subscribers that cannot hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import cast

from google.protobuf.message import DecodeError

from baton.kvtransfer import engine_stages, local_wire
from baton.kvtransfer.errors import TransferError
from baton.runtime import worker_directory
from baton.v1 import kv_transfer_pb2 as pb

# Written and not read by the other end: above HIGH notifications are merged instead, above MAX the
# connection is given up.
_HIGH_WATER_BYTES = 2**18
_MAX_UNREAD_BYTES = 4 * local_wire.MAX_LOCAL_MESSAGE_BYTES
_MAX_MERGED = 65_536

logger = logging.getLogger(__name__)


class LocalConnection(asyncio.Protocol):
    """One client of the control socket.

    Attributes:
        subscribed: to handoffs' states.
        is_main: the worker's main process; hears how sends end, and the service ends with it.
    """

    def __init__(
        self,
        on_request: Callable[[LocalConnection, pb.LocalRequest], None],
        on_lost: Callable[[LocalConnection], None],
    ) -> None:
        self._on_request, self._on_lost = on_request, on_lost
        self._unpacker = local_wire.Unpacker()
        self._transport: asyncio.Transport | None = None
        self._paused = False
        # The latest notification about each thing, not written yet.
        self._merged: OrderedDict[tuple[str, bytes], pb.LocalReply] = OrderedDict()
        self.subscribed = False
        self.is_main = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._unpacker.feed(data):
                self._on_request(self, pb.LocalRequest.FromString(message))
        except (TransferError, DecodeError) as error:
            logger.warning("control connection closed: %s", error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._merged.clear()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        while self._merged and not self._paused:
            _, message = self._merged.popitem(last=False)
            self._write(message)

    def reply(self, message: pb.LocalReply) -> None:
        """Answers a call."""
        self._write(message)

    def notify(self, key: tuple[str, bytes], message: pb.LocalReply) -> None:
        """Tells the latest about something; replaces what was not written yet about it."""
        if not self._paused:
            self._write(message)
            return
        self._merged.pop(key, None)
        self._merged[key] = message
        if len(self._merged) > _MAX_MERGED:
            logger.warning("control connection closed: it does not read")
            self.abort()

    def abort(self) -> None:
        """Closes it now."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, message: pb.LocalReply) -> None:
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            logger.warning("control connection closed: it does not read its replies")
            self.abort()
            return
        self._transport.write(local_wire.encode(message))


def bind(path: str) -> socket.socket:
    """A listening socket that only this user can connect to; replaces a dead one's file.

    Raises:
        TransferError: naming the path when it cannot be.
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


def remove(path: str) -> None:
    """Removes a socket's file, and a worker's directory with its engine's sockets; idempotent.

    The worker removes its directory itself, unless it was killed. A directory with anything else in
    it stays.
    """
    Path(path).unlink(missing_ok=True)
    directory = Path(path).parent
    if directory.name.startswith(worker_directory.PREFIX):
        engine_stages.forget(path)
        with contextlib.suppress(OSError):
            for one in directory.iterdir():
                if one.is_socket():
                    one.unlink(missing_ok=True)
            directory.rmdir()
