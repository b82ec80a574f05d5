"""The failure detector: how long a worker may be silent before its requests move."""

from __future__ import annotations

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.workers import Worker

# Longest silence of a worker whose stream has ended, in seconds. A living worker reconnects within
# a tenth of this time.
_GONE_S = 0.5
# A silence of this many times the longest recent silence counts as a failure.
_UNUSUAL = 2.0
# Every worker may be silent for this share of the configured time.
_LEAST_SHARE = 2 / 3
# Decay per load report of the longest silence; it halves every 14 reports.
_FORGETTING = 0.95
# In heartbeat intervals: if no worker was heard for _DEAF, this process stood still; it then needs
# _CATCH_UP to read the waiting messages.
_DEAF, _CATCH_UP = 1.2, 0.25


class FailureDetector:
    """Learns the usual silence of each worker and detects unusual silences.

    This is an adaptive failure detector, as in Hayashibara et al., "The phi accrual failure
    detector", 2004.

    Args:
        config: Bounds of the silence.

    Attributes:
        least_silent_s: Silence that is always allowed: one heartbeat is missing and the next one is
            late.
        catch_up_s: Time that this process needs to read waiting messages after a pause.
    """

    def __init__(self, config: CoreConfig) -> None:
        self._most_silent_s = most_s = config.worker_silent_s
        self._lost_after_s = config.worker_timeout_s
        self.least_silent_s = min(most_s, max(_LEAST_SHARE * most_s, 2 * config.heartbeat_s))
        self.catch_up_s = _CATCH_UP * config.heartbeat_s
        self._deaf_s = _DEAF * config.heartbeat_s
        # When any worker was heard last, and when that happened last after a long silence of all.
        self._heard_at = self._deaf_until = float("-inf")

    def expect(self, worker: Worker) -> None:
        """Sets the initial silence limit of a new worker."""
        worker.longest_silence_s = self._most_silent_s / _UNUSUAL

    def heard(self, worker: Worker, now: float) -> None:
        """Notes a message of a worker."""
        silence_s = now - worker.heard_at
        if silence_s > worker.longest_silence_s:
            worker.longest_silence_s = min(silence_s, self._most_silent_s)
        worker.heard_at = now
        if now - self._heard_at > self._deaf_s:
            self._deaf_until = now
        self._heard_at = now

    def reported(self, worker: Worker) -> None:
        """Notes a load report, which decays the worker's longest silence."""
        worker.longest_silence_s *= _FORGETTING

    def may_be_silent_s(self, worker: Worker) -> float:
        """Returns how long a worker may be silent, in seconds: less, the more punctual it was."""
        if not worker.connected:
            return min(self._most_silent_s, _GONE_S)
        usual_s = max(self.least_silent_s, _UNUSUAL * worker.longest_silence_s)
        return min(self._most_silent_s, usual_s)

    def next_look(self, worker: Worker, now: float) -> float:
        """Returns when the worker's silence must be checked next, by the core's clock."""
        silent_s = self.may_be_silent_s(worker)
        due = worker.heard_at + silent_s
        if due <= now:
            # Checked again, because other workers may attach that can take its requests.
            due = now + silent_s
        return min(due, worker.heard_at + self._lost_after_s, worker.leaves_by)

    def is_deaf(self, now: float) -> bool:
        """Returns whether no worker is heard, or waiting messages are still being read.

        Then this process stood still, rather than all workers at once. If all workers had failed,
        no other worker could take their requests anyway.
        """
        return now - self._heard_at > self._deaf_s or now - self._deaf_until < self.catch_up_s
