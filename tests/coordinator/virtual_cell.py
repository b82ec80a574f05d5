"""The coordinator's core with simulated workers, under a virtual clock.

The core is the production code. Only the workers and their engines are simulated, by the latency
model: like vLLM, a step decodes every running request and computes prompt chunks within a token
budget.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.coordinator.core.core import Core
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import StreamKey, Submission, WorkerKey
from baton.runtime.errors import BatonError, ResourceExhausted
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.runtime.steps.latency import LatencyModel, PrefillChunk
from baton.runtime.ttft_target import TtftTarget
from baton.simulator.hello import hello
from baton.simulator.parts import PrefixCache
from baton.v1 import cluster_pb2, common_pb2

_PREFILL, _DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
_TOKEN = 7


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Properties of a simulated worker.

    Attributes:
        model: Latency model of the worker's steps.
        noise: Relative standard deviation of a step's duration.
        delay_s: Delay of every message between the worker and the coordinator.
        handoff_s: Seconds from the first token until the decode worker has the KV cache.
        prefix_caching: Whether computed blocks are kept for later prompts.
        host_kv_tokens, kv_bytes_per_token: As in the worker's Hello.
    """

    model: LatencyModel
    kv_tokens: int = 65536
    block_size_tokens: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    noise: float = 0.02
    delay_s: float = 0.001
    handoff_s: float = 0.002
    prefix_caching: bool = True
    host_kv_tokens: int = 0
    kv_bytes_per_token: float = 64.0


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it.

    Attributes:
        token_times: Arrival time of each token.
        error: Error of a failed or refused request.
        ended_at: Time of the last event; None while the request runs.
    """

    lane: common_pb2.Lane.ValueType
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrived_at: float
    token_times: list[float] = field(default_factory=list)
    error: BatonError | None = None
    ended_at: float | None = None

    @property
    def shed(self) -> bool:
        return isinstance(self.error, ResourceExhausted) and not self.token_times

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.arrived_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times)]


@dataclass(slots=True, eq=False)
class _Live:
    """A request in a simulated engine.

    Attributes:
        num_left: Output tokens that remain to be generated on this worker.
        waited_s: Seconds that the request waited for its handoff.
        began_at: Time of the request's first step.
    """

    spec: cluster_pb2.RequestSpec
    order: tuple[int, int]
    num_missing: int
    num_done: int
    num_tokens: int
    num_left: int
    prefill_only: bool
    offset: int
    ready_at: float
    hashes: Sequence[int]
    came_at: float
    waited_s: float
    num_handoff_tokens: int
    num_in_step: int = 0
    started: bool = False
    began_at: float | None = None
    told: bool = False


class _Worker:
    """One simulated worker process; messages in both directions take `delay_s`."""

    def __init__(
        self, cell: VirtualCell, key: WorkerKey, role: common_pb2.Role.ValueType, shape: WorkerShape
    ) -> None:
        self.cell, self.key, self.role, self.shape = cell, key, role, shape
        self.live: dict[tuple[str, int], _Live] = {}
        self.running: list[_Live] = []
        self.waiting: list[tuple[tuple[int, int], int, _Live]] = []
        self.kv_tokens = 0
        self.num_steps = 0
        self.samples: deque[cluster_pb2.StepSample] = deque(maxlen=256)
        self.busy = self.gone = False
        self.cache = PrefixCache(shape.kv_tokens, shape.block_size_tokens)

    # ---- Commands of the coordinator.

    def take(self, command: ev.Command) -> None:
        if self.gone:
            return
        if isinstance(command, cluster_pb2.CancelCommand):
            self._drop((command.request_id, command.attempt))
        elif isinstance(command, cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand):
            self._begin(command)

    def _begin(self, command: cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand) -> None:
        spec, cell = command.spec, self.cell
        prefill_only = isinstance(command, cluster_pb2.PrefillCommand)
        handed = not prefill_only and command.HasField("handoff")
        num_known = len(spec.known_token_ids)
        total = len(spec.prompt_token_ids) + num_known
        hashes = block_hashes(
            spec.prompt_token_ids, self.shape.block_size_tokens, root_of(spec.adapter)
        )
        num_cached = 0 if handed else self.cache.num_cached(hashes)
        num_done = command.handoff.num_tokens if handed else num_cached
        num_missing = total - min(num_done, total - 1)
        live = _Live(
            spec=spec,
            order=(spec.priority, next(cell.order)),
            num_missing=num_missing,
            num_done=total - num_missing,
            num_tokens=total,
            num_left=1 if prefill_only else max(1, spec.sampling.max_tokens - num_known),
            prefill_only=prefill_only,
            offset=num_known,
            ready_at=cell.now + (self.shape.handoff_s if handed else 0.0),
            hashes=hashes,
            came_at=cell.now,
            waited_s=self.shape.handoff_s if handed else 0.0,
            num_handoff_tokens=num_done if handed else 0,
        )
        self.live[spec.request_id, spec.attempt] = live
        cell.at(live.ready_at, lambda: self._arrive(live))

    def _arrive(self, live: _Live) -> None:
        if (live.spec.request_id, live.spec.attempt) in self.live:
            heapq.heappush(self.waiting, (live.order, id(live), live))
            self._go()

    def _drop(self, key: tuple[str, int]) -> None:
        live = self.live.pop(key, None)
        if live is not None and live.started:
            self.running.remove(live)
            self.kv_tokens -= live.num_tokens
            self._keep(live)

    def _keep(self, live: _Live) -> None:
        """Keeps the blocks of an ended request until others need the room."""
        if not self.shape.prefix_caching:
            return
        # A running step also computes blocks of requests that have been cancelled.
        changes = self.cache.keep(live.hashes, live.num_done + live.num_in_step)
        if changes is not None:
            self.cell.tell(self, ev.WorkerCache(self.key, changes))

    # ---- Engine.

    def _go(self) -> None:
        if not self.busy and not self.gone:
            self._step()

    def _step(self) -> None:
        self._start_waiting()
        budget = self.shape.max_num_batched_tokens
        work: list[tuple[_Live, int]] = []
        chunks: list[PrefillChunk] = []
        num_decodes = num_kv = 0
        for live in self.running:
            count = min(live.num_missing, budget)
            if not count:
                continue
            budget -= count
            work.append((live, count))
            live.num_in_step = count
            if live.began_at is None:
                live.began_at = self.cell.now
            if live.num_missing == 1 and live.num_done:
                num_decodes += 1
                num_kv += live.num_tokens
            else:
                chunks.append(PrefillChunk(live.num_done, count))
        if not work:
            return
        model, noise = self.shape.model, self.shape.noise
        took_s = model.step_s(chunks, num_decodes, num_kv)
        took_s *= max(0.5, self.cell.random.gauss(1.0, noise))
        self.busy = True
        sample = cluster_pb2.StepSample(
            num_prefill_tokens=sum(one.num_tokens for one in chunks),
            num_decodes=num_decodes,
            num_kv_tokens=num_kv,
            prefill_token_squares=sum(
                (one.num_done_tokens + one.num_tokens) ** 2 - one.num_done_tokens**2
                for one in chunks
            ),
            duration_us=round(took_s * 1e6),
        )
        self.cell.at(self.cell.now + took_s, lambda: self._stepped(work, sample))

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.shape.max_num_seqs:
            live = self.waiting[0][2]
            if (live.spec.request_id, live.spec.attempt) not in self.live:
                heapq.heappop(self.waiting)
                continue
            if self.running and self.kv_tokens + live.num_tokens > self.shape.kv_tokens:
                return
            heapq.heappop(self.waiting)
            live.started = True
            self.running.append(live)
            self.kv_tokens += live.num_tokens

    def _stepped(self, work: Sequence[tuple[_Live, int]], sample: cluster_pb2.StepSample) -> None:
        self.busy = False
        if self.gone:
            return
        self.num_steps += 1
        self.samples.append(sample)
        outputs = []
        for live, count in work:
            if not live.started or (live.spec.request_id, live.spec.attempt) not in self.live:
                continue
            live.num_in_step = 0
            live.num_missing -= count
            live.num_done += count
            if not live.num_missing:
                outputs.append(self._token(live))
        if outputs:
            step = cluster_pb2.StepOutputs(step=self.num_steps, outputs=outputs)
            self.cell.tell(self, ev.WorkerStep(self.key, step))
        self._go()

    def _token(self, live: _Live) -> cluster_pb2.RequestOutput:
        output = cluster_pb2.RequestOutput(
            request_id=live.spec.request_id, attempt=live.spec.attempt
        )
        if not live.told and live.began_at is not None:
            live.told = True
            output.timings.queue_us = round((live.began_at - live.came_at) * 1e6)
            output.timings.run_us = round((self.cell.now - live.began_at) * 1e6)
            output.timings.handoff_wait_us = round(live.waited_s * 1e6)
            output.timings.num_handoff_tokens = live.num_handoff_tokens
        output.delta.offset = live.offset
        output.delta.token_ids.append(_TOKEN)
        live.offset, live.num_left = live.offset + 1, live.num_left - 1
        live.num_tokens, live.num_missing = live.num_tokens + 1, 1
        self.kv_tokens += 1
        if not live.num_left:
            whole = live.offset >= live.spec.sampling.max_tokens
            output.finished.reason = (
                common_pb2.FINISH_REASON_LENGTH if whole else common_pb2.FINISH_REASON_UNSPECIFIED
            )
            self._drop((live.spec.request_id, live.spec.attempt))
        return output

    def report(self) -> cluster_pb2.LoadReport:
        samples, self.samples = list(self.samples), deque(maxlen=256)
        return cluster_pb2.LoadReport(
            num_steps=self.num_steps,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_tokens_used=self.kv_tokens,
            kv_tokens_total=self.shape.kv_tokens,
            steps=samples,
        )


class VirtualCell:
    """A coordinator's core and its simulated workers.

    Args:
        config: Configuration of the core.
        heartbeat_s: Interval of load reports.
        seed: Seed of all randomness.

    Attributes:
        now: Virtual time in seconds.
        outcomes: Outcomes of all submitted requests, in order.
    """

    def __init__(self, config: CoreConfig, *, heartbeat_s: float = 0.5, seed: int = 0) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)
        self.order = itertools.count()
        self.outcomes: list[Outcome] = []
        self.core = Core(config, random.Random(seed).randbytes)
        self._heartbeat_s = heartbeat_s
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._workers: dict[WorkerKey, _Worker] = {}
        self._by_stream: dict[StreamKey, Outcome] = {}

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedules an action."""
        heapq.heappush(self._agenda, (when, next(self.order), action))

    def run(self, until: float) -> None:
        """Advances the clock and runs all scheduled actions."""
        while True:
            due = self.core.next_deadline()
            when = self._agenda[0][0] if self._agenda else float("inf")
            if min(when, due if due is not None else when) > until:
                break
            if due is not None and due < when:
                self.now = max(self.now, due)
                self.post(ev.Tick())
            else:
                when, _, action = heapq.heappop(self._agenda)
                self.now = max(self.now, when)
                action()
        self.now = until

    # ---- Workers.

    def add_worker(
        self,
        name: str,
        role: common_pb2.Role.ValueType,
        shape: WorkerShape,
        incarnation: int = 1,
        revision: str = "",
    ) -> None:
        key = (name, incarnation)
        self._workers[key] = worker = _Worker(self, key, role, shape)
        message = hello(key, role, shape, shape.kv_tokens)
        message.revision = revision
        self.post(ev.WorkerAttached(message))
        self._beat(worker)

    def kill(self, name: str, reason: str = "was killed") -> None:
        for key, worker in list(self._workers.items()):
            if key[0] == name:
                worker.gone = True
                del self._workers[key]
                self.post(ev.WorkerLost(name, reason, key[1]))

    def stop(self, name: str) -> None:
        """A worker reaches the time limit of its drain: it drops its requests and leaves."""
        for key, worker in list(self._workers.items()):
            if key[0] == name:
                worker.gone = True
                del self._workers[key]
                stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
                self.post(ev.WorkerChanged(key, stopped))

    def tell(self, worker: _Worker, event: ev.Event) -> None:
        """Sends a worker's message, which arrives after the worker's delay."""

        def arrive() -> None:
            if not worker.gone:
                self.post(event)

        self.at(self.now + worker.shape.delay_s, arrive)

    def _beat(self, worker: _Worker) -> None:
        if worker.gone:
            return
        self.post(ev.LoadReported(worker.key, worker.report()))
        # The workers' heartbeats have random phases.
        self.at(
            self.now + self._heartbeat_s * self.random.uniform(0.95, 1.05),
            lambda: self._beat(worker),
        )

    # ---- Clients.

    def submit(
        self,
        num_prompt_tokens: int,
        num_output_tokens: int,
        *,
        lane: common_pb2.Lane.ValueType = common_pb2.LANE_INTERACTIVE,
        tenant: str = "default",
        prompt: Sequence[int] | None = None,
        timeout_s: float | None = None,
        slo_ttft_s: float | None = None,
        slo_ttft: TtftTarget | None = None,
        slo_itl_s: float | None = None,
        session_id: str = "",
    ) -> Outcome:
        """Submits a request now; without a given prompt, it shares no prefix with others."""
        outcome = Outcome(lane, tenant, num_prompt_tokens, num_output_tokens, self.now)
        number = len(self.outcomes)
        self.outcomes.append(outcome)
        to = StreamKey(1, number)
        self._by_stream[to] = outcome
        if prompt is None:
            # The first token is unique, so no two prompts share a first block.
            prompt = array("I", [number, *itertools.repeat(1, num_prompt_tokens - 1)])
        submission = Submission(
            to=to,
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(max_tokens=num_output_tokens),
            lane=lane,
            arrived_at=self.now,
            timeout_s=timeout_s,
            tenant=tenant,
            slo_ttft=TtftTarget(slo_ttft_s) if slo_ttft_s is not None else slo_ttft,
            slo_itl_s=slo_itl_s,
            session_id=session_id,
        )
        self.post(ev.Submitted(submission))
        return outcome

    def poisson(self, rate: float, begin: float, end: float, submit: Callable[[], object]) -> None:
        """Calls `submit` at the times of a Poisson process with `rate` per second."""
        when = begin + self.random.expovariate(rate)
        while when < end:
            self.at(when, lambda: (submit(), None)[1])
            when += self.random.expovariate(rate)

    def post(self, event: ev.Event) -> None:
        """Handles an event of the coordinator now."""
        for effect in self.core.handle(event, self.now):
            self.carry_out(effect)

    def carry_out(self, effect: ev.Effect) -> None:
        """Carries out an effect of the coordinator."""
        if isinstance(effect, ev.SendCommand):
            self._send(effect)
        elif isinstance(effect, ev.SendDeltas):
            for to, encoded in effect.deltas:
                delta = common_pb2.TokenDelta.FromString(encoded)
                self._by_stream[to].token_times += [self.now] * len(delta.token_ids)
        elif isinstance(effect, ev.SendFinished):
            self._by_stream.pop(effect.to).ended_at = self.now
        elif isinstance(effect, ev.SendFailed):
            outcome = self._by_stream.pop(effect.to)
            outcome.error, outcome.ended_at = effect.error, self.now

    # ---- Private methods.

    def _send(self, effect: ev.SendCommand) -> None:
        worker = self._workers.get(effect.worker)
        if worker is not None:
            self.at(self.now + worker.shape.delay_s, lambda: worker.take(effect.command))
