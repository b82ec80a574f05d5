"""How long a worker may be silent before it is taken to stand still."""

from __future__ import annotations

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.workers import Worker

# A worker whose stream has broken is back within a tenth of this, or it is dead.
_GONE_S = 0.5
# A worker that is silent for so many times its longest silence lately stands still, most likely.
_UNUSUAL = 2.0
# This share of the configured silence is allowed to every worker, however punctual.
_LEAST_SHARE = 2 / 3
# What a silence counts for shrinks by this with every load report: by half in fourteen.
_FORGETTING = 0.95
# In heartbeats: without a word from anybody for so long it is this process that does not listen,
# and so long it takes to read what came meanwhile.
_DEAF, _CATCH_UP = 1.2, 0.25


class FailureDetector:
    """Learns how punctual each worker is, and says from when its silence is a failure.

    What is a usual silence on a machine is learned worker by worker: an adaptive failure detector,
    as in Hayashibara et al., "The phi accrual failure detector", 2004.

    Args:
        config: bounds of what may be learned.

    Attributes:
        least_silent_s: the silence that no worker need explain: it misses a heartbeat, and the next
            is late.
        catch_up_s: how long it takes to read what came while this process did not listen.
    """

    def __init__(self, config: CoreConfig) -> None:
        self._most_silent_s = most_s = config.worker_silent_s
        self._lost_after_s = config.worker_timeout_s
        self.least_silent_s = min(most_s, max(_LEAST_SHARE * most_s, 2 * config.heartbeat_s))
        self.catch_up_s = _CATCH_UP * config.heartbeat_s
        self._deaf_s = _DEAF * config.heartbeat_s
        # When a worker was heard last, and when last after a time without a word from any.
        self._heard_at = self._deaf_until = float("-inf")

    def expect(self, worker: Worker) -> None:
        """A new worker is not known to be punctual yet."""
        worker.longest_silence_s = self._most_silent_s / _UNUSUAL

    def heard(self, worker: Worker, now: float) -> None:
        """A worker gave a sign of life."""
        silence_s = now - worker.heard_at
        if silence_s > worker.longest_silence_s:
            worker.longest_silence_s = min(silence_s, self._most_silent_s)
        worker.heard_at = now
        if now - self._heard_at > self._deaf_s:
            self._deaf_until = now
        self._heard_at = now

    def reported(self, worker: Worker) -> None:
        """A load report came: its latest silences count for less."""
        worker.longest_silence_s *= _FORGETTING

    def may_be_silent_s(self, worker: Worker) -> float:
        """How long a silent worker keeps its requests: less, the more punctual it has been."""
        if not worker.connected:
            return min(self._most_silent_s, _GONE_S)
        usual_s = max(self.least_silent_s, _UNUSUAL * worker.longest_silence_s)
        return min(self._most_silent_s, usual_s)

    def next_look(self, worker: Worker, now: float) -> float:
        """When the worker's silence is to be looked at next, by the core's clock."""
        silent_s = self.may_be_silent_s(worker)
        due = worker.heard_at + silent_s
        if due <= now:
            # Looked at again, since others may come that could take its requests.
            due = now + silent_s
        return min(due, worker.heard_at + self._lost_after_s, worker.leaves_by)

    def is_deaf(self, now: float) -> bool:
        """Whether no worker is heard, or what they said meanwhile is just being read.

        It is then this process that was busy or stood still rather than every worker at once; and
        were it every worker, none could take another's requests.
        """
        return now - self._heard_at > self._deaf_s or now - self._deaf_until < self.catch_up_s
