"""The service's end of the control socket: connections, and subscribers that cannot hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import cast

from google.protobuf.message import DecodeError

from baton.kvtransfer import engine_stages, local_wire, notes
from baton.kvtransfer.errors import TransferError
from baton.runtime import worker_directory
from baton.v1 import kv_transfer_pb2 as pb

# Written and not read by the other end: above HIGH notifications are merged instead, above MAX the
# connection is given up.
_HIGH_WATER_BYTES = 2**18
_MAX_UNREAD_BYTES = 4 * local_wire.MAX_LOCAL_MESSAGE_BYTES
_MAX_MERGED = 65_536
# Of the file's name (vllm/utils/network_utils.py, get_file_store_init_method).
_RENDEZVOUS = "vllm_dist_"

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


def remove(path: str) -> None:
    """Removes a socket's file, and a worker's directory with what its engine leaves; idempotent.

    The worker removes its directory itself, unless it was killed. A directory with anything in it
    but sockets, links, and the file by which ranks find each other stays.
    """
    Path(path).unlink(missing_ok=True)
    # Of an engine that was killed.
    Path(notes.path_beside(path)).unlink(missing_ok=True)
    directory = Path(path).parent
    if directory.name.startswith(worker_directory.PREFIX):
        engine_stages.forget(path)
        with contextlib.suppress(OSError):
            for one in directory.iterdir():
                if one.is_socket() or one.is_symlink() or one.name.startswith(_RENDEZVOUS):
                    one.unlink(missing_ok=True)
            directory.rmdir()
