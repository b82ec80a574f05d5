"""Flips: workers change their role after they have finished the requests of the old role.

Nothing is loaded again, because every engine computes prompts and decodes. A flip only changes
which requests the coordinator sends to a worker, and the role that the worker reports.
"""

from __future__ import annotations

from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.parts import Parts
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.lanes import LANES
from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.requests import Request, RequestState, WorkerKey
from baton.coordinator.state.workers import Flipping, Worker
from baton.runtime.errors import BatonError, FailedPrecondition
from baton.v1 import cluster_pb2, common_pb2


class Flips:
    """Owns the workers that change to the other pool.

    A flipping worker finishes its prompts. Each of its outputs ends on this worker or moves to
    another one, depending on where the latency model predicts the earlier end. To move an output,
    the worker itself hands over the KV cache after computing the last block again, or a prefill
    worker computes the prompt again. When the time limit of the flip has passed, all remaining
    outputs move. If no other worker is left in its pool, the worker keeps its role, or takes it
    back, because requests wait for the role.

    Args:
        parts: The shared parts of the core.
        attempts: Moves requests off flipping workers.
        scaler: Sizes of the pools, which an operator's flips change.
    """

    def __init__(self, parts: Parts, attempts: Attempts, scaler: Scaler) -> None:
        self._clock = parts.clock
        self._workers, self._placers, self._requests = parts.workers, parts.placers, parts.requests
        self._lanes, self._effects, self._room_freed = parts.lanes, parts.effects, parts.room_freed
        self._attempts, self._scaler = attempts, scaler
        # How long a worker may take to finish its requests, in seconds.
        self._limit_s = parts.config.scaling.drain_s
        # Flipping workers in the order in which their flips began.
        self._flipping: dict[WorkerKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._flipping)

    def error(self, worker: Worker, role: common_pb2.Role.ValueType) -> BatonError | None:
        """Returns why a worker cannot change to this role now; None if it can, or will have it."""
        if worker.next_role == role:
            return None
        name, serves = f"worker {worker.id}", POOL_OF[worker.role].value
        if worker.flip is not None:
            return FailedPrecondition(f"{name} is changing its role; wait until it serves")
        if not worker.serving:
            return FailedPrecondition(f"{name} does not serve: only a serving worker can change")
        if worker.fleet.workers.serving(worker.role) == [worker]:
            return FailedPrecondition(
                f"{name} is the only serving {serves} worker: scale {serves} up first"
            )
        return None

    def begin(self, worker: Worker, role: common_pb2.Role.ValueType, *, by_hand: bool) -> None:
        """Begins a flip: the worker gets no new requests. `error` must have returned None."""
        now = self._clock.now
        if worker.role == role or worker.flip is not None:
            return
        worker.flip = Flipping(role, since=now, until=now + self._limit_s, by_hand=by_hand)
        if by_hand:
            self._scaler.flipped(worker.id, POOL_OF[worker.role], POOL_OF[role])
        self._flipping[worker.key] = None
        self._placers.refresh(worker)
        self.move_outputs(worker)

    def move_outputs(self, worker: Worker) -> None:
        """Moves outputs that would end sooner on another worker; after the time limit, all outputs.

        Membership calls it for each load report of a flipping worker.
        """
        flip = worker.flip
        if flip is None or flip.told:
            return
        elsewhere = bool(worker.fleet.workers.serving(worker.role))
        late = self._clock.now >= flip.until
        if late and not elsewhere:
            self._give_up(worker)
            return
        if not elsewhere:
            return
        waiting_s: float | None = None
        for key in worker.ledger:
            request = self._requests.get(key)
            if request is None or not worker.can_resume(request):
                # Its peers run the same engine, so they cannot continue the request either.
                continue
            if late:
                if request.state in (RequestState.DECODING, RequestState.PREFILLING):
                    self._attempts.move(request)
            elif request.decode == worker.key and request.state is RequestState.DECODING:
                # Requests without a first token are checked again after it has come.
                if waiting_s is None:
                    # Slow with many tenants, and the same for all requests of a worker's fleet.
                    waits = self._lanes.waits
                    waiting_s = sum(waits.work_s(lane, worker.fleet) for lane in LANES)
                self._move_sooner(request, worker, waiting_s)

    def advance(self) -> None:
        """Tells idle flipping workers to change their role."""
        for key in tuple(self._flipping):
            worker = self._workers.get(key)
            if worker is None or worker.flip is None:
                self._flipping.pop(key, None)
                continue
            told, others = worker.flip.told, worker.fleet.workers.presence(worker.role)
            if not others.num_staying:
                if told:
                    # The worker changes its role and back again.
                    self._tell(worker, worker.role)
                self._give_up(worker)
            elif not told and not len(worker.ledger) and others.num_serving:
                worker.flip.told = True
                self._tell(worker, worker.flip.into)

    def heard(self, worker: Worker) -> None:
        """Handles a worker's report of the role that it serves."""
        self._scaler.launches.moved(worker.id, POOL_OF[worker.role])
        if worker.flip is not None and worker.role == worker.flip.into:
            self._end(worker)

    def stop(self, worker: Worker) -> None:
        """Ends the flip of a worker that drains instead."""
        if worker.flip is not None:
            self._end(worker)

    # ---- Private methods

    def _tell(self, worker: Worker, role: common_pb2.Role.ValueType) -> None:
        self._effects.add(ev.SendCommand(worker.key, cluster_pb2.SetRoleCommand(role=role)))

    def _move_sooner(self, request: Request, worker: Worker, waiting_s: float) -> None:
        """Moves an output to another worker if it would end sooner there.

        Args:
            request: The output's request.
            worker: The flipping worker that decodes it.
            waiting_s: Seconds of prefill work that wait for workers of the fleet.
        """
        placer = self._placers.of(request.fleet)
        predictions = placer.predictions
        here_s = predictions.remaining_output_s(request)
        anew_s = predictions.move_s(request, waiting_s)
        placement = placer.by_handoff(request, worker, within_s=min(here_s, anew_s))
        if placement is not None:
            self._attempts.move(request, placement)
        elif anew_s < here_s and placer.has_room(request):
            self._attempts.move(request)

    def _give_up(self, worker: Worker) -> None:
        assert worker.flip is not None
        if worker.flip.by_hand:
            pool, into = POOL_OF[worker.role], POOL_OF[worker.flip.into]
            self._scaler.not_flipped(worker.id, pool, into, worker.flip.since)
        self._end(worker)

    def _end(self, worker: Worker) -> None:
        worker.flip = None
        self._flipping.pop(worker.key, None)
        self._placers.refresh(worker)
        self._room_freed()
