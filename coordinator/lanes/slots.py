"""The requests that a tenant may have running at a time, and how soon one more may."""

from __future__ import annotations

from dataclasses import dataclass

from baton.coordinator.lanes.wait_correction import WaitCorrection

# About so many of its latest requests count.
_NUM_LATEST = 32
# So many of its latest waits tell how others turn out.
_WINDOW = 64


@dataclass(slots=True)
class _Watched:
    """A wait that was foreseen, and is compared with what it turns out to be.

    Attributes:
        since: when it was foreseen.
        num_left: how many requests have yet to leave until it is over.
        foreseen_s: how long it was to take.
    """

    since: float
    num_left: int
    foreseen_s: float


class Slots:
    """Counts a tenant's running requests, and foresees how long another one waits to be one.

    A request gets a slot when those that wait before it have got theirs and one more has left. With
    s slots and requests that run for t seconds on average, one leaves every t / s seconds. What is
    foreseen so is watched, whether or not anybody waits in the end; later forecasts are multiplied
    by what nearly all of the watched ones turned out to be (WaitCorrection).

    After a restart of the coordinator more may run than there are slots: those that workers go on
    with.

    Args:
        num_slots: how many of the tenant's requests may run at a time.
        now: by the core's clock, as all times here.
    """

    __slots__ = ("_at", "_num_left", "_num_running", "_num_slots", "_ran_s", "_ratio", "_watched")

    def __init__(self, num_slots: int, now: float) -> None:
        self._num_slots = num_slots
        self._num_running = 0
        # How long requests ran, those that still do among them, and how many left; both fade.
        self._ran_s = self._num_left = 0.0
        self._at = now
        self._ratio = WaitCorrection(_WINDOW)
        self._watched: _Watched | None = None

    @property
    def num_free(self) -> int:
        """How many more requests may run."""
        return max(0, self._num_slots - self._num_running)

    @property
    def has_history(self) -> bool:
        """Whether any request has left yet, so that waits can be foreseen."""
        return self._num_left > 0

    def took(self, now: float) -> None:
        """One more request runs."""
        self._pass(now)
        self._num_running += 1

    def left(self, now: float) -> None:
        """A request runs no longer."""
        self._pass(now)
        self._num_running -= 1
        keeps = 1 - 1 / _NUM_LATEST
        self._ran_s *= keeps
        self._num_left = (self._num_left + 1) * keeps
        watched = self._watched
        if watched is not None:
            watched.num_left -= 1
            if not watched.num_left:
                self._ratio.turned_out(now - watched.since, watched.foreseen_s)
                self._watched = None

    def gave_up(self) -> None:
        """A request has ended while it waited: what was foreseen for those behind it is void."""
        self._watched = None

    def wait_s(self, num_waiting: int, now: float) -> float | None:
        """How long one more request would wait for a slot, in seconds.

        Args:
            num_waiting: how many requests wait before it.
            now: by the core's clock.

        Returns:
            None where there is a slot for it.
        """
        num_before = num_waiting + 1 - self._num_slots + self._num_running
        if num_before <= 0:
            return None
        self._pass(now)
        # Until the first has left it is taken to leave now.
        wait_s = num_before * self._ran_s / (self._num_left or 1.0) / self._num_slots
        if wait_s and self._watched is None and self.has_history:
            self._watched = _Watched(now, num_before, wait_s)
        return wait_s * self._ratio.value

    def _pass(self, now: float) -> None:
        """Adds the time that has passed to what running requests ran."""
        if now > self._at:
            self._ran_s += self._num_running * (now - self._at)
            self._at = now
