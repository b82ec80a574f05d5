"""Transports of simulated workers: the interface of the real ones, without a process or a network.

Links and shared segments belong to the simulated World, which loses and alters what they carry.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.push import Push
from baton.kvtransfer.sending import Batch, Outgoing, OutgoingBlocks
from baton.kvtransfer.transports.negotiation import Negotiator
from baton.kvtransfer.transports.registry import transport_class
from baton.kvtransfer.transports.transport import LinkLost, ServiceContext, Transport
from baton.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from simulated_decode import Decode
    from simulated_network import World
    from simulated_prefill import Prefill

NO_SERVICE = ServiceContext("")


def run_now(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("the coroutine waits")


class SimulatedMemory(Transport):
    """Shared memory whose segments are the world's byte arrays.

    Args:
        segment: Name of the sender's segment; empty at a receiver.
    """

    def __init__(self, world: World, segment: str) -> None:
        super().__init__("shm", ServiceContext(segment))
        self._world = world
        self._attached: dict[int, str] = {}

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, shm_segment=self._service.segment_name)

    def frame(self, blocks: OutgoingBlocks) -> Outgoing:
        return blocks.reference()

    def accept(self, stream: int, offer: pb.TransportOffer) -> None:
        self._attached[stream] = offer.shm_segment

    def resolve(self, stream: int, frame: Frame, num_bytes: int) -> Frame:
        if stream not in self._attached:
            raise MalformedFrame("a reference on a stream that has not chosen shared memory")
        return frame.referenced(self._world.segments[self._attached[stream]], num_bytes)

    def end(self, stream: int) -> None:
        self._attached.pop(stream, None)


class SimulatedLinks(Transport):
    """One link of the world for each pair of workers."""

    def __init__(self, world: World, node: Prefill | Decode) -> None:
        super().__init__("link", NO_SERVICE)
        self._world, self._node = world, node

    def offer(self, target: str) -> pb.TransportOffer:
        link = self._world.link(self._node, self._world.addresses[target])
        return pb.TransportOffer(name=self.name, link_id=link.link_id)

    async def send(self, push: Push, batch: Batch) -> None:
        link = self._world.links[batch.link_id]
        if link.is_lost:
            raise LinkLost("lost")
        link.queue.append(batch.frames)

    def accept(self, stream: int, offer: pb.TransportOffer) -> None:
        if self._world.links[offer.link_id].is_lost:
            raise LinkLost("lost")


class NamedTransport(Transport):
    """Carries data frames on the push, under any name; its links are named like the transport."""

    def __init__(self, name: str) -> None:
        super().__init__(name, NO_SERVICE)

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, link_id=self.name)

    def frame(self, blocks: OutgoingBlocks) -> Outgoing:
        return blocks.reference() if self.name == "shm" else super().frame(blocks)

    def accept(self, stream: int, offer: pb.TransportOffer) -> None:
        return


def named(*names: str) -> Negotiator:
    """Returns a negotiator whose transports work for every target."""
    return Negotiator([NamedTransport(name) for name in names])


def simulated(
    world: World, node: Prefill | Decode, names: Iterable[str], segment: str = ""
) -> Negotiator:
    """Returns the negotiator of a simulated worker."""
    made: list[Transport] = []
    for name in names:
        if name == "shm":
            made.append(SimulatedMemory(world, segment))
        elif name == "link":
            made.append(SimulatedLinks(world, node))
        else:
            made.append(transport_class(name)(name, NO_SERVICE))
    return Negotiator(made)
