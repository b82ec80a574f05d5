"""The service's end of the control socket. A client that does not read cannot block the service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import cast

from google.protobuf.message import DecodeError

from baton.kvtransfer import engine_groups, local_wire, start_phases
from baton.kvtransfer.errors import TransferError
from baton.runtime.process import worker_directory
from baton.v1 import kv_transfer_pb2 as pb

# Limits of the bytes that a client has not read: above HIGH the service merges notifications, above
# MAX it closes the connection.
_HIGH_WATER_BYTES = 2**18
_MAX_UNREAD_BYTES = 4 * local_wire.MAX_LOCAL_MESSAGE_BYTES
# Most merged notifications for one client.
_MAX_MERGED = 65_536
_ENDED = (pb.HANDOFF_STATE_RELEASED, pb.HANDOFF_STATE_FAILED)
# Start of the file name in vllm/utils/network_utils.py, get_file_store_init_method.
_RENDEZVOUS = "vllm_dist_"
# Beginnings of the names of files that are removed with a killed worker's directory.
_NAMES = (_RENDEZVOUS, worker_directory.STEP_TARGETS)

logger = logging.getLogger(__name__)


class LocalConnection(asyncio.Protocol):
    """One client of the control socket.

    Attributes:
        subscribed: Whether the client is told the states of handoffs.
        is_main: Whether the client is the worker's main process. It is told how sends end, and the
            service ends when it disconnects.
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
        # The latest notification that is not written yet, for each key.
        self._merged: OrderedDict[tuple[str, bytes], pb.LocalReply] = OrderedDict()
        self.subscribed = False
        self.is_main = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
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
        """Writes the reply to a call."""
        self._write(message)

    def notify(self, key: tuple[str, bytes], message: pb.LocalReply) -> None:
        """Sends a notification; it replaces an unwritten one with the same key.

        When there are too many unwritten ones, the oldest end of a handoff is dropped. The
        connection of the main process is closed instead, because that process counts handoffs.
        """
        if not self._paused:
            self._write(message)
            return
        self._merged.pop(key, None)
        self._merged[key] = message
        if len(self._merged) > _MAX_MERGED and not self._drop_oldest_end():
            logger.warning("control connection closed: it does not read")
            self.abort()

    def _drop_oldest_end(self) -> bool:
        """Drops the oldest unwritten end of a handoff; returns False if none may be dropped.

        An engine that waits for no handoff does not read, for as long as the worker only sends.
        Such an engine remembers fewer ends than stay here (HandoffScheduler).
        """
        if self.is_main:
            return False
        # Few handoffs are live: each holds staging or a place in the queue for staging.
        ends = (key for key, each in self._merged.items() if each.handoff.state in _ENDED)
        oldest = next(ends, None)
        if oldest is not None:
            del self._merged[oldest]
        return oldest is not None

    def abort(self) -> None:
        """Closes the connection now."""
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
    """Removes a socket's file, and the worker's directory with its engine's files. Idempotent.

    A worker that was not killed removes its directory itself. The directory stays if it holds
    anything except sockets, links, the file through which ranks find each other, and the targets of
    the engine's steps.
    """
    Path(path).unlink(missing_ok=True)
    directory = Path(path).parent
    if directory.name.startswith(worker_directory.PREFIX):
        start_phases.remove(path)
        engine_groups.remove(path)
        with contextlib.suppress(OSError):
            for one in directory.iterdir():
                if one.is_socket() or one.is_symlink() or one.name.startswith(_NAMES):
                    one.unlink(missing_ok=True)
            directory.rmdir()
