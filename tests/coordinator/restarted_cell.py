"""A virtual cell whose coordinator can be restarted and whose workers can be stopped."""

from __future__ import annotations

from array import array
from dataclasses import replace

from baton.client.retry_policy import backoff_s
from baton.coordinator.core.core import Core
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import StreamKey
from baton.runtime.prompts.request_digest import request_digest
from baton.simulator.hello import hello
from baton.v1 import cluster_pb2
from baton.worker import attach
from tests.coordinator.virtual_cell import VirtualCell

# Time to connect to a coordinator that listens.
_CONNECT_S = 0.03


class RestartedCell(VirtualCell):
    """A cell with coordinator restarts.

    Workers continue without a coordinator and attach to the next one. A single client owns all
    streams and resumes them. Both reconnect with the backoff of the production code.
    """

    def __init__(self, config, **options) -> None:
        super().__init__(config, **options)
        self._config, self._is_up, self._session = config, True, 1
        self._submitted = {}

    def stop(self, name: str) -> None:
        """SIGSTOP a worker: its connections stay open, and it sends nothing."""
        for key, worker in self._workers.items():
            if key[0] == name:
                worker.gone = True

    def restart(self, after_s: float) -> None:
        """Kills the coordinator; another one listens after this many seconds."""
        self._is_up, died_at, up_at = False, self.now, self.now + after_s
        self.core = Core(self._config, self.random.randbytes)
        self.at(up_at, self._start_listening)
        for worker in self._workers.values():
            at, pause_s = died_at, attach._BACKOFF_S[0]
            while at < up_at:
                at += pause_s * self.random.uniform(0.5, 1.0)
                pause_s = min(attach._BACKOFF_GROWTH * pause_s, attach._BACKOFF_S[1])
            self.at(at + _CONNECT_S, lambda worker=worker: self._reattach(worker))
        at, num_failures = died_at, 0
        while at < up_at:
            at += backoff_s(max(0, num_failures - 1), self.random.random())
            num_failures += 1
        self.at(at + _CONNECT_S, self._resubmit_all)

    def post(self, event) -> None:
        if self._is_up:
            if isinstance(event, ev.Submitted):
                self._submitted[event.submission.to] = event.submission
            super().post(event)

    def carry_out(self, effect) -> None:
        if isinstance(effect, ev.WelcomeWorker):
            worker = self._workers[effect.worker]
            adopted = {(one.request_id, one.attempt) for one in effect.adopted}
            for key in [one for one in worker.live if one not in adopted]:
                worker._drop(key)
        super().carry_out(effect)

    def _start_listening(self) -> None:
        self._is_up = True

    def _reattach(self, worker) -> None:
        if worker.gone:
            return
        message = hello(worker.key, worker.role, worker.shape, worker.shape.kv_tokens)
        message.generation = 77
        message.running.extend(
            cluster_pb2.RunningRequest(
                request_id=live.spec.request_id,
                attempt=live.spec.attempt,
                role=worker.role,
                token_ids=[7] * live.offset,
                decoding=live.told,
                digest=request_digest(live.spec.prompt_token_ids, live.spec.sampling),
                tenant=live.spec.tenant,
            )
            for live in worker.live.values()
        )
        self.post(ev.WorkerAttached(message, returns=True))

    def _resubmit_all(self) -> None:
        self._session += 1
        streams, self._by_stream = self._by_stream, {}
        for to, outcome in streams.items():
            again = replace(
                self._submitted[to],
                to=StreamKey(self._session, to.stream),
                known_token_ids=array("I", [7] * len(outcome.token_times)),
                arrived_at=self.now,
            )
            self._by_stream[again.to] = outcome
            self.post(ev.Submitted(again))
