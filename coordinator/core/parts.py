"""The parts of the core that its other parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.coordinator.core.commands import Commands
from baton.coordinator.core.effects import Effects
from baton.coordinator.lanes.admission import Admission
from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.rollouts.traffic import Traffic
from baton.coordinator.routing.loads.latency import LatencyRegistry
from baton.coordinator.routing.placers import Placers
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.fleets import Fleets
from baton.coordinator.state.latency_targets import LatencyTargets
from baton.coordinator.state.request_table import RequestTable
from baton.coordinator.state.session_blocks import SessionBlocks
from baton.coordinator.state.timers import Timers
from baton.coordinator.state.workers import WorkerRegistry
from baton.coordinator.telemetry.stats import CoreStats


@dataclass(frozen=True, slots=True)
class Parts:
    """One object of each kind that several parts of the core use; `Core` makes it once.

    A part of the core gets this object, and its constructor takes from it only what the part uses.

    Attributes:
        config: Limits and times.
        random_bytes: Makes handoff ids; injected so that a simulation is reproducible.
        room_freed: Requests a round of dispatching. It is called when a waiting request may find a
            worker: a request has arrived or ended, or a worker can take more.
        clock: Time of the event that the core handles.
        timers: One timer per request, per worker and per CoreTimer.
        effects: Collects the messages of an event for clients and workers.
        targets: Latency targets of requests that name none.
        fleets: The fleets of workers.
        workers: Attached workers.
        latency: Fitted costs of engine steps.
        placers: Choose workers for requests and count the load on them.
        traffic: Chooses the fleet of a new request.
        requests: Requests that have not ended, and the latest that have.
        lanes: Waiting requests in their order, and the tenants' accounts.
        admission: Decides whether requests are admitted.
        session_blocks: KV blocks of the latest sessions.
        stats: Counters.
        commands: Sends the commands of requests to workers.
    """

    config: CoreConfig
    random_bytes: Callable[[int], bytes]
    room_freed: Callable[[], None]
    clock: CoreClock
    timers: Timers
    effects: Effects
    targets: LatencyTargets
    fleets: Fleets
    workers: WorkerRegistry
    latency: LatencyRegistry
    placers: Placers
    traffic: Traffic
    requests: RequestTable
    lanes: Lanes
    admission: Admission
    session_blocks: SessionBlocks
    stats: CoreStats
    commands: Commands

    @classmethod
    def of(
        cls,
        config: CoreConfig,
        random_bytes: Callable[[int], bytes],
        room_freed: Callable[[], None],
    ) -> Parts:
        """Makes the parts of a core that has no workers and no requests."""
        clock, effects = CoreClock(), Effects()
        fleets = Fleets(config.revision, elastic=config.elastic)
        workers = WorkerRegistry(config.model_name, fleets)
        latency = LatencyRegistry(config.latency)
        placers = Placers(config, workers, latency, clock)
        lanes = Lanes(clock, config.lanes, config.tenant_defaults, config.tenants)
        return cls(
            config=config,
            random_bytes=random_bytes,
            room_freed=room_freed,
            clock=clock,
            timers=Timers(),
            effects=effects,
            targets=LatencyTargets(config.targets),
            fleets=fleets,
            workers=workers,
            latency=latency,
            placers=placers,
            traffic=Traffic(fleets),
            requests=RequestTable(config.max_ended_requests, config.max_running_requests),
            lanes=lanes,
            admission=Admission(config, lanes, placers, clock),
            session_blocks=SessionBlocks(),
            stats=CoreStats(),
            commands=Commands(config, workers, clock, effects.add),
        )
