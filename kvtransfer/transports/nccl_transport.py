"""NCCL between GPUs, and gloo, its form on CPUs: torch process groups of two services.

links.py keeps the process groups. Importing it loads torch, so that happens only where the
configuration lists one of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import grpc

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.push import Push
from baton.kvtransfer.sending import Batch
from baton.kvtransfer.transports.link_store import may_have_gpu
from baton.kvtransfer.transports.transport import (
    LinkLost,
    ServiceContext,
    Transport,
    TransportHandler,
)
from baton.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from baton.kvtransfer.transports.links import Links
    from baton.kvtransfer.transports.process_group import Backend

# Longest time for one frame's payload through a link, in seconds.
LINK_FRAME_TIMEOUT_S = 10.0


class ProcessGroupTransport(Transport):
    """Sends frames through a process group. The transport's name is torch's backend name."""

    def __init__(self, name: str, service: ServiceContext) -> None:
        super().__init__(name, service)
        self._links: Links | None = None
        self._check_backend()

    def _check_backend(self) -> None:
        """Raises TransferError when this process cannot use the backend."""
        try:
            from baton.kvtransfer.transports import process_group
        except ImportError as error:
            raise TransferError(f"no torch here: {error}") from None
        if (reason := process_group.unusable_reason(cast("Backend", self.name))) is not None:
            raise TransferError(reason)

    def serve(self, server: grpc.aio.Server, handler: TransportHandler) -> None:
        from baton.kvtransfer.transports.links import Links

        def make() -> Links:
            config = self._service.config
            links = Links(
                handler,
                open_timeout_s=config.open_timeout_s,
                # A lost link must leave enough time for another transport.
                frame_timeout_s=min(LINK_FRAME_TIMEOUT_S, config.idle_timeout_s / 2),
                dial=self._service.dial,
                within_host=self._service.within_host,
            )
            links.add_to(server)
            return links

        # Both backends are joined through the same method of the gRPC port.
        self._links = self._service.share(Links, make)
        self._links.allow(self.name)

    async def close(self) -> None:
        if self._links is not None:
            await self._links.close()

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, link_id=self._served().link_id(self.name, target))

    async def prepare(self, target: str) -> None:
        await self._served().wait_decided(self.name, target)

    async def send(self, push: Push, batch: Batch) -> None:
        await self._served().send(batch.link_id, batch.frames)

    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        if not self._served().has_incoming(offer.link_id):
            raise LinkLost("the link is over")
        return 0

    def _served(self) -> Links:
        if self._links is None:
            raise LinkLost("the service does not serve links yet")
        return self._links


class NcclTransport(ProcessGroupTransport):
    """Between two GPUs."""

    def _check_backend(self) -> None:
        if not may_have_gpu():
            # Checked first: torch takes seconds and memory to load.
            raise TransferError("no GPU here")
        super()._check_backend()


class GlooTransport(ProcessGroupTransport):
    """Between two CPUs, over TCP."""
