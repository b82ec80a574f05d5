"""Transports by reference: this service reads blocks from the staging of their sender.

The service that owns the target of a read starts it and sees it end, so it always knows whether
bytes may still arrive in one of its extents; a remote write has no such owner. Every Puller
promises just that: a read that it reports as ended writes nothing any more.

Ownership: only the PullThread uses the puller. The event loop owns everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.outgoing import OutgoingBlocks, OutgoingFrame
from baton.kvtransfer.transports.transport import (
    EndedPull,
    Pull,
    ServiceContext,
    Transport,
    TransportHandler,
)

# Memory of another service, as a puller names it.
SourceT = TypeVar("SourceT")
# Longest wait in seconds for the thread to end.
CLOSE_TIMEOUT_S = 2.0
# Part of the time without an end after which the thread looks for ends again, and its limit.
_POLL_SHARE = 1 / 16
_MAX_POLL_S = 0.05

logger = logging.getLogger(__name__)


class Puller(ABC, Generic[SourceT]):
    """One way to read the memory of other services; its PullThread makes all calls.

    Attributes:
        poll_s: Time between two calls of `ended` in seconds, while reads are under way and none of
            them has ended.
    """

    poll_s: float

    def open(self) -> None:
        """Called first. Raises TransferError when nothing can be read here; says why."""
        return

    @abstractmethod
    def start(self, source: SourceT, pull: Pull) -> None:
        """Begins a read. One that cannot begin ends like one that fails."""

    def forget(self, source: SourceT) -> None:
        """Releases what reads from a source have left; none of them is under way."""
        del source

    @abstractmethod
    def ended(self) -> list[EndedPull]:
        """Returns reads that have ended; each read is returned once."""

    def close(self) -> None:
        """Called last after `open` has succeeded, perhaps with reads under way."""
        return


class PullThread(Generic[SourceT]):
    """Runs a puller. Constructed and called on a running event loop.

    Args:
        name: Name of the thread.
        puller: Object whose work the thread runs.
        on_ended: Called on the event loop with reads that have ended.
    """

    def __init__(
        self, name: str, puller: Puller[SourceT], on_ended: Callable[[list[EndedPull]], None]
    ) -> None:
        self._puller, self._on_ended = puller, on_ended
        self._loop = asyncio.get_running_loop()
        self._problem: str | None = "is starting"
        self._opened, self._gone = asyncio.Event(), asyncio.Event()
        # Guards the attributes below, which both sides use.
        self._changed = threading.Condition()
        # Reads to begin; without a pull, sources to forget.
        self._posted: list[tuple[SourceT, Pull | None]] = []
        self._ended: list[EndedPull] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why the thread reads nothing (yet, or any more); None while it does."""
        return self._problem

    def post(self, source: SourceT, pull: Pull) -> None:
        """Begins a read after those that were posted before."""
        self._post(source, pull)

    def forget(self, source: SourceT) -> None:
        """Releases what reads from a source have left; none of them is under way."""
        self._post(source, None)

    async def opened(self) -> None:
        """Waits until the puller is ready or has failed: `problem` then is final."""
        await self._opened.wait()

    async def close(self) -> None:
        """Ends the thread and waits at most CLOSE_TIMEOUT_S for it. Idempotent.

        Reads that have not ended are not reported any more, so their targets may not be used again.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._gone.wait()

    def _post(self, source: SourceT, pull: Pull | None) -> None:
        with self._changed:
            self._posted.append((source, pull))
            self._changed.notify()

    def _deliver(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        self._on_ended(ended)

    def _decided(self, problem: str | None) -> None:
        self._problem = problem
        self._opened.set()

    # ---- In the thread.

    def _run(self) -> None:
        problem = "is closed"
        try:
            self._puller.open()
            try:
                self._call(self._decided, None)
                self._serve()
            finally:
                self._puller.close()
        except TransferError as error:
            problem = str(error)
        except Exception:
            logger.exception("the thread of a transport failed")
            problem = "internal error"
        self._call(self._decided, problem)
        self._call(self._gone.set)

    def _serve(self) -> None:
        num_started, last_end = 0, 0.0
        wait_s: float | None = None
        while True:
            with self._changed:
                if wait_s != 0.0 and not self._closing and not self._posted:
                    self._changed.wait(wait_s)
                if self._closing:
                    return
                posted, self._posted = self._posted, []
            if not num_started:
                last_end = time.monotonic()
            for source, pull in posted:
                if pull is None:
                    self._puller.forget(source)
                else:
                    self._puller.start(source, pull)
                    num_started += 1
            ended = self._puller.ended()
            if ended:
                num_started -= len(ended)
                last_end = time.monotonic()
                self._tell(ended)
            wait_s = None
            if num_started:
                waited_s = time.monotonic() - last_end
                # Reads that do not end for long, perhaps never, are looked at ever less often.
                patient_s = min(waited_s * _POLL_SHARE, _MAX_POLL_S)
                wait_s = 0.0 if ended else max(self._puller.poll_s, patient_s)

    def _tell(self, ended: list[EndedPull]) -> None:
        with self._changed:
            is_first = not self._ended
            self._ended += ended
        if is_first:
            self._call(self._deliver)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        # The loop may be closed already when the process ends.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


class PullTransport(Transport, Generic[SourceT]):
    """A transport whose frames are references, and which reads them with a puller."""

    def __init__(self, name: str, service: ServiceContext) -> None:
        super().__init__(name, service)
        self._thread: PullThread[SourceT] | None = None
        self._handler: TransportHandler | None = None
        # Source of each accepted stream, and of each pull that has not ended.
        self._sources: dict[int, SourceT] = {}
        self._pulled: dict[int, SourceT] = {}

    @abstractmethod
    def _puller(self) -> Puller[SourceT]:
        """Returns the puller of this transport."""

    def _check_thread(self) -> None:
        """Raises TransferError when the thread of this service reads nothing; says why."""
        if self._thread is not None and self._thread.problem is not None:
            raise TransferError(self._thread.problem)

    def _released(self, source: SourceT) -> None:
        """Called when a stream or a pull no longer uses a source."""
        del source

    def serve(self, server: grpc.aio.Server, handler: TransportHandler) -> None:
        self._handler = handler
        self._start_thread()

    def _start_thread(self) -> None:
        self._thread = PullThread(f"kv-{self.name}", self._puller(), self._take_ended)

    async def started(self) -> None:
        if self._thread is not None:
            await self._thread.opened()

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.close()

    def frame(self, blocks: OutgoingBlocks) -> OutgoingFrame:
        return blocks.reference()

    def pull(self, pull: Pull) -> None:
        assert self._thread is not None
        source = self._pulled[pull.serial] = self._sources[pull.stream]
        self._thread.post(source, pull)

    def end(self, stream: int) -> None:
        if stream in self._sources:
            self._released(self._sources.pop(stream))

    def _take_ended(self, ended: list[EndedPull]) -> None:
        for each in ended:
            self._released(self._pulled.pop(each.serial))
        assert self._handler is not None
        self._handler.pulls_ended(ended)
