"""Real transfer services on this host without engines: measurements use them.

One `Worker` object plays both the worker's main process and the engine's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton.kvtransfer.arena import SEGMENT_DIRECTORY
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.errors import ServiceGone
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.kv.kv_transfer_config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb


@dataclass(slots=True)
class Watch:
    """The latest states of one handoff at one worker.

    Attributes:
        gone: Whether the worker's service has ended.
    """

    send: pb.LocalSendState | None = None
    receive: pb.LocalHandoffState | None = None
    gone: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, done: Callable[[Watch], bool]) -> None:
        """Waits until `done` is true.

        Raises:
            ServiceGone: the service ended before.
        """
        while not done(self):
            if self.gone:
                raise ServiceGone("the service has ended")
            self.changed.clear()
            await self.changed.wait()

    async def sent(self) -> pb.LocalSendState:
        """Waits for the end of the send and returns its last state."""
        await self.until(lambda watch: watch.send is not None)
        assert self.send is not None
        return self.send

    async def received(self, *states: pb.HandoffState.ValueType) -> pb.LocalHandoffState:
        """Waits until the received handoff is in one of these states."""
        await self.until(lambda watch: watch.receive is not None and watch.receive.state in states)
        assert self.receive is not None
        return self.receive


class Worker:
    """A transfer service and both of its clients.

    Attributes:
        client: Client of the worker's main process.
        port: Client of the engine's process; it has no subscriptions.
    """

    def __init__(self, client: TransferClient, port: EnginePort) -> None:
        """Owns both clients; call `start` instead."""
        self.client, self.port = client, port
        self._process = psutil.Process(client.pid)
        self._watches: dict[bytes, Watch] = {}
        self._events = asyncio.create_task(self._take_events())

    @classmethod
    async def start(cls, config: KvTransferConfig, directory: Path, layout: KvLayout) -> Worker:
        """Starts a service with its socket in `directory`, for engines with this cache.

        Raises:
            ServiceGone: the service did not start.
            TransferRefused: the service refused the layout.
        """
        socket_path = str(directory / f"{secrets.token_hex(4)}.sock")
        client = await TransferClient.start(config, socket_path, log_level="error")
        try:
            await client.configure(layout.fingerprint())
            return cls(client, EnginePort(socket_path))
        except BaseException:
            await client.close()
            raise

    @property
    def segment_path(self) -> Path:
        return SEGMENT_DIRECTORY / self.port.description.shm_name

    def cpu_s(self) -> float:
        """Returns the CPU time of the service's process with all threads."""
        times = self._process.cpu_times()
        return times.user + times.system

    def private_bytes(self) -> int:
        """Returns the service's resident memory without mapped segments and program files."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def num_files(self) -> int:
        """Returns the number of open file descriptors of the service."""
        return int(self._process.num_fds())

    @contextlib.contextmanager
    def watching(self, handoff_id: bytes) -> Iterator[Watch]:
        """Records the states of a handoff inside the block; enter it before the handoff opens."""
        watch = self._watches[handoff_id] = Watch(gone=self.client.gone.is_set())
        try:
            yield watch
        finally:
            del self._watches[handoff_id]

    async def close(self) -> None:
        self.port.close()
        await self.client.close()
        await self._events

    async def _take_events(self) -> None:
        try:
            while True:
                for event in await self.client.next_events():
                    if (watch := self._watches.get(event.handoff_id)) is None:
                        continue
                    if isinstance(event, pb.LocalSendState):
                        watch.send = event
                    else:
                        watch.receive = event
                    watch.changed.set()
        except ServiceGone:
            for watch in self._watches.values():
                watch.gone = True
                watch.changed.set()


@contextlib.asynccontextmanager
async def pair(
    sending: KvTransferConfig, receiving: KvTransferConfig, directory: Path, layout: KvLayout
) -> AsyncIterator[tuple[Worker, Worker]]:
    """Starts a sender and a receiver."""
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        # The sender ends first, because the end of the receiver would interrupt its sends.
        for config in (receiving, sending):
            workers.append(await Worker.start(config, directory, layout))
            stack.push_async_callback(workers[-1].close)
        receiver, sender = workers
        yield sender, receiver
