"""Measures the CPU time of one scheduling decision by number of workers and waiting requests.

The last token of a request frees a slot: the request ends, the next request is placed, and its
command is made. The same event with an empty queue measures the end of the request alone; the
difference is the cost of the decision. Only the core runs: no other processes and no messages.
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections import deque
from dataclasses import dataclass, replace

from baton.bench.cost_answers import MODEL
from baton.bench.cost_worker import hello
from baton.coordinator.core.core import Core
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import StreamKey, Submission, WorkerKey
from baton.load import stats
from baton.runtime.config import BatonConfig, LanesConfig
from baton.v1 import cluster_pb2, common_pb2

NUM_TENANTS = 100
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 128
# Largest number of requests per worker. All workers are full of decodes, so other requests wait.
MAX_PREFILLS, MAX_DECODES = 2, 8
WARM_UP = 50


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Durations for one number of workers and waiting requests, in microseconds.

    Attributes:
        p50_us, p99_us: Percentiles of the whole event.
        end_us: Median of the event with an empty queue.
    """

    num_workers: int
    num_queued: int
    p50_us: float
    p99_us: float
    end_us: float

    @property
    def decision_us(self) -> float:
        return self.p50_us - self.end_us

    @property
    def name(self) -> str:
        return f"{self.num_workers:,} workers, {self.num_queued:,} queued"


def measure(num_workers: int, num_queued: int, num_decisions: int) -> Scheduling:
    """Measures decisions in an elastic cell, whose workers all compute prompts and decode."""
    ends_us = _durations_us(_Cell(num_workers, 0), num_decisions)
    waited_us = _durations_us(_Cell(num_workers, num_queued), num_decisions)
    return Scheduling(
        num_workers,
        num_queued,
        stats.percentile(waited_us, 50),
        stats.percentile(waited_us, 99),
        stats.median(ends_us),
    )


def _durations_us(cell: _Cell, num_decisions: int) -> list[float]:
    # As in the coordinator, the garbage collector does not scan old objects again.
    gc.collect()
    gc.freeze()
    durations_us = [cell.decide() * 1e6 for _ in range(WARM_UP + num_decisions)]
    gc.unfreeze()
    return durations_us[WARM_UP:]


class _Cell:
    """A core with a queue of requests, and workers that answer only when the benchmark says so."""

    def __init__(self, num_workers: int, num_queued: int) -> None:
        num_requests = num_queued + num_workers * MAX_DECODES
        lane = {"max_queued": num_requests + 1, "max_queue_s": 1e6}
        self._core = Core(
            replace(
                CoreConfig.of(BatonConfig(served_model_name=MODEL)),
                max_running_requests=num_requests + 1,
                max_prefill_requests=MAX_PREFILLS,
                max_decode_requests=MAX_DECODES,
                lanes=LanesConfig.model_validate({"interactive": lane}),
            )
        )
        self._random = random.Random(f"{num_workers} {num_queued}")
        self._now = 0.0
        # Prompts that are being computed, and whether their worker decodes the output too.
        self._prompts: deque[tuple[WorkerKey, cluster_pb2.RequestSpec, bool]] = deque()
        # Outputs that are being decoded; each has its first token.
        self._decodes: deque[tuple[WorkerKey, cluster_pb2.RequestSpec]] = deque()
        for number in range(num_requests):
            self._handle(self._submitted(number))
        for number in range(num_workers):
            role = common_pb2.ROLE_DECODE if number % 2 else common_pb2.ROLE_PREFILL
            self._handle(ev.WorkerAttached(hello(f"worker-{number}", role)))
        self._answer_prompts()

    @property
    def num_queued(self) -> int:
        return self._core.num_queued(common_pb2.LANE_INTERACTIVE)

    def decide(self) -> float:
        """Returns the CPU seconds of one event; the placed request's prompt is answered after."""
        worker, spec = self._decodes.popleft()
        finished = cluster_pb2.WorkerFinished(reason=common_pb2.FINISH_REASON_LENGTH)
        delta = common_pb2.TokenDelta(offset=1, token_ids=[7])
        event = _step(worker, spec, delta, finished)
        num_waiting, began_at = self.num_queued, time.thread_time()
        effects = self._core.handle(event, self._now)
        duration_s = time.thread_time() - began_at
        assert self.num_queued == max(0, num_waiting - 1), "the next request was not placed"
        self._take(effects)
        self._answer_prompts()
        return duration_s

    def _submitted(self, number: int) -> ev.Submitted:
        return ev.Submitted(
            Submission(
                to=StreamKey(number % 64, number),
                request_id=f"{number:024d}",
                prompt_token_ids=array("I", self._random.choices(range(50_000), k=PROMPT_TOKENS)),
                sampling=common_pb2.SamplingParams(max_tokens=OUTPUT_TOKENS),
                lane=common_pb2.LANE_INTERACTIVE,
                arrived_at=self._now,
                tenant=f"tenant-{self._random.randrange(NUM_TENANTS)}",
            )
        )

    def _answer_prompts(self) -> None:
        while self._prompts:
            worker, spec, goes_on = self._prompts.popleft()
            first = common_pb2.TokenDelta(token_ids=[7])
            finished = None if goes_on else cluster_pb2.WorkerFinished()
            if goes_on:
                self._decodes.append((worker, spec))
            self._handle(_step(worker, spec, first, finished))

    def _handle(self, event: ev.Event) -> None:
        self._now += 1e-6
        self._take(self._core.handle(event, self._now))

    def _take(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.SendCommand):
                command = effect.command
                if isinstance(command, cluster_pb2.PrefillCommand):
                    self._prompts.append((effect.worker, command.spec, False))
                elif isinstance(command, cluster_pb2.DecodeCommand):
                    if command.spec.known_token_ids:
                        self._decodes.append((effect.worker, command.spec))
                    else:
                        self._prompts.append((effect.worker, command.spec, True))


def _step(
    worker: WorkerKey,
    spec: cluster_pb2.RequestSpec,
    delta: common_pb2.TokenDelta,
    finished: cluster_pb2.WorkerFinished | None,
) -> ev.WorkerStep:
    output = cluster_pb2.RequestOutput(
        request_id=spec.request_id, attempt=spec.attempt, delta=delta, finished=finished
    )
    return ev.WorkerStep(worker, cluster_pb2.StepOutputs(outputs=[output]))
