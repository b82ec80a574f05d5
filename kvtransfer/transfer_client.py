"""The worker's main process's end: starts the transfer service, talks to it, ends it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2

HandoffEvent = kv_transfer_pb2.LocalHandoffState | kv_transfer_pb2.LocalSendState


class TransferClient:
    """The transfer service of this worker, which lives as long as this object.

    Use from one event loop; `start` makes it, `close` (or leaving `async with`) ends it.

    Attributes:
        socket_path: of the control socket; engine processes get it for their EnginePort.
        address: host:port that other workers' services push to.
        send_bytes: size of the sender's staging: the largest handoff this worker can send.
        receive_bytes: the same of the receiver's.
        gone: set once the service has ended, whoever ended it; `gone_reason` says why.
    """

    socket_path: str
    address: str
    send_bytes: int
    receive_bytes: int
    gone: asyncio.Event
    gone_reason: str

    @classmethod
    async def start(
        cls,
        config: KvTransferConfig,
        socket_path: str,
        *,
        log_level: str = "info",
        timeout_s: float = 30.0,
    ) -> TransferClient:
        """Starts the service's process and connects to it.

        Args:
            socket_path: where the service makes its control socket; a short path in a directory
                that only this user can enter.

        Raises:
            ServiceGone: it did not start; the message is its one line of explanation.
        """
        raise NotImplementedError

    async def configure(self, fingerprint: kv_transfer_pb2.KvFingerprint) -> None:
        """Says what the engine's cache is like; before that the service takes no handoffs.

        Raises:
            ServiceGone, TransferRefused.
        """
        raise NotImplementedError

    async def open_send(
        self,
        handoff_id: bytes,
        target: str,
        num_blocks: int,
        num_tokens: int,
        wait_s: float,
        *,
        epoch: int = 1,
    ) -> int:
        """Reserves the sender's staging and begins to open the handoff at the receiver.

        Cancelling the call aborts the send.

        Args:
            target: host:port of the receiving worker's transfer service.
            wait_s: how long to wait for room, here and at the receiver.
            epoch: of the first frames.

        Returns:
            The offset of the handoff's bytes in the segment (see LocalSendOpened). How it goes on
            is told by `events`, always with exactly one LocalSendState unless it is aborted.

        Raises:
            TransferRefused: no room in time, too large, or the id is in use: prefill without
                handing over.
            ServiceGone: the same.
        """
        raise NotImplementedError

    def abort_send(self, handoff_id: bytes) -> None:
        """The send is over: cancelled, or finished with its first token. Idempotent."""
        raise NotImplementedError

    def drop(self, handoff_id: bytes) -> None:
        """A handoff to this worker is not wanted (any more), also before it was opened."""
        raise NotImplementedError

    async def stats(self) -> kv_transfer_pb2.LocalStatistics:
        """Raises ServiceGone."""
        raise NotImplementedError

    async def next_events(self) -> list[HandoffEvent]:
        """Waits for changes of handoffs' states; the latest of each since the last call.

        LocalHandoffState for handoffs to this worker, LocalSendState for those from it. One caller
        at a time.

        Raises:
            ServiceGone: the service has ended, and with it every handoff.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the service and waits for its end; socket and segment are gone after. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> TransferClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
