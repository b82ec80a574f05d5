"""Prefill and decode workers on a network that loses, repeats, reorders and alters messages.

The state machines are the real ones. The work of the transfer service around them (a process for
each worker, tasks for each stream) happens here in single steps, in any order that a test chooses.
Time is a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.service.sender import Sender
from tests.kvtransfer.simulated_decode import Decode
from tests.kvtransfer.simulated_prefill import Prefill
from tests.kvtransfer.simulated_streams import Socket, Stream


class World:
    """Some workers of each kind, and all messages between them.

    Attributes:
        has_quick_sockets: Whether messages within a worker arrive at once.
        committed: Each (handoff ID, epoch) that a receiver has committed.
    """

    def __init__(
        self,
        num_shards: int,
        prefill_transports,
        decode_transports,
        batch_bytes: int,
        num_replicas: int = 1,
        *,
        has_quick_sockets: bool = True,
    ):
        self.layout = KvLayout(
            "m", "r", "float32", 2, 1, 8, 4, 128, "heads,tokens,content",
            tp_size=num_shards * num_replicas, num_replicas=num_replicas,
        )  # fmt: skip
        self.batch_bytes = batch_bytes
        self.now = 0.0
        self._numbers = 0
        self.has_quick_sockets = has_quick_sockets
        self.sockets: list[Socket] = []
        self.segments: dict[str, memoryview] = {}
        self.addresses: dict[str, Decode] = {}
        self.streams: list[Stream] = []
        self.committed: set[tuple[bytes, int]] = set()
        self.prefills = [Prefill(self, names) for names in prefill_transports]
        self.decodes = [Decode(self, names) for names in decode_transports]

    def number(self) -> int:
        """Returns a new number."""
        self._numbers += 1
        return self._numbers

    @property
    def nodes(self) -> list[Prefill | Decode]:
        return [*self.prefills, *self.decodes]

    def twin(self, node: Prefill | Decode) -> Prefill | Decode:
        """Returns the receiver of a sender's worker, or the reverse."""
        if isinstance(node, Prefill):
            return self.decodes[self.prefills.index(node)]
        return self.prefills[self.decodes.index(node)]

    @property
    def machines(self) -> list[Sender | Receiver]:
        return [each.sender for each in self.prefills] + [each.receiver for each in self.decodes]

    def stream(self, number: int) -> Stream | None:
        return next((each for each in self.streams if each.number == number), None)

    # ---- What happens next.

    def steps(self) -> list[Callable[[], None]]:
        """Returns every step that may happen next: deliveries, sends and reads."""
        self.streams = [
            each
            for each in self.streams
            if each.up or each.down or not (each.sender_over and each.receiver_over)
        ]
        steps: list[Callable[[], None]] = []
        for stream in self.streams:
            if stream.awake:
                steps.append(functools.partial(stream.source.write, stream))
            if stream.up:
                steps.append(functools.partial(self._up, stream))
            if stream.down:
                steps.append(functools.partial(self._down, stream))
        for decode in self.decodes:
            steps += decode.puller.steps()
        steps += [socket.deliver for socket in self.sockets if socket]
        return steps

    def settle(self) -> None:
        """Runs steps until there are none."""
        for _ in range(10_000):
            steps = self.steps()
            if not steps:
                return
            for step in steps:
                step()
        raise AssertionError("the workers never stop sending")

    def advance(self, to: float) -> None:
        """Sets the time, and lets every worker's deadlines expire."""
        self.now = to
        for node in self.nodes:
            node.expire()

    def next_deadline(self) -> float | None:
        deadlines = (machine.next_deadline() for machine in self.machines)
        return min((each for each in deadlines if each is not None), default=None)

    def restart(self, old: Prefill | Decode, keep: int) -> None:
        """Kills a worker and starts another; its peers see their streams end.

        Args:
            old: The worker to kill.
            keep: Number of its messages on each stream that still arrive.
        """
        old.alive = False
        old.close_sockets()
        if isinstance(old, Prefill):
            self.prefills[self.prefills.index(old)] = Prefill(self, old.transports)
            for send in old.sends.values():
                send.writing = False
        else:
            self.decodes[self.decodes.index(old)] = Decode(self, old.transports)
        for stream in self.streams:
            if stream.source is old:
                stream.cut(keep_up=keep)
                stream.sender_over = True
            elif stream.target is old:
                stream.cut(keep_down=keep)
                stream.receiver_over = True

    def _up(self, stream: Stream) -> None:
        message, target = stream.up.popleft() if stream.up else None, stream.target
        if stream.receiver_over:
            return
        if message is None:
            target.lose(stream)
        elif not stream.ending:
            target.take(stream, message)

    def _down(self, stream: Stream) -> None:
        if not stream.down:
            return
        reply = stream.down.popleft()
        if reply is not None:
            if stream.source.alive:
                stream.source.take(stream, reply)
            return
        if stream.source.alive:
            stream.source.lose(stream)
        stream.up.clear()
        if not stream.receiver_over:
            stream.target.lose(stream)
