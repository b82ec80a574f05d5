"""NCCL between GPUs, and gloo, its form on CPUs: torch process groups of two services.

Each pair of services has a link (collective.py), by which the receiver reads from the sender's
staging. links.py keeps the links. Importing it loads torch, so that happens only where the
configuration lists one of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import grpc

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.link_store import may_have_gpu
from baton.kvtransfer.transports.outgoing import OutgoingBlocks, OutgoingFrame
from baton.kvtransfer.transports.transport import Pull, ServiceContext, Transport, TransportHandler
from baton.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from baton.kvtransfer.transports.collective import ReceivingLink
    from baton.kvtransfer.transports.links import Links
    from baton.kvtransfer.transports.process_group import Backend

# Longest time for one operation of a group, in seconds.
LINK_FRAME_TIMEOUT_S = 10.0


class ProcessGroupTransport(Transport):
    """Sends references on the stream; the receiver reads the blocks by a process group.

    The transport's name is torch's name of the backend.
    """

    def __init__(self, name: str, service: ServiceContext) -> None:
        super().__init__(name, service)
        self._links: Links | None = None
        # The link of each accepted stream.
        self._sources: dict[int, ReceivingLink] = {}
        self._check_backend()

    def _check_backend(self) -> None:
        """Raises TransferError when this process cannot use the backend."""
        try:
            from baton.kvtransfer.transports import process_group
        except ImportError as error:
            raise TransferError(f"no torch here: {error}") from None
        if (reason := process_group.unusable_reason(self._backend)) is not None:
            raise TransferError(reason)

    def serve(self, server: grpc.aio.Server, handler: TransportHandler) -> None:
        from baton.kvtransfer.transports.links import Links

        config = self._service.config
        self._links = Links(
            self._backend,
            handler,
            self._service.memory,
            open_timeout_s=config.open_timeout_s,
            # A lost link must leave enough time for another transport.
            frame_timeout_s=min(LINK_FRAME_TIMEOUT_S, config.idle_timeout_s / 2),
            dial=self._service.dial,
            within_host=self._service.within_host,
        )
        self._links.add_to(server)

    async def close(self) -> None:
        if self._links is not None:
            await self._links.close()

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, link_id=self._served().link_id(target))

    async def prepare(self, target: str) -> None:
        await self._served().wait_decided(target)

    def frame(self, blocks: OutgoingBlocks) -> OutgoingFrame:
        return blocks.reference()

    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        if (link := self._served().incoming(offer.link_id)) is None:
            raise TransferError("the link is over")
        self._sources[stream] = link
        return link.source_bytes

    def pull(self, pull: Pull) -> None:
        self._sources[pull.stream].read(pull)

    def end(self, stream: int) -> None:
        self._sources.pop(stream, None)

    @property
    def _backend(self) -> Backend:
        return cast("Backend", self.name)

    def _served(self) -> Links:
        if self._links is None:
            raise TransferError("the service does not serve links yet")
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
