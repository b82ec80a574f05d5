"""Simulation of a coordinator's core with workers and clients, driven at random from one seed.

The core, the worker links and the workers' outboxes are the production code. Processes, engines
and connections are simulated under a virtual clock (random_worker.py, random_network.py). The
clients know which output each of them must get (random_clients.py). random_events.py chooses the
events at random, under conditions that random_conditions.py draws first. A violated rule fails at
once; `finish_and_check` asserts the rules for the end of a run.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from baton.coordinator.core.core import Core
from baton.coordinator.server.link import WorkerLink
from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import ROLE_OF, Pool
from baton.coordinator.state.requests import WorkerKey
from baton.runtime.errors import BatonError
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.random_clients import RandomClients
from tests.coordinator.random_conditions import draw
from tests.coordinator.random_network import RandomNetwork
from tests.coordinator.random_worker import DECODE, PREFILL, RandomWorker

# check_integrity costs more than handling an event; it runs once per this many events.
_EVENTS_BETWEEN_CHECKS = 9
# More ticks than this at one moment mean a timer that never advances.
_MAX_TICKS_AT_ONCE = 50
_MAX_LOGGED_EVENTS = 400
_PROMPTS = re.compile(r"(prompt_token_ids: \d+ ?)+|prompt(_token_ids)?=\[[^]]*\]")
# Longest time until a worker serves, after earlier starts of its pool have failed.
_LONGEST_START_S = 120.0
# Time after the last request for outputs that no client resumes, and for drains, to end.
_REST_S = 40.0


class RandomCoordinator:
    """One coordinator process: a real core, and a simulated shell that carries out its effects.

    Attributes:
        generation: Number of this coordinator process; unique in a cell.
        is_up: Whether the process runs.
        frozen_until: The process is stopped (SIGSTOP) until this time of the cell's clock.
        links: Links of the attached workers.
        processes: IDs of workers that the core has started and not ended.
    """

    def __init__(self, cell: RandomCell, generation: int) -> None:
        numbers = itertools.count(generation * 10**6)
        self.generation, self.is_up, self.frozen_until = generation, True, -math.inf
        self.core = Core(cell.conditions.config, lambda count: next(numbers).to_bytes(count))
        self.links: dict[WorkerKey, WorkerLink] = {}
        self.processes: set[str] = set()
        self._cell, self._refusal, self._num_events = cell, None, 0

    @property
    def listens(self) -> bool:
        """Whether the process runs and handles events now."""
        return self.is_up and self.frozen_until <= self._cell.now

    def attach(self, hello: cluster_pb2.Hello, *, returns: bool) -> BatonError | None:
        """Handles a worker's Hello; returns the error if the core refuses the worker."""
        self._refusal: BatonError | None = None
        self.post(ev.WorkerAttached(hello, returns))
        return self._refusal

    def post(self, event: ev.Event) -> None:
        """Handles an event after the end of any SIGSTOP; an ended process ignores the event."""
        if not self.is_up:
            return
        if not self.listens:
            self._cell.at(self.frozen_until, lambda: self.post(event))
            return
        if not isinstance(event, ev.LoadReported | ev.Tick):
            self._cell.log("  ", event)
        for effect in self.core.handle(event, self._cell.now):
            self._carry_out(effect)
        self._num_events += 1
        if self._num_events % _EVENTS_BETWEEN_CHECKS == 0:
            self.core.check_integrity()
        for link in list(self.links.values()):
            self._cell.network.send_down(link)

    def check_deadlines(self) -> None:
        """Asserts that no running request is past its deadline."""
        now = self._cell.now
        for request in self.core.running():
            assert now <= request.deadline, (request.key, request.state, now - request.deadline)

    def _carry_out(self, effect: ev.Effect) -> None:
        cell, clients = self._cell, self._cell.clients
        match effect:
            case ev.SendDeltas(deltas):
                for to, encoded in deltas:
                    clients.take_delta(to, common_pb2.TokenDelta.FromString(encoded))
            case ev.SendAccepted(to):
                clients.take_accepted(to)
            case ev.SendFinished():
                clients.take_finished(effect)
            case ev.SendFailed(to, error):
                clients.take_failed(to, error)
            case ev.SendCommand(worker, command):
                assert worker in self.links, f"a command to {worker}, which has no link: {command}"
                self.links[worker].send(command)
            case ev.WelcomeWorker(worker, role, adopted):
                link = self.links.setdefault(worker, WorkerLink(worker))
                link.role, link.adopted = role, adopted
            case ev.RefuseWorker(_, error):
                self._refusal = error
            case ev.FenceWorker(worker, error):
                if (link := self.links.pop(worker, None)) is not None:
                    link.end(error)
                if error is not None:
                    cell.after(cell.conditions.delay_s, lambda: cell.fence(worker, error))
            case ev.StartWorker(worker_id, pool, revision):
                cell.log("  starts", worker_id)
                cell.launch(self, worker_id, ROLE_OF[pool], revision.name)
            case ev.EndWorker(worker_id):
                cell.log("  ends", worker_id)
                cell.end_launched(self, worker_id)


class RandomCell:
    """A coordinator, its workers and its clients; all randomness comes from one seed.

    Attributes:
        now: Virtual time in seconds.
        rng: The only random generator of the run.
        conditions: Conditions of this run.
        workers: Live worker processes in the order of their start.
        num_losses: Number of injected faults after which the coordinator may have lost a worker.
    """

    def __init__(self, seed: int, *, faults: bool) -> None:
        self.now, self.rng = 1000.0, random.Random(seed)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._generations, self._incarnations = itertools.count(1), itertools.count(1)
        self._num_ticks = 0
        self.conditions = draw(self.rng, faults=faults)
        self._events: deque[tuple[float, tuple[object, ...]]] = deque(maxlen=_MAX_LOGGED_EVENTS)
        self.workers: list[RandomWorker] = []
        self.num_losses, self._starts_fail = 0, faults
        breaks = faults and self.rng.random() < 0.3
        self.network = RandomNetwork(self, self.conditions.delay_s, breaks=breaks)
        self.clients = RandomClients(self)
        self.coordinator = RandomCoordinator(self, next(self._generations))
        if self.conditions.launched:
            self._begin_launching()
        else:
            for name, role in (("p1", PREFILL), ("d1", DECODE), ("p2", PREFILL), ("d2", DECODE)):
                self.spawn(name, role, "1")

    def log(self, *words: object) -> None:
        """Records an event for the report of a failed run."""
        self._events.append((self.now, words))

    def recent_events(self) -> str:
        """Returns the latest recorded events, one per line."""
        return "\n".join(
            " ".join([f"{when:.3f}", *map(_in_short, words)]) for when, words in self._events
        )

    # ---- Time.

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, seconds: float) -> None:
        """Advances the clock, and runs all actions and core deadlines that are due."""
        until = self.now + seconds
        while True:
            coordinator = self.coordinator
            due = coordinator.core.next_deadline() if coordinator.is_up else None
            tick_at = math.inf if due is None else max(due, coordinator.frozen_until)
            when = self._agenda[0][0] if self._agenda else math.inf
            if min(when, tick_at) > until:
                break
            if tick_at < when:
                self._num_ticks = self._num_ticks + 1 if tick_at <= self.now else 0
                assert self._num_ticks < _MAX_TICKS_AT_ONCE, "a timer goes off without end"
                self.now = max(self.now, tick_at)
                coordinator.post(ev.Tick())
                coordinator.check_deadlines()
            else:
                when, _, action = heapq.heappop(self._agenda)
                self.now = max(self.now, when)
                action()
        self.now = until

    # ---- Processes.

    def spawn(self, worker_id: str, role: int, revision: str, launched_by: int = 0) -> RandomWorker:
        """Starts a worker process, which then connects to the coordinator."""
        key = (worker_id, next(self._incarnations))
        self.log("worker", key, revision, "begins")
        worker = RandomWorker(self, key, role, revision, launched_by)
        self.workers.append(worker)
        self.network.connect(worker)
        return worker

    def exit(self, worker: RandomWorker, reason: str) -> None:
        """Ends a worker process; the coordinator that started the process gets WorkerExited."""
        if worker.dead:
            return
        self.log("worker", worker.key, reason)
        worker.dead = True
        self.workers.remove(worker)
        self.network.ended(worker)
        coordinator = self.coordinator
        if worker.launched_by == coordinator.generation:
            exited = ev.WorkerExited(worker.id, reason)
            seconds = self.rng.choice([0.001, 0.05, 0.3])
            self.after(seconds, lambda: coordinator.post(exited))

    def fence(self, key: WorkerKey, error: BatonError) -> None:
        """Delivers the fence: the worker exits when it reads the error."""
        for worker in self.workers:
            if worker.key == key:
                self._exit_later(worker, 0.0, f"was fenced: {error}")

    def worker_at(self, address: str) -> RandomWorker | None:
        """Returns the running worker that accepts handoffs at this address, or None."""
        for worker in self.workers:
            if worker.address == address and worker.frozen_until <= self.now:
                return worker
        return None

    def launch(
        self, coordinator: RandomCoordinator, worker_id: str, role: int, revision: str
    ) -> None:
        """Starts a process after a delay; some starts wait for a GPU, and some fail."""
        rng = self.rng
        coordinator.processes.add(worker_id)
        if self._starts_fail and rng.random() < 0.1:
            failed = ev.WorkerExited(worker_id, "could not be started")
            self.after(0.5, lambda: coordinator.post(failed))
            return

        def begin() -> None:
            if coordinator.is_up and worker_id in coordinator.processes:
                self.spawn(worker_id, role, revision, coordinator.generation)

        seconds = rng.choice([0.5, 2.0, 5.0, 8.0])
        if self._starts_fail and rng.random() < 0.1:
            seconds = 30.0
            waits = ev.WorkerWaits(worker_id, "waits for a GPU")
            self.after(1.0, lambda: coordinator.post(waits))
            self.after(20.0, lambda: coordinator.post(ev.WorkerWaits(worker_id, "")))
        self.after(seconds, begin)

    def end_launched(self, coordinator: RandomCoordinator, worker_id: str) -> None:
        """Ends the process with this worker ID, and reports that it is gone."""

        def end() -> None:
            if not coordinator.is_up:
                return
            coordinator.processes.discard(worker_id)
            for worker in list(self.workers):
                if worker.id == worker_id and worker.launched_by == coordinator.generation:
                    self.exit(worker, "was ended")
            coordinator.post(ev.WorkerExited(worker_id, "was ended", gone=True))

        self.after(self.rng.choice([0.01, 0.2, 2.0]), end)

    def lose_coordinator(self) -> None:
        """Kills the coordinator and starts another one later; workers and clients reconnect."""
        self.log("the coordinator dies")
        self.coordinator.is_up = False
        for worker in list(self.workers):
            if worker.is_launched:
                # A launched worker exits once it notices the death of its coordinator.
                self._exit_later(worker, self.rng.uniform(0, 1.5), "is alone")
            self.network.lost_coordinator(worker)
        self.clients.lost_coordinator()
        self.after(self.rng.choice([0.2, 1.0, 3.0]), self._begin_coordinator)

    def _exit_later(self, worker: RandomWorker, seconds: float, reason: str) -> None:
        worker.after(seconds, lambda: self.exit(worker, reason))

    def _begin_coordinator(self) -> None:
        self.log("another coordinator starts")
        self.coordinator = RandomCoordinator(self, next(self._generations))
        if self.conditions.launched:
            self._begin_launching()

    def _begin_launching(self) -> None:
        sizes: Mapping[Pool, int] = {pool: self.rng.choice([1, 2]) for pool in Pool}
        self.coordinator.post(ev.LauncherReady(sizes))

    # ---- The end.

    def finish_and_check(self) -> None:
        """Stops all faults; asserts that all requests end, nothing is left and the cell serves."""
        self.log("no more faults from here on")
        self.network.breaks, self._starts_fail = False, False
        self.conditions = replace(self.conditions, p_gives_up=0.0)
        if not self.coordinator.listens:
            self.run(15.0)
        coordinator, core = self.coordinator, self.coordinator.core
        if self.conditions.launched:
            coordinator.post(ev.AutoscaleRequested(False))
            for pool in Pool:
                coordinator.post(ev.ScaleRequested(pool, 1))
        else:
            # An operator adds one worker to each pool, so that the cell can serve.
            for name, role in (("last-p", PREFILL), ("last-d", DECODE)):
                self.spawn(name, role, core.fleets.stable.name)
        # Wait until all stopped processes and stuck engines continue.
        for worker in list(self.workers):
            self.run(max(0.0, worker.frozen_until - self.now, worker.wedged_until - self.now))
        until = self.now + max(self.conditions.config.max_request_s, _LONGEST_START_S)
        while (core.num_requests or not core.can_serve) and self.now < until:
            self.run(1.0)
        self.run(_REST_S)
        self._check_nothing_is_left(core)
        assert core.can_serve, [(one.id, one.role, one.state) for one in core.workers]
        clients = [self.clients.submit(plain=True) for _ in range(4)]
        self.run(30.0)
        for client in clients:
            assert client.outcome == "finished", client
        self._check_nothing_is_left(core)

    def _check_nothing_is_left(self, core: Core) -> None:
        core.check_integrity()
        assert not [each for each in self.clients.everyone if not each.outcome]
        assert core.num_requests == 0, core.running()
        for lane in core.stats.lanes:
            assert core.num_running(lane) == 0
            assert core.num_queued(lane) == 0
            for fleet in core.fleets:
                assert core._parts.lanes.waits.work_s(lane, fleet) == 0
        assert not core._adoption._orphans
        for worker in core.workers:
            assert worker.flip is None, worker
            assert not list(worker.ledger), worker
            assert not worker.ledger.handoffs, worker
            assert not worker.ledger.unanswered, worker
            load = core.placers.load(worker)
            assert load is not None
            assert (load.num_prefills, load.num_decodes, load.queued_tokens) == (0, 0, 0), load
            assert load.free_tokens == self.conditions.kv_tokens, load
        for process in self.workers:
            for account in (process.held, process.sends):
                assert not account, (process.key, account)
            assert process.stream is None or not len(process.outbox), process.key


def _in_short(word: object) -> str:
    text = " ".join(str(word).split())
    return _PROMPTS.sub("prompt", text)[:300]
