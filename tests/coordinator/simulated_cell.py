"""The real core under a virtual clock, with simulated workers without prefix caches."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable

from baton.coordinator.core.core import Core
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import StreamKey, Submission
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


class Cell:
    """Two prefill and two decode workers.

    Attributes:
        dispatched: request IDs in order of dispatch.
        served: (time, tenant, lane, tokens) in order of service; output tokens count twice.
        waits: (lane, seconds from submission to dispatch) in order of dispatch.
    """

    prefill_token_s, step_s = 0.0001, 0.02

    def __init__(self, say_hello, **changes) -> None:
        self.now = 1000.0
        fields = {
            "model_name": "demo",
            "max_running_requests": 10**6,
            "max_request_s": 1e6,
            **dict.fromkeys(("worker_timeout_s", "worker_silent_s", "worker_stuck_s"), 1e6),
            "max_recovery_s": 30.0,
            "max_lost_attempts": 4,
            "handoff_timeout_s": 10.0,
            "max_prefill_requests": 1,
            "max_decode_requests": 8,
            "local_prefill": False,
            **changes,
        }
        ids = itertools.count(1)
        self.core = Core(CoreConfig(**fields), lambda count: next(ids).to_bytes(count))
        self.dispatched: list[str] = []
        self.served: list[tuple[float, str, int, int]] = []
        self.waits: list[tuple[int, float]] = []
        self._submissions: dict[str, tuple[Submission, int]] = {}
        self._numbers = itertools.count(1)
        self._agenda: list = []
        self._order = itertools.count()
        self._prefill_free_at: dict[str, float] = defaultdict(float)
        self._decoding: dict[str, dict[str, int]] = defaultdict(dict)
        # Current attempt number by request.
        self._attempts: dict[str, int] = {}
        self._prompts: dict[int, list[int]] = {}
        model = common_pb2.ModelDescription(
            name="demo", revision="r1", max_model_len=8192, vocab_size=512
        )
        for name, role in (("p1", PREFILL), ("p2", PREFILL), ("d1", DECODE), ("d2", DECODE)):
            self._handle(ev.WorkerAttached(say_hello(name, role, model=model)))

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), action))

    def run(self, until: float) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = until
        self.core.check_integrity()

    def submit(
        self,
        tenant: str = "default",
        lane: int = common_pb2.LANE_INTERACTIVE,
        num_prompt: int = 64,
        num_output: int = 32,
    ) -> str:
        number = next(self._numbers)
        submission = Submission(
            to=StreamKey(1, number),
            request_id=f"r{number}",
            prompt_token_ids=self._prompts.setdefault(num_prompt, [0] * num_prompt),
            sampling=common_pb2.SamplingParams(max_tokens=num_output),
            lane=lane,
            arrived_at=self.now,
            tenant=tenant,
        )
        self._submissions[submission.key] = submission, num_output
        self._handle(ev.Submitted(submission))
        return submission.key

    def every(self, period_s: float, begin: float, end: float, **fields) -> None:
        """Submits requests periodically."""

        def again() -> None:
            self.submit(**fields)
            if self.now + period_s < end:
                self.at(self.now + period_s, again)

        self.at(begin, again)

    def tokens(self, begin: float, end: float, key: int = 1) -> dict:
        """Tokens served in a time span, by tenant (key 1) or lane (key 2)."""
        sums: dict = defaultdict(int)
        for one in self.served:
            if begin <= one[0] < end:
                sums[one[key]] += one[3]
        return sums

    def _handle(self, event) -> None:
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, ev.SendCommand):
                self._command(effect.worker[0], effect.command)

    def _command(self, worker: str, command) -> None:
        if isinstance(command, cluster_pb2.PrefillCommand):
            spec = command.spec
            request_id = spec.request_id
            self._begin(spec)
            num_prompt = len(spec.prompt_token_ids)
            end = max(self.now, self._prefill_free_at[worker]) + num_prompt * self.prefill_token_s
            self._prefill_free_at[worker] = end
            self.at(end, lambda: self._prefilled(worker, request_id, spec.attempt))
        elif isinstance(command, cluster_pb2.DecodeCommand):
            spec, running = command.spec, self._decoding[worker]
            if not running:
                self.at(self.now + self.step_s, lambda: self._step(worker))
            running[spec.request_id] = len(spec.known_token_ids)
            if spec.request_id not in self._attempts:
                # The worker computes the prompt too, in no time.
                self._begin(spec)
                submission, _ = self._submissions[spec.request_id]
                self._serve(submission, len(submission.prompt_token_ids))
        elif isinstance(command, cluster_pb2.CancelCommand):
            if self._attempts.get(command.request_id) == command.attempt:
                del self._attempts[command.request_id]
            if worker in self._decoding:
                self._decoding[worker].pop(command.request_id, None)

    def _begin(self, spec: cluster_pb2.RequestSpec) -> None:
        submission, _ = self._submissions[spec.request_id]
        if spec.attempt == 1:
            self.dispatched.append(spec.request_id)
            self.waits.append((submission.lane, self.now - submission.arrived_at))
        self._attempts[spec.request_id] = spec.attempt

    def _prefilled(self, worker: str, request_id: str, attempt: int) -> None:
        if self._attempts.get(request_id) != attempt:
            return
        submission, _ = self._submissions[request_id]
        output = cluster_pb2.RequestOutput(request_id=request_id, attempt=attempt)
        output.finished.SetInParent()
        if attempt == 1:
            # Recomputed tokens of a later attempt do not count as service.
            self._serve(submission, len(submission.prompt_token_ids) + 2)
            output.delta.token_ids.append(0)
        step = cluster_pb2.StepOutputs(outputs=[output])
        self._handle(ev.WorkerStep((worker, 1), step))

    def _step(self, worker: str) -> None:
        running = self._decoding[worker]
        step = cluster_pb2.StepOutputs()
        for request_id, offset in tuple(running.items()):
            submission, num_output = self._submissions[request_id]
            self._serve(submission, 2)
            attempt = self._attempts[request_id]
            output = step.outputs.add(request_id=request_id, attempt=attempt)
            output.delta.offset = offset
            output.delta.token_ids.append(0)
            running[request_id] = offset + 1
            if offset + 1 == num_output:
                output.finished.reason = common_pb2.FINISH_REASON_LENGTH
                del running[request_id]
        if running:
            self.at(self.now + self.step_s, lambda: self._step(worker))
        self._handle(ev.WorkerStep((worker, 1), step))

    def _serve(self, submission: Submission, num_tokens: int) -> None:
        self.served.append((self.now, submission.tenant, submission.lane, num_tokens))
