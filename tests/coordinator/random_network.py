"""Simulated Attach streams between the workers of a random cell and its coordinator.

Numbering, replay and acknowledgement of messages are the production code (server/link.py,
worker/outbox.py). Every message has the same delay. When a stream breaks, each end notices that by
itself, at its own time.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.coordinator.server.link import WorkerLink
from baton.coordinator.state import events as ev
from baton.v1 import cluster_pb2
from tests.coordinator.random_worker import RandomWorker

if TYPE_CHECKING:
    from tests.coordinator.random_cell import RandomCell, RandomCoordinator

# Shortest and longest pause between two attempts to reach a coordinator.
_RETRY_S = (0.05, 0.3)


class Stream:
    """One Attach call with the messages in flight in each direction."""

    def __init__(self, worker: RandomWorker, coordinator: RandomCoordinator) -> None:
        self.worker, self.coordinator = worker, coordinator
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()

    @property
    def link(self) -> WorkerLink | None:
        """The coordinator's link if this stream is still its current one, else None."""
        link = self.coordinator.links.get(self.worker.key)
        is_open = link is not None and link.stream is self and not link.ended
        return link if is_open and self.coordinator.is_up else None


class RandomNetwork:
    """Delivers messages, and breaks streams together with their messages in flight.

    Attributes:
        breaks: Streams may also break before the worker receives its Welcome.
    """

    def __init__(self, cell: RandomCell, delay_s: float, *, breaks: bool) -> None:
        self._cell, self._delay_s, self.breaks = cell, delay_s, breaks

    # ---- A stream's beginning and end.

    def connect(self, worker: RandomWorker) -> None:
        """Sends a Hello, and repeats that until a coordinator answers."""
        coordinator = self._cell.coordinator
        if worker.stream is not None:
            return
        if not coordinator.is_up:
            self._retry(worker)
            return
        hello = worker.hello()
        worker.outbox.mark_hello()
        stream = worker.pending = Stream(worker, coordinator)
        self._cell.after(self._delay_s, functools.partial(self._attach, stream, hello))

    def cut(self, worker: RandomWorker) -> None:
        """Breaks the connection; both ends notice in any order, and the worker reconnects."""
        stream, rng = worker.stream, self._cell.rng
        if isinstance(stream, Stream):
            worker.lost_stream()
            self._cell.after(rng.choice([0, 0.01, 0.5, 3.0]), lambda: self.detach(stream))
            worker.after(rng.choice([0.01, 0.05, 0.5, 2.0]), lambda: self.connect(worker))

    def lost_coordinator(self, worker: RandomWorker) -> None:
        """Ends the worker's stream after the death of the coordinator; the worker reconnects."""
        worker.pending = None
        worker.lost_stream()
        self._retry(worker)

    def ended(self, worker: RandomWorker) -> None:
        """The worker process has ended; the coordinator sees the connection close."""
        if isinstance(stream := worker.stream, Stream):
            worker.stream = None
            self._cell.after(2 * self._delay_s, lambda: self.detach(stream))

    def detach(self, stream: Stream) -> None:
        """The coordinator sees that a stream has ended."""
        if not stream.coordinator.listens and stream.coordinator.is_up:
            self._cell.at(stream.coordinator.frozen_until, lambda: self.detach(stream))
        elif (link := stream.link) is not None:
            link.stream = None
            stream.coordinator.post(ev.WorkerDetached(link.key))

    def _retry(self, worker: RandomWorker) -> None:
        worker.after(self._cell.rng.uniform(*_RETRY_S), lambda: self.connect(worker))

    def _attach(self, stream: Stream, hello: cluster_pb2.Hello) -> None:
        """Delivers a Hello to the coordinator, and sends its answer."""
        worker, coordinator = stream.worker, stream.coordinator
        if worker.dead:
            return
        if not coordinator.is_up:
            self._retry(worker)
            return
        if not coordinator.listens:
            self._cell.at(coordinator.frozen_until, lambda: self._attach(stream, hello))
            return
        link = coordinator.links.get(worker.key)
        if link is not None and hello.generation == coordinator.generation:
            link.acknowledge(hello.ack)
        returns = hello.generation not in (0, coordinator.generation)
        refusal = coordinator.attach(hello, returns=returns)
        if refusal is not None:
            worker.after(self._delay_s, lambda: self._cell.exit(worker, f"was refused: {refusal}"))
            return
        link = coordinator.links[worker.key]
        link.open(stream)
        adopted = frozenset((one.request_id, one.attempt) for one in link.adopted)
        welcome = functools.partial(self._welcome, stream, link.received, link.role, adopted)
        worker.after(self._delay_s, welcome)
        self.send_down(link)

    def _welcome(
        self, stream: Stream, ack: int, role: int, adopted: frozenset[tuple[str, int]]
    ) -> None:
        """Delivers the Welcome to a worker."""
        worker = stream.worker
        if worker.pending is not stream:
            return
        if self.breaks and self._cell.rng.random() < 0.1:
            # The Welcome is lost with its stream.
            self._cell.after(0.2, lambda: self.detach(stream))
            worker.after(0.1, lambda: self.connect(worker))
            return
        worker.stream = stream
        worker.welcomed(stream.coordinator.generation, ack, role, adopted)
        self.send_up(worker)

    # ---- Messages of a stream.

    def send_down(self, link: WorkerLink) -> None:
        """Sends all pending messages of a coordinator to a worker."""
        if not isinstance(stream := link.stream, Stream):
            return
        while (message := link.next_to_send()) is not None:
            stream.down.append(message)
            stream.worker.after(self._delay_s, functools.partial(self._deliver_down, stream))

    def send_up(self, worker: RandomWorker) -> None:
        """Sends all pending messages of a worker."""
        if isinstance(stream := worker.stream, Stream) and not worker.dead:
            while (message := worker.outbox.next_batch()) is not None:
                self._send_up(stream, message)

    def send_load(self, worker: RandomWorker, load: cluster_pb2.LoadReport) -> None:
        """Sends a load report; a worker without a stream drops it."""
        if isinstance(stream := worker.stream, Stream):
            self._send_up(stream, cluster_pb2.WorkerMessage(load=load))

    def _send_up(self, stream: Stream, message: cluster_pb2.WorkerMessage) -> None:
        stream.up.append(message.SerializeToString())
        self._deliver_unless_frozen(stream.worker, functools.partial(self._deliver_up, stream))

    def _deliver_unless_frozen(self, worker: RandomWorker, action: Callable[[], None]) -> None:
        """Runs the delivery of a message, after the end of a SIGSTOP of the worker that sent it.

        Messages that a process has written arrive also after its death.
        """

        def act() -> None:
            if worker.frozen_until > self._cell.now and not worker.dead:
                self._cell.at(worker.frozen_until, act)
            else:
                action()

        self._cell.after(self._delay_s, act)

    def _deliver_down(self, stream: Stream) -> None:
        worker = stream.worker
        message = cluster_pb2.CoordinatorMessage.FromString(stream.down.popleft())
        if worker.stream is not stream:
            return
        worker.outbox.acknowledge(message.ack)
        for one in message.batch or (message,):
            if worker.stream is not stream or one.seq <= worker.received:
                continue
            assert one.seq == worker.received + 1, (one.seq, worker.received)
            own = cluster_pb2.CoordinatorMessage()
            own.CopyFrom(one)
            self._cell.log(worker.key, "receives", own)
            worker.take(own)
            worker.received = one.seq

    def _deliver_up(self, stream: Stream) -> None:
        if (link := stream.link) is None:
            return
        if not stream.coordinator.listens:
            self._cell.at(stream.coordinator.frozen_until, lambda: self._deliver_up(stream))
            return
        message = cluster_pb2.WorkerMessage.FromString(stream.up.popleft())
        for one in message.batch or (message,):
            if stream.link is not link:
                return
            if one.seq and one.seq <= link.received:
                continue
            assert not one.seq or one.seq == link.received + 1, (one.seq, link.received)
            stream.coordinator.post(_event(link.key, one))
            if one.seq:
                link.processed(one.seq)
        received = link.received
        stream.worker.after(self._delay_s, functools.partial(self._acknowledge, stream, received))

    @staticmethod
    def _acknowledge(stream: Stream, received: int) -> None:
        if stream.worker.stream is stream:
            stream.worker.outbox.acknowledge(received)


def _event(worker: tuple[str, int], message: cluster_pb2.WorkerMessage) -> ev.Event:
    kind = message.WhichOneof("message")
    if kind == "step":
        return ev.WorkerStep(worker, message.step)
    if kind == "load":
        return ev.LoadReported(worker, message.load)
    if kind == "handoff":
        return ev.WorkerHandoff(worker, message.handoff)
    if kind == "cache":
        return ev.WorkerCache(worker, message.cache)
    if kind == "state_changed":
        return ev.WorkerChanged(worker, message.state_changed)
    return ev.WorkerHeard(worker)
