"""Transports of simulated workers: the interface of the real ones, without a process or a network.

Segments belong to the simulated World; SimulatedPuller spoils the reads of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from baton.kvtransfer import frames
from baton.kvtransfer.transports.negotiation import Negotiator
from baton.kvtransfer.transports.outgoing import OutgoingBlocks, OutgoingFrame
from baton.kvtransfer.transports.registry import transport_class
from baton.kvtransfer.transports.transport import Pull, ServiceContext, Transport
from baton.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from tests.kvtransfer.simulated_decode import Decode
    from tests.kvtransfer.simulated_network import World
    from tests.kvtransfer.simulated_prefill import Prefill

NO_SERVICE = ServiceContext("")


class SimulatedPuller:
    """Reads that are late, torn, reported twice, or stuck; each thing happens when a test says so.

    Attributes:
        under_way: Source and pull of each read that has not ended, by serial number.
        stuck: Serial numbers of reads that do not end until `release`.
        is_slow: Whether reads end only when a test asks for it.
    """

    def __init__(self, target: memoryview, on_ended: Callable[[int, int | None], None]) -> None:
        self._target, self._on_ended = target, on_ended
        self.under_way: dict[int, tuple[memoryview, Pull]] = {}
        self.stuck: set[int] = set()
        self.is_slow = False
        self._last: tuple[int, int | None] | None = None

    def start(self, source: memoryview, pull: Pull) -> None:
        self.under_way[pull.serial] = source, pull

    def steps(self) -> list[Callable[[], None]]:
        """Returns the ends of all reads that are not stuck; they may happen in any order."""
        if self.is_slow:
            return []
        return [
            functools.partial(self.land, serial)
            for serial in self.under_way
            if serial not in self.stuck
        ]

    def land(self, serial: int) -> None:
        if serial in self.under_way:
            source, pull = self.under_way.pop(serial)
            self._end(serial, self._write(source, pull, pull.num_bytes))

    def tear(self, serial: int) -> None:
        """Writes the first half of the bytes; the read goes on."""
        source, pull = self.under_way[serial]
        self._write(source, pull, pull.num_bytes // 2)

    def fail(self, serial: int) -> None:
        self.tear(serial)
        del self.under_way[serial]
        self._end(serial, None)

    def repeat(self) -> None:
        """Reports the latest end again."""
        if self._last is not None:
            self._on_ended(*self._last)

    def release(self) -> None:
        self.stuck.clear()

    def _write(self, source: memoryview, pull: Pull, num_bytes: int) -> int:
        target = self._target[pull.target : pull.target + num_bytes]
        target[:] = source[pull.source : pull.source + num_bytes]
        return frames.checksum(target)

    def _end(self, serial: int, digest: int | None) -> None:
        self.stuck.discard(serial)
        self._last = serial, digest
        self._on_ended(serial, digest)


class SimulatedMemory(Transport):
    """A transport that reads from segments, which are the world's byte arrays.

    Args:
        name: Its name.
        world: The world.
        node: The worker; a decode worker has the puller.
        segment: Name of the sender's segment; empty at a receiver.
    """

    def __init__(self, name: str, world: World, node: Prefill | Decode, segment: str) -> None:
        super().__init__(name, ServiceContext(segment))
        self._world, self._node = world, node
        self._attached: dict[int, str] = {}

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, shm_segment=self._service.segment_name)

    def frame(self, blocks: OutgoingBlocks) -> OutgoingFrame:
        return blocks.reference()

    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        self._attached[stream] = offer.shm_segment
        return len(self._world.segments[offer.shm_segment])

    def pull(self, pull: Pull) -> None:
        source = self._world.segments[self._attached[pull.stream]]
        self._node.puller.start(source, pull)

    def end(self, stream: int) -> None:
        self._attached.pop(stream, None)


class NamedTransport(Transport):
    """Carries data frames on the stream, under any name; as shm, references."""

    def __init__(self, name: str) -> None:
        super().__init__(name, NO_SERVICE)

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name)

    def frame(self, blocks: OutgoingBlocks) -> OutgoingFrame:
        return blocks.reference() if self.name == "shm" else super().frame(blocks)

    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        return 2**20 if self.name == "shm" else 0


def named(*names: str) -> Negotiator:
    """Returns a negotiator whose transports work for every target."""
    return Negotiator([NamedTransport(name) for name in names])


def simulated(
    world: World, node: Prefill | Decode, names: Iterable[str], segment: str = ""
) -> Negotiator:
    """Returns the negotiator of a simulated worker."""
    made: list[Transport] = []
    for name in names:
        if name in ("shm", "gloo"):
            made.append(SimulatedMemory(name, world, node, segment))
        else:
            made.append(transport_class(name)(name, NO_SERVICE))
    return Negotiator(made)
