"""Predicts how long KV blocks take from one worker to another, from the transfers so far."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple, TypeAlias

from baton.coordinator.state.requests import WorkerKey

Pair: TypeAlias = tuple[WorkerKey, WorkerKey]

# Seconds per byte before the first transfer: 10 GB/s. The guess is low, so that a fetch is tried;
# if the guess was wrong, the fetch is given up when its time is over.
_GUESS = 1e-10
# Assumed speed of handoffs between hosts and within a host before the first transfer. These guesses
# are not tried out, so they are closer to what networks can do.
_FAR_BYTES_PER_S, _NEAR_BYTES_PER_S = 1e9, 5e9
# Weight of the latest transfer in the mean seconds per byte.
_WEIGHT = 0.3
# Transfers with fewer bytes say more about delays than about speed.
_LEAST_BYTES = 2**17
# A measurement counts half after this many seconds: what was slow is tried again some time.
_HALF_LIFE_S = 600.0
# A fetch that was given up has taken at least this many times as long as it was waited for.
_GIVEN_UP_FACTOR = 2.0
# Seconds for which the outcome of the first fetch is waited for before the next one.
_TRIAL_S = 10.0
# Number of pairs that are remembered; the least recently measured is forgotten.
_MAX_PAIRS = 65536


class _Measured(NamedTuple):
    """Mean seconds per byte, and when it was measured last."""

    s_per_byte: float
    at: float


class Transfers:
    """Speeds between pairs of workers, and how long each worker is busy sending fetched blocks.

    A pair that has moved nothing lately is assumed to be as fast as the other pairs of its kind:
    workers of one host, or of different hosts.

    Attributes:
        now: time by the core's clock; the owner sets it before each use.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._pairs: OrderedDict[Pair, _Measured] = OrderedDict()
        # By whether the workers are on one host.
        self._kinds: dict[bool, _Measured] = {}
        self._tried_at: dict[bool, float] = {}
        self._free_at: dict[WorkerKey, float] = {}

    def seconds(self, pair: Pair, num_bytes: float, *, near: bool) -> float:
        """Predicted seconds that this many bytes take, without waiting for earlier ones.

        Args:
            pair: sender and receiver.
            num_bytes: number of bytes.
            near: whether both are on one host.

        Returns:
            Infinite while the first transfer of a kind shows how fast it is.
        """
        found = self._measured(pair, near=near)
        if found is None:
            is_trying = self.now - self._tried_at.get(near, -math.inf) < _TRIAL_S
            return math.inf if is_trying else num_bytes * _GUESS
        share = math.exp2(-(self.now - found.at) / _HALF_LIFE_S)
        return num_bytes * max(_GUESS, found.s_per_byte * share)

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

    def _measured(self, pair: Pair, *, near: bool) -> _Measured | None:
        """The latest measurement of a pair, or of its kind."""
        found = self._pairs.get(pair)
        if found is None or self.now - found.at > _HALF_LIFE_S:
            return self._kinds.get(near)
        return found

    def wait_s(self, holder: WorkerKey) -> float:
        """Predicted seconds until a worker has sent what it was told to send."""
        return max(0.0, self._free_at.get(holder, self.now) - self.now)

    def begins(self, holder: WorkerKey, sending_s: float, *, near: bool) -> None:
        """Records that a worker was told to send blocks, which takes this many seconds."""
        self._free_at[holder] = self.now + self.wait_s(holder) + sending_s
        self._tried_at[near] = self.now

    def took(self, pair: Pair, num_bytes: int, seconds: float, *, near: bool) -> None:
        """Records a transfer's size and duration."""
        if num_bytes < _LEAST_BYTES:
            self._tried_at.pop(near, None)
            return
        latest = max(seconds, 1e-6) / num_bytes
        self._pairs[pair] = self._mean(self._pairs.pop(pair, None), latest)
        self._kinds[near] = self._mean(self._kinds.get(near), latest)
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs.popitem(last=False)

    def took_at_most(self, pair: Pair, num_bytes: int, seconds: float, *, near: bool) -> None:
        """Records a transfer that also waited for something else."""
        if seconds < self.seconds(pair, num_bytes, near=near) < math.inf:
            self.took(pair, num_bytes, seconds, near=near)

    def given_up(self, pair: Pair, num_bytes: int, seconds: float, *, near: bool) -> None:
        """Records a transfer that was given up after this many seconds."""
        if num_bytes < _LEAST_BYTES:
            self._tried_at.pop(near, None)
        else:
            measured = _Measured(_GIVEN_UP_FACTOR * seconds / num_bytes, self.now)
            self._pairs.pop(pair, None)
            self._pairs[pair] = self._kinds[near] = measured

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker."""
        self._free_at.pop(worker, None)
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]

    def _mean(self, before: _Measured | None, latest: float) -> _Measured:
        if before is not None and self.now - before.at <= _HALF_LIFE_S:
            latest = before.s_per_byte + _WEIGHT * (latest - before.s_per_byte)
        return _Measured(latest, self.now)
