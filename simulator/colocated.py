"""Colocated serving, the usual alternative to disaggregation: plain servers behind a balancer.

Each worker computes prompts and decodes in the same steps (chunked prefill), first come, first
served, as vLLM does by default. The balancer sends a request to the worker with the fewest running
and waiting requests. The workers and their step times are those of Baton's simulations, and a
message takes as long as between a coordinator and a worker.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.load.duration_histogram import DurationHistogram
from baton.load.traces import Arrival
from baton.simulator.parts import Shape
from baton.simulator.record import Record
from baton.simulator.virtual_time import START_S, VirtualTime
from baton.simulator.worker import SimulatedWorker
from baton.v1 import cluster_pb2, common_pb2

# Seconds between two samples of load and latency for `Record.moments`.
_SAMPLED_EVERY_S = 5.0


class Balancer:
    """Chooses the worker with the fewest unfinished requests; equal workers take turns."""

    def __init__(self, num_workers: int) -> None:
        self.num_unfinished = [0] * num_workers
        self._turn = 0

    def send(self) -> int:
        """Returns the index of the worker that gets the next request, and counts the request."""
        number = len(self.num_unfinished)
        in_turn = (index % number for index in range(self._turn, self._turn + number))
        chosen = min(in_turn, key=self.num_unfinished.__getitem__)
        self.num_unfinished[chosen] += 1
        self._turn = chosen + 1
        return chosen

    def finished(self, index: int) -> None:
        self.num_unfinished[index] -= 1


class ColocatedCell(VirtualTime):
    """Simulated plain servers, their balancer and clients, under a virtual clock.

    Args:
        shape: Size and speed of a worker. `max_num_batched_tokens` limits the prompt tokens and
            decodes of a step together.
        num_workers: Number of workers; it stays constant.
        gpus: GPUs per worker.

    Attributes:
        record: Request times as seen by clients, and the cost of the workers, which count as
            decode workers.
        gaps: Gaps between tokens.
        prompt_tokens: Tokens of the prompts that got a first token, by source: "device", "host"
            (memory) and "computed".
        workers: The workers.
    """

    def __init__(self, shape: Shape, num_workers: int, gpus: int = 1) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; must be at least 1")
        super().__init__()
        self.gaps = DurationHistogram()
        self.prompt_tokens: Counter[str] = Counter()
        self.record = Record(START_S, dict.fromkeys(Pool, gpus))
        self._delay_s = shape.delay_s
        self._balancer = Balancer(num_workers)
        self.workers = [
            SimulatedWorker(self, (f"colocated-{number}", 1), common_pb2.ROLE_DECODE, shape)
            for number in range(num_workers)
        ]
        self._index = {worker.key: index for index, worker in enumerate(self.workers)}
        for worker in self.workers:
            self.record.worker_began(worker.key[0], Pool.DECODE, self.now)

    def run(self, arrivals: Iterable[Arrival], lasts_s: float) -> Record:
        """Simulates a trace until all requests have ended, for one hour after `lasts_s` at most.

        Args:
            arrivals: Requests in order of time.
            lasts_s: GPU costs are recorded for this many seconds.
        """
        self.next_arrival(iter(arrivals), 0)
        self._sample(START_S + lasts_s)
        self._run(START_S + lasts_s)
        self.record.close(self.now)
        self._run(self.now + 3600.0)
        return self.record

    def _run(self, until: float) -> None:
        while self.scheduled and self.scheduled[0][0] <= until:
            when, _, action, arguments = heapq.heappop(self.scheduled)
            self.now = when
            action(*arguments)
        self.now = until

    def _sample(self, until: float) -> None:
        sizes = {Pool.PREFILL: 0, Pool.DECODE: len(self.workers)}
        self.record.sample(self.now, self.gaps.percentile_since_last(95), sizes)
        if self.now + _SAMPLED_EVERY_S <= until:
            self.at(self.now + _SAMPLED_EVERY_S, self._sample, until)

    # ---- Host of the workers.

    def send(self, worker: SimulatedWorker, event: ev.Event) -> None:
        """Delivers the tokens of a worker to the clients after the message delay."""
        if isinstance(event, ev.WorkerStep):
            self.at(self.now + self._delay_s, self._received, worker.key, event.step)

    def worker_at(self, address: str) -> SimulatedWorker | None:
        raise AssertionError(f"plain servers send nothing to each other, but one to {address}")

    def num_output_tokens(self, spec: cluster_pb2.RequestSpec) -> int:
        """Returns the length of a request's output, its max_tokens; the balancer ignores it."""
        return spec.sampling.max_tokens

    def ended(self, worker: SimulatedWorker) -> None:
        raise AssertionError(f"{worker.key} was never asked to drain")

    # ---- Clients.

    def arrive(self, one: Arrival, arrivals: Iterator[Arrival], number: int) -> None:
        self.record.arrived(number, self.now, one.num_prompt_tokens, one.num_output_tokens)
        command = cluster_pb2.DecodeCommand(
            spec=cluster_pb2.RequestSpec(
                request_id=str(number),
                attempt=1,
                prompt_token_ids=one.prompt(number),
                sampling=common_pb2.SamplingParams(max_tokens=one.num_output_tokens),
            )
        )
        worker = self.workers[self._balancer.send()]
        self.at(self.now + self._delay_s, worker.take, command)
        self.next_arrival(arrivals, number + 1)

    def _received(self, worker: tuple[str, int], step: cluster_pb2.StepOutputs) -> None:
        for output in step.outputs:
            number = int(output.request_id)
            if not output.delta.offset:
                self.record.first_token(number, self.now)
            if output.HasField("finished"):
                self._balancer.finished(self._index[worker])
                self.record.finished(number, self.now)
