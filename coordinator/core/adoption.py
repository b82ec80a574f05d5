"""Adoption: a restarted coordinator takes over the outputs that workers are still computing.

Workers continue to decode while there is no coordinator, and report their outputs to the next one.
Clients resume by themselves with the tokens that they have. When a worker and a client of the same
request have both come back, the client gets the tokens that it lacks and the worker continues.

A request whose worker does not come back soon is computed again. A worker that comes back later
still gets the request, as long as no other worker decodes it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.outputs import Outputs
from baton.coordinator.core.parts import Parts
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import (
    Request,
    RequestKey,
    RequestState,
    Submission,
    WorkerKey,
)
from baton.coordinator.state.timers import CoreTimer
from baton.coordinator.state.workers import Worker
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2

# How long resumed requests wait for their worker after the first worker has come back, in seconds.
# Workers try to connect at least three times a second, so nearly all have come back by then.
_RETURN_S = 0.25
# How long resumed requests wait for their worker, after the first worker has come back, if their
# fleet has no worker that could continue them, in seconds.
_LATE_S = 2.0
# How long a worker continues an output whose client has not come back, in seconds.
_UNCLAIMED_S = 10.0
# Number of requests whose cancelled attempt is remembered.
_MAX_CANCELLED = 4096


class _Phase(Enum):
    """How far the return of an earlier coordinator's workers has come.

    Attributes:
        NO_WORKER: No worker has attached yet.
        RETURNING: Resumed requests wait for the worker that runs them.
        LATE: Resumed requests wait only if no other worker can continue them.
        SETTLED: No request waits for a worker of an earlier coordinator.
    """

    NO_WORKER = auto()
    RETURNING = auto()
    LATE = auto()
    SETTLED = auto()


@dataclass(slots=True)
class _Orphan:
    """An attempt that a worker runs for an earlier coordinator, without a client so far.

    Attributes:
        worker: The worker that runs it.
        fleet: The worker's fleet.
        attempt: Number of the attempt, which the earlier coordinator gave it.
        tenant: Tenant that is charged for the request.
        digest: Digest of prompt, sampling and adapter; identifies the request of a client.
        num_prompt_tokens: Number of prompt tokens; 0 if the worker does not report it.
        token_ids: Output so far.
        num_text_chars: Number of code points of the whole text.
        last_text: The last part of the text.
        finished: How the output ended; None: it has not ended.
    """

    worker: WorkerKey
    fleet: Fleet
    attempt: int
    tenant: str
    digest: int
    num_prompt_tokens: int
    token_ids: array[int]
    num_text_chars: int
    last_text: str
    finished: cluster_pb2.WorkerFinished | None

    @classmethod
    def of(cls, worker: Worker, running: cluster_pb2.RunningRequest) -> _Orphan:
        return cls(
            worker.key,
            worker.fleet,
            running.attempt,
            running.tenant,
            running.digest,
            running.num_prompt_tokens,
            array("I", running.token_ids),
            running.num_text_chars,
            running.last_text,
            running.finished if running.HasField("finished") else None,
        )

    @property
    def num_kv_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.token_ids)

    def take(self, output: cluster_pb2.RequestOutput) -> None:
        """Adds a new output of the worker."""
        self.token_ids.extend(output.delta.token_ids)
        self.last_text += output.delta.text
        self.num_text_chars += len(output.delta.text)
        if output.HasField("finished"):
            self.finished = output.finished

    def rest(
        self, submission: Submission, token_ids: Sequence[int], num_text_chars: int
    ) -> common_pb2.TokenDelta | None:
        """Returns the part of this output that a client lacks.

        Args:
            submission: The client's request.
            token_ids: Tokens that the client has.
            num_text_chars: Number of code points that the client has.

        Returns:
            None if the output belongs to another request, or if the client's tokens are not its
            first tokens.
        """
        sampling, num_known = submission.sampling, len(token_ids)
        num_chars = self.num_text_chars - num_text_chars
        if (
            self.tenant != submission.tenant
            or self.digest != submission.digest
            # Logprobs of earlier tokens are not kept.
            or sampling.HasField("logprobs")
            or sampling.HasField("prompt_logprobs")
            or self.token_ids[:num_known] != array("I", token_ids)
            or not 0 <= num_chars <= len(self.last_text)
        ):
            return None
        return common_pb2.TokenDelta(
            offset=num_known,
            token_ids=self.token_ids[num_known:],
            text=self.last_text[len(self.last_text) - num_chars :],
        )


class Adoption:
    """Owns the orphans and connects them with the requests of clients that come back.

    An orphan is an attempt that a worker runs for an earlier coordinator and that no client has
    resumed yet. An attempt is adopted if it decodes and the client's tokens are its first tokens.
    If two workers report the same request, the newer attempt counts. A worker ends all attempts
    that its welcome does not list, so that no two workers feed one stream.
    """

    def __init__(self, parts: Parts, attempts: Attempts, outputs: Outputs) -> None:
        self._clock = parts.clock
        self._requests, self._workers, self._placers = parts.requests, parts.workers, parts.placers
        self._timers, self._effects, self._room_freed = (
            parts.timers,
            parts.effects,
            parts.room_freed,
        )
        self._attempts, self._outputs = attempts, outputs
        self._orphans: dict[RequestKey, _Orphan] = {}
        # Latest cancelled attempt by request. A worker that lost its stream before the welcome
        # reports the attempt again in its next Hello, and reads the cancel after that welcome.
        self._cancelled: OrderedDict[RequestKey, int] = OrderedDict()
        self._phase, self._has_returned = _Phase.NO_WORKER, False

    @property
    def num_timers(self) -> int:
        """How many timers are set: one per orphan, and CoreTimer.ADOPTION."""
        return len(self._orphans) + (self._phase in (_Phase.RETURNING, _Phase.LATE))

    # ---- Workers

    def attached(
        self,
        worker: Worker,
        running: Sequence[cluster_pb2.RunningRequest],
        *,
        returns: bool,
    ) -> list[cluster_pb2.AdoptedRequest]:
        """Handles the running attempts of a worker that attaches.

        Args:
            worker: The attached worker.
            running: Attempts in its Hello.
            returns: Whether the worker served another coordinator before.

        Returns:
            The attempts that the worker continues.
        """
        if self._phase is _Phase.NO_WORKER or (returns and not self._has_returned):
            # A new worker may attach before the first worker of the earlier coordinator.
            self._phase = _Phase.RETURNING if returns else _Phase.LATE
            self._timers.set(
                CoreTimer.ADOPTION, self._clock.now + (_RETURN_S if returns else _LATE_S)
            )
        self._has_returned |= returns
        if not returns:
            return []
        return [
            cluster_pb2.AdoptedRequest(request_id=one.request_id, attempt=one.attempt)
            for one in running
            if one.role == common_pb2.ROLE_DECODE
            and one.decoding
            and self._keep(RequestKey(one.request_id), _Orphan.of(worker, one))
        ]

    def apply_step(self, worker: WorkerKey, step: cluster_pb2.StepOutputs) -> None:
        """Handles a worker's outputs of orphans."""
        if not self._orphans:
            return
        for output in step.outputs:
            key = RequestKey(output.request_id)
            orphan = self._orphans.get(key)
            if orphan is None or (orphan.worker, orphan.attempt) != (worker, output.attempt):
                continue
            if output.HasField("failed"):
                self._forget(key)
                continue
            orphan.take(output)
            if orphan.finished is not None:
                self._placers.release_held(key, orphan.fleet, orphan.worker)
                self._room_freed()
            else:
                self._placers.grow_held(key, orphan.fleet, orphan.worker, orphan.num_kv_tokens)

    def lost(self, worker: WorkerKey) -> None:
        """Drops the orphans of a worker that is removed."""
        for key in [one for one, orphan in self._orphans.items() if orphan.worker == worker]:
            self._forget(key)

    # ---- Clients

    def may_find(self, key: RequestKey) -> bool:
        """Returns whether a worker runs a request of this key, or may still come back with it."""
        return self._phase is not _Phase.SETTLED or key in self._orphans

    def admitted(self, request: Request) -> None:
        """Gives a newly queued request to the worker that already runs it, if there is one."""
        # Workers may still report earlier attempts.
        cancelled = self._cancelled.get(request.key, 0)
        request.attempts_before = max(request.attempts_before, cancelled)
        orphan = self._pop(request.key)
        if orphan is not None and not self._join(request, orphan):
            self._cancel(request.key, orphan)

    def may_return(self, request: Request) -> bool:
        """Returns whether a request should wait because its worker will probably come back soon."""
        returning = self._phase is _Phase.RETURNING
        return returning and request.attempt == 0 and len(request.token_ids) > 0

    def advance(self) -> None:
        """CoreTimer.ADOPTION is due: fewer resumed requests wait for a worker from now on."""
        if self._phase is _Phase.RETURNING:
            self._phase = _Phase.LATE
            self._timers.set(CoreTimer.ADOPTION, self._clock.now + _LATE_S - _RETURN_S)
        else:
            self._phase = _Phase.SETTLED
        self._room_freed()

    def expire(self, key: RequestKey) -> None:
        """Cancels an orphan whose client has not come back in time."""
        orphan = self._pop(key)
        assert orphan is not None
        self._cancel(key, orphan)

    # ---- Private methods

    def _keep(self, key: RequestKey, orphan: _Orphan) -> bool:
        """Decides whether a worker continues an attempt; if so, keeps it as orphan or adopts it."""
        request = self._requests.get(key)
        if request is not None and self._may_take_back(request, orphan):
            return self._join(request, orphan)
        if request is not None:
            # The worker got no welcome after its last Hello and sends the same Hello again.
            served = (request.decode, request.attempt_number) == (orphan.worker, orphan.attempt)
            return served and self._deliver(request, orphan)
        other = self._orphans.get(key)
        newer = other is not None and other.attempt > orphan.attempt
        is_cancelled = orphan.attempt <= self._cancelled.get(key, 0)
        if other is not None and (other.worker, other.attempt) == (orphan.worker, orphan.attempt):
            # The cancelled attempt of this number belongs to another worker.
            is_cancelled = False
        if newer or is_cancelled or self._requests.ended(key) is not None:
            return False
        if other is not None and other.worker != orphan.worker:
            self._cancel(key, other)
        self._pop(key)
        self._orphans[key] = orphan
        self._timers.set(key, self._clock.now + _UNCLAIMED_S)
        worker = self._workers.get(orphan.worker)
        if worker is not None and orphan.finished is None:
            self._placers.hold(key, worker, orphan.num_kv_tokens)
        return True

    @staticmethod
    def _may_take_back(request: Request, orphan: _Orphan) -> bool:
        """Returns whether a request may be given back to the worker that runs it.

        A request may be given back while it waits, and while its first new attempt has not begun to
        decode; later attempts are numbered after the worker's own. A worker that takes part in the
        new attempt does not get the request back, because the ends of the two attempts could be
        confused. A cancelled attempt is not taken back: the worker is about to read the cancel.
        """
        if request.state is RequestState.QUEUED:
            return orphan.attempt > request.attempts_before
        return (
            request.state
            in (RequestState.PREFILLING, RequestState.HANDING_OFF, RequestState.RECOVERING)
            and request.attempt_number == 1
            and orphan.worker not in (request.prefill, request.decode, *request.avoid)
        )

    def _join(self, request: Request, orphan: _Orphan) -> bool:
        """Gives a request to the worker that runs it; returns whether that was possible."""
        worker = self._workers.get(orphan.worker)
        # The request may have come before the first worker of the fleet.
        submission = request.submission.cut_to(orphan.fleet.workers.max_model_len)
        rest = orphan.rest(submission, request.token_ids, request.text_chars)
        if worker is None or not worker.connected or worker.unresponsive or rest is None:
            if not request.attempt:
                request.attempts_before = max(request.attempts_before, orphan.attempt)
            return False
        self._attempts.adopt(request, worker, orphan.attempt)
        return self._deliver(request, orphan)

    def _deliver(self, request: Request, orphan: _Orphan) -> bool:
        """Sends the tokens that the client lacks; returns whether the worker continues."""
        rest = orphan.rest(request.submission, request.token_ids, request.text_chars)
        if rest is None:
            error = errors.Internal(f"worker {orphan.worker[0]} came back with another output")
            self._attempts.recover(request, orphan.worker, error)
            return False
        output = cluster_pb2.RequestOutput(
            request_id=request.key, attempt=orphan.attempt, delta=rest, finished=orphan.finished
        )
        self._outputs.apply_step(orphan.worker, cluster_pb2.StepOutputs(outputs=[output]))
        return request.state is RequestState.DECODING

    def _pop(self, key: RequestKey) -> _Orphan | None:
        """Removes an orphan and releases its KV room; returns it, or None."""
        orphan = self._orphans.pop(key, None)
        if orphan is not None:
            self._placers.release_held(key, orphan.fleet, orphan.worker)
            self._room_freed()
        return orphan

    def _forget(self, key: RequestKey) -> None:
        self._pop(key)
        self._timers.cancel(key)

    def _cancel(self, key: RequestKey, orphan: _Orphan) -> None:
        self._cancelled[key] = max(orphan.attempt, self._cancelled.pop(key, 0))
        if len(self._cancelled) > _MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        command = cluster_pb2.CancelCommand(request_id=key, attempt=orphan.attempt)
        self._effects.add(ev.SendCommand(orphan.worker, command))
