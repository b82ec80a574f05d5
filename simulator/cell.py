"""Runs the production coordinator core with simulated workers under a virtual clock.

The core and the scaling policy make all decisions. This module plays the workers, which start,
serve, drain and leave, and the clients, which send the requests of a trace. The clients do not know
how long their outputs will be: all requests have the same `max_tokens`, and the engines end each
output at its length in the trace.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from baton.coordinator.core.core import Core
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import POOL_OF, ROLE_OF, Pool
from baton.coordinator.state.requests import StreamKey, Submission, WorkerKey
from baton.coordinator.state.scaling_config import ScalingSettings
from baton.coordinator.state.scaling_decision import Flip, SetSize
from baton.load.duration_histogram import DurationHistogram
from baton.load.traces import Arrival
from baton.simulator.hello import hello
from baton.simulator.parts import Shape
from baton.simulator.policies import Policy
from baton.simulator.record import Record
from baton.simulator.virtual_time import START_S, VirtualTime
from baton.simulator.worker import SimulatedWorker
from baton.v1 import cluster_pb2, common_pb2

# Prefix of the requests' IDs; their numbers in the trace follow.
_ID_PREFIX = "trace-"
# Time from a worker's last request in one role until the worker serves in the other role.
_FLIP_S = 1.0


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Stages of a worker's start, in seconds."""

    process_s: float = 5.0
    weights_s: float = 40.0
    kv_s: float = 5.0
    warm_up_s: float = 10.0

    @property
    def total_s(self) -> float:
        return self.process_s + self.weights_s + self.kv_s + self.warm_up_s

    @classmethod
    def lasting(cls, total_s: float) -> ColdStart:
        """Returns a cold start of this length, with the default proportions of its stages."""
        one = cls()
        return cls(
            *(
                part * total_s / one.total_s
                for part in (one.process_s, one.weights_s, one.kv_s, one.warm_up_s)
            )
        )


@dataclass(slots=True)
class _Member:
    """A worker from the start order to its end; its GPUs are paid for during that time.

    Attributes:
        worker: None while the worker starts.
        removed: Whether the worker has ended.
    """

    worker_id: str
    pool: Pool
    worker: SimulatedWorker | None = None
    removed: bool = False


def common_max_tokens(arrivals: Sequence[Arrival]) -> int:
    """Returns the `max_tokens` of all requests: a power of two that no output exceeds."""
    longest = max((one.num_output_tokens for one in arrivals), default=1)
    return 1 << (longest - 1).bit_length()


class SimulatedCell(VirtualTime):
    """A simulated cluster: the coordinator's core, workers and clients.

    Args:
        config: Configuration of the core.
        shapes: Size and speed of a worker, by pool.
        policy: Scaling policy.
        cold_start: Duration of the start of every worker that the policy orders.
        heartbeat_s: Seconds between load reports.
        gpus: GPUs per worker, by pool.
        seed: Seed of all random choices.

    Attributes:
        record: Request times as seen by clients, and the cost of the workers.
        gaps: Gaps between tokens.
        prompt_tokens: Tokens of the prompts that got a first token, by source: "device", "host"
            (memory), "fetched" and "computed".
    """

    def __init__(
        self,
        config: CoreConfig,
        shapes: dict[Pool, Shape],
        policy: Policy,
        *,
        cold_start: ColdStart | None = None,
        heartbeat_s: float = 0.5,
        gpus: dict[Pool, int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.gaps = DurationHistogram()
        self.prompt_tokens: Counter[str] = Counter()
        self.record = Record(START_S, gpus or dict.fromkeys(Pool, 1))
        settings = ScalingSettings(policy.config, autoscale=True, drain_s=config.scaling.drain_s)
        self.core = Core(replace(config, scaling=settings), random.Random(seed).randbytes, policy)
        self._random = random.Random(seed)
        self._shapes, self._cold = shapes, cold_start or ColdStart()
        self._heartbeat_s = heartbeat_s
        # False while the initial workers start: these have no cold start.
        self._began = False
        self._workers: dict[WorkerKey, SimulatedWorker] = {}
        self._members: dict[str, _Member] = {}
        self._lane = common_pb2.LANE_INTERACTIVE
        self._max_model_len = min(one.max_model_len for one in shapes.values())
        self._max_tokens = 1

    # ---- Time.

    def _run(self, until: float) -> None:
        heap, next_deadline = self.scheduled, self.core.next_deadline
        while True:
            due = next_deadline()
            when = heap[0][0] if heap else float("inf")
            if due is not None and due < when:
                if due > until:
                    break
                self.now = max(self.now, due)
                self._post(ev.Tick())
                continue
            if when > until:
                break
            when, _, action, arguments = heapq.heappop(heap)
            self.now = max(self.now, when)
            action(*arguments)
        self.now = max(self.now, until)

    def run(self, arrivals: Sequence[Arrival], sizes: dict[Pool, int], lasts_s: float) -> Record:
        """Simulates a trace until all requests have ended, for one hour after `lasts_s` at most.

        Args:
            arrivals: Requests in order of time.
            sizes: Workers that serve from the beginning.
            lasts_s: GPU costs are recorded for this many seconds.
        """
        self._max_tokens = common_max_tokens(arrivals)
        self._post(ev.LauncherReady(sizes))
        self._began = True
        self.next_arrival(iter(arrivals), 0)
        end = START_S + lasts_s
        self._run(end)
        self.record.close(self.now)
        limit = self.now + 3600.0
        while self.core.num_requests and self.now < limit:
            self._run(self.now + 5.0)
        return self.record

    # ---- Workers.

    def _start(self, effect: ev.StartWorker) -> None:
        member = _Member(effect.worker_id, effect.pool)
        self._members[member.worker_id] = member
        self.record.worker_began(member.worker_id, effect.pool, self.now)
        wait_s = 0.0
        if self._began:
            wait_s = self._cold.total_s
            self.record.cold_start(wait_s)
        self.at(self.now + wait_s, self._attach, member)

    def _attach(self, member: _Member) -> None:
        if member.removed:
            return
        key, shape = (member.worker_id, 1), self._shapes[member.pool]
        member.worker = self._workers[key] = SimulatedWorker(self, key, ROLE_OF[member.pool], shape)
        room = shape.kv_tokens if shape.announced_kv_tokens is None else shape.announced_kv_tokens
        # Workers with other step times have another device.
        device = repr(shape.model)
        self._post(ev.WorkerAttached(hello(key, ROLE_OF[member.pool], shape, room, device)))
        self._heartbeat(member.worker)

    def _heartbeat(self, worker: SimulatedWorker) -> None:
        if worker.stopped:
            return
        self._post(ev.LoadReported(worker.key, worker.report()))
        # Jitter keeps the workers' heartbeats apart.
        self.at(
            self.now + self._heartbeat_s * self._random.uniform(0.95, 1.05), self._heartbeat, worker
        )

    def send(self, worker: SimulatedWorker, event: ev.Event) -> None:
        """Delivers a worker's message to the core after the worker's message delay."""
        self.at(self.now + worker.shape.delay_s, self._post, event)

    def worker_at(self, address: str) -> SimulatedWorker | None:
        """Returns the worker with this KvTransfer address; None: it has left."""
        return self._workers.get((address.rpartition(":")[0], 1))

    def num_output_tokens(self, spec: cluster_pb2.RequestSpec) -> int:
        """Returns the length in the trace of a request's output, or its max_tokens if smaller."""
        most, name = spec.sampling.max_tokens, spec.request_id
        return min(most, self.record.outputs[int(name.removeprefix(_ID_PREFIX))])

    def ended(self, worker: SimulatedWorker) -> None:
        """Removes a worker that has drained."""
        self._workers.pop(worker.key, None)
        self._members[worker.key[0]].worker = None
        self._remove(worker.key[0])

    def _remove(self, worker_id: str) -> None:
        member = self._members.pop(worker_id, None)
        if member is not None:
            member.removed = True
            self.record.worker_ended(worker_id, self.now)

    # ---- Sizes.

    def _decided(self, effect: ev.Decided) -> None:
        for action in effect.decision.actions:
            if isinstance(action, SetSize):
                what = f"{action.pool.value}: {action.num_workers} wanted"
            elif isinstance(action, Flip):
                what = f"{action.worker_id} flips to {action.to.value}"
            else:
                what = f"{action.worker_id} drains"
            self.record.event(self.now, what)
        sizes = {pool: len(self.core.workers.serving(role)) for pool, role in ROLE_OF.items()}
        self.record.decided(self.now, effect.decision, self.gaps.percentile_since_last(95), sizes)

    def _command(self, effect: ev.SendCommand) -> None:
        worker = self._workers.get(effect.worker)
        if worker is None:
            return
        wait_s = worker.shape.delay_s
        if isinstance(effect.command, cluster_pb2.SetRoleCommand):
            self.record.worker_moved(effect.worker[0], POOL_OF[effect.command.role])
            wait_s += _FLIP_S
        self.at(self.now + wait_s, worker.take, effect.command)

    def _end(self, effect: ev.EndWorker) -> None:
        """Stops a worker's process; a worker that has drained was removed before."""
        member = self._members.get(effect.worker_id)
        if member is not None and member.worker is not None:
            member.worker.stopped = True
            self._workers.pop(member.worker.key, None)
        self._remove(effect.worker_id)
        self.at(self.now, self._post, ev.WorkerExited(effect.worker_id, "was ended", gone=True))

    # ---- Clients.

    def arrive(self, one: Arrival, arrivals: Iterator[Arrival], number: int) -> None:
        self.record.arrived(number, self.now, one.num_prompt_tokens, one.num_output_tokens)
        room = max(1, self._max_model_len - one.num_prompt_tokens)
        submission = Submission(
            to=StreamKey(1, number),
            request_id=f"{_ID_PREFIX}{number}",
            prompt_token_ids=one.prompt(number),
            sampling=common_pb2.SamplingParams(max_tokens=min(self._max_tokens, room)),
            lane=self._lane,
            arrived_at=self.now,
        )
        self.next_arrival(arrivals, number + 1)
        self._post(ev.Submitted(submission))

    def _post(self, event: ev.Event) -> None:
        record, now = self.record, self.now
        for effect in self.core.handle(event, now):
            if isinstance(effect, ev.SendDeltas):
                for to, delta in effect.deltas:
                    if not common_pb2.TokenDelta.FromString(delta).offset:
                        record.first_token(to.stream, now)
            elif isinstance(effect, ev.SendCommand):
                self._command(effect)
            elif isinstance(effect, ev.WelcomeWorker):
                self._command(ev.SendCommand(effect.worker, self.core.step_targets()))
            elif isinstance(effect, ev.SendFinished):
                record.finished(effect.to.stream, now)
            elif isinstance(effect, ev.SendFailed):
                record.failed(effect.to.stream, str(effect.error))
            elif isinstance(effect, ev.StartWorker):
                self._start(effect)
            elif isinstance(effect, ev.EndWorker):
                self._end(effect)
            elif isinstance(effect, ev.Decided):
                self._decided(effect)
