"""The production coordinator core and autoscaler over simulated workers, under a virtual clock.

Everything that is decided is decided by the core and by the scaling policy; here workers start,
serve, drain and leave, and clients send what a trace says.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from baton.bench.simulate.engine import Engine
from baton.bench.simulate.parts import Shape
from baton.bench.simulate.policies import Policy
from baton.bench.simulate.record import Record
from baton.bench.simulate.traces import Arrival
from baton.bench.tally import Tally
from baton.coordinator import events as ev
from baton.coordinator.autoscale.types import (
    Action,
    Drain,
    Flip,
    Observation,
    Phase,
    Want,
    WorkerView,
)
from baton.coordinator.core import Core
from baton.coordinator.core_config import CoreConfig
from baton.coordinator.load_index import Pool
from baton.coordinator.request import StreamKey, Submission, WorkerKey
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

ROLES = {Pool.PREFILL: common_pb2.ROLE_PREFILL, Pool.DECODE: common_pb2.ROLE_DECODE}
_START_S = 1000.0


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
        """In the same proportions."""
        one = cls()
        return cls(
            *(
                part * total_s / one.total_s
                for part in (one.process_s, one.weights_s, one.kv_s, one.warm_up_s)
            )
        )


@dataclass(slots=True)
class _Member:
    """A worker from the order to its end; its GPUs are paid for all the time.

    Attributes:
        engine: None while it starts.
        into: the pool that it changes to, once drained.
    """

    worker_id: str
    pool: Pool
    since: float
    engine: Engine | None = None
    into: Pool | None = None
    incarnation: int = 1
    gone: bool = False


class SimulatedCell:
    """A coordinator's core, its workers and its clients.

    Args:
        config: of the core.
        shapes: of a worker, by pool.
        policy: that sizes the pools.
        cold_start: of every worker that the policy asks for.
        flip_s: from a worker's last request in one role until it serves in the other.
        heartbeat_s: between load reports.
        gpus: of one worker, by pool.

    Attributes:
        now: seconds.
        record: what clients saw and what workers cost.
        tally: gaps between tokens.
    """

    def __init__(
        self,
        config: CoreConfig,
        shapes: dict[Pool, Shape],
        policy: Policy,
        *,
        cold_start: ColdStart | None = None,
        flip_s: float = 1.0,
        heartbeat_s: float = 0.5,
        gpus: dict[Pool, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.now = _START_S
        self.tally = Tally()
        self.record = Record(_START_S, gpus or dict.fromkeys(Pool, 1))
        self.core = Core(config, random.Random(seed).randbytes)
        self._random = random.Random(seed)
        self._observer = self.core.observer()
        self._shapes, self._policy, self._cold = shapes, policy, cold_start or ColdStart()
        self._flip_s, self._heartbeat_s = flip_s, heartbeat_s
        self._agenda: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._engines: dict[WorkerKey, Engine] = {}
        self._members: dict[str, _Member] = {}
        self._lane = common_pb2.LANE_INTERACTIVE

    # ---- Time.

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        """Something happens, then."""
        heapq.heappush(self._agenda, (when, next(self._order), action, arguments))

    def _run(self, until: float) -> None:
        agenda, next_deadline = self._agenda, self.core.next_deadline
        while True:
            due = next_deadline()
            when = agenda[0][0] if agenda else float("inf")
            if due is not None and due < when:
                if due > until:
                    break
                self.now = max(self.now, due)
                self._post(ev.Tick())
                continue
            if when > until:
                break
            when, _, action, arguments = heapq.heappop(agenda)
            self.now = max(self.now, when)
            action(*arguments)
        self.now = max(self.now, until)

    def run(self, arrivals: Iterable[Arrival], sizes: dict[Pool, int], lasts_s: float) -> Record:
        """Everything that arrives, from pools of these sizes on, until all of it has ended.

        Args:
            arrivals: in order of time.
            sizes: workers that serve from the beginning.
            lasts_s: how long the pools are sized and paid for, at least.
        """
        for pool, number in sizes.items():
            for _ in range(number):
                self._attach(self._new(pool))
        self.at(self.now, self._decide)
        self._next_arrival(iter(arrivals), 0)
        end = _START_S + lasts_s
        self._run(end)
        self.record.close(self.now)
        limit = self.now + 3600.0
        while self.core.num_requests and self.now < limit:
            self._run(self.now + 5.0)
        return self.record

    # ---- Workers.

    def _new(self, pool: Pool) -> _Member:
        member = _Member(f"{pool.value}-{next(self._numbers)}", pool, self.now)
        self._members[member.worker_id] = member
        self.record.worker_began(member.worker_id, pool, self.now)
        return member

    def _start(self, pool: Pool) -> None:
        member = self._new(pool)
        self.record.cold_start(self._cold.total_s)
        self.at(self.now + self._cold.total_s, self._attach, member)

    def _attach(self, member: _Member) -> None:
        if member.gone:
            return
        key = (member.worker_id, member.incarnation)
        shape = self._shapes[member.pool]
        member.engine = self._engines[key] = Engine(self, key, ROLES[member.pool], shape)
        self._post(ev.WorkerAttached(_hello(key, ROLES[member.pool], shape)))
        self._beat(member.engine)

    def _beat(self, engine: Engine) -> None:
        if engine.gone:
            return
        self._post(ev.WorkerLoad(engine.key, engine.report()))
        # Workers do not beat in step.
        self.at(self.now + self._heartbeat_s * self._random.uniform(0.95, 1.05), self._beat, engine)

    def tell(self, worker: Engine, event: ev.Event) -> None:
        """A worker's message; it arrives a moment later."""
        self.at(self.now + worker.shape.delay_s, self._post, event)

    def ended(self, worker: Engine) -> None:
        """It has drained: it leaves, or comes back in the other role without a cold start."""
        self._engines.pop(worker.key, None)
        member = self._members[worker.key[0]]
        member.engine = None
        if member.into is None:
            self._remove(member)
            return
        member.pool, member.into, member.since = member.into, None, self.now
        member.incarnation += 1
        # Its last message, that it has stopped, goes first.
        self.at(self.now + worker.shape.delay_s + self._flip_s, self._attach, member)

    def _remove(self, member: _Member) -> None:
        member.gone = True
        del self._members[member.worker_id]
        self.record.worker_ended(member.worker_id, self.now)

    # ---- Sizes.

    def _decide(self) -> None:
        observation = self._observe()
        decision = self._policy.decide(observation, self.now)
        for action in decision.actions:
            self._obey(action)
        self.record.decided(self.now, decision, self.tally.latest(95), self._sizes())
        self.at(self.now + self._policy.interval_s, self._decide)

    def _observe(self) -> Observation:
        starting = [
            WorkerView(one.worker_id, one.pool, Phase.STARTING, one.since)
            for one in self._members.values()
            if one.engine is None
        ]
        seen = self._observer.observe(self._policy.config, self.now, starting)
        views = []
        for view in seen.workers:
            member = self._members.get(view.worker_id)
            if member is not None and member.into is not None:
                # On its way into the other pool.
                view = replace(view, pool=member.into, phase=Phase.STARTING, since=member.since)
            views.append(view)
        return replace(seen, workers=tuple(views))

    def _sizes(self) -> dict[Pool, int]:
        """Workers that serve."""
        return {pool: len(self.core.workers.serving(role)) for pool, role in ROLES.items()}

    def _obey(self, action: Action) -> None:
        if isinstance(action, Want):
            present = sum(
                (one.into or one.pool) is action.pool and not self._drains(one)
                for one in self._members.values()
            )
            for _ in range(action.num_workers - present):
                self._start(action.pool)
            self.record.event(self.now, f"{action.pool.value}: {action.num_workers} wanted")
            return
        member = self._members.get(action.worker_id)
        if member is None:
            return
        if isinstance(action, Flip):
            member.into, member.since = action.to, self.now
            self.record.worker_moved(member.worker_id, action.to)
            self.record.event(self.now, f"{member.worker_id} flips to {action.to.value}")
        elif isinstance(action, Drain):
            self.record.event(self.now, f"{member.worker_id} drains")
        if member.engine is None:
            self._remove(member)
        else:
            self._post(ev.DrainAsked(member.worker_id, 600.0, "scaling"))

    def _drains(self, member: _Member) -> bool:
        worker = self.core.workers.by_id(member.worker_id)
        drains = worker is not None and worker.state == cluster_pb2.WORKER_STATE_DRAINING
        return drains and member.into is None

    # ---- Clients.

    def _next_arrival(self, arrivals: Iterator[Arrival], number: int) -> None:
        one = next(arrivals, None)
        if one is not None:
            self.at(_START_S + one.at_s, self._arrive, one, arrivals, number)

    def _arrive(self, one: Arrival, arrivals: Iterator[Arrival], number: int) -> None:
        self.record.arrived(number, self.now, one.num_prompt_tokens, one.num_output_tokens)
        submission = Submission(
            to=StreamKey(1, number),
            request_id=f"r{number}",
            prompt_token_ids=one.prompt(number),
            sampling=common_pb2.SamplingParams(max_tokens=one.num_output_tokens),
            lane=self._lane,
            arrived_at=self.now,
        )
        self._next_arrival(arrivals, number + 1)
        self._post(ev.Submitted(submission))

    def _post(self, event: ev.Event) -> None:
        record, now = self.record, self.now
        for effect in self.core.handle(event, now):
            if isinstance(effect, ev.SendDeltas):
                for to, delta in effect.deltas:
                    if not common_pb2.TokenDelta.FromString(delta).offset:
                        record.first_token(to.stream, now)
            elif isinstance(effect, ev.SendCommand):
                engine = self._engines.get(effect.worker)
                if engine is not None:
                    self.at(now + engine.shape.delay_s, engine.take, effect.command)
            elif isinstance(effect, ev.SendFinished):
                record.finished(effect.to.stream, now)
            elif isinstance(effect, ev.SendFailed):
                record.failed(effect.to.stream, now, str(effect.error))


def _hello(key: WorkerKey, role: common_pb2.Role.ValueType, shape: Shape) -> cluster_pb2.Hello:
    name, incarnation = key
    room = shape.kv_tokens if shape.announced_kv_tokens is None else shape.announced_kv_tokens
    return cluster_pb2.Hello(
        worker_id=name,
        incarnation=incarnation,
        role=role,
        state=cluster_pb2.WORKER_STATE_SERVING,
        model=common_pb2.ModelDescription(
            name="simulated", revision="1", max_model_len=shape.max_model_len, vocab_size=2**31
        ),
        fingerprint=kv_transfer_pb2.KvFingerprint(
            model="simulated",
            num_layers=1,
            block_size_tokens=shape.block_size_tokens,
            block_bytes=1024,
            tp_size=1,
        ),
        capacity=cluster_pb2.Capacity(
            kv_tokens=room,
            block_size_tokens=shape.block_size_tokens,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_send_bytes=2**40,
            max_receive_bytes=2**40,
            supports_forced_tokens=True,
            keeps_prefixes=shape.prefix_caching,
        ),
        kv_address=f"{name}:1",
        host_id=name,
        engine="simulated",
        engine_version="1",
    )
