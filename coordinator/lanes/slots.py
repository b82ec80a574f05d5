"""The concurrency limit of a tenant, and when the tenant may run one more request."""

from __future__ import annotations

from dataclasses import dataclass

from baton.coordinator.lanes.wait_correction import WaitCorrection

# Number of recent requests that the averages cover.
_NUM_LATEST = 32
# Number of recent waits that correct predictions.
_WINDOW = 64


@dataclass(slots=True)
class _PredictedWait:
    """A predicted wait that is compared with the actual one.

    Attributes:
        since: When it was predicted.
        num_left: Number of requests that have yet to end until the wait is over.
        predicted_s: Predicted length in seconds.
    """

    since: float
    num_left: int
    predicted_s: float


class Slots:
    """Counts a tenant's running requests, and predicts how long one more has to wait.

    A request gets a slot when all requests that wait before it have one and one more request ends.
    With s slots and requests that run t seconds on average, a request ends every t / s seconds.
    One predicted wait at a time is compared with the actual wait, even if no request waits that
    long; WaitCorrection scales later predictions.

    More requests may run than there are slots: interrupted requests do not wait for one, and after
    a restart of the coordinator, workers continue the requests that they had.

    Args:
        num_slots: Number of the tenant's requests that may run at a time.
        now: Current time by the core's clock, as all times here.
    """

    __slots__ = (
        "_correction",
        "_num_left",
        "_num_running",
        "_num_slots",
        "_predicted",
        "_ran_s",
        "_updated_at",
    )

    def __init__(self, num_slots: int, now: float) -> None:
        self._num_slots = num_slots
        self._num_running = 0
        # Seconds that requests ran, running ones included, and number that ended. Both decay.
        self._ran_s = self._num_left = 0.0
        self._updated_at = now
        self._correction = WaitCorrection(_WINDOW)
        self._predicted: _PredictedWait | None = None

    @property
    def num_free(self) -> int:
        """Number of further requests that may run."""
        return max(0, self._num_slots - self._num_running)

    @property
    def has_history(self) -> bool:
        """Whether a request has ended, so that waits can be predicted."""
        return self._num_left > 0

    def acquire(self, now: float) -> None:
        """A request begins to run."""
        self._update(now)
        self._num_running += 1

    def release(self, now: float) -> None:
        """A running request ends."""
        self._update(now)
        self._num_running -= 1
        decay = 1 - 1 / _NUM_LATEST
        self._ran_s *= decay
        self._num_left = (self._num_left + 1) * decay
        predicted = self._predicted
        if predicted is not None:
            predicted.num_left -= 1
            if not predicted.num_left:
                self._correction.observe(now - predicted.since, predicted.predicted_s)
                self._predicted = None

    def waiter_left(self) -> None:
        """A waiting request has ended: requests after it wait shorter than was predicted."""
        self._predicted = None

    def wait_s(self, num_waiting: int, now: float) -> float | None:
        """Predicts how long one more request waits for a slot, in seconds.

        Args:
            num_waiting: Number of requests that wait before it.
            now: Current time.

        Returns:
            None if it has a slot at once.
        """
        num_before = num_waiting + 1 - self._num_slots + self._num_running
        if num_before <= 0:
            return None
        self._update(now)
        # Before the first request ends, it is assumed to end now.
        wait_s = num_before * self._ran_s / (self._num_left or 1.0) / self._num_slots
        if wait_s and self._predicted is None and self.has_history:
            self._predicted = _PredictedWait(now, num_before, wait_s)
        return wait_s * self._correction.value

    def _update(self, now: float) -> None:
        """Adds the run time of running requests since the last update."""
        if now > self._updated_at:
            self._ran_s += self._num_running * (now - self._updated_at)
            self._updated_at = now
