"""The requests that a tenant may have running at a time, and how soon one more may."""

from __future__ import annotations

from dataclasses import dataclass

from baton.coordinator.lanes.wait_ratio import WaitRatio

# About so many of its latest requests count.
_NUM_LATEST = 32
# So many of its latest waits tell how others turn out.
_WINDOW = 64


@dataclass(slots=True)
class _Watched:
    """A wait that was foreseen: since when, for how many to leave, and how long it would take."""

    since: float
    num_left: int
    foreseen_s: float


class Slots:
    """Who waits for a slot goes on when those before it, and one that runs, have left.

    They leave one by one, as fast as they run on average by as many as there are slots. Waits that
    were foreseen so are watched, whether or not anybody waits in the end; later ones are reckoned
    with as nearly all of these turned out.

    Those of a restarted coordinator that go on may be more than there are slots.
    """

    __slots__ = ("_at", "_num_left", "_num_running", "_num_slots", "_ran_s", "_ratio", "_watched")

    def __init__(self, num_slots: int, now: float) -> None:
        self._num_slots = num_slots
        self._num_running = 0
        # How long requests ran, those that still do among them, and how many left; both fade.
        self._ran_s = self._num_left = 0.0
        self._at = now
        self._ratio = WaitRatio(_WINDOW)
        self._watched: _Watched | None = None

    @property
    def num_free(self) -> int:
        return max(0, self._num_slots - self._num_running)

    @property
    def has_history(self) -> bool:
        return self._num_left > 0

    def took(self, now: float) -> None:
        """One more runs."""
        self._pass(now)
        self._num_running += 1

    def left(self, now: float) -> None:
        """One runs no longer."""
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
        """One that waited does so no longer: those behind it wait for less."""
        self._watched = None

    def wait_s(self, num_waiting: int, now: float) -> float | None:
        """How long another one waits for a slot, in seconds; None: there is one for it.

        Args:
            num_waiting: that go before it.
            now: by the core's clock.
        """
        num_before = num_waiting + 1 - self._num_slots + self._num_running
        if num_before <= 0:
            return None
        self._pass(now)
        # Until the first has left, as if it did now.
        wait_s = num_before * self._ran_s / (self._num_left or 1.0) / self._num_slots
        if wait_s and self._watched is None and self.has_history:
            self._watched = _Watched(now, num_before, wait_s)
        return wait_s * self._ratio.value

    def _pass(self, now: float) -> None:
        """Time has passed."""
        if now > self._at:
            self._ran_s += self._num_running * (now - self._at)
            self._at = now
