"""The life of a started worker: it serves, drains and leaves."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from time import monotonic
from typing import Any

from baton.engine.base import EngineDead
from baton.kvtransfer.errors import TransferError
from baton.runtime.enum_names import role_name
from baton.v1 import cluster_pb2
from baton.worker.attach import AttachError, Attachment, CoordinatorGone
from baton.worker.errors import NoCoordinator, WorkerFailed
from baton.worker.host import WorkerHost
from baton.worker.runner import Runner

_log = logging.getLogger(__name__)

# Longest waits of a leaving worker in seconds: for its dropped requests, and for its stream to end.
_SETTLE_S = 5.0
_LEAVE_S = 8.0


class AttachedWorker:
    """Serves with the parts of a started worker.

    Args:
        host: The worker on the attach stream.
        runner: Owner of the worker's requests.
        attachment: Stream to the coordinator; it runs while the worker serves.
        drain_timeout_s: Longest drain after a stop signal, see `worker.drain_timeout_s`.
    """

    def __init__(
        self, host: WorkerHost, runner: Runner, attachment: Attachment, *, drain_timeout_s: float
    ) -> None:
        self._host, self._runner, self._attachment = host, runner, attachment
        self._drain_timeout_s = drain_timeout_s

    async def serve(self, stopping: asyncio.Task[Any], ready: Callable[[str], None] | None) -> None:
        """Serves until the worker is told to stop, then drains and leaves.

        Args:
            stopping: Ends when the process is told to stop.
            ready: Called with the worker's ID when a coordinator has welcomed it.

        Raises:
            WorkerFailed: The worker cannot continue.
        """
        attached = asyncio.create_task(self._report_ready(ready), name="ready")
        attaching = asyncio.create_task(self._attachment.run(), name="attach")
        running = asyncio.create_task(self._runner.run(), name="run")
        drain_ordered = asyncio.create_task(self._host.drain_ordered.wait(), name="drain ordered")
        tasks: list[asyncio.Future[Any]] = [attached, attaching, running, drain_ordered]
        try:
            ends: list[asyncio.Future[Any]] = [attaching, running, self._runner.died]
            await asyncio.wait(
                [*ends, stopping, drain_ordered], return_when=asyncio.FIRST_COMPLETED
            )
            if not any(end.done() for end in ends):
                await self._drain(stopping, ends)
            await self._leave(attaching, running)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, stopping: asyncio.Task[Any], ends: list[asyncio.Future[Any]]) -> None:
        """Takes no new work and waits for running requests.

        The wait ends at the deadline of the latest drain command. After a stop signal it also ends
        after `worker.drain_timeout_s`, because the process manager kills the process some time
        after the signal.
        """
        host = self._host
        reason = host.drain.reason if host.drain is not None else "the process was told to stop"
        _log.info("draining: %s", reason)
        host.change_state(cluster_pb2.WORKER_STATE_DRAINING, reason)
        idle = asyncio.create_task(self._drained(), name="drain")
        done, stop_deadline = [idle, *ends], math.inf
        try:
            while not any(one.done() for one in done):
                if stopping.done():
                    stop_deadline = min(stop_deadline, monotonic() + self._drain_timeout_s)
                deadline = host.drain.deadline if host.drain is not None else math.inf
                left_s = min(stop_deadline, deadline) - monotonic()
                if left_s <= 0:
                    return
                host.drain_ordered.clear()
                ordered = asyncio.create_task(host.drain_ordered.wait(), name="drain ordered")
                changes = [ordered] if stopping.done() else [ordered, stopping]
                try:
                    await asyncio.wait(
                        [*done, *changes], timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    ordered.cancel()
        finally:
            idle.cancel()

    async def _leave(self, attaching: asyncio.Task[None], running: asyncio.Task[None]) -> None:
        """Reports the stop, drops remaining requests and ends the stream.

        The coordinator continues the remaining requests on other workers.

        Raises:
            WorkerFailed: The worker did not stop on request.
        """
        failure = _failure(attaching, running, self._runner.died)
        attached = not attaching.done() and self._host.attached.is_set()
        if attached:
            self._host.change_state(
                cluster_pb2.WORKER_STATE_STOPPED, failure or "stopped", failed=bool(failure)
            )
        self._runner.keep_only(frozenset())
        await self._runner.settle(_SETTLE_S)
        if attached:
            self._attachment.leave()
            await asyncio.wait([attaching], timeout=_LEAVE_S)
        if failure:
            raise (NoCoordinator if _has_no_coordinator(attaching) else WorkerFailed)(failure)

    async def _report_ready(self, ready: Callable[[str], None] | None) -> None:
        await self._host.attached.wait()
        hello = self._host.hello()
        _log.info("attached", extra={"role": role_name(hello.role)})
        if ready is not None:
            ready(hello.worker_id)

    async def _drained(self) -> None:
        """Waits until no request is left, and until the coordinator cannot send another one.

        The coordinator cannot once it has released this worker, or once no stream is up.
        """
        released = asyncio.create_task(self._host.released.wait(), name="released")
        detached = asyncio.create_task(self._attachment.detached.wait(), name="detached")
        try:
            await asyncio.wait([released, detached], return_when=asyncio.FIRST_COMPLETED)
        finally:
            released.cancel()
            detached.cancel()
        await self._runner.idle.wait()


def _failure(
    attaching: asyncio.Task[None], running: asyncio.Task[None], died: asyncio.Future[str]
) -> str:
    """Returns why the worker cannot continue; "" if it can."""
    if died.done():
        return f"engine: {died.result()}"
    for task in (running, attaching):
        if not task.done() or (error := task.exception()) is None:
            continue
        for cause in _leaf_errors(error):
            match cause:
                case EngineDead():
                    return f"engine: {cause}"
                case TransferError() | AttachError():
                    return str(cause)
        _log.error("a task of the worker failed", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return ""


def _has_no_coordinator(attaching: asyncio.Task[None]) -> bool:
    if not attaching.done() or attaching.cancelled() or (error := attaching.exception()) is None:
        return False
    return any(isinstance(one, CoordinatorGone) for one in _leaf_errors(error))


def _leaf_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaf_errors(one)]
    return [error]
