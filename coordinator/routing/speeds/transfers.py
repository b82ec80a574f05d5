"""Predicts how long workers take to send KV blocks to each other, from the transfers so far."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import islice
from typing import TypeAlias

from baton.coordinator.routing.speeds.mean_speed import LEAST_BYTES, MeanSpeed, with_latest
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.requests import WorkerKey

Pair: TypeAlias = tuple[WorkerKey, WorkerKey]

# Assumed seconds per byte of fetches before the first transfer: 10 GB/s. The assumption is
# optimistic, so that a fetch is tried; if it is wrong, the fetch ends at its timeout.
_GUESS = 1e-10
# Assumed speed of handoffs between hosts and within a host before the first transfer. A handoff is
# sent however slow it is, so these guesses are closer to the speed of real networks.
_FAR_BYTES_PER_S, _NEAR_BYTES_PER_S = 1e9, 5e9
# A fetch that was given up has taken at least this many times as long as it was waited for.
_GIVEN_UP_FACTOR = 2.0
# Before the first transfer of a kind is measured, one fetch is tried in this many seconds.
_TRIAL_S = 10.0
# Number of pairs that are remembered; the least recently measured is forgotten.
_MAX_PAIRS = 65536


class Transfers:
    """Speeds between pairs of workers, and how long each worker is busy sending fetched blocks.

    A pair that has moved nothing lately is assumed to be as fast as the other pairs of its kind:
    workers of one host, or of different hosts.

    Args:
        clock: Time of the event that the core handles.
    """

    def __init__(self, clock: CoreClock) -> None:
        self._clock = clock
        self._pairs: OrderedDict[Pair, MeanSpeed] = OrderedDict()
        # By whether the workers are on one host.
        self._kinds: dict[bool, MeanSpeed] = {}
        self._tried_at: dict[bool, float] = {}
        self._free_at: dict[WorkerKey, float] = {}

    def seconds(self, pair: Pair, num_bytes: float, *, near: bool) -> float:
        """Predicted seconds that this many bytes take, without waiting for earlier ones.

        Args:
            pair: sender and receiver.
            num_bytes: number of bytes.
            near: whether both are on one host.

        Returns:
            Infinite while the first transfer of a kind is under way, because no speed is known.
        """
        found = self._measured(pair, near=near)
        if found is None:
            is_trying = self._clock.now - self._tried_at.get(near, -math.inf) < _TRIAL_S
            return math.inf if is_trying else num_bytes * _GUESS
        if found.s_per_byte <= _GUESS:
            return num_bytes * found.s_per_byte
        # A pair that was slow is not used, so its speed would never be measured again.
        return num_bytes * max(_GUESS, found.s_per_byte * found.share(self._clock.now))

    def handoff_s(self, pair: Pair, num_bytes: float, *, near: bool) -> float:
        """Predicted seconds that the bytes of a handoff take; always finite.

        Args:
            pair: sender and receiver.
            num_bytes: number of bytes.
            near: whether both are on one host.
        """
        if (found := self._measured(pair, near=near)) is not None:
            return num_bytes * found.s_per_byte
        return num_bytes / (_NEAR_BYTES_PER_S if near else _FAR_BYTES_PER_S)

    def _measured(self, pair: Pair, *, near: bool) -> MeanSpeed | None:
        """The latest measurement of a pair, or of its kind."""
        found = self._pairs.get(pair)
        if found is None or not found.is_recent(self._clock.now):
            return self._kinds.get(near)
        return found

    def measured(self, most: int) -> dict[Pair, float]:
        """Returns the mean speed of the latest transfers, in bytes per second, by pair.

        Args:
            most: number of pairs; the most recently measured ones, the latest first.
        """
        latest = tuple(islice(reversed(self._pairs.items()), most))
        return {pair: 1 / found.s_per_byte for pair, found in latest}

    def wait_s(self, holder: WorkerKey) -> float:
        """Predicted seconds until a worker has sent all blocks that it was told to send."""
        return max(0.0, self._free_at.get(holder, self._clock.now) - self._clock.now)

    def begins(self, holder: WorkerKey, sending_s: float, *, near: bool) -> None:
        """Records that a worker was told to send blocks, which takes this many seconds."""
        self._free_at[holder] = self._clock.now + self.wait_s(holder) + sending_s
        self._tried_at[near] = self._clock.now

    def observe(self, pair: Pair, num_bytes: int, seconds: float, *, near: bool) -> None:
        """Records a transfer's size and duration; a duration of 0 says nothing about the speed."""
        if num_bytes < LEAST_BYTES or seconds <= 0:
            self._tried_at.pop(near, None)
            return
        self._pairs[pair] = with_latest(
            self._pairs.pop(pair, None), num_bytes, seconds, self._clock.now
        )
        self._kinds[near] = with_latest(self._kinds.get(near), num_bytes, seconds, self._clock.now)
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs.popitem(last=False)

    def observe_at_most(self, pair: Pair, num_bytes: int, seconds: float, *, near: bool) -> None:
        """Records a transfer whose duration also includes waits; only a shorter time counts."""
        if seconds < self.seconds(pair, num_bytes, near=near) < math.inf:
            self.observe(pair, num_bytes, seconds, near=near)

    def observe_timeout(self, pair: Pair, num_bytes: int, seconds: float, *, near: bool) -> None:
        """Records a transfer that was given up after this many seconds.

        The time counts for other pairs of the same kind only if none of them has a recent
        measurement, because the sender may have been stopped.
        """
        if num_bytes < LEAST_BYTES:
            self._tried_at.pop(near, None)
            return
        measured = MeanSpeed(_GIVEN_UP_FACTOR * seconds / num_bytes, self._clock.now)
        self._pairs.pop(pair, None)
        self._pairs[pair] = measured
        if near not in self._kinds or not self._kinds[near].is_recent(self._clock.now):
            self._kinds[near] = measured

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker."""
        self._free_at.pop(worker, None)
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]
