"""Builds the commands of a request for its workers, and sends them."""

from __future__ import annotations

import math
from collections.abc import Callable

from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.requests import Request, WorkerKey
from baton.coordinator.state.workers import WorkerRegistry
from baton.runtime.durations import duration
from baton.v1 import cluster_pb2, common_pb2


def _spec(request: Request) -> cluster_pb2.RequestSpec:
    """Returns the part that all commands of a request share, without its prompt."""
    submission = request.submission
    return cluster_pb2.RequestSpec(
        request_id=request.key,
        sampling=submission.sampling,
        lane=submission.lane,
        priority=_priority(submission.lane),
        traceparent=submission.traceparent,
        tenant=submission.tenant,
        adapter=submission.adapter,
        cache_salt=submission.cache_salt,
        images=submission.images,
        itl_ms=0 if submission.slo_itl_s is None else max(1, round(submission.slo_itl_s * 1e3)),
    )


def _priority(lane: common_pb2.Lane.ValueType) -> int:
    """Returns the engine's priority; when the KV cache is full, it preempts batch requests."""
    # Smaller values go first.
    return 1 if lane == common_pb2.LANE_BATCH else 0


def _add_chat(spec: cluster_pb2.RequestSpec, request: Request) -> None:
    """Adds the images' files, for a worker that may have to compute the prompt."""
    if request.submission.chat is not None:
        spec.chat.CopyFrom(request.submission.chat)


def _only_prompt(wanted: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """Returns the sampling of a prefill for the KV cache alone; its token is dropped."""
    sampling = common_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    if wanted.HasField("prompt_logprobs"):
        sampling.prompt_logprobs = wanted.prompt_logprobs
    return sampling


class Commands:
    """Sends commands to the workers of a request's current attempt.

    Args:
        emit: Takes effects.
    """

    def __init__(
        self,
        config: CoreConfig,
        workers: WorkerRegistry,
        clock: CoreClock,
        emit: Callable[[ev.Effect], None],
    ) -> None:
        self._workers, self._clock, self._emit = workers, clock, emit
        self._commit_timeout = duration(config.handoff_timeout_s)

    def prefill(self, request: Request, worker: WorkerKey) -> None:
        """Tells the prefill worker to compute the prompt, and the first token if it is unknown."""
        command = cluster_pb2.PrefillCommand()
        self._specify(command.spec, request)
        _add_chat(command.spec, request)
        if request.num_known:
            command.spec.sampling.CopyFrom(_only_prompt(request.submission.sampling))
            command.spec.prompt_token_ids.extend(request.known_prompt(request.num_known))
        if request.handoff_id:
            command.handoff.CopyFrom(self._handoff_plan(request))
        if request.fetch is not None:
            command.fetch.CopyFrom(request.fetch)
        self._send(worker, command)

    def decode(self, request: Request) -> None:
        """Tells the decode worker to continue after the known tokens."""
        assert request.decode is not None
        command = cluster_pb2.DecodeCommand()
        self._specify(command.spec, request)
        self._add_known(command.spec, request)
        if request.handoff_id:
            command.handoff.CopyFrom(self._handoff_plan(request))
        if not request.handoff_id or request.hands_over_all:
            # A handoff of this request has lacked the images before, so this one may lack them too.
            _add_chat(command.spec, request)
        if request.fetch is not None and request.prefill is None:
            command.fetch.CopyFrom(request.fetch)
        self._send(request.decode, command)

    def send_prefix(
        self, request: Request, holder: WorkerKey, prefill: WorkerKey, least_tokens: int
    ) -> None:
        """Tells a worker to send the cached beginning of a prompt to its prefill worker.

        Args:
            request: The request, with its fetch.
            holder: The worker that sends.
            prefill: The worker that computes the prompt.
            least_tokens: Smallest number of leading prompt tokens that is worth sending.
        """
        fetch, worker = request.fetch, self._workers.get(prefill)
        assert fetch is not None
        assert worker is not None
        submission = request.submission
        command = cluster_pb2.SendPrefixCommand(
            handoff=cluster_pb2.HandoffPlan(
                handoff_id=fetch.handoff_id,
                target=worker.hello.kv_address,
                num_tokens=fetch.num_tokens,
                skip_tokens=fetch.skip_tokens,
                least_tokens=least_tokens,
            ),
            prompt_token_ids=submission.prompt_token_ids[: fetch.num_tokens],
            adapter=submission.adapter,
            cache_salt=submission.cache_salt,
            images=submission.images,
            priority=_priority(submission.lane),
            traceparent=submission.traceparent,
            timeout=fetch.timeout,
        )
        self._send(holder, command)

    def cancel_prefix(self, holder: WorkerKey, handoff_id: bytes) -> None:
        """Tells the holder of a fetch that its blocks are not needed."""
        if self._workers.get(holder) is not None:
            self._send(holder, cluster_pb2.CancelCommand(handoff_id=handoff_id))

    def cancel(self, request: Request) -> None:
        """Cancels the attempt on both workers; a worker ignores unknown attempts."""
        self.cancel_at(request.prefill, request)
        self.cancel_at(request.decode, request)

    def cancel_at(self, key: WorkerKey | None, request: Request) -> None:
        if key is None or self._workers.get(key) is None:
            return
        command = cluster_pb2.CancelCommand(
            request_id=request.key, attempt=request.attempt_number, handoff_id=request.handoff_id
        )
        self._send(key, command)

    def handoff_failed(self, request: Request) -> None:
        """Tells the decode worker that the handoff will not come."""
        assert request.decode is not None
        self.drop_handoff(request.decode, request, request.handoff_id)

    def drop_handoff(self, receiver: WorkerKey, request: Request, handoff_id: bytes) -> None:
        """Tells the receiver of a handoff that it will not come."""
        if self._workers.get(receiver) is not None:
            command = cluster_pb2.CancelCommand(request_id=request.key, handoff_id=handoff_id)
            self._send(receiver, command)

    # ---- Private methods

    def _send(self, worker: WorkerKey, command: ev.Command) -> None:
        self._emit(ev.SendCommand(worker, command))

    def _specify(
        self,
        spec: cluster_pb2.RequestSpec,
        request: Request,
    ) -> None:
        now = self._clock.now
        if request.spec is None:
            request.spec = _spec(request)
            # protobuf reads a list faster than an array.
            request.spec.prompt_token_ids.extend(list(request.submission.prompt_token_ids))
        spec.CopyFrom(request.spec)
        spec.attempt, spec.handle = request.attempt_number, request.handle
        # Duration.FromMicroseconds does the same at several times the cost.
        seconds, micros = divmod(max(1, round((request.deadline - now) * 1e6)), 10**6)
        spec.timeout.seconds, spec.timeout.nanos = seconds, micros * 1000
        if (due_at := request.first_token_due_at) < math.inf:
            spec.first_token_due_us = round((due_at - now) * 1e6)

    def _handoff_plan(self, request: Request) -> cluster_pb2.HandoffPlan:
        decoder = self._workers.get(request.decode)
        return cluster_pb2.HandoffPlan(
            handoff_id=request.handoff_id,
            target=decoder.hello.kv_address if decoder is not None else "",
            num_tokens=request.num_prompt_tokens + len(request.known_prompt(request.num_known)),
            skip_tokens=request.skip_tokens,
            commit_timeout=self._commit_timeout,
        )

    @staticmethod
    def _add_known(spec: cluster_pb2.RequestSpec, request: Request) -> None:
        spec.known_token_ids.extend(request.token_ids)
        spec.known_text_chars = request.text_chars
