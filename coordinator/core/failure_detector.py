"""Decides how long a worker may be silent before other workers take over its requests."""

from __future__ import annotations

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.workers import Worker

# Longest silence of a worker whose stream has ended, in seconds. A living worker reconnects within
# a tenth of this time.
_MAX_DISCONNECTED_S = 0.5
# A silence of this many times the longest recent silence counts as a failure.
_FAILURE_FACTOR = 2.0
# Share of the configured silence that every worker may be silent for, however punctual it was.
_LEAST_SHARE = 2 / 3
# Decay per load report of the longest silence; it halves every 14 reports.
_DECAY = 0.95
# If no worker was heard for this many heartbeat intervals, this process itself was paused.
_PAUSE_INTERVALS = 1.2
# After a pause, this process needs this many heartbeat intervals to read the waiting messages.
_CATCH_UP_INTERVALS = 0.25


class FailureDetector:
    """Learns the usual silence of each worker and detects unusual silences.

    This is an adaptive failure detector, as in Hayashibara et al., "The phi accrual failure
    detector", 2004.

    Args:
        config: Bounds of the silence.

    Attributes:
        least_silent_s: Silence that is always allowed, in seconds: one heartbeat may be missing and
            the next one late.
        catch_up_s: Time that this process needs to read waiting messages after a pause.
    """

    def __init__(self, config: CoreConfig) -> None:
        self._most_silent_s = most_s = config.worker_silent_s
        self._lost_after_s = config.worker_timeout_s
        self.least_silent_s = min(most_s, max(_LEAST_SHARE * most_s, 2 * config.heartbeat_s))
        self.catch_up_s = _CATCH_UP_INTERVALS * config.heartbeat_s
        self._pause_s = _PAUSE_INTERVALS * config.heartbeat_s
        # When any worker was heard last, and when a worker was first heard after the latest pause.
        self._heard_at = self._resumed_at = float("-inf")

    def expect(self, worker: Worker) -> None:
        """Sets the initial silence limit of a new worker."""
        worker.longest_silence_s = self._most_silent_s / _FAILURE_FACTOR

    def heard(self, worker: Worker, now: float) -> None:
        """Records a message of a worker."""
        silence_s = now - worker.heard_at
        if silence_s > worker.longest_silence_s:
            worker.longest_silence_s = min(silence_s, self._most_silent_s)
        worker.heard_at = now
        if now - self._heard_at > self._pause_s:
            self._resumed_at = now
        self._heard_at = now

    def reported(self, worker: Worker) -> None:
        """Records a load report, which decays the worker's longest silence."""
        worker.longest_silence_s *= _DECAY

    def may_be_silent_s(self, worker: Worker) -> float:
        """Returns how long a worker may be silent, in seconds: less, the more punctual it was."""
        if not worker.connected:
            return min(self._most_silent_s, _MAX_DISCONNECTED_S)
        usual_s = max(self.least_silent_s, _FAILURE_FACTOR * worker.longest_silence_s)
        return min(self._most_silent_s, usual_s)

    def next_check(self, worker: Worker, now: float) -> float:
        """Returns when the worker's silence must be checked next, by the core's clock."""
        silent_s = self.may_be_silent_s(worker)
        due = worker.heard_at + silent_s
        if due <= now:
            # Checked again, because other workers may attach that can take its requests.
            due = now + silent_s
        return min(due, worker.heard_at + self._lost_after_s, worker.leaves_by)

    def was_paused(self, now: float) -> bool:
        """Returns whether this process was paused, or still reads the messages from that time.

        It was paused if no worker was heard: that is more likely than a failure of all workers at
        once. If all workers had failed, no other worker could take their requests anyway.
        """
        return now - self._heard_at > self._pause_s or now - self._resumed_at < self.catch_up_s
