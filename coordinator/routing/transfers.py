"""Predicts how long KV blocks take from one worker to another, from the transfers so far."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from baton.coordinator.state.requests import WorkerKey

# Bytes per second between two workers that have moved none lately. The guess is high, so that a
# first fetch is tried; if the guess was wrong, the fetch is given up when its time is over.
_GUESS = 10e9
# Weight of the latest transfer in the mean of a pair's seconds per byte.
_WEIGHT = 0.3
# Transfers with fewer bytes say more about delays than about speed.
_LEAST_BYTES = 2**17
# Seconds for which a measurement counts.
_VALID_S = 600.0
# Number of pairs that are remembered; the least recently measured is forgotten.
_MAX_PAIRS = 65536


class _Measured(NamedTuple):
    s_per_byte: float
    at: float


class Transfers:
    """Speeds between pairs of workers, and how long each worker is busy sending fetched blocks.

    Attributes:
        now: time by the core's clock; the owner sets it before each use.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._pairs: OrderedDict[tuple[WorkerKey, WorkerKey], _Measured] = OrderedDict()
        self._free_at: dict[WorkerKey, float] = {}

    def seconds(self, holder: WorkerKey, reader: WorkerKey, num_bytes: float) -> float:
        """Predicted seconds that this many bytes take, without waiting for earlier ones."""
        found = self._pairs.get((holder, reader))
        if found is None or self.now - found.at > _VALID_S:
            return num_bytes / _GUESS
        return num_bytes * found.s_per_byte

    def wait_s(self, holder: WorkerKey) -> float:
        """Predicted seconds until a worker has sent what it was told to send."""
        return max(0.0, self._free_at.get(holder, self.now) - self.now)

    def begins(self, holder: WorkerKey, sending_s: float) -> None:
        """Records that a worker was told to send blocks, which takes this many seconds."""
        self._free_at[holder] = self.now + self.wait_s(holder) + sending_s

    def took(self, holder: WorkerKey, reader: WorkerKey, num_bytes: int, seconds: float) -> None:
        """Records a transfer's size and duration."""
        if num_bytes < _LEAST_BYTES:
            return
        latest, pair = max(seconds, 1e-6) / num_bytes, (holder, reader)
        before = self._pairs.pop(pair, None)
        if before is not None and self.now - before.at <= _VALID_S:
            latest = before.s_per_byte + _WEIGHT * (latest - before.s_per_byte)
        self._pairs[pair] = _Measured(latest, self.now)
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs.popitem(last=False)

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker."""
        self._free_at.pop(worker, None)
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]
