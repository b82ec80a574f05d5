"""Starts, watches and ends the workers of one coordinator in a connected Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import psutil
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.actor import WorkerActor
from baton.coordinator.launchers.ray_launch.calls import (
    CALL_TIMEOUT_S,
    error_line,
    in_thread,
    live_nodes,
    result,
)
from baton.coordinator.launchers.ray_launch.cluster import NAME_PREFIX
from baton.coordinator.launchers.ray_launch.placement import (
    cpu_build_hint,
    default_gpus,
    in_use,
    partner_node,
    shortage,
)
from baton.coordinator.launchers.worker_process import KILL_TIMEOUT_S
from baton.runtime.process.long_tasks import keep_running

_HEAD_PROCESSES = ("gcs_server", "raylet")
_PROBE_S = 1.0
_SILENT_S = 5.0
# Timeout for a silent head; Ray's own clients try to reconnect for as long.
_GONE_S = 60.0
# An actor that cannot be reached for this long is lost.
_UNREACHABLE_S = 5.0
# A new worker should share a node with a worker of the other role. If such a worker has no node
# yet, the new worker waits for its placement, until this long after the creation of its actor.
_PARTNER_WAIT_S = 5.0
# Interval of the checks why a worker has no node yet.
_PLACEMENT_CHECK_S = 2.0
# After this time without a node, the worker is reported as waiting for resources that are in use.
_IN_USE_AFTER_S = 10.0


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker's actor.

    Attributes:
        needs: resources that the worker needs, by Ray's names.
        created_at: time.monotonic() when the actor was created.
        preferred_node: ID of the node on which Ray places the actor if the node has room; empty:
            any node.
        node: ID of the node that runs the worker's processes; empty before the placement, and after
            the actor was lost.
        settled: set when the worker is placed or has failed to be placed.
        ending: whether the worker was told to stop, or has ended and was reported.
        has_default_gpus: whether the configuration leaves the number of GPUs open.
    """

    worker_id: str
    role: str
    actor: Any
    needs: Mapping[str, float]
    created_at: float
    preferred_node: str
    node: str = ""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    ending: bool = False
    has_default_gpus: bool = False
    watch: asyncio.Task[None] | None = None


class RayWorkers:
    """Starts, watches and ends workers in a Ray that is connected."""

    def __init__(self, opening: wire.Open, say: Callable[[wire.Message], None]) -> None:
        self._opening, self._say = opening, say
        self._workers: dict[str, _Worker] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._silent_s = 0.0
        self._stop_timeout_s = opening.stop_timeout_s
        self._placing = asyncio.Lock()
        own = psutil.Process().children() if not opening.address else []
        self._head = [child for child in own if child.name() in _HEAD_PROCESSES]

    async def run(self, commands: asyncio.StreamReader) -> None:
        """Runs until the commands end, and then ends all workers."""
        probe = asyncio.create_task(keep_running("the probe of Ray", self._probe))
        tasks: set[asyncio.Task[None]] = set()
        try:
            while line := await commands.readline():
                match wire.decode(line):
                    case wire.Start() as start:
                        task = asyncio.create_task(self._start(start))
                        self._starting[start.worker_id] = task
                    case wire.End(worker_id):
                        task = asyncio.create_task(self._end_started(worker_id))
                    case other:
                        raise ValueError(f"not for a driver: {other}")
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            probe.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.TaskGroup() as group:
                for worker_id in list(self._workers):
                    group.create_task(self._end(worker_id))

    def kill(self) -> None:
        """Kills the processes of all workers that run or are ending; `run` then ends them soon."""
        self._stop_timeout_s = 0.0
        for worker in self._workers.values():
            if worker.node:
                worker.actor.stop.remote(0.0)

    async def _start(self, start: wire.Start) -> None:
        try:
            why = await self._try_start(start)
        except Exception as error:
            why = f"Ray cannot start the worker: {error_line(error)}"
        finally:
            self._starting.pop(start.worker_id, None)
        self._say(wire.Started(start.worker_id, why))

    async def _try_start(self, start: wire.Start) -> str:
        """Creates the worker's actor; returns why that is not possible, or an empty string."""
        if (earlier := self._workers.get(start.worker_id)) is not None:
            if not earlier.ending:
                return "it has been started already"
            await self._end(start.worker_id)
        nodes = await in_thread(live_nodes)
        gpus = start.gpus
        if gpus is None:
            gpus = default_gpus(start.num_ranks, nodes, is_local=not self._opening.address)
        needs = {"CPU": start.cpus, "GPU": gpus, **start.resources}
        lack = shortage(needs, nodes)
        if lack and not self._opening.address:
            # A local Ray never gets further nodes, so waiting would not help.
            return lack
        # One worker at a time, so that workers that start together can be placed on one node.
        async with self._placing:
            node = await self._partner_node(start.role)
            actor = await in_thread(lambda: self._make_actor(start, gpus, node))
            worker = _Worker(start.worker_id, start.role, actor, needs, monotonic(), node or "")
            worker.has_default_gpus = start.gpus is None
            self._workers[start.worker_id] = worker
        worker.watch = asyncio.create_task(self._watch(worker), name=f"watch {start.worker_id}")
        return ""

    async def _partner_node(self, role: str) -> str | None:
        """Returns the ID of the node with the most workers that lack a partner of this role."""
        # The wait is limited, so that a worker that no node has room for does not delay others.
        pending = [
            worker
            for worker in self._workers.values()
            if worker.role != role and not worker.settled.is_set()
        ]
        latest = max((worker.created_at for worker in pending), default=0.0) + _PARTNER_WAIT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, latest - monotonic())):
                await asyncio.gather(*(worker.settled.wait() for worker in pending))
        placed = (
            (worker.role, worker.node or worker.preferred_node)
            for worker in self._workers.values()
            if not worker.ending
        )
        return partner_node(role, [(other, node) for other, node in placed if node])

    def _make_actor(self, start: wire.Start, gpus: float, node: str | None) -> Any:
        opening = self._opening
        options: dict[str, Any] = {
            "name": f"{NAME_PREFIX}{start.worker_id}.{next(self._numbers)}",
            "num_cpus": start.cpus,
            "num_gpus": gpus,
            "resources": start.resources,
            # The coordinator replaces lost workers, not Ray.
            "max_restarts": 0,
        }
        if node is not None:
            # Ray uses this node if it has room now, and otherwise any node (as in Ray Serve).
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node, soft=True, _spill_on_unavailable=True
            )
        return (
            ray.remote(WorkerActor)
            .options(**options)
            .remote(
                start.worker_id,
                start.role,
                opening.coordinator,
                start.config,
                opening.command,
                start.environment,
            )
        )

    async def _watch(self, worker: _Worker) -> None:
        """Runs until the worker has ended; reports the exit unless the worker was told to stop."""
        try:
            lost = await self._place(worker)
            if not lost and not worker.ending:
                await result(worker.actor.start.remote(worker.node))
                fields = await self._until_exit(worker)
                ended = wire.Exited(**fields)
        except ActorDiedError as error:
            lost = f"was lost with its Ray actor: {error_line(error)}"
        except RayTaskError as error:
            lost = f"could not be started: {error_line(error.cause)}"
        except TimeoutError:
            lost = f"was lost: its Ray actor cannot be reached for {_UNREACHABLE_S:g} s"
        except Exception as error:
            lost = f"was lost: {error_line(error)}"
        worker.settled.set()
        if worker.ending:
            return
        worker.ending = True
        if not lost:
            # The actor still ends the worker's child processes, which may hold GPUs; see `_end`.
            self._say(ended)
            return
        worker.node = ""
        self._say(wire.Exited(worker.worker_id, None, lost=lost))
        # Ending the actor frees its resources on the node.
        with contextlib.suppress(Exception):
            await in_thread(lambda: ray.kill(worker.actor, no_restart=True))

    async def _place(self, worker: _Worker) -> str:
        """Waits until the worker's actor runs; returns why it cannot run, or an empty string."""
        placement_timeout_s = self._opening.placement_timeout_s
        starting = asyncio.ensure_future(result(worker.actor.place.remote()))
        begun_at, reported = monotonic(), ""
        while True:
            waited_s = monotonic() - begun_at
            done, _ = await asyncio.wait(
                [starting],
                timeout=max(0.0, min(_PLACEMENT_CHECK_S, placement_timeout_s - waited_s)),
            )
            if done:
                break
            # The reason may change, because nodes join and leave and resources become free.
            waited_s = monotonic() - begun_at
            why = await self._why_not_placed(worker, waited_s) or reported
            if waited_s >= placement_timeout_s:
                starting.cancel()
                why = why or "its resources are in use, or its node is slow"
                if why != reported:
                    # The coordinator must know that the worker has never run.
                    self._say(wire.Waits(worker.worker_id, why))
                limit = f"ray.placement_timeout_s ({placement_timeout_s:g} s)"
                return f"was not placed on a node within {limit}: {why}"
            if why != reported:
                self._say(wire.Waits(worker.worker_id, why))
                reported = why
        if reported and starting.exception() is not None:
            # It has left the queue for room, and failed: a failed start, which delays the next.
            self._say(wire.Waits(worker.worker_id, ""))
        place = starting.result()
        worker.node = place["node"]
        worker.settled.set()
        self._say(wire.Placed(worker.worker_id, place["node"], place["host"]))
        return ""

    @staticmethod
    async def _why_not_placed(worker: _Worker, waited_s: float) -> str:
        """Returns why a worker has no node yet; empty if unknown, or if it waits only briefly."""
        with contextlib.suppress(Exception):
            nodes = await in_thread(live_nodes)
            if lack := shortage(worker.needs, nodes):
                return lack + (
                    cpu_build_hint(worker.role, nodes) if worker.has_default_gpus else ""
                )
            if waited_s >= _IN_USE_AFTER_S:
                return in_use(worker.needs, await in_thread(ray.available_resources))
        return ""

    async def _until_exit(self, worker: _Worker) -> dict[str, Any]:
        while True:
            try:
                return dict(await result(worker.actor.exited.remote()))
            except ActorUnavailableError:
                # The connection to the actor broke, or Ray is gone.
                await self._reach(worker)

    async def _reach(self, worker: _Worker) -> None:
        async with asyncio.timeout(_UNREACHABLE_S):
            while True:
                with contextlib.suppress(ActorUnavailableError):
                    await result(worker.actor.coordinator.remote())
                    return
                await asyncio.sleep(_PROBE_S)

    async def _end_started(self, worker_id: str) -> None:
        """Waits until the worker's start has finished, then ends the worker."""
        if (starting := self._starting.get(worker_id)) is not None:
            await asyncio.wait([starting])
        await self._end(worker_id)

    async def _end(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            assert worker.watch is not None
            worker.ending = True
            if worker.node:
                stop_timeout_s = self._stop_timeout_s
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(stop_timeout_s + 2 * KILL_TIMEOUT_S):
                        await result(worker.actor.stop.remote(stop_timeout_s))
            with contextlib.suppress(Exception):
                # A silent Ray hardly answers this call, so the wait for it is short.
                timeout_s = _PROBE_S if self._silent_s else CALL_TIMEOUT_S
                await in_thread(lambda: ray.kill(worker.actor, no_restart=True), timeout_s)
                # The watch task ends when its calls to the dead actor fail.
                await asyncio.wait([worker.watch], timeout=CALL_TIMEOUT_S)
            worker.watch.cancel()
            await asyncio.gather(worker.watch, return_exceptions=True)
            self._workers.pop(worker_id, None)
        self._say(wire.Ended(worker_id))

    async def _probe(self) -> None:
        """Reports when Ray does not answer, and ends this process after _GONE_S seconds."""
        answered_at = monotonic()
        asking = asyncio.ensure_future(in_thread(live_nodes, _GONE_S))
        while True:
            await asyncio.wait([asking], timeout=_PROBE_S)
            if asking.done():
                if asking.exception() is None:
                    answered_at = monotonic()
                await asyncio.sleep(_PROBE_S)
                asking = asyncio.ensure_future(in_thread(live_nodes, _GONE_S))
            silent_s = monotonic() - answered_at
            if (is_silent := silent_s > _SILENT_S) or self._silent_s:
                self._silent_s = silent_s if is_silent else 0.0
                self._say(wire.Silent(self._silent_s))
            if psutil.wait_procs(self._head, timeout=0)[0]:
                self._give_up("one of its processes has ended")
            if silent_s > _GONE_S:
                self._give_up(f"it has not answered for {silent_s:.0f} s")

    def _give_up(self, why: str) -> None:
        for worker in self._workers.values():
            if not worker.ending:
                lost = f"was lost with Ray, which has stopped: {why}"
                self._say(wire.Exited(worker.worker_id, None, lost=lost))
        # os._exit skips Ray's own shutdown, which would wait for the lost Ray.
        os._exit(3)
