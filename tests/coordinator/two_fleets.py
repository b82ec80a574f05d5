"""A world of two fleets, with a rollout of the second."""

from __future__ import annotations

from baton.coordinator.state import events as ev
from baton.coordinator.state.revision import Revision
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
SERVING, DRAINING = cluster_pb2.WORKER_STATE_SERVING, cluster_pb2.WORKER_STATE_DRAINING


class TwoFleets:
    """A world of two fleets: workers p, p2, d, d2 of "1" and cp, cp2, cd, cd2 of "r2"."""

    def __init__(self, new_world, out, share=1.0, **changes):
        wide = {"max_running_requests": 10**5, "max_prefill_requests": 10**5}
        self.world = new_world(**{**wide, "max_decode_requests": 10**5, **changes})
        self.out = out
        for name, role in (("p", PREFILL), ("p2", PREFILL), ("d", DECODE), ("d2", DECODE)):
            self.world.attach(name, role)
            self.world.attach(f"c{name}", role, revision="r2")
        if share is not None:
            self.start(share)

    def start(self, share):
        assert self.core.rollouts.start_error(Revision("r2"), share, {}) is None
        self.world.handle(ev.RolloutRequested(Revision("r2"), share, {}))

    @property
    def core(self):
        return self.world.core

    def request(self, to):
        return self.core.request(f"r{to.stream}")

    def fleet_name(self, to):
        return self.request(to).fleet.name

    def first_token(self, to):
        request = self.request(to)
        output = self.out(request.id, [7], text="a", finish=0, attempt=request.attempt)
        self.world.step(request.prefill[0], output)

    def token(self, to, finish=None):
        """The decode worker reports the next token, whose id is its position in the output."""
        request = self.request(to)
        offset = len(request.token_ids)
        output = self.out(
            request.id, [offset], offset, finish=finish, attempt=request.attempt_number
        )
        self.world.step(request.decode[0], output)

    def begin(self, **fields):
        """Submits a request and brings it to decoding."""
        to = self.world.submit(**fields)
        self.first_token(to)
        self.token(to)
        return to

    def state(self, worker_id):
        worker = self.core.workers.by_id(worker_id)
        return worker.state if worker is not None else None

    def beat(self, seconds=1):
        """Advances the clock; all workers send a sign of life, and idle draining workers stop."""
        for _ in range(seconds):
            self.world.after(1.0)
            for worker in self.core.workers:
                self.world.handle(ev.WorkerHeard(worker.key))
                if worker.state == DRAINING and not len(worker.ledger):
                    stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
                    self.world.handle(ev.WorkerChanged(worker.key, stopped))

    def ids(self):
        return {worker.id for worker in self.core.workers}


def fleet_of_session(world, number):
    """Returns the name of the fleet that a session's requests get now."""
    to = world.submit(session_id=f"s{number}", num_prompt=8)
    request = world.core.request(f"r{to.stream}")
    world.handle(ev.RequestCancelled(request.id))
    return request.fleet.name
