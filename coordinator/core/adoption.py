"""What a restarted coordinator finds running in its workers, and who comes back for it.

Workers go on with what they decode while there is no coordinator, and report it to the next one.
Clients come back by themselves with the tokens they have. Where both meet, nothing is computed
again: the client is sent what it lacks, and the worker goes on.

A request whose worker is not back soon is begun anew. A worker that comes later still gets it back
as long as no other one decodes it: waiting and computing go on side by side.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.coordinator.core.outputs import apply_step
from baton.coordinator.core.request_lifecycle import RequestLifecycle
from baton.coordinator.routing.placers import Placers
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import (
    Request,
    RequestKey,
    RequestState,
    Submission,
    WorkerKey,
)
from baton.coordinator.state.timers import CoreTimer, Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.runtime import errors
from baton.runtime.request_digest import request_digest
from baton.v1 import cluster_pb2, common_pb2

# How long requests wait for their worker from when the first worker is back. Nearly all are back by
# then: they look for a coordinator three times a second and more.
_RETURN_S = 0.25
# How long after the first worker requests wait for a worker of a fleet that has none.
_LATE_S = 2.0
# How long a worker goes on with an output that no client has come back for.
_UNCLAIMED_S = 10.0
# So many requests are remembered with the attempt that a worker was told to end.
_MAX_OVER = 4096


class _Phase(Enum):
    """How long this coordinator has had workers.

    Attributes:
        ALONE: it has had none.
        RETURNING: resumed requests wait for the worker that goes on with them.
        LATE: resumed requests wait only where no other worker may go on with them.
        SETTLED: no request waits for a worker from before.
    """

    ALONE = auto()
    RETURNING = auto()
    LATE = auto()
    SETTLED = auto()


@dataclass(slots=True)
class _Orphan:
    """An attempt that a worker goes on with, and whose client has not come back.

    Attributes:
        worker: the worker.
        fleet: The worker's fleet.
        attempt: the attempt's number, which another coordinator gave it.
        tenant: whom it is charged to.
        digest: of prompt, sampling and adapter: tells whether a client's request is this one.
        num_prompt_tokens: 0 where the worker does not say.
        token_ids: its output so far.
        num_text_chars: how many characters its whole text has.
        last_text: the end of its text.
        finished: how it ended; None: it has not.
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
        """Adds what the worker has produced meanwhile."""
        self.token_ids.extend(output.delta.token_ids)
        self.last_text += output.delta.text
        self.num_text_chars += len(output.delta.text)
        if output.HasField("finished"):
            self.finished = output.finished

    def rest(
        self, submission: Submission, token_ids: Sequence[int], num_text_chars: int
    ) -> common_pb2.TokenDelta | None:
        """What a client lacks of this output.

        Args:
            submission: the client's request.
            token_ids: the tokens that the client has.
            num_text_chars: how many characters the client has.

        Returns:
            None when this is the output of another request, or the client's tokens are not its
            first ones.
        """
        sampling, num_known = submission.sampling, len(token_ids)
        num_chars = self.num_text_chars - num_text_chars
        if (
            self.tenant != submission.tenant
            or self.digest
            != request_digest(submission.prompt_token_ids, sampling, submission.adapter)
            # Logprobs went by and are not kept.
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
    """Owns the attempts that no client has come back for, and joins them with those that do.

    An attempt is adopted when it decodes, and the client's tokens are the first of its own. Where
    two workers report the same request the newer attempt counts. A worker ends what is not adopted
    when it hears the welcome, so that nobody else feeds the stream.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        workers: WorkerRegistry,
        placers: Placers,
        timers: Timers,
    ) -> None:
        self._lifecycle, self._workers, self._placers, self._timers = (
            lifecycle,
            workers,
            placers,
            timers,
        )
        self._orphans: dict[RequestKey, _Orphan] = {}
        # The latest attempt that a worker was told to end. One that has not heard its welcome says
        # Hello again with it, and reads behind the next welcome that it is to end it.
        self._over: OrderedDict[RequestKey, int] = OrderedDict()
        self._phase, self._has_returned = _Phase.ALONE, False

    @property
    def num_timers(self) -> int:
        """How many timers are set: one per orphan, and CoreTimer.ADOPTION."""
        return len(self._orphans) + (self._phase in (_Phase.RETURNING, _Phase.LATE))

    # ---- Workers.

    def attached(
        self,
        worker: Worker,
        running: Sequence[cluster_pb2.RunningRequest],
        now: float,
        *,
        returns: bool,
    ) -> list[cluster_pb2.AdoptedRequest]:
        """A worker has attached; returns what it goes on with.

        Args:
            worker: attached.
            running: by its Hello.
            now: by the core's clock.
            returns: it comes from another coordinator.
        """
        if self._phase is _Phase.ALONE or (returns and not self._has_returned):
            # A new worker may be here before the first of those that another coordinator had.
            self._phase = _Phase.RETURNING if returns else _Phase.LATE
            self._timers.set(CoreTimer.ADOPTION, now + (_RETURN_S if returns else _LATE_S))
        self._has_returned |= returns
        if not returns:
            return []
        return [
            cluster_pb2.AdoptedRequest(request_id=one.request_id, attempt=one.attempt)
            for one in running
            if one.role == common_pb2.ROLE_DECODE
            and one.decoding
            and self._keep(RequestKey(one.request_id), _Orphan.of(worker, one), now)
        ]

    def apply_step(self, worker: WorkerKey, step: cluster_pb2.StepOutputs) -> None:
        """Takes a worker's outputs of requests that no client has come back for."""
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
                self._placers.let_go(key, orphan.fleet, orphan.worker)
                self._lifecycle.room_freed()
            else:
                self._placers.held_grows(key, orphan.fleet, orphan.worker, orphan.num_kv_tokens)

    def lost(self, worker: WorkerKey) -> None:
        """A worker is gone, and all that it ran with it."""
        for key in [one for one, orphan in self._orphans.items() if orphan.worker == worker]:
            self._forget(key)

    # ---- Clients.

    def may_find(self, key: RequestKey) -> bool:
        """Whether a worker goes on with a request of this key, or may still come back with it."""
        return self._phase is not _Phase.SETTLED or key in self._orphans

    def admitted(self, request: Request, now: float) -> None:
        """A request has joined its lane; it leaves the lane again if a worker goes on with it."""
        # Workers may still report of earlier attempts.
        over = self._over.get(request.key, 0)
        request.attempts_before = max(request.attempts_before, over)
        orphan = self._pop(request.key)
        if orphan is not None and not self._join(request, orphan, now):
            self._cancel(request.key, orphan)

    def may_return(self, request: Request) -> bool:
        """Whether the request should wait: its worker is likely to come back with it soon."""
        returning = self._phase is _Phase.RETURNING
        return returning and request.attempt == 0 and len(request.token_ids) > 0

    def advance(self, now: float) -> None:
        """CoreTimer.ADOPTION is due: fewer resumed requests wait for a worker from now on."""
        if self._phase is _Phase.RETURNING:
            self._phase = _Phase.LATE
            self._timers.set(CoreTimer.ADOPTION, now + _LATE_S - _RETURN_S)
        else:
            self._phase = _Phase.SETTLED
        self._lifecycle.room_freed()

    def expire(self, key: RequestKey) -> None:
        """No client has come back for this attempt in time: its worker is told to end it."""
        orphan = self._pop(key)
        assert orphan is not None
        self._cancel(key, orphan)

    # ---- Inside.

    def _keep(self, key: RequestKey, orphan: _Orphan, now: float) -> bool:
        """Decides whether the worker goes on with the attempt; if so, remembers or adopts it."""
        request = self._lifecycle.requests.get(key)
        if request is not None and self._may_take_back(request, orphan):
            return self._join(request, orphan, now)
        if request is not None:
            # It heard no welcome after its last Hello, and says all that again.
            served = (request.decode, request.attempt_number) == (orphan.worker, orphan.attempt)
            return served and self._deliver(request, orphan, now)
        other = self._orphans.get(key)
        newer = other is not None and other.attempt > orphan.attempt
        is_over = orphan.attempt <= self._over.get(key, 0)
        if other is not None and (other.worker, other.attempt) == (orphan.worker, orphan.attempt):
            # What is over is another worker's, whose coordinator counted as this one's did.
            is_over = False
        if newer or is_over or key in self._lifecycle.requests.ended:
            return False
        if other is not None and other.worker != orphan.worker:
            self._cancel(key, other)
        self._pop(key)
        self._orphans[key] = orphan
        self._timers.set(key, now + _UNCLAIMED_S)
        worker = self._workers.get(orphan.worker)
        if worker is not None and orphan.finished is None:
            self._placers.hold(key, worker, orphan.num_kv_tokens)
        return True

    @staticmethod
    def _may_take_back(request: Request, orphan: _Orphan) -> bool:
        """Whether a request may be given back to a worker that goes on with it.

        It may while it waits, and while it was begun anew and nobody decodes it yet. That holds for
        its first attempt here only: later ones are numbered after the worker's own. It may not go
        back to a worker that the new attempt uses, which would take the end of the one for the end
        of the other. Nor may an attempt that counts as over: its worker may be about to read that
        it is to end it.
        """
        if request.state is RequestState.QUEUED:
            return orphan.attempt > request.attempts_before
        return (
            request.state
            in (RequestState.PREFILLING, RequestState.HANDING_OFF, RequestState.RECOVERING)
            and request.attempt_number == 1
            and orphan.worker not in (request.prefill, request.decode, *request.avoid)
        )

    def _join(self, request: Request, orphan: _Orphan, now: float) -> bool:
        """Gives a request to the worker that goes on with it; returns whether that was possible."""
        worker = self._workers.get(orphan.worker)
        rest = orphan.rest(request.submission, request.token_ids, request.text_chars)
        if worker is None or not worker.connected or worker.unresponsive or rest is None:
            if not request.attempt:
                request.attempts_before = max(request.attempts_before, orphan.attempt)
            return False
        self._lifecycle.adopt(request, worker, orphan.attempt, now)
        return self._deliver(request, orphan, now)

    def _deliver(self, request: Request, orphan: _Orphan, now: float) -> bool:
        """Sends what the client lacks; returns whether the worker goes on with the request."""
        rest = orphan.rest(request.submission, request.token_ids, request.text_chars)
        if rest is None:
            error = errors.Internal(f"worker {orphan.worker[0]} came back with another output")
            self._lifecycle.recover(request, orphan.worker, error, now)
            return False
        output = cluster_pb2.RequestOutput(
            request_id=request.key, attempt=orphan.attempt, delta=rest, finished=orphan.finished
        )
        apply_step(self._lifecycle, orphan.worker, cluster_pb2.StepOutputs(outputs=[output]), now)
        return request.state is RequestState.DECODING

    def _pop(self, key: RequestKey) -> _Orphan | None:
        """Takes an attempt out, and gives back the room it held; None when there is none."""
        orphan = self._orphans.pop(key, None)
        if orphan is not None:
            self._placers.let_go(key, orphan.fleet, orphan.worker)
            self._lifecycle.room_freed()
        return orphan

    def _forget(self, key: RequestKey) -> None:
        self._pop(key)
        self._timers.cancel(key)

    def _cancel(self, key: RequestKey, orphan: _Orphan) -> None:
        self._over[key] = max(orphan.attempt, self._over.pop(key, 0))
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)
        command = cluster_pb2.CancelCommand(request_id=key, attempt=orphan.attempt)
        self._lifecycle.out.append(ev.SendCommand(orphan.worker, command))
