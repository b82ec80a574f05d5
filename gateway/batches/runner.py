"""Runs the lines of all open batches on the generation routes of this gateway."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import ParamSpec, Self, TypeVar

from baton.gateway.batches import route_call
from baton.gateway.batches.batch_store import BatchStore, Line, OpenBatch
from baton.gateway.batches.database import Database, DatabaseThread
from baton.gateway.batches.file_store import FileStore
from baton.gateway.batches.input_file import InputParser, WrongFile
from baton.gateway.batches.line_queue import LineQueue
from baton.gateway.batches.pace import FairSlots
from baton.gateway.batches.route_call import Answer
from baton.gateway.batches.status import Status
from baton.gateway.error_responses import internal_error
from baton.gateway.generation import Generation
from baton.gateway.metrics import BatchStats
from baton.runtime.closing import AsyncClosing
from baton.runtime.config import HttpConfig

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds between two searches for what has expired, and between two tries after the disk failed or
# while the store is full.
_SWEEP_S, _RETRY_S = 30.0, 5.0


class BatchRunner(AsyncClosing):
    """Validates batches, runs their lines, and ends them. Open it with `async with`.

    A batch has one task. A line goes through the same route as a client's request, with the
    caller's credential and tenant, in the batch lane.

    Args:
        database: The database.
        routes: The endpoints of the generation routes by path.
        config: Limits.
        stats: Counts of lines, for the metrics.
        clock: Returns Unix time in seconds.

    Attributes:
        thread: The thread that uses `files` and `batches`.
        files: Files in the database.
        batches: Batches in the database.
    """

    def __init__(
        self,
        database: Database,
        routes: Mapping[str, Generation],
        config: HttpConfig,
        stats: BatchStats,
        clock: Callable[[], float],
    ) -> None:
        self.thread = DatabaseThread()
        self.files = FileStore(database, config.batches)
        self.batches = BatchStore(database, config.batches)
        self._database, self._routes, self._config = database, routes, config
        self._stats, self._clock = stats, clock
        self._slots = FairSlots(config.batches.max_running)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Tasks that end a batch before its lines are done.
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._has_stopped = False

    @property
    def endpoints(self) -> Collection[str]:
        """Paths of the routes that a batch may have as its endpoint."""
        return self._routes.keys()

    def now(self) -> int:
        """Unix time."""
        return int(self._clock())

    async def __aenter__(self) -> Self:
        for batch in await self.thread.call(self.batches.open_batches):
            if batch.status is Status.CANCELLING:
                self.end(batch.id, Status.CANCELLED)
            else:
                self.start(batch)
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="expiry of batches")
        return self

    async def stop(self) -> None:
        """Cancels the running lines and starts no others; idempotent.

        These lines run when the next process opens the directory. Files and batches can still be
        read and written.
        """
        self._has_stopped = True
        tasks = [*self._tasks.values(), *self._endings.values()]
        tasks += [self._sweeper] if self._sweeper is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Stops, and ends the thread."""
        await self.stop()
        await self.thread.aclose()

    def start(self, batch: OpenBatch) -> None:
        """Runs a batch from the state in the database, unless the runner has stopped."""
        if self._has_stopped:
            return
        name = f"batch {batch.id}"
        self._tasks[batch.id] = asyncio.create_task(self._run(batch), name=name)
        self._count()

    def end(self, batch_id: str, status: Status) -> None:
        """Cancels the lines that run, and ends the batch as cancelled or expired."""
        if batch_id not in self._endings and not self._has_stopped:
            ending = asyncio.create_task(self._end(batch_id, status), name=f"end of {batch_id}")
            self._endings[batch_id] = ending

    async def sweep(self) -> None:
        """Ends batches whose completion window is over, and deletes what has expired."""
        due, self._stats.num_bytes = await self.thread.call(self._swept, self.now())
        for batch_id in due:
            self.end(batch_id, Status.EXPIRED)

    # ---- Inside

    def _swept(self, now: int) -> tuple[list[str], int]:
        """Returns the batches whose completion window is over, and the used bytes."""
        self.files.delete_orphans()
        self.files.delete_expired(now)
        self.batches.delete_old(now)
        return self.batches.due(now), self._database.num_bytes

    async def _with_room(
        self, owner: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls a function in the thread, as soon as its caller has room for what follows."""

        def call() -> tuple[T] | None:
            return None if self.files.is_full_for(owner) else (function(*args, **kwargs),)

        while True:
            result = await self.thread.call(call)
            if result is not None:
                return result[0]
            await asyncio.sleep(_RETRY_S)

    async def _sweep_forever(self) -> None:
        while True:
            await self._retried("expiry of files and batches", self.sweep)
            await asyncio.sleep(_SWEEP_S)

    async def _run(self, batch: OpenBatch) -> None:
        what = f"batch {batch.id}"
        try:
            if batch.status is Status.VALIDATING:
                is_right = await self._retried(what, lambda: self._validate(batch))
                if not is_right:
                    return
            await self._retried(what, lambda: self._run_lines(batch))
            await self._retried(what, lambda: self._finish(batch.id, Status.COMPLETED))
        finally:
            del self._tasks[batch.id]
            self._count()

    async def _end(self, batch_id: str, status: Status) -> None:
        task = self._tasks.get(batch_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        try:
            await self._retried(f"batch {batch_id}", lambda: self._finish(batch_id, status))
        finally:
            del self._endings[batch_id]
            self._count()

    async def _finish(self, batch_id: str, status: Status) -> None:
        await self.thread.call(self.batches.finish, batch_id, status, self.now())

    async def _validate(self, batch: OpenBatch) -> bool:
        """Reads the input file; returns False if the batch has failed."""
        limits = self._config
        parser = InputParser(
            batch.endpoint,
            limits.max_body_bytes,
            limits.batches.max_lines,
            self._routes[batch.endpoint].dialect.batch_defaults,
        )
        try:
            await self.thread.call(self.batches.begin_validation, batch.id)
            number = 0
            read_input = self.batches.read_input
            while await self._with_room(batch.owner, read_input, batch, parser, number):
                number += 1
            num_wrong = await self.thread.call(self.batches.begin_lines, batch.id, self.now())
        except WrongFile as problem:
            await self.thread.call(self.batches.fail, batch.id, problem, self.now())
            return False
        self._stats.lines["failed"] += num_wrong
        return True

    async def _run_lines(self, batch: OpenBatch) -> None:
        """Runs the lines without a result; returns when every line has one."""

        async def fetch(model_number: int, after: int) -> list[Line]:
            next_lines = self.batches.next_lines
            return await self._with_room(batch.owner, next_lines, batch.id, model_number, after)

        model_numbers = await self.thread.call(self.batches.model_numbers, batch.id)
        queue = LineQueue(fetch, model_numbers, self._config.batches.max_running)
        async with asyncio.TaskGroup() as group:
            while (line := await queue.get()) is not None:
                await self._slots.take(batch.owner)
                task = group.create_task(self._run_line(batch, line, queue))
                # A task that is cancelled before its first step runs none of its code.
                task.add_done_callback(lambda _: self._give_back(batch.owner))
                self._count()

    async def _run_line(self, batch: OpenBatch, line: Line, queue: LineQueue) -> None:
        answer = await self._answered(batch, line)
        if answer.retry_after_s is not None:
            self._stats.lines["refused"] += 1
            queue.refused(line, answer.retry_after_s)
            return
        succeeded = await self.thread.call(self.batches.record, batch.id, line, answer)
        self._stats.lines["completed" if succeeded else "failed"] += 1
        queue.done(line)

    async def _answered(self, batch: OpenBatch, line: Line) -> Answer:
        """Sends a line to its route; a route that raises fails this line only."""
        request_id, path = f"req_{secrets.token_hex(12)}", batch.endpoint
        try:
            return await route_call.post(
                self._routes[path], path, line.body, _headers(batch, request_id)
            )
        except Exception:
            extra = {"request_id": request_id}
            _log.exception("batch %s: line %d failed", batch.id, line.number, extra=extra)
            told = self._routes[path].dialect.error_body(internal_error(), request_id)
            return Answer(500, request_id, told, None)

    async def _retried(self, what: str, step: Callable[[], Awaitable[T]]) -> T:
        """Runs a step until the database lets it succeed: a full disk is no reason to give up."""
        while True:
            try:
                return await step()
            except Exception:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # A task group that already aborts raises its own error (Python 3.11).
                    raise asyncio.CancelledError from None
                _log.exception("%s does not go on; trying again in %g s", what, _RETRY_S)
                await asyncio.sleep(_RETRY_S)

    def _give_back(self, owner: bytes) -> None:
        self._slots.give_back(owner)
        self._count()

    def _count(self) -> None:
        self._stats.num_open = len(self._tasks.keys() | self._endings.keys())
        self._stats.num_running = self._slots.num_held


def _headers(batch: OpenBatch, request_id: str) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a line's request.

    Every try has another ID, because the coordinator may still know the last one.
    """
    found = {
        "x-request-id": request_id,
        "x-baton-lane": "batch",
        "authorization": batch.authorization,
        "x-baton-tenant": batch.tenant,
    }
    return [(name.encode(), value.encode("latin-1")) for name, value in found.items() if value]
